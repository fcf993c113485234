"""The parts of a report: what was predicted, measured, planned, checked and tried; each is plain data."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Peaks:
    """Where memory stood in one variant of the model; all in bytes, peaks over the second training step.

    ``phases`` holds (phase, bytes in use as the phase ends) for steps 1 and 2 in order; ``categories`` the bytes in use
    at the peak by kind (parameters, gradients, optimizer state, inputs, activations, temporaries, ...). ``reserved`` is
    what CUDA's caching allocator then holds of the device; on the CPU, which has none, the peak.
    """

    peak: int
    peak_step1: int
    phases: tuple[tuple[str, int], ...]
    categories: dict[str, int]
    reserved: int


@dataclass(frozen=True)
class Measured:
    """What really happened on the device: bytes allocated and reserved at the peak, median step time in ms.

    ``phases`` is as in ``Peaks``. ``device_used`` is what the whole CUDA device holds after the steps, for everybody on
    it: the CUDA context and the allocator's unused blocks count; None elsewhere.
    """

    peak: int
    reserved: int
    step_ms: float
    phases: tuple[tuple[str, int], ...]
    device: str
    device_used: int | None = None

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Measured":
        """The inverse of ``dataclasses.asdict`` through JSON."""
        return cls(**{**data, "phases": tuple((name, size) for name, size in data["phases"])})


@dataclass(frozen=True)
class Segment:
    """One checkpoint segment: the nodes it covers, what it frees and what running it again costs.

    One of ``depth`` 2 lies inside one of depth 1, which frees the same bytes and more.
    """

    first: str
    last: str
    nodes: int
    saved_bytes: int
    rerun_ms: float
    depth: int = 1


@dataclass(frozen=True)
class Share:
    """A part of the model, by path ("" for what lies in no other part), and the bytes its forward keeps for backward.

    ``untouched`` says why the part stays as it is, "" where it is open to rewrites.
    """

    path: str
    kept_bytes: int
    untouched: str = ""


@dataclass(frozen=True)
class Curve:
    """Memory over the second step, as many of its moments as a drawing needs, its highest always among them.

    A moment is an operator that allocates, or the end of a phase; ``length`` is how many there were, ``moments`` the
    numbers of those that are kept, ``phases`` the phases in order, each with the number of its first moment. ``bytes``
    has, by category, the bytes in use at each moment kept. ``makers`` lists (module path, operator), ``made_by`` says
    which of them allocated at each moment kept; a module path of "" is the model itself, of None outside of it.
    """

    length: int
    phases: tuple[tuple[str, int], ...]
    moments: tuple[int, ...]
    bytes: dict[str, tuple[int, ...]]
    makers: tuple[tuple[str | None, str], ...]
    made_by: tuple[int, ...]

    @property
    def totals(self) -> tuple[int, ...]:
        """Bytes in use at each moment kept."""
        return tuple(map(sum, zip(*self.bytes.values(), strict=True)))

    @property
    def highest(self) -> int:
        """Which of the moments kept is the peak."""
        totals = self.totals
        return max(range(len(totals)), key=totals.__getitem__)


@dataclass(frozen=True)
class PeaksBySize:
    """The predicted peak of a step, in bytes of the kind that the budget bounds, against the size of what varies.

    ``sizes`` has by what varies (``"input_ids, size 1"``) its sizes, from the smallest to the one planned for; those of
    one place are of one step. ``original`` is None where the original takes no such inputs, or is not known there.
    ``missing`` says why there are no figures, where there are none.
    """

    sizes: dict[str, tuple[int, ...]]
    original: tuple[int | None, ...]
    rewritten: tuple[int, ...]
    missing: str = ""


@dataclass(frozen=True)
class ModuleBytes:
    """The activations one submodule made that are there as forward ends (in inference: at the peak), in bytes.

    ``before`` in the model as it was, ``after`` in the rewritten one. A path of "" is the model itself, None outside.
    """

    path: str | None
    before: int
    after: int


@dataclass(frozen=True)
class Check:
    """What verification found in one group of values (all gradients, say) over all steps.

    ``bit_equal`` of its ``count`` values had the same bits. Of the others ``worst`` came nearest to, or went farthest
    beyond, what is ``allowed``: its ``error``, and the original's ``own_error``, as ``compare.TensorVerdict`` has them.
    A figure that is no number is None, and so are all three where every value is bit-equal.
    """

    group: str
    count: int
    bit_equal: int
    passed: bool
    worst: str = ""
    error: float | None = None
    own_error: float | None = None
    allowed: float | None = None


@dataclass(frozen=True)
class Option:
    """Another way to take the step: its predicted peak in bytes, whether that fits, and what it costs, in words."""

    name: str
    peak_bytes: int
    fits: bool
    cost: str


@dataclass(frozen=True)
class HabitCost:
    """What something that the loop keeps alive, in ``words``, adds to the predicted peak, in bytes."""

    words: str
    bytes: int
