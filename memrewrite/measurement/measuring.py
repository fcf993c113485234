"""What a training step really takes: peak bytes, bytes after each phase and milliseconds, on the device itself.

On CUDA the caching allocator's own counters are read; on the CPU the step runs on real tensors under the storage
tracker. Everything the steps change is put back, whatever happens.
"""

import contextlib
import gc
import itertools
import statistics
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from memrewrite.measurement.snapshot import State, cuda_devices
from memrewrite.process.child import run_job
from memrewrite.records.errors import DataDependentError, DoesNotFitError, MeasurementError, UsageError, first_line
from memrewrite.records.mesh import Fsdp, Tp
from memrewrite.records.outcomes import Measured
from memrewrite.runtime.assembled import Written, assembled
from memrewrite.runtime.promise import BeyondPlanWarning, FallbackWarning
from memrewrite.simulate import Noted, Timeline, Twins, layout_for, run_tracked, simulate, with_workspaces
from memrewrite.simulate.fake.copier import tensors_of
from memrewrite.simulate.fake.refusals import counts_nothing
from memrewrite.targets.allocator import allocator_on
from memrewrite.targets.layout import bytes_of_blocks
from memrewrite.torch_internals.autograd_nodes import acting_hooks_off
from memrewrite.torch_internals.cuda import clear_cublas_workspaces
from memrewrite.workload.step import Inputs, Phase, Running, Step, device_of, device_type
from memrewrite.workload.stepspec import StepSpec

_CPU_STEPS = 3  # steps there are slow and vary little


@dataclass(frozen=True)
class Loader:
    """What a measuring process loads: a target as the command line has it, optionally rewritten by a saved artifact.

    ``inputs`` are ``--input`` texts, ``artifact`` a folder that ``memrewrite.artifact`` wrote, ``seed`` seeds the
    random state before the target is loaded and before the steps; ``compiled`` measures what ``torch.compile`` makes of
    the model; ``dynamic`` are the ranges as text to whose ends the inputs are brought.
    """

    target: str
    inputs: tuple[str, ...] = ()
    batch_size: int | None = None
    artifact: str | None = None
    device: str = "cpu"
    seed: int = 0
    compiled: bool = False
    dynamic: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Loader":
        """The inverse of ``dataclasses.asdict`` through JSON."""
        return cls(**{**data, "inputs": tuple(data["inputs"]), "dynamic": tuple(data["dynamic"])})


def measure_in_child(loader: Loader, step: StepSpec, *, timeout_s: float, steps: int = 10) -> Measured:
    """``measure`` in a fresh process, which is gone when this returns or raises (also on Ctrl-C).

    Raises ``DoesNotFitError`` when memory runs out, ``MeasurementError`` when the process dies or takes longer than
    ``timeout_s`` seconds, and what loading the target raises.
    """
    job = {
        "kind": "measure",
        "device": loader.device,
        "loader": asdict(loader),
        "step": step.to_json(),
        "steps": steps,
    }
    return Measured.from_json(run_job(job, timeout_s=timeout_s))


def predict(
    module: nn.Module,
    inputs: Inputs,
    step: Step,
    *,
    workspace_bytes: int = 0,
    steps: int = 2,
    attribute: bool = False,
    probe: bool = True,
    blocks: bool = True,
    both: bool = False,
    written: Written | None = None,
    noted: Noted | None = None,
    twins: Twins | None = None,
) -> Timeline:
    """``simulate``, or where the step depends on values real steps under the tracker, after which all is put back.

    It does, too, where a program runs the original on fake tensors, as that is none that it was made for.
    What those reserve on CUDA is read there. ``both``, ``noted`` and ``twins`` are as in ``simulate``, blocks or not;
    real steps count one way.
    Raises ``DoesNotFitError`` when those run out of memory, ``DataDependentError`` for such a step of a target without
    its device or, with ``probe`` False, on CUDA: that leaves the device alone.
    """
    left_alone = not probe and device_type(module, inputs) != "cpu"
    measurable = step.target.measurable and not left_alone and not isinstance(step.mesh, Fsdp | Tp)
    try:
        with warnings.catch_warnings():
            if measurable:
                warnings.simplefilter("error", FallbackWarning)
            return simulate(
                module,
                inputs,
                step,
                workspace_bytes=workspace_bytes,
                steps=steps,
                attribute=attribute,
                probe=probe,
                blocks=blocks or both,
                both=both,
                written=written,
                noted=noted,
                twins=twins,
            )
    except (DataDependentError, FallbackWarning) as error:
        if not measurable:
            raise
        module = module if written is None else assembled(module, written)
        timeline = _tracked(module, inputs, step, steps, attribute, blocks, workspace_bytes)
        return replace(with_workspaces(timeline, workspace_bytes), real=isinstance(error, DataDependentError))


def _tracked(
    module: nn.Module, inputs: Inputs, step: Step, steps: int, attribute: bool, blocks: bool, libraries: int
) -> Timeline:
    with preserved_state(module, inputs, step), warnings.catch_warnings():
        warnings.simplefilter("ignore", BeyondPlanWarning)  # values choose sizes of parts; what they take is seen here
        try:
            layout = layout_for(step, module, inputs)
            allocator = allocator_on(device_type(module, inputs), layout) if blocks else None
            timeline = run_tracked(
                module, inputs, step, steps=steps, attribute=attribute, allocator=allocator, libraries=libraries
            )
            if allocator is None:
                return timeline
            # What operators take while they run is not tracked, and makes the allocator split its blocks otherwise.
            device = device_of(module, inputs)
            return replace(timeline, reserved=_on_cuda(module, inputs, step, 1, device).reserved)
        except torch.OutOfMemoryError as error:
            name = type(module).__name__
            raise DoesNotFitError(
                f"The step of {name} depends on values, so its memory cannot be predicted, and it does not fit the "
                "device; give smaller example inputs."
            ) from error


