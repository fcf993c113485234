"""What comes of the plans of one graph that are compiled."""

from dataclasses import dataclass

from memrewrite.backends.frontier import Found


@dataclass(frozen=True)
class Foreseen:
    """What a division of one graph takes, in bytes: the peak of the step, before and after, and what is kept.

    ``ms`` is what running nodes again takes; ``kept_by`` has what is kept and ``reruns`` how much runs again, by
    operator, most first.
    """

    before: int
    after: int
    kept_before: int
    kept: int
    regions: int
    ms: float
    kept_by: dict[str, int]
    reruns: dict[str, int]


@dataclass(frozen=True)
class Outcome:
    """What came of a plan that was compiled: as in ``Partition``, with the plan itself, None where it is not known."""

    found: Found | None
    apart: bool
    choice: str
    foreseen: Foreseen | None
    observed: int | None
    unseen: str
    kept: int
