"""A short profile of a graph's nodes on their device: each distinct operator and signature is timed once."""

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

import torch
from torch import fx

from memrewrite.costs import ROOFLINES, Costs, Times
from memrewrite.costs.calls import Call, call_of
from memrewrite.costs.normalizations import again_ms, call_again
from memrewrite.costs.table import Table, cache_file
from memrewrite.costs.table import environment as environment_of
from memrewrite.costs.timer import Measure, timing_on
from memrewrite.observe.effects import Effects, autocast_switch

_SECONDS = 10.0  # for one model, all its variants together


class Profile:
    """Times nodes for one model; what is not timed when ``seconds`` are spent, or cannot be, is left to the roofline.

    ``table`` remembers times, ``timing`` opens what measures a call, ``clock`` gives seconds.
    """

    def __init__(
        self,
        table: Table,
        timing: Callable[[], AbstractContextManager[Measure]],
        *,
        seconds: float = _SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._table, self._timing, self._clock = table, timing, clock
        self._left = seconds

    def costs(self, effects: Effects, amp: torch.dtype | None) -> Costs:
        """The costs of a CUDA graph's nodes as observed (``effects``) under ``amp``, after timing what is unknown."""
        roofline = ROOFLINES["cuda"]
        expected = {node: roofline.ms((f.flops, f.moved), amp) for node, f in effects.of.items()}
        measured = self._times(_calls(effects, amp), expected)
        guessed = sum(expected[node] for node in measured)
        real = sum(times.forward for node, times in measured.items() if expected[node])
        return Costs(roofline, amp, measured, real / guessed if real and guessed else 1.0)

    def again(self, normalizations: Mapping[fx.Node, fx.Node | None]) -> dict[fx.Node, float]:
        """What it takes, in ms, to run each normalization and its rectifier again; by the roofline where not timed."""
        expected = again_ms(normalizations, ROOFLINES["cuda"])
        calls = [(node, call_again(node, relu is not None)) for node, relu in normalizations.items()]
        return expected | {node: times.forward for node, times in self._times(calls, expected).items()}

    def _times(self, calls: list[tuple[fx.Node, Call]], expected: Mapping[fx.Node, float]) -> dict[fx.Node, Times]:
        """The times of nodes by their calls, as far as they are known once what is unknown was timed."""
        known = self._table.known
        weights: dict[str, float] = defaultdict(float)
        for node, call in calls:
            weights[call.text] += expected[node]
        distinct = {call.text: call for _, call in calls if call.text not in known}
        # The dearest first, so that the time runs out on those that matter least.
        self._measure(sorted(distinct.values(), key=lambda call: weights[call.text], reverse=True))
        return {node: times for node, call in calls if (times := known.get(call.text)) is not None}

    def _measure(self, calls: list[Call]) -> None:
        if not calls or self._left <= 0:
            return
        known = self._table.known
        with self._table.alone():
            began = self._clock()
            done = set()
            with self._timing() as measure:
                for call in calls:
                    if self._clock() - began >= self._left:
                        break
                    if call.text not in known:
                        known[call.text] = measure(call)
                        done |= {call.text} if call.lasting else set()
            self._left -= self._clock() - began
            self._table.save(done)


def profile_on(device: torch.device) -> Profile | None:
    """A profile for one model on ``device``; None on devices other than CUDA, where the roofline has to do."""
    if device.type != "cuda":
        return None
    return Profile(_table(environment_of(device)), functools.partial(timing_on, device))


@functools.cache
def _table(environment: str) -> Table:
    return Table(environment, cache_file(environment))


def _calls(effects: Effects, amp: torch.dtype | None) -> list[tuple[fx.Node, Call]]:
    """The nodes that can be timed, which those are not that run where the graph itself switches autocast."""
    found = []
    depth = 0
    for node in effects.order:
        depth += autocast_switch(node)
        if depth == 0 and (call := call_of(node, effects.of[node], amp)) is not None:
            found.append((node, call))
    return found
