"""What the commands that run a model share: a request made concrete, and errors of the device."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import nn

from memrewrite.commands import launched
from memrewrite.commands.answer import Outcome, respond
from memrewrite.commands.progress import Stages
from memrewrite.commands.requests import MeasureRequest, ModelRequest, OptimizeRequest
from memrewrite.measurement.measuring import Loader
from memrewrite.records.errors import DoesNotFitError, MeasurementError, UsageError, first_line
from memrewrite.targets.cuda_from_cpu import CUDA_FROM_CPU
from memrewrite.targets.eager import EAGER
from memrewrite.torch_internals.logs import untold_failures
from memrewrite.workload import target
from memrewrite.workload.inputs import to_device
from memrewrite.workload.step import Inputs, Step
from memrewrite.workload.workload import on_meta, refuse_meta, refuse_unready

R = TypeVar("R", bound=ModelRequest)


@dataclass(frozen=True)
class Job(Generic[R]):
    """A request made concrete: the model and its inputs on their device, and the step."""

    request: R
    module: nn.Module
    inputs: Inputs
    name: str
    step: Step
    device: torch.device

    @property
    def planned_for(self) -> str | None:
        """The device to plan for where that is not the one that the model lies on."""
        return None if self.step.target.measurable else "cuda"

    def loader(self, artifact: Path | None = None) -> Loader:
        """How another process loads the model, rewritten by ``artifact``; this one gives up the device for it."""
        self.module.to("cpu")
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return loader_of(self.request, self.device, artifact)


def loader_of(request: ModelRequest, device: torch.device, artifact: Path | None = None) -> Loader:
    """How another process loads what was asked for, rewritten by ``artifact``; it compiles what it measures on CUDA."""
    folder = None if artifact is None else str(artifact)
    compiled = device.type == "cuda" and isinstance(request, OptimizeRequest | MeasureRequest) and request.compiled
    return Loader(
        request.target, request.input, request.batch_size, folder, str(device), request.seed, compiled, request.ranges
    )


def run(request: R, work: Callable[[Job[R], Stages], Outcome], *, on_device: bool = True) -> int:
    """Load the model, do the work, answer, and give the exit code; raises what ``memrewrite.records.errors`` names.

    With ``on_device`` False a step for CUDA is planned on the CPU also where CUDA is, and the device left alone.
    """

    def on_job(stage: Stages) -> Outcome:
        stage("load")
        with _loaded(request, on_device) as job:
            return work(job, stage)

    return respond(request, on_job)


@contextlib.contextmanager
def _loaded(request: R, on_device: bool) -> Iterator[Job[R]]:
    """The model and its inputs, in the mode of the step and on the device; while it lasts its imports are found.

    With ``on_device`` False they may be on the meta device, and stay there.
    """
    torch.manual_seed(request.seed)
    wanted = device_named(request.device)
    without = wanted.type == "cuda" and not (on_device and torch.cuda.is_available())
    device = torch.device("cpu") if without else wanted
    if device.type == "cuda" and launched.processes() > 1:
        torch.cuda.set_device(device)  # where FSDP2 puts what its units gather
    found = target.load(request.target, request.input, request.batch_size, request.ranges)
    logged = contextlib.nullcontext() if request.verbose else untold_failures()
    refuse_unready(found.inputs, found.module)
    if on_device:
        refuse_meta(found.inputs, found.module)
    meta = on_meta(found.inputs, found.module) != ""
    with target.importable(found.folder), memory_errors(), logged:
        module = found.module if meta else found.module.to(device)
        if module.training != (request.mode == "train"):  # else leave submodules the user froze as they are
            module.train(request.mode == "train")
        step = replace(request.step.build(), target=CUDA_FROM_CPU if without else EAGER)
        inputs = found.inputs if meta else to_device(found.inputs, device)
        yield Job(request, module, inputs, found.name, step, device)


@contextlib.contextmanager
def memory_errors() -> Iterator[None]:
    """Turn the device's own errors into ``MeasurementError``."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        text = f"The device ran out of memory: {first_line(error)}; try a smaller --batch-size or --device cpu."
        raise DoesNotFitError(text) from error
    except torch.AcceleratorError as error:
        text = f"The device failed while the model ran: {first_line(error)}; are all indices in the inputs in range?"
        raise MeasurementError(text) from error


def device_named(name: str) -> torch.device:
    """The device that ``--device`` names; raises ``UsageError`` where there is none of that name.

    A first CUDA device is one to plan for, where there is no CUDA.
    """
    if name == "auto":
        return torch.device("cuda", launched.place()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"Device {name!r} is unknown; give auto, cpu or cuda:0.") from error
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"Device {name!r} is not supported; give auto, cpu or cuda:0.")
    if device.type == "cuda" and (device.index or 0) >= max(1, torch.cuda.device_count()):
        raise UsageError(f"There is no device {name!r}: PyTorch sees {torch.cuda.device_count()} CUDA devices.")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device
