"""The main program of a measuring process: one job as JSON on stdin, one answer as JSON on the last line of stdout."""

import contextlib
import json
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any, TextIO

import torch
from torch import nn

from memrewrite.measurement.measuring import Loader, measure, out_of_memory
from memrewrite.measurement.original import blaming
from memrewrite.records.errors import MemrewriteError, OtherInputsError, UsageError, first_line
from memrewrite.runtime.dropin import programs
from memrewrite.runtime.promise import BeyondPlanError, FallbackWarning
from memrewrite.targets.compiled import CompiledTarget
from memrewrite.workload.inputs import to_device
from memrewrite.workload.step import Inputs, Step, autocast, device_type
from memrewrite.workload.stepspec import StepSpec
from memrewrite.workload.target import importable, load
from memrewrite.workload.workload import refuse_meta, refuse_unready


def main() -> None:
    """Do the job on stdin and answer ``{"ok": ...}`` or ``{"error": [name of the error, sentence]}``."""
    answers = _take_stdout()
    job = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        answer = {"ok": JOBS[job["kind"]](job)}
    except MemrewriteError as error:
        answer = {"error": [type(error).__name__, str(error)]}
    except torch.OutOfMemoryError:
        answer = {"error": ["DoesNotFitError", out_of_memory("The model", job["device"])]}
    except Exception as error:
        traceback.print_exc()
        reason = first_line(error)
        answer = {"error": ["MeasurementError", f"The measuring process failed with {type(error).__name__}: {reason}"]}
    print(json.dumps(answer), file=answers, flush=True)


def _take_stdout() -> TextIO:
    """The real stdout; from here on, what anyone else prints to stdout goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    sys.stdout.flush()
    os.dup2(2, 1)
    return answers


def _end_with_parent() -> None:
    # The parent holds the other end open as long as it lives; read by descriptor, so that no lock is held at exit.
    while os.read(0, 1):
        continue
    os._exit(1)


def _measure(job: dict[str, Any]) -> dict[str, Any]:
    loader = Loader.from_json(job["loader"])
    with _loaded(loader, StepSpec.from_json(job["step"])) as (module, inputs, step):
        step = replace(step, target=CompiledTarget()) if loader.compiled else step
        torch.manual_seed(loader.seed)
        return asdict(measure(module, inputs, step, steps=job["steps"]))


@contextlib.contextmanager
def _refused_fallback() -> Iterator[None]:
    """Raise ``OtherInputsError`` where a rewritten model would run its original forward, or a strict one refuses to."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=r".*ran its original forward")
        try:
            yield
        except (UserWarning, RuntimeError) as told:  # an artifact has classes of its own
            if type(told).__name__ not in (FallbackWarning.__name__, BeyondPlanError.__name__):
                raise
            raise OtherInputsError(f"The rewritten model was not made for these inputs. {told}") from told


def _refuse_other_inputs(rewritten: nn.Module, inputs: Inputs, step: Step) -> None:
    """Raise ``OtherInputsError`` where a call says that the rewritten model was not made for them."""
    try:
        with _refused_fallback(), autocast(step.amp, device_type(rewritten, inputs)):
            rewritten(*inputs.args, **inputs.kwargs)
    except Exception as error:
        if isinstance(error, OtherInputsError):  # of all else a verdict tells
            raise


def _refuse_other_mode(model: nn.Module) -> None:
    for path, program in programs(model).items():
        if model.get_submodule(path).training != program.training[""]:
            mode = "train" if program.training[""] else "inference"
            raise UsageError(f"The rewritten model was made for steps in {mode} mode; say --mode {mode}.")


def _verify(job: dict[str, Any]) -> dict[str, Any]:
    from memrewrite.artifact.load import load as load_artifact
    from memrewrite.equivalence.verifying import verify

    loader = Loader.from_json(job["loader"])
    # A part that runs its original forward would be compared with itself.
    with _loaded(replace(loader, artifact=None), StepSpec.from_json(job["step"])) as (original, inputs, step):
        rewritten = load_artifact(str(loader.artifact), original)
        _refuse_other_mode(rewritten)
        verdict = verify(original, rewritten, inputs, step, exact=job["exact"], seed=loader.seed)
        if not verdict.checks:  # it raised something
            _refuse_other_inputs(rewritten, inputs, step)
    return {
        "equivalent": verdict.equivalent,
        "exact": verdict.exact,
        "summary": verdict.summary,
        "batch": verdict.batch,
        "checks": [asdict(check) for check in verdict.checks],
    }


@contextlib.contextmanager
def _loaded(loader: Loader, spec: StepSpec) -> Iterator[tuple[nn.Module, Inputs, Step]]:
    """What a step is taken of; while it lasts imports of the target's are found, and errors of its steps told as its.

    A rewritten model may not run its original forward meanwhile.
    """
    torch.manual_seed(loader.seed)
    loaded = load(loader.target, loader.inputs, loader.batch_size, loader.dynamic)
    try:
        device = torch.device(loader.device)
    except RuntimeError as error:
        raise UsageError(f"Device {loader.device!r} is unknown; give cpu or cuda:0.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"Device {loader.device} was asked for but PyTorch finds no CUDA device; use cpu.")
    refuse_unready(loaded.inputs, loaded.module)
    refuse_meta(loaded.inputs, loaded.module)
    with importable(loaded.folder):
        module = _placed(loaded.module, loader, spec, device)
        step = spec.build()
        with blaming(module, step.in_backward), _refused_fallback():
            yield module, to_device(loaded.inputs, device), step


def _placed(made: nn.Module, loader: Loader, spec: StepSpec, device: torch.device) -> nn.Module:
    """The model on its device in the mode of the step, rewritten if it is to be."""
    module = made.to(device)
    if module.training != (spec.mode == "train"):  # else leave submodules the user froze as they are
        module.train(spec.mode == "train")
    if loader.artifact is not None:
        from memrewrite.artifact.load import load as load_artifact

        module = load_artifact(loader.artifact, module)
        _refuse_other_mode(module)
    return module


JOBS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "measure": _measure,
    "verify": _verify,
}

if __name__ == "__main__":
    main()
