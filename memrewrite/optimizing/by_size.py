"""The predicted peak of a step against the size of what varies in its inputs, original and rewritten."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from memrewrite.equivalence.sizes import Place, cut, varying
from memrewrite.optimizing.foresight import Foresight
from memrewrite.records.outcomes import PeaksBySize
from memrewrite.records.report import Report
from memrewrite.report.later import complete_by
from memrewrite.runtime.dropin import own, programs
from memrewrite.runtime.matching import specs_of_tensors
from memrewrite.workload.hooks import hooks_off
from memrewrite.workload.original import original_of

# For each size but the one planned for, what is tried until the program takes it, as in ``equivalence.sizes``.
_SHARES = (((0.0, 0), (0.0, 1)), ((0.25, 0),), ((0.5, 0),), ((0.75, 0),))
_NOT_DRAWN = "Peaks at other sizes are not drawn: "
_OF_PARTS = f"{_NOT_DRAWN}only parts of the model were rewritten."
_COMPILED = f"{_NOT_DRAWN}what a compiled step takes there is not known before it is compiled."
_UNKNOWN = (
    f"{_NOT_DRAWN}simulation knows none. The step's course depends on values, or its loss function takes outputs of "
    "the planned size alone, or the model was changed since."
)


def when_written(result: nn.Module) -> Callable[[Report], Report]:
    """What gives a report of ``result`` its peaks by size, as long as that is there; holds nothing of it."""
    there = weakref.ref(result)

    def complete(report: Report) -> Report:
        found = there()
        return report if found is None else replace(report, by_size=by_size(found, report))

    return complete


def noted(report: Report, note: str, result: nn.Module) -> Report:
    """The report on a ``result`` with one more note; what is found out as it is written stays promised."""
    more = replace(report, notes=(*report.notes, note))
    complete_by(more, when_written(result))
    return more


def by_size(result: nn.Module, report: Report) -> PeaksBySize | None:
    """The peaks of a ``result``, in the process that planned it, for its lengths, or where none vary for the batch.

    The largest size is the one planned for, whose peaks ``report`` has; the others are simulated. None where no size
    varies.
    """
    kept = own(result)
    if kept is None:
        return _none(_OF_PARTS) if any(_vary(program.leaves) for program in programs(result).values()) else None
    foresee = kept.promise.foresee
    if not isinstance(foresee, Foresight):
        return None
    places = _lengths_first(varying(result, foresee.planned.inputs))
    if not any(place.size > place.least for place in places):
        return None
    if foresee.step.target.compiles:
        return _none(_COMPILED)
    with hooks_off(result), _as_planned(result):
        points = list(_Pair(original_of(result), result, foresee, places).points())
    if not points:
        return _none(_UNKNOWN)
    first: dict[int, Place] = {}  # what is as long there is as long everywhere
    for place in places:
        first.setdefault(place.size, place)
    named = {f"{place.name}, size {place.dim}": place for place in first.values()}
    sizes = {name: (*(place.shortened(*share) for share, _, _ in points), place.size) for name, place in named.items()}
    limit = foresee.limit
    return PeaksBySize(
        sizes,
        (*(before for _, before, _ in points), limit.of(report.predicted_before)),
        (*(after for _, _, after in points), limit.of(report.predicted_after)),
    )


def _none(why: str) -> PeaksBySize:
    return PeaksBySize({}, (), (), why)


def _vary(leaves: tuple[Any, ...]) -> bool:
    return any(isinstance(size, str) for spec in specs_of_tensors(leaves) for size in spec[2])


def _lengths_first(places: list[Place]) -> list[Place]:
    """What is no size of a first dimension, wherever it is found; everything where there is nothing else."""
    lengths = {place.symbol for place in places if place.dim}
    return [place for place in places if place.symbol in lengths] or places


@dataclass(frozen=True)
class _Pair:
    """Both models, and what tells their peaks where the sizes of these places are smaller."""

    original: nn.Module
    rewritten: nn.Module
    foresee: Foresight
    places: list[Place]

    def points(self) -> Iterator[tuple[tuple[float, int], int | None, int]]:
        """A share of the sizes, and both peaks there, from the smallest up; not those for which the program is none."""
        seen = {tuple(place.size for place in self.places)}
        for shares in _SHARES:
            for share in shares:
                sizes = tuple(place.shortened(*share) for place in self.places)
                if sizes in seen:
                    continue
                seen.add(sizes)
                after = self._peak(self.rewritten, share)
                if after is not None:
                    yield share, self._peak(self.original, share), after
                    break

    def _peak(self, module: nn.Module, share: tuple[float, int]) -> int | None:
        planned = self.foresee.planned
        sizes = {place.symbol: place.shortened(*share) for place in self.places}
        inputs = planned.placed(cut(planned.inputs, self.places, sizes))
        return self.foresee((module, inputs.args, inputs.kwargs))


@contextmanager
def _as_planned(result: nn.Module) -> Iterator[None]:
    """Let every submodule be in the mode it was planned in, and no wrapper be around forward, as it is by now."""
    around = {name: vars(result).pop(name) for name in ("forward",) if name in vars(result)}
    flags = [(part, part.training) for part in result.modules()]
    planned = programs(result)[""].training
    for path, part in result.named_modules():
        part.training = planned.get(path, part.training)
    try:
        yield
    finally:
        vars(result).update(around)
        for part, flag in flags:
            part.training = flag
