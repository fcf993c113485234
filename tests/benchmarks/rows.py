"""Rows of the benchmarks in JSON-lines files, and what every row says about its machine."""

import functools
import hashlib
import json
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import torch

from memrewrite.version import __version__

PARETO, PREDICT, PLANTIME, MAXBATCH = "pareto.jsonl", "predict.jsonl", "plantime.jsonl", "maxbatch.jsonl"
HARDCAP = "hardcap.jsonl"
INFEASIBLE = "infeasible"
ROOT = Path(__file__).resolve().parents[2]
_MEASURED = ("memrewrite", "passes")  # folders whose code the figures depend on
_LIBRARIES = ("torch", "timm", "transformers", "torchvision", "triton", "diffusers")

R = TypeVar("R", bound="Row")


@dataclass(frozen=True, kw_only=True)
class Row:
    """What every row has. ``note`` is why there are no figures where ``ok`` is False, else a remark or "".

    ``code`` is when the code that made it was committed, and its commit; of rows made before that was noted, the commit
    that they came with.
    """

    workload: str
    batch: int
    amp: str
    optimizer: str
    ok: bool
    note: str = ""
    device: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    code: str = ""


@dataclass(frozen=True, kw_only=True)
class ParetoRow(Row):
    """One contender at one workload: bytes and ms over steady steps.

    ``fixed`` are the bytes of parameters, buffers, gradients, optimizer state and inputs, ``setup_s`` the seconds until
    the model was ready to train (optimized, compiled, two steps taken), ``lowest`` the lowest reachable peak where the
    budget is infeasible. ``loop`` is the one that was measured: until 22 November 2026 there was one that drops its
    output, and rows said nothing of it.
    """

    contender: str
    loop: str = "drop-output"
    budget: int | None = None
    predicted: int | None = None
    peak: int | None = None
    reserved: int | None = None
    fixed: int | None = None
    step_ms: float | None = None
    quartiles_ms: tuple[float, float] | None = None
    steps: int | None = None
    setup_s: float | None = None
    segments: int | None = None
    lowest: int | None = None


@dataclass(frozen=True, kw_only=True)
class PredictRow(Row):
    """Predicted against measured peak bytes of a step, allocated and reserved; ``seconds`` is what predicting took."""

    predicted: int | None = None
    measured: int | None = None
    predicted_reserved: int | None = None
    reserved: int | None = None
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class PlanRow(Row):
    """Seconds until a graph of ``nodes`` nodes was captured, rewritten and observed, and until it was planned for
    ``budget`` bytes; ``peak`` is the simulated peak of the plan."""

    nodes: int | None = None
    budget: int | None = None
    peak: int | None = None
    capture_s: float | None = None
    plan_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class ReadyRow(Row):
    """Seconds of ``optimize`` for a ``budget``, in all and by stage; ``peak`` is what it predicts of the result.

    ``again`` are the seconds of a second start, which finds the plan of the first; ``pace`` is that of the host.
    """

    budget: str
    seconds: float
    stages: dict[str, float]
    peak: int | None = None
    again: float | None = None
    pace: float | None = None


@dataclass(frozen=True, kw_only=True)
class BatchRow(Row):
    """The largest ``batch`` that a contender trains within ``budget`` bytes, and samples per second at it.

    ``peak`` is of what is allocated; ``reserved`` is what the allocator held then, where that was noted.
    """

    contender: str
    budget: int
    peak: int | None = None
    reserved: int | None = None
    step_ms: float | None = None
    per_second: float | None = None
    trials: int | None = None


@dataclass(frozen=True, kw_only=True)
class CapRow(Row):
    """Training within ``cap`` bytes reserved, by a plan for ``budget`` bytes: whether (``ok``) and how many ``steps``.

    ``predicted`` is the simulated peak of what is allocated, ``predicted_reserved`` what is reserved under that cap;
    ``retries`` counts how often the allocator gave cached segments back to get another.
    """

    budget: int | None = None
    cap: int | None = None
    predicted: int | None = None
    predicted_reserved: int | None = None
    reserved: int | None = None
    peak: int | None = None
    retries: int | None = None
    steps: int | None = None
    seconds: float | None = None


def read(path: Path, kind: type[R]) -> list[R]:
    """The rows of a file, none if there is no file."""
    if not path.exists():
        return []
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [kind(**{name: _frozen(value) for name, value in row.items()}) for row in rows]


def _frozen(value: Any) -> Any:
    """What JSON made a list of as the tuple that it was."""
    return tuple(value) if isinstance(value, list) else value


def append(path: Path, row: Row) -> None:
    """Add a row to the file and print it."""
    line = json.dumps(asdict(row))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(line + "\n")
    print(line, flush=True)


def machine(device: torch.device) -> dict[str, Any]:
    """The fields ``device``, ``versions`` and ``code`` of a row."""
    versions = {"memrewrite": __version__, "torch": torch.__version__}
    for name in _LIBRARIES[1:]:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {"device": name, "versions": versions, "code": code()}


@functools.cache
def code() -> str:
    """The last commit of what is measured, with its time; outside of a repository, the time now and a digest of it."""
    asked = ["git", "log", "-1", "--date=format:%Y-%m-%d %H:%M", "--format=%cd %h", "--", *_MEASURED]
    changed = ["git", "status", "--porcelain", "--", *_MEASURED]
    found, more = (
        subprocess.run(each, cwd=ROOT, capture_output=True, text=True, check=False) for each in (asked, changed)
    )
    if found.returncode == 0 and found.stdout.strip():
        return found.stdout.strip() + " and changes" * bool(more.stdout.strip())
    digest = hashlib.sha256()
    for folder in _MEASURED:
        for file in sorted((ROOT / folder).rglob("*.py")):
            digest.update(file.read_bytes())
    return f"{datetime.now(tz=UTC):%Y-%m-%d %H:%M} sources {digest.hexdigest()[:7]}"


def reason(error: BaseException) -> str:
    """Why something failed, on one line."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    error = getattr(error, "inner_exception", error)  # of a compiler's back end, which that says no word of at first
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {line}"[:300]


def attempt(run: Callable[[], R], failed: Callable[[str], R], known: Sequence[type[Exception]] = (Exception,)) -> R:
    """``run()``, or ``failed(reason)`` once nothing refers to the failed attempt's tensors any more."""
    try:
        return run()
    except tuple(known) as error:
        why = reason(error)
    return failed(why)
