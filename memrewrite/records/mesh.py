"""The mesh a step runs on: how many processes train together, and what PyTorch's engine for that is told.

A mesh is written as text, ``ddp=8,gradient-as-bucket-view`` or ``fsdp=64,param-dtype=bf16``: a number of processes, and
the arguments of ``DistributedDataParallel`` or ``fully_shard`` by their own names. ``Ddp`` and ``Fsdp`` have them all.
``tp=8`` is tensor parallelism, and ``fsdp=64,tp=8`` both: 512 processes, in 64 groups of 8 neighbours.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

from memrewrite.records.errors import UsageError

_SIZE = re.compile(r"(ddp|fsdp|tp)=([1-9]\d{0,5})")
_CAP = re.compile(r"bucket-cap-mb=(\d{1,6}(?:\.\d+)?)")
_DTYPE = re.compile(r"(param|reduce|output)-dtype=(bf16|fp16|fp32)")
_NUMBER = re.compile(r"(reshard|replicas)=([1-9]\d{0,5})")
_UNITS = re.compile(r"units=([\w.*]+)")
_IGNORED = re.compile(r"ignored=([\w.*]+)")
_SWITCHES: dict[str, tuple[str, bool]] = {
    "no-cast-inputs": ("cast_inputs", False),
    "no-reshard": ("reshard", False),
    "reshard-root": ("reshard_root", True),
    "cpu-offload": ("offload", True),
}
_OTHERS = re.compile(r"(ddp|fsdp|tp|hsdp|pp|cp|ep)(=.*)?")


@dataclass(frozen=True)
class Mesh(ABC):
    """``size`` processes, of which each is one device's; ``str`` writes what ``parse`` reads."""

    size: int
    kind: ClassVar[str] = ""

    @classmethod
    def parse(cls, value: "str | Mesh") -> "Mesh":
        """Read a mesh; raises ``UsageError`` for one that means nothing or is not supported."""
        if isinstance(value, Mesh):
            return value
        first, *others = str(value).replace(" ", "").split(",")
        match = _SIZE.fullmatch(first)
        if match is None:
            if _OTHERS.fullmatch(first):
                raise UsageError(f"The mesh {value!r} is not supported; ddp=8, fsdp=8 and tp=8 are.")
            raise UsageError(f"The mesh {value!r} is unknown; write e.g. ddp=8 or fsdp=8,param-dtype=bf16.")
        kinds: dict[str, type[Ddp | Fsdp | Tp]] = {"ddp": Ddp, "fsdp": Fsdp, "tp": Tp}
        found = kinds[match[1]](int(match[2]))
        for word in others:
            second = _SIZE.fullmatch(word)
            if isinstance(found, Fsdp) and found.tp == 1 and second is not None and second[1] == "tp":
                found = replace(found, tp=int(second[2]))
            elif _OTHERS.fullmatch(word):
                raise UsageError(
                    f"A mesh of {found.kind} and {word!r} is not supported; fsdp=64,tp=8 is, in this order, or give "
                    "one of them."
                )
            else:
                found = found.told(word)
        return found

    @property
    def in_inference(self) -> "Mesh | None":
        """The mesh that a forward without gradients is planned in, None where each process has all of the model."""
        return None

    def of_mode(self, mode: Literal["train", "inference"]) -> "Mesh | None":
        """The mesh that a step is planned in, None as above.

        Raises ``UsageError`` where it is not known what one takes.
        """
        return self if mode == "train" else self.in_inference

    @property
    def processes(self) -> int:
        """How many processes there are in all."""
        return self.size

    @property
    def divides_layers(self) -> bool:
        """Whether layers are divided among processes, which send each other what these give."""
        return False

    @abstractmethod
    def told(self, word: str) -> Self:
        """The mesh with one more argument; raises ``UsageError`` for one that it does not have."""

    @abstractmethod
    def _words(self) -> list[str]:
        """Its arguments as text, "" for one that is not given."""

    def __str__(self) -> str:
        return ",".join([f"{self.kind}={self.size}", *filter(None, self._words())])


