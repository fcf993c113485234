"""What a command was asked for: its options as parsed, defaults of ``pyproject.toml`` included.

A request that cannot be meant is refused when it is made, before PyTorch is imported.
"""

import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from memrewrite.artifact import manifest
from memrewrite.cache.place import VARIABLE, Asked, folder
from memrewrite.records.errors import UsageError
from memrewrite.records.loop import Loop
from memrewrite.records.mesh import Mesh
from memrewrite.records.options import Budget, check_passes, check_seed, device_bytes, pass_names
from memrewrite.records.ranges import parse_ranges
from memrewrite.workload.input_text import InputText
from memrewrite.workload.place import Source
from memrewrite.workload.stepspec import StepSpec

_DEVICE = re.compile(r"auto|(cpu|cuda)(:\d{1,3})?")
PLOTS = (".png", ".svg", ".pdf")


def check_files(files: dict[str, Path | None]) -> None:
    """Raise ``UsageError`` where one, by what asks for it, could not be written in the end, or would be another's."""
    named: dict[Path, str] = {}
    for what, file in files.items():
        if file is None:
            continue
        place = Path(os.path.realpath(file))
        if not place.parent.is_dir():
            raise UsageError(f"There is no folder for the {what} file {file}; make it first.")
        if place.is_dir():
            raise UsageError(f"{file} is a folder; name a file for {what}.")
        if file.exists() and not file.is_file():  # a device or a pipe
            continue
        if not os.access(place.parent, os.W_OK):
            raise UsageError(f"{file} cannot be written, as its folder may not be; name another file for {what}.")
        if (first := named.setdefault(place, what)) != what:
            raise UsageError(f"{first} and {what} are both {file}; name two files.")


def check_apart(files: dict[str, Path | None], model: Path | None, folder: Path | None = None) -> None:
    """Raise ``UsageError`` where one would replace the model's file, or come into the folder of an artifact."""
    for what, file in files.items():
        if file is None:
            continue
        place = Path(os.path.realpath(file))
        if place == model:
            raise UsageError(f"{file} is the model's own file; name another one for {what}.")
        if folder is not None and Path(os.path.realpath(folder)) in place.parents:
            raise UsageError(
                f"{file} would lie in {folder}, which is for the rewritten model and its report alone; name a file "
                f"elsewhere for {what}."
            )


@dataclass(frozen=True, kw_only=True)
class Request:
    """What every command takes: where its JSON goes (a file, or ``-`` for stdout) and how much it says.

    ``typed`` is the command line itself, "" where there was none.
    """

    json: str | None
    verbose: bool
    quiet: bool
    typed: str = ""

    def __post_init__(self) -> None:
        if self.verbose and self.quiet:
            raise UsageError("Give -v or -q, not both.")
        check_files({"JSON": self.json_file})

    @property
    def json_file(self) -> Path | None:
        """The file that JSON goes to, None for stdout or where there is none."""
        return None if self.json in (None, "-") else Path(str(self.json))

    def effective(self) -> dict[str, Any]:
        """The options as plain data for ``json.dumps``."""
        options = {key: value for key, value in asdict(self).items() if key != "typed"}
        return {key: str(value) if isinstance(value, Path) else value for key, value in options.items()}


@dataclass(frozen=True, kw_only=True)
class ModelRequest(Request):
    """What every command takes that runs a model: the target, its inputs, the step and the device."""

    target: str
    input: tuple[str, ...]
    batch_size: int | None
    micro_batches: int
    loop: str
    mesh: str | None
    optimizer: str
    loss: str | None
    amp: Literal["off", "bf16", "fp16"]
    mode: Literal["train", "inference"]
    device: str
    seed: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_apart({"JSON": self.json_file}, Source.parse(self.target).file)
        for text in self.input:
            InputText.parse(text)
        Loop.parse(self.loop)
        if self.mesh is not None:
            Mesh.parse(self.mesh)
        self.step.check()
        if not _DEVICE.fullmatch(self.device):
            raise UsageError(f"Device {self.device!r} is not supported; give auto, cpu or cuda:0.")
        check_seed(self.seed)

    @property
    def ranges(self) -> tuple[str, ...]:
        """The ranges of sizes that were asked for, as text."""
        return ()

    @property
    def step(self) -> StepSpec:
        """The step that was asked for."""
        return StepSpec(self.mode, self.optimizer, self.loss, self.amp, self.micro_batches, self.loop, self.mesh)


