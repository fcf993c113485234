"""The verdict on two models: in one sentence, by group of values, and value by value."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from memrewrite.equivalence.compare import Comparison, TensorVerdict
from memrewrite.equivalence.trial import Key
from memrewrite.records.outcomes import Check


@dataclass(frozen=True)
class Verdict:
    """Whether two models are equivalent, in one sentence (``summary``) and value by value (``tensors``).

    ``exact`` means everything was bit-equal. ``batch`` is the size of dimension 0 of the inputs it was found at,
    None if they have none. ``room`` is what float64 left to each value, as ``verify`` takes it for what is known.
    """

    equivalent: bool
    exact: bool
    summary: str
    tensors: tuple[TensorVerdict, ...] = field(repr=False)
    batch: int | None
    room: Mapping[Key, float] = field(default_factory=dict, repr=False)

    @property
    def checks(self) -> tuple[Check, ...]:
        """The same by group of values, in the order they were computed."""
        groups: dict[str, list[TensorVerdict]] = {}
        for tensor in self.tensors:
            groups.setdefault(tensor.kind, []).append(tensor)
        return tuple(_check(kind, tensors) for kind, tensors in groups.items())


def concluded(comparison: Comparison, steps: int, batch: int | None, at: str = "") -> Verdict:
    """The verdict on what was compared over ``steps`` steps; ``at`` ends its sentence."""
    tensors = comparison.verdicts()
    failed = [t for t in tensors if not t.passed]
    changed = [t for t in tensors if not t.bit_equal]
    if failed:
        worst = max(failed, key=_excess)
        text = f"not equivalent: {_describe(worst)} ({len(failed)} of {len(tensors)} values differ)"
    elif changed:
        text = f"equivalent: worst {_describe(max(changed, key=_excess))}"
    else:
        counts = Counter(t.kind for t in tensors)
        text = f"bit-equal: {steps} steps, {counts['gradient']} gradients, {counts['buffer']} buffers, random state"
    return Verdict(not failed, not changed, text + at, tensors, batch, comparison.room())


def _check(kind: str, tensors: list[TensorVerdict]) -> Check:
    changed = [t for t in tensors if not t.bit_equal]
    row = Check(kind, len(tensors), len(tensors) - len(changed), all(t.passed for t in tensors))
    if not changed:
        return row
    worst = max(changed, key=lambda t: (not t.passed, _excess(t)))
    error, own, allowed = (x if math.isfinite(x) else None for x in (worst.error, worst.reference_error, worst.allowed))
    return replace(row, worst=worst.name, error=error, own_error=own, allowed=allowed)


def _describe(tensor: TensorVerdict) -> str:
    label = tensor.kind if tensor.name == tensor.kind else f"{tensor.kind} {tensor.name}"
    if not math.isfinite(tensor.error):
        return f"{label}, which is missing, of another form or not finite in one of the two models"
    if tensor.reference_error > 0:
        own = "between two runs of the original" if tensor.by_noise else "the original's own"
        own += " with other last bits in its weights" * tensor.by_rounding
        times = f"{tensor.error / tensor.reference_error:.2g} times {own}"
        return f"{label}, error {tensor.error:.2g}, {times} (allowed {tensor.allowed:.2g})"
    return f"{label}, error {tensor.error:.2g} (allowed {tensor.allowed:.2g})"


def _excess(tensor: TensorVerdict) -> float:
    return tensor.error / tensor.allowed if tensor.allowed > 0 else math.inf