@dataclass(frozen=True)
class Ddp(Mesh):
    """Processes that train a copy of the model each; the rest are arguments of ``DistributedDataParallel``.

    ``bucket_cap_mb`` is in MiB, None for PyTorch's default. ``hook`` is a communication hook with its state, as
    ``register_comm_hook`` takes them, None for the default; text cannot say it.
    """

    bucket_cap_mb: float | None = None
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    find_unused_parameters: bool = False
    buffers: bool = True
    hook: tuple[Any, Callable[..., Any]] | None = None
    kind: ClassVar[str] = "ddp"
    words: ClassVar[tuple[str, ...]] = (
        "bucket-cap-mb=MIB",
        "gradient-as-bucket-view",
        "static-graph",
        "find-unused-parameters",
        "no-buffers",
    )

    def told(self, word: str) -> Self:
        """As in ``Mesh``; ``no-buffers`` is ``broadcast_buffers=False``."""
        if match := _CAP.fullmatch(word):
            return replace(self, bucket_cap_mb=float(match[1]))
        if word == "no-buffers":
            return replace(self, buffers=False)
        if word not in self.words:
            raise _unknown(word, self.words)
        given: dict[str, Any] = {word.replace("-", "_"): True}
        return replace(self, **given)

    def _words(self) -> list[str]:
        return [
            "" if self.bucket_cap_mb is None else f"bucket-cap-mb={self.bucket_cap_mb:g}",
            "gradient-as-bucket-view" if self.gradient_as_bucket_view else "",
            "static-graph" if self.static_graph else "",
            "find-unused-parameters" if self.find_unused_parameters else "",
            "" if self.buffers else "no-buffers",
        ]