@dataclass(frozen=True, kw_only=True)
class OptimizeRequest(ModelRequest):
    """``memrewrite optimize``."""

    budget: str | None
    reserved: bool
    passes: str | None
    exact: bool
    compiled: bool
    strict: bool
    returns: Literal["all", "lazy", "loss"]
    dynamic: tuple[str, ...]
    output: Path | None
    force: bool
    check: bool
    diff: bool
    verify: bool
    measure: bool
    timeout: float
    report: Path | None
    png: Path | None
    snapshot: Path | None
    advise: bool
    cache: str | None
    no_cache: bool

    def __post_init__(self) -> None:
        files = {"--report": self.report, "--png": self.png, "--snapshot": self.snapshot}
        if self.output is not None:  # refuse at once what could not be written in the end
            manifest.check_place(self.output, force=self.force)
            check_apart({**files, "--json": self.json_file}, None, self.output)  # which may not be there yet
        super().__post_init__()
        check_apart(files, Source.parse(self.target).file)
        folder(self.plans)
        budget = None if self.budget is None else Budget.parse(self.budget)
        check_passes(self.pass_names)
        parse_ranges(self.dynamic)
        if self.check and any(files.values()):
            option = next(option for option, file in files.items() if file is not None)
            raise UsageError(f"--check writes nothing; leave out {option}.")
        check_files({**files, "--json": self.json_file})
        if self.check and self.budget is None:
            raise UsageError("--check needs a budget to check against; give --budget.")
        if self.advise and (self.check or self.budget is None):
            raise UsageError("--advise says what else would fit a budget; give --budget, and leave out --check.")
        if self.reserved and self.budget is None:
            raise UsageError("--reserved says what the budget bounds; give --budget.")
        if self.strict and self.budget is None:
            raise UsageError("--strict refuses calls that a budget does not hold for; give --budget.")
        if self.check and self.output is not None:
            raise UsageError("--check writes nothing; leave out -o.")
        if self.check and budget is not None and budget.minimum:
            raise UsageError("--check needs a budget in bytes or per cent; min says nothing about the model as it is.")

    @property
    def ranges(self) -> tuple[str, ...]:
        """Those of ``--dynamic``."""
        return self.dynamic

    @property
    def plans(self) -> Asked:
        """Where plans are kept."""
        return False if self.no_cache else self.cache

    @property
    def pass_names(self) -> tuple[str, ...] | None:
        """The passes that were asked for, None for all."""
        return pass_names(None if self.passes is None else self.passes.split(","))


@dataclass(frozen=True, kw_only=True)
class MeasureRequest(ModelRequest):
    """``memrewrite measure``."""

    artifact: Path | None
    batch_sizes: tuple[int, ...]
    plot: Path | None
    compiled: bool
    timeout: float

    def __post_init__(self) -> None:
        super().__post_init__()
        files = {"--plot": self.plot, "--json": self.json_file}
        if self.artifact is not None:
            manifest.find(self.artifact)
            check_apart(files, None, self.artifact)
        if self.batch_sizes and self.batch_size is not None:
            raise UsageError("Give --batch-size or --batch-sizes, not both.")
        if self.plot is None:
            return
        if not self.batch_sizes:
            raise UsageError("--plot draws the peak against the batch size; give --batch-sizes 32,64,128.")
        if self.plot.suffix not in PLOTS:
            raise UsageError(f"{self.plot} cannot be drawn; give a file that ends in {', '.join(PLOTS)}.")
        check_files(files)
        check_apart({"--plot": self.plot}, Source.parse(self.target).file)


@dataclass(frozen=True, kw_only=True)
class VerifyRequest(ModelRequest):
    """``memrewrite verify``."""

    artifact: Path
    exact: bool
    timeout: float

    def __post_init__(self) -> None:
        super().__post_init__()
        manifest.find(self.artifact)
        check_apart({"--json": self.json_file}, None, self.artifact)


@dataclass(frozen=True, kw_only=True)
class ShowRequest(Request):
    """``memrewrite show``."""

    artifact: Path

    def __post_init__(self) -> None:
        super().__post_init__()
        manifest.find(self.artifact)
        check_apart({"--json": self.json_file}, None, self.artifact)


@dataclass(frozen=True, kw_only=True)
class CacheRequest(Request):
    """``memrewrite cache``."""

    cache: str | None
    clear: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        if folder(self.cache) is None:
            raise UsageError(f"Plans are not kept, as {VARIABLE} says; name a folder with --cache.")


@dataclass(frozen=True, kw_only=True)
class EstimateRequest(ModelRequest):
    """``memrewrite estimate``."""

    device_memory: str | None
    depth: int | None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.device_memory is not None:
            device_bytes(self.device_memory)
