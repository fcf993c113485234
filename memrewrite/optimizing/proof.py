"""The proof of a rewritten model: against the original, and against itself without segments."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from memrewrite.equivalence import verifying
from memrewrite.equivalence.verdict import Verdict
from memrewrite.records.errors import NotEquivalentError
from memrewrite.search import registry
from memrewrite.search.candidate import Candidate
from memrewrite.workload.gathered import as_gathered, cast_inputs


@dataclass(frozen=True)
class Proof:
    """The verdict on a result, and whether it was to have the bits of the original; else float64 was the measure.

    ``plain`` makes the result without segments then, whose bits it has.
    """

    verdict: Verdict
    bitwise: bool
    plain: Callable[[], nn.Module] | None = None


def prove(candidate: Candidate, result: nn.Module, seed: int, exact: bool) -> Proof:
    """Verify against the original; where arithmetic changed, also bit for bit against the program without segments.

    That a rewrite computes in pieces what the device computes at once shows in the bits: if not all are the same, it
    has changed the arithmetic there, and so has a capture that takes a way of its own.
    Raises ``NotEquivalentError``.
    """
    bench, changed = candidate.bench, candidate.arithmetic_changed
    model, inputs = as_gathered(bench.model, bench.step.mesh), cast_inputs(bench.inputs, bench.step.mesh)
    result = result if model is bench.model else candidate.build_on(model)

    def verified(bitwise: bool) -> Verdict:
        parts = len(candidate.regions) > 1  # whose sizes need not vary where those of the model do
        segmented = candidate.results.get("checkpoint_segments")
        apart = not bitwise and segmented is not None and segmented.modified
        plain = candidate.without_segments().build_on(model) if apart else None
        how: dict[str, Any] = {"exact": bitwise, "seed": seed, "smaller": not parts, "plain": plain}
        return verifying.verify(model, result, inputs, bench.step, **how)

    verdict = verified(not changed)
    in_pieces = any(name in registry.SLOWER and found.modified for name, found in candidate.results.items())
    if not (verdict.equivalent or changed or exact) and (in_pieces or not candidate.captured_exactly):
        changed = True
        verdict = verified(False)
    if not verdict.equivalent:
        done = ", ".join(name for name, r in candidate.results.items() if r.modified)
        notes = "".join(f" {note}" for note in candidate.notes)
        why = verdict.summary.removesuffix(".")  # of what the model raised
        raise NotEquivalentError(
            f"The rewritten model is not equivalent ({done}): {why}.{notes}{_advice(candidate, exact)}"
        )
    return Proof(verdict, not changed, (lambda: candidate.without_segments().build()) if changed else None)


def _advice(candidate: Candidate, exact: bool) -> str:
    if candidate.arithmetic_changed:
        return " exact=True leaves out the rewrites that change the arithmetic."
    if exact and not candidate.captured_exactly:
        return (
            " The original has a way of its own to the same result, as values it asks for decide, or what a compiler "
            "made of it; leave out exact=True."
        )
    return ""