def measure(module: nn.Module, inputs: Inputs, step: Step, *, steps: int = 10) -> Measured:
    """Take two steps for the phase table and ``steps`` more for the time; the peak is that of the second step on.

    The steps are those of ``step.loop``. On CUDA, allocations from before that are neither the module's nor the inputs'
    nor the loss function's are left out of the allocated figures. On the CPU nothing is cached, so the reserved figure
    is the peak.
    Raises ``DoesNotFitError`` when memory runs out, ``UsageError`` for a device that is neither CPU nor CUDA, or on
    which the target cannot be measured, ``MeasurementError`` where the module does not compile.
    """
    tensors = [*module.parameters(), *inputs.tensors()]
    device = tensors[0].device if tensors else torch.device("cpu")
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"Memory cannot be measured on {device}; move the model and its inputs to cpu or cuda.")
    if steps < 1:
        raise UsageError(f"No time can be measured over {steps} steps; give at least 1.")
    if isinstance(step.mesh, Fsdp | Tp):
        raise UsageError(f"A mesh of {step.mesh} cannot be measured in one process; its step is predicted by estimate.")
    step.target.check(device)
    run = _on_cuda if device.type == "cuda" else _on_cpu
    measured = step.target.prepared(module)
    # Raised after the handler, where nothing refers to the failed step's tensors any more.
    with preserved_state(module, inputs, step):
        try:
            return run(measured, inputs, step, steps, device)
        except torch.OutOfMemoryError:
            failed = True
        except (RuntimeError, AssertionError) as error:
            if sentence := counts_nothing(type(module).__name__, error):
                raise MeasurementError(sentence) from error
            failed = "DefaultCPUAllocator" in str(error)
            if not failed and not step.target.compiles:
                raise
            if not failed:
                reason = first_line(error)
                raise MeasurementError(f"{type(module).__name__} does not run compiled: {reason}") from error
    raise DoesNotFitError(out_of_memory(f"The training step of {type(module).__name__}", str(device)))


def out_of_memory(who: str, device: str) -> str:
    """The sentence for a step that does not fit on ``device``."""
    name = torch.device(device)
    total = ""
    if name.type == "cuda" and torch.cuda.is_available():
        total = f", which has {torch.cuda.get_device_properties(name).total_memory / 2**30:.1f} GiB"
    return f"{who} ran out of memory on {device}{total}; set a lower budget or use a smaller batch."


def _on_cpu(module: nn.Module, inputs: Inputs, step: Step, steps: int, device: torch.device) -> Measured:
    timeline = run_tracked(module, inputs, step)
    loop = step.begin(module, inputs, step.make_optimizer(module))
    times = []
    for _ in range(min(steps, _CPU_STEPS) + 1):
        start = time.perf_counter()
        loop.take()
        times.append((time.perf_counter() - start) * 1e3)
    return Measured(timeline.peak, timeline.peak, statistics.median(times[1:]), timeline.phases, str(device))


def _on_cuda(module: nn.Module, inputs: Inputs, step: Step, steps: int, device: torch.device) -> Measured:
    gc.collect()
    torch.cuda.synchronize(device)
    clear_cublas_workspaces()  # those of earlier work would pass for other allocations
    torch.cuda.empty_cache()
    targets = step.targets(module, inputs)
    own = [each for each in (*tensors_of(module), *inputs.tensors(), *targets.all) if each.device == device]
    others = torch.cuda.memory_allocated(device) - bytes_of_blocks(own)
    phases: list[tuple[str, int]] = []

    def on_phase(phase: Phase) -> None:
        phases.append((phase, torch.cuda.memory_allocated(device) - others))

    loop = step.begin(module, inputs, step.make_optimizer(module), targets)
    loop.take(on_phase)
    torch.cuda.reset_peak_memory_stats(device)
    loop.take(on_phase)
    step_ms = _median_ms(loop, steps, device)
    peak = torch.cuda.max_memory_allocated(device) - others
    free, total = torch.cuda.mem_get_info(device)
    name = f"{torch.cuda.get_device_name(device)} ({device})"
    return Measured(peak, torch.cuda.max_memory_reserved(device), step_ms, tuple(phases), name, total - free)


def _median_ms(loop: Running, steps: int, device: torch.device) -> float:
    """The median time between CUDA events around each of ``steps`` steps, in ms."""
    with torch.cuda.device(device):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(max(steps, 1) + 1)]
        marks[0].record()
        for mark in marks[1:]:
            loop.take()
            mark.record()
        torch.cuda.synchronize(device)
    return statistics.median(start.elapsed_time(end) for start, end in itertools.pairwise(marks))


@contextlib.contextmanager
def preserved_state(module: nn.Module, inputs: Inputs, step: Step | None = None) -> Iterator[None]:
    """Put back everything steps change: tensor contents, gradients, attributes, training flags and random state.

    So is what a ``step`` changes of its loss function; what a parameter's hooks would do meanwhile is left out, such as
    an optimizer's step in backward. The contents wait in CPU memory; gradients that exist already are set aside where
    they are.
    """
    changed = [] if step is None else step.targets(module, inputs).changing
    loss_fn = None if step is None else step.loss_fn
    state = State((module,), cuda_devices((module,), inputs), [*inputs.tensors(), *changed], loss_fn)
    state.clear_gradients()
    try:
        with acting_hooks_off(module.parameters()):
            yield
    finally:
        state.restore()
