"""What is known of a graph from the one that it was made of: a node that is given what it was given did what it did.

A rewrite changes a handful of nodes. All others would run again on the same fake tensors: where a node that did run
again gives what looks as before, the tensors of before stand for it, so that those after it are given the same.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, fx, nn

from memrewrite.observe.node_effects import NodeEffects
from memrewrite.observe.recorder import Recorder, Storage
from memrewrite.simulate.memory.repeats import casts_are_kept
from memrewrite.torch_internals.autograd_nodes import is_view
from memrewrite.torch_internals.dispatch_modes import PLAIN
from memrewrite.torch_internals.fake_tensors import FakeTensor, FakeTensorMode
from memrewrite.torch_internals.pytrees import tensors_in, tree_flatten


class UnlikeError(Exception):
    """What ran before does not tell what runs now."""


@dataclass(frozen=True, slots=True)
class Run:
    """How a node ran: what it called, what it was ``given``, also by modes that are on, and its ``result``.

    ``keys`` are the storages of the result's tensors, ``forms`` what these look like then, ``made`` the storages that
    it made.
    """

    target: Any
    given: Any
    result: Any
    keys: tuple[int, ...]
    forms: list[Any]
    facts: NodeEffects
    made: range

    @property
    def stays(self) -> bool:
        """Whether its result looks as it did: by what is written in place it may have come by a gradient."""
        return forms_of(self.result) == self.forms


@dataclass(frozen=True)
class Runs:
    """The runs of a graph's nodes in a fake ``mode``; ``attributes`` are real tensors with their fakes, by id."""

    mode: FakeTensorMode = field(default_factory=lambda: FakeTensorMode(allow_non_fake_inputs=True))
    of: dict[fx.Node, Run] = field(default_factory=dict)
    attributes: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    storages: dict[int, Storage] = field(default_factory=dict)

    def on(self, copies: dict[fx.Node, fx.Node]) -> "Runs":
        """The same of copies of the nodes."""
        return replace(self, of={copies[node]: run for node, run in self.of.items()})

    def tell_others(self) -> bool:
        """Whether a node that runs again is given what looks as it did then."""
        return all(run.stays for run in self.of.values())


class Carried:
    """Gives what the nodes of a graph did ``before``, in the numbers that storages have now."""

    def __init__(self, before: Runs, recorder: Recorder) -> None:
        self._before, self._recorder = before, recorder
        self._now: dict[int, int] = {}  # the number of a storage by what it was
        self._leaves: set[int] = set()  # by id, those that nodes are given which need not run under autocast

    def fake_of(self, attribute: Tensor) -> Tensor | None:
        """What stood for an attribute of the module."""
        real, fake = self._before.attributes.get(id(attribute), (attribute, None))
        return fake if fake is not None and fake.requires_grad == real.requires_grad else None

    def again(self, node: fx.Node, given: Any) -> Run | None:
        """What a node does that is given the same, None where it has to run.

        Raises ``UnlikeError`` where it may read what autocast keeps, a leaf's cast, of a leaf that was cast before.
        """
        if not self._before.of:
            return None
        cast = tensors_in(given) if casts_are_kept(self._recorder.device_type) else []
        leaves = {id(each) for each in cast if each.is_leaf and each.requires_grad}
        then = self._before.of.get(node)
        if then is None or not self._tells(then, node, given):
            if leaves & self._leaves:
                raise UnlikeError
            return None
        self._leaves |= leaves
        made = self._recorder.make(self._before.storages[key].bytes for key in then.made)
        self._now.update(zip(then.made, made, strict=True))
        keys = tuple(self._now[key] for key in then.keys)
        self._stand_for(then.result, keys)
        return replace(then, keys=keys, facts=then.facts.renumbered(self._now), made=made)

    def _tells(self, then: Run, node: fx.Node, given: Any) -> bool:
        """Whether it is told by this run: only of what has a gradient, as no value of it decides anything."""
        facts = then.facts
        alike = node.op in ("call_function", "call_method") and then.target == node.target and not facts.opaque
        if not alike or facts.changes or not any(each.requires_grad for each in tensors_in(then.result)):
            return False
        return _same(given, then.given) and all(key in self._now or key in then.made for key in facts.numbers)

    def as_before(self, node: fx.Node, result: Any, keys: tuple[int, ...], forms: list[Any]) -> Any:
        """What stands for a ``result`` of these forms in these storages: what it was, where that looks the same."""
        then = self._before.of.get(node)
        if then is None or forms != then.forms:
            return result
        made = {old: new for old, new in zip(then.keys, keys, strict=True) if old not in self._now}
        if any(self._now.get(old, made.get(old)) != new for old, new in zip(then.keys, keys, strict=True)):
            return result
        self._now |= made
        self._stand_for(then.result, keys)
        return then.result

    def _stand_for(self, result: Any, keys: tuple[int, ...]) -> None:
        for tensor, key in zip(tensors_in(result), keys, strict=True):
            self._recorder.name(tensor, key)


def _same(now: Any, then: Any) -> bool:
    """Whether arguments are the same tensors, and the same of all else."""
    kind = type(now)
    if kind in PLAIN:
        return type(then) is kind and bool(now == then)
    if issubclass(kind, tuple | list):
        return type(then) is kind and len(now) == len(then) and all(map(_same, now, then))
    if issubclass(kind, dict):
        return now.keys() == then.keys() and all(_same(now[key], then[key]) for key in now)
    return now is then and not isinstance(now, nn.Module)


def forms_of(result: Any) -> list[Any]:
    """All that tells what operators do with a result, but which storages it has."""
    if isinstance(result, FakeTensor):
        return [_form(result)]
    leaves, tree = tree_flatten(result)
    return [tree, *map(_form, leaves)]


def _form(leaf: Any) -> Any:
    if isinstance(leaf, FakeTensor):
        place = leaf.storage_offset(), leaf.untyped_storage().nbytes(), leaf.fake_device
        try:
            marks = leaf.requires_grad, leaf.is_leaf, is_view(leaf), leaf.is_neg(), leaf.is_conj()
        except RuntimeError:  # of views made without gradients that were written with them PyTorch tells no history
            return object()  # like no other
        return type(leaf), leaf.dtype, leaf.shape, leaf.stride(), *place, *marks
    return (type(leaf), leaf) if type(leaf) in PLAIN else id(leaf)
