"""The record of one ``estimate`` call. Everything in bytes unless it says otherwise."""

from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

from memrewrite.records.loop import TUTORIAL
from memrewrite.records.outcomes import HabitCost, Option

SCHEMA_VERSION = 1
_TABLE = "memrewrite.report.estimate_table"  # what an estimate is shown by, named and not imported


@dataclass(frozen=True)
class ModuleShare:
    """What one module takes, its submodules included; ``path`` is "" for the whole model, ``kind`` its class.

    ``kept`` is what its forward keeps for backward at the batch size, ``kept_alone`` without its submodules';
    ``kept_per_sample`` is what one more sample adds to ``kept``, None where no other batch size was simulated.
    ``at_peak`` are the activations and temporaries it made that are in use at the peak.
    """

    path: str
    kind: str
    parameters: int
    kept: int
    kept_alone: int
    kept_per_sample: int | None
    at_peak: int


@dataclass(frozen=True)
class Peak:
    """Where the peak of the second step is: its bytes by category, and the operator that allocates there.

    ``reserved`` is what CUDA's caching allocator holds then; on the CPU, which has none, the peak. ``module`` is the
    path of the submodule whose operator it is (in backward, whose forward it undoes), "" the model's own forward, None
    what lies outside, such as the loss and the optimizer.
    """

    bytes: int
    categories: dict[str, int]
    phase: str
    operator: str
    module: str | None
    reserved: int


@dataclass(frozen=True)
class Textbook:
    """The rule of thumb: (parameters x ``copies`` + (activations x ``errors`` + inputs) x batch) x 4 bytes.

    ``parameters``, and per sample ``activations`` and ``inputs``, are counts of numbers. ``copies`` is 3 in training
    (weights, gradients, momentum) and ``errors`` 2 (each activation and its gradient), else both are 1.
    """

    parameters: int
    activations: float
    inputs: float
    batch_size: int
    copies: int
    errors: int

    @property
    def bytes(self) -> int:
        """What the rule gives."""
        per_sample = self.activations * self.errors + self.inputs
        return round(4 * (self.parameters * self.copies + per_sample * self.batch_size))

    @property
    def as_written(self) -> float:
        """The rule in MB of 2**20 bytes with each term rounded to 0.01 MB first, as it is worked by hand."""
        activations, parameters, inputs = (
            round(4 * count / 2**20, 2)
            for count in (
                self.activations * self.errors,
                self.parameters * self.copies,
                self.inputs * self.batch_size,
            )
        )
        return round(activations * self.batch_size + parameters + inputs, 2)


@dataclass(frozen=True)
class Difference:
    """How many ``bytes`` the peak has more (or less) than the textbook's, and ``why``. They sum to all of it."""

    bytes: int
    why: str


@dataclass(frozen=True)
class Largest:
    """The largest batch whose peak is within the memory, and its ``peak``.

    ``batch_size`` is 0 where not even one sample fits, None where none is known, and ``why`` says the reason then.
    ``simulated`` are the batch sizes whose steps were simulated with their peaks (None where the step fails); the one
    after the largest is among them, unless ``why`` says that there is no bound.
    """

    mode: str
    batch_size: int | None
    peak: int | None
    simulated: tuple[tuple[int, int | None], ...]
    why: str = ""


@dataclass(frozen=True)
class Estimate:
    """What a step of the model takes, predicted on fake tensors; ``str()`` of it is for people.

    ``inference_peak`` is that of a forward under ``no_grad`` in eval mode with the same inputs. ``differences`` lead
    from ``textbook`` to ``peak``. ``fits``, ``largest`` (in training and in inference) and ``options`` (what would fit
    where it does not) are about ``device_memory`` and empty without one. ``habits`` is what the ``loop`` keeps alive
    and need not. In a ``mesh`` it is the step of one of its processes.
    """

    model: str
    mode: str
    device: str
    batch_size: int | None
    peak: Peak
    inference_peak: int | None
    modules: tuple[ModuleShare, ...]
    textbook: Textbook
    differences: tuple[Difference, ...]
    device_memory: int | None = None
    fits: bool | None = None
    largest: tuple[Largest, ...] = ()
    options: tuple[Option, ...] = ()
    notes: tuple[str, ...] = ()
    loop: str = TUTORIAL
    mesh: str | None = None
    habits: tuple[HabitCost, ...] = ()

    def __str__(self) -> str:
        text: str = import_module(_TABLE).text(self)
        return text

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``; carries ``schema_version``."""
        rule = {**asdict(self.textbook), "bytes": self.textbook.bytes, "as_written": self.textbook.as_written}
        return {"schema_version": SCHEMA_VERSION, **asdict(self), "textbook": rule}