@dataclass(frozen=True)
class Fsdp(Mesh):
    """Processes that have a part of each parameter; the rest are arguments of ``fully_shard`` (FSDP2).

    ``param_dtype``, ``reduce_dtype`` and ``output_dtype`` (``bf16``, ``fp16``, ``fp32`` or None) are its mixed
    precision, and ``cast_inputs`` whether inputs of units become ``param_dtype``. ``reshard`` is whether the parameters
    of units are freed after forward, or to how many parts of them, ``reshard_root`` whether those of the model's own
    are. With ``replicas`` there are so many times ``size`` processes, which have the parts once each (HSDP); with
    ``tp`` so many times again, which are tensor parallel as in ``Tp``. ``units`` is a pattern of the paths of the
    modules that are sharded one by one before the model is (``model.layers.*``), "" for the members of lists of modules
    of one class. With ``offload`` what each process has of the parameters, their gradients and the optimizer's state
    lies in the memory of the host (``CPUOffloadPolicy``). ``ignored`` are patterns of the paths of parameters that
    every process keeps whole (``ignored_params``).

    What text cannot say is known of a model that is sharded already: ``paths`` are those of its units, ``groups`` those
    of them that are sharded as one, ``reshards`` are the units that differ from ``reshard``, and for those
    ``prefetched`` says which others they gather ahead in "forward" or "backward". ``devices`` are the meshes of
    PyTorch's that ``fully_shard`` is called with and that layers are divided over, of a model that is tensor parallel
    already.
    """

    param_dtype: str | None = None
    reduce_dtype: str | None = None
    output_dtype: str | None = None
    cast_inputs: bool = True
    reshard: bool | int = True
    reshard_root: bool = False
    replicas: int = 1
    tp: int = 1
    units: str = ""
    offload: bool = False
    ignored: tuple[str, ...] = ()
    paths: tuple[str, ...] | None = None
    groups: tuple[tuple[str, ...], ...] = ()
    reshards: tuple[tuple[str, bool | int], ...] = ()
    prefetched: tuple[tuple[str, str, tuple[str, ...]], ...] = ()
    devices: tuple[Any, Any] | None = None
    kind: ClassVar[str] = "fsdp"
    words: ClassVar[tuple[str, ...]] = (
        "param-dtype=bf16",
        "reduce-dtype=fp32",
        "output-dtype=bf16",
        "no-cast-inputs",
        "no-reshard",
        "reshard=PARTS",
        "reshard-root",
        "replicas=2",
        "units=PATTERN",
        "cpu-offload",
        "ignored=PATTERN",
    )

    def __post_init__(self) -> None:
        if self.offload and self.ignored:
            raise UsageError(
                "Parameters on the host (cpu-offload, CPUOffloadPolicy) beside others that are whole on the device "
                "(ignored, ignored_params) are not supported; leave out one of the two."
            )

    @property
    def processes(self) -> int:
        """Those of all replicas."""
        return self.size * self.replicas * self.tp

    @property
    def dimensions(self) -> dict[str, int]:
        """How many processes there are along each dimension of their mesh, by name."""
        sizes = {"replicate": self.replicas, "shard": self.size, "tp": self.tp}
        return {name: size for name, size in sizes.items() if size > 1 or name == "shard"}

    @property
    def divides_layers(self) -> bool:
        """As in ``Mesh``."""
        return self.tp > 1

    @property
    def applied(self) -> bool:
        """Whether the model is tensor parallel already."""
        return self.devices is not None

    @property
    def in_inference(self) -> "Mesh | None":
        """As in ``Mesh``; what is tensor parallel stays so."""
        return Tp(self.tp) if self.tp > 1 else None

    def of_mode(self, mode: Literal["train", "inference"]) -> "Mesh | None":
        """As in ``Mesh``; parameters are gathered in inference, too, which is not simulated."""
        if mode == "inference":
            raise UsageError(
                f"fsdp={self.size} is planned in training alone; for inference leave it out, and figures are those "
                "of a process that has the whole model."
            )
        return self

    def told(self, word: str) -> Self:
        """As in ``Mesh``; ``no-reshard`` is ``reshard_after_forward=False``, ``reshard=8`` an integer there."""
        if match := _DTYPE.fullmatch(word):
            given: dict[str, Any] = {f"{match[1]}_dtype": match[2]}
            return replace(self, **given)
        if match := _NUMBER.fullmatch(word):
            given = {match[1]: int(match[2])}
            return self._dividing(replace(self, **given))
        if match := _UNITS.fullmatch(word):
            return replace(self, units=match[1])
        if match := _IGNORED.fullmatch(word):
            return replace(self, ignored=(*self.ignored, match[1]))
        if word not in _SWITCHES:
            raise _unknown(word, self.words)
        field, value = _SWITCHES[word]
        given = {field: value}
        return replace(self, **given)

    def _dividing(self, found: Self) -> Self:
        """``found``, where it is one that ``fully_shard`` takes."""
        parts = found.reshard
        if not isinstance(parts, bool) and (self.size % parts or not 1 < parts < self.size):
            raise UsageError(f"fsdp={self.size} cannot reshard to {parts} parts; give a divisor of {self.size}.")
        return found

    def _words(self) -> list[str]:
        kinds = {"param": self.param_dtype, "reduce": self.reduce_dtype, "output": self.output_dtype}
        parts = "" if self.reshard is True else "no-reshard" if self.reshard is False else f"reshard={self.reshard}"
        return [
            f"tp={self.tp}" if self.tp > 1 else "",
            *(f"{kind}-dtype={dtype}" for kind, dtype in kinds.items() if dtype is not None),
            "" if self.cast_inputs else "no-cast-inputs",
            parts,
            "reshard-root" if self.reshard_root else "",
            f"replicas={self.replicas}" if self.replicas > 1 else "",
            f"units={self.units}" if self.units else "",
            "cpu-offload" if self.offload else "",
            *(f"ignored={pattern}" for pattern in self.ignored),
        ]


@dataclass(frozen=True)
class Tp(Mesh):
    """Processes that have a part of each product of a layer, on the same inputs: ``parallelize_module`` of a plan.

    ``applied`` says that the model is parallelized already, in a group of its own; text cannot say it.
    """

    applied: bool = False
    kind: ClassVar[str] = "tp"
    words: ClassVar[tuple[str, ...]] = ()

    @property
    def divides_layers(self) -> bool:
        """As in ``Mesh``."""
        return True

    @property
    def in_inference(self) -> "Mesh | None":
        """As in ``Mesh``."""
        return self

    def told(self, word: str) -> Self:
        """As in ``Mesh``; there are no arguments."""
        raise UsageError(f"{word!r} is unknown in this mesh; tp={self.size} has no arguments.")

    def _words(self) -> list[str]:
        return []


def _unknown(word: str, known: tuple[str, ...]) -> UsageError:
    return UsageError(f"{word!r} is unknown in this mesh; known are {', '.join(known)}.")
