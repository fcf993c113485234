"""Peaks that were simulated before, so that the same step is not simulated twice for one answer."""

from dataclasses import dataclass, field

from memrewrite.workload.step import Inputs, Step


@dataclass(frozen=True)
class Known:
    """The peaks in bytes of steps of one model, by step and batch size; its inputs differ by that alone.

    Steps are compared and not looked up: a loss function need not have a hash.
    """

    found: list[tuple[Step, int, int]] = field(default_factory=list)

    def add(self, step: Step, inputs: Inputs, peak: int) -> None:
        """Remember a peak."""
        self.found.append((step, inputs.batch_size, peak))

    def of(self, step: Step, inputs: Inputs) -> int | None:
        """The peak of that step; None where it was not simulated."""
        size = inputs.batch_size
        return next((peak for other, batch, peak in self.found if batch == size and other == step), None)
