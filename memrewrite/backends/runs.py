"""What forward and a planned backward run, in stretches that orders have in common.

A storage is a key; its copy for a region is one, too: the storage and, once more than the region's number, how many
storages there are.
"""

import functools
from collections.abc import Iterable, Mapping, Set
from itertools import pairwise

from memrewrite.backends.facts import Facts
from memrewrite.backends.plan import Order, Part
from memrewrite.backends.stretches import Key, Run, Stretch

_STRETCH = 100  # nodes of forward or of backward itself that are simulated at once

Keys = tuple[Key, ...]
Step = tuple[int, bool]


class Runs:
    """Turns orders of one joint graph into stretches of runs; what two orders have in common is made once."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.count = max(len(facts.bytes), 1)
        self.outputs = frozenset(s for node in facts.outputs for s in facts.holds[node])
        self._first = self._made_of(facts.outputs, frozenset())
        self._block = {node: rank // _STRETCH for rank, node in enumerate(self._nodes(forward=False))}
        self._keys = self._lies()
        self._plain = [self._reads(node, {}, {}) for node in range(len(facts.inputs))]
        self._flags = [self._flags_of(node) for node in range(len(facts.inputs))]
        self._strange = self._elsewhere()
        self._forward: dict[object, Stretch] = {}
        self._backward: dict[object, tuple[Stretch, dict[int, Keys]]] = {}
        self._parts: dict[object, list[Stretch]] = {}

    def size(self, key: Key) -> int:
        """The bytes of a storage, or of a copy of it."""
        return self.facts.bytes[key % self.count]

    def forward(self, values: Iterable[int], saved: frozenset[int]) -> list[Stretch]:
        """What forward runs: all that its outputs and the values that are kept, in storages ``saved``, are made of."""
        facts, found = self.facts, []
        more = self._made_of(values, self._first)
        for nodes, makes in self._blocks:
            extra, ending = more & nodes, saved & makes
            key = (nodes, extra, ending)
            if key not in self._forward:
                there = [i for i in sorted(nodes) if i in self._first or i in extra]
                runs = (self._run(at, i, facts.makes[i], self._plain[i]) for at, i in enumerate(there))
                ends = ending | makes & self.outputs
                self._forward[key] = Stretch(filter(None, runs), len(there), ends, self.size)
            found.append(self._forward[key])
        return found

    def backward(self, order: Order) -> tuple[list[Stretch], frozenset[Key]]:
        """What backward runs, and the storages that gradients lie in."""
        strange = self._found(order) if self._strange else {}
        told = tuple(strange.items())
        ends = frozenset(key for node in self.facts.gradients for key in strange.get(node, self._keys[node]))
        found: list[Stretch] = []
        for part in order.parts:
            if (part, told) not in self._parts:
                self._parts[part, told] = list(self._of_part(part, strange, ends))
            found += self._parts[part, told]
        return found, ends

    def _of_part(self, part: Part, strange: Mapping[int, Keys], ends: frozenset[Key]) -> Iterable[Stretch]:
        """The stretches of a part of backward; they end at the same of its nodes whatever is made again."""
        copies: dict[int, Keys] = {}
        told = tuple(strange.items())
        for start, end in pairwise(self._bounds(part.steps)):
            steps = part.steps[start:end]
            read = {i for node, _ in steps for i in self.facts.inputs[node]}
            before = {i: copies[i] for i in sorted(read & copies.keys())}
            key = (part.region, steps, tuple(before.items()), told)
            known = self._backward.get(key)
            if known is None:
                runs = [self._step(at, step, part.region, before, strange) for at, step in enumerate(steps)]
                there = [run for run in runs if run is not None]
                ending = ends & {key for run in there for key in run.makes}
                known = self._backward[key] = Stretch(there, len(steps), ending, self.size), before
            stretch, more = known
            copies |= more
            yield stretch

    def _bounds(self, steps: tuple[Step, ...]) -> list[int]:
        """Where the stretches of these begin, and the last one ends; what is made again goes with what is before it."""
        bounds, now = [0], None
        for at, (node, copied) in enumerate(steps):
            if not copied and (block := self._block[node]) != now:
                bounds += [at] if now is not None else []
                now = block
        return [*bounds, len(steps)] if steps else []

    def _step(
        self, at: int, step: Step, region: int, copies: dict[int, Keys], strange: Mapping[int, Keys]
    ) -> Run | None:
        """A step of backward as it runs; a copy is then among ``copies``."""
        node, copied = step
        elsewhere = strange or not copies.keys().isdisjoint(self.facts.inputs[node])
        reads = self._reads(node, copies, strange) if elsewhere else self._plain[node]
        makes = self.facts.makes[node]
        if copied:
            ahead = (region + 1) * self.count
            makes = tuple([key + ahead for key in makes])
            copies[node] = makes or self._held(node, reads)
        return self._run(at, node, makes, reads, node in self.facts.stored)

    def _run(self, at: int, node: int, makes: Keys, reads: Keys, stored: bool = False) -> Run | None:
        if not makes and node in self.facts.views:
            return None
        return Run(at, makes, reads, *self._flags[node], stored)

    def _flags_of(self, node: int) -> tuple[bool, bool, bool, int]:
        """Whether it is fused, reads fused and is heavy, and its scratch: as in ``Run``."""
        facts = self.facts
        return node in facts.fused, node in facts.reader, node in facts.heavy, facts.scratch[node]

    def _reads(self, node: int, copies: Mapping[int, Keys], strange: Mapping[int, Keys]) -> Keys:
        found: list[Key] = []
        for i in self.facts.inputs[node]:
            found += copies[i] if i in copies else strange[i] if i in strange else self._keys[i]
        return tuple(found)

    def _held(self, node: int, reads: Keys) -> Keys:
        """The storages that what makes nothing lies in, of those that it reads."""
        own = self.facts.holds[node]
        return tuple([key for key in reads if key % self.count in own])

    def _nodes(self, forward: bool) -> list[int]:
        facts = self.facts
        there = facts.given | {*facts.tangents}
        return [i for i, before in enumerate(facts.forward) if before == forward and i not in there]

    @functools.cached_property
    def _blocks(self) -> list[tuple[frozenset[int], frozenset[Key]]]:
        """The nodes of forward, so many at a time, and the storages that they make."""
        nodes = self._nodes(forward=True)
        blocks = [frozenset(nodes[i : i + _STRETCH]) for i in range(0, len(nodes), _STRETCH)]
        return [(block, frozenset(s for i in block for s in self.facts.makes[i])) for block in blocks]

    def _made_of(self, values: Iterable[int], known: Set[int]) -> frozenset[int]:
        """What of forward these are made of and is not known."""
        facts, found = self.facts, set[int]()
        ahead = list(values)
        while ahead:
            node = ahead.pop()
            if node not in found and node not in known and facts.forward[node] and node not in facts.given:
                found.add(node)
                ahead += facts.inputs[node]
        return frozenset(found)

    def _lies(self) -> list[Keys]:
        """For each node the storages that its value lies in where it is no copy and reads none."""
        facts = self.facts
        found: list[Keys] = []
        for node, (makes, holds) in enumerate(zip(facts.makes, facts.holds, strict=True)):
            backward = node in self._block
            read = [key for i in facts.inputs[node] for key in found[i]] if backward else []
            found.append((makes or tuple(key for key in read if key in {*holds})) if backward else holds)
        return found

    def _elsewhere(self) -> frozenset[int]:
        """The nodes of which only an order tells where they lie, though others than its part read them: gradients that
        forward makes, and what of backward lies in what forward makes."""
        facts = self.facts
        of_forward = {s for i in self._nodes(forward=True) for s in facts.makes[i]}
        own = {i for i in self._block if not facts.makes[i] and of_forward & {*facts.holds[i]}}
        return frozenset(own | {i for i in facts.gradients if facts.forward[i] and i not in facts.given})

    def _found(self, order: Order) -> dict[int, Keys]:
        """Where they lie."""
        found: dict[int, Keys] = {}
        for part in order.parts:
            copies: dict[int, Keys] = {}
            for step in part.steps:
                node, copied = step
                self._step(0, step, part.region, copies, found)
                if node in self._strange:
                    reads = self._reads(node, copies, found)
                    found[node] = copies[node] if copied else self.facts.makes[node] or self._held(node, reads)
        return found
