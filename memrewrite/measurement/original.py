"""The model as it is: its timeline, and whose fault it is where it does not run."""

import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

import torch
from torch import nn

from memrewrite.measurement.measuring import predict
from memrewrite.records.errors import CaptureError, DataDependentError, MemrewriteError, UsageError, first_line
from memrewrite.records.lines import line_of
from memrewrite.runtime.promise import FallbackWarning
from memrewrite.simulate import Noted, Timeline, setting_up
from memrewrite.simulate.fake.refusals import refusal
from memrewrite.targets.set_up import SettingUp
from memrewrite.torch_internals.logs import untold_failures
from memrewrite.workload.step import Inputs, Running, Step, device_of

_MIXED = "got mixed torch.Tensor and DTensor"  # as every operator says it that is given both
_WRITTEN = "modified by an inplace operation"
_WITHOUT_GRADIENT = "does not require grad and does not have a grad_fn"
_OF_OTHERS = "differentiated Tensor"  # and what follows, where a gradient is asked for by what is not in the graph
_FORWARD, _BACKWARD, _LOSS = Running._forward.__code__, Step.backward.__code__, Running._pass.__code__
_OPTIMIZER = {Step.make_optimizer.__code__, Step.update.__code__}


def simulate_original(
    model: nn.Module,
    inputs: Inputs,
    step: Step,
    workspace: int,
    *,
    attribute: bool = False,
    probe: bool = True,
    noted: Noted | None = None,
) -> Timeline:
    """The timeline of the model as it is, by ``measuring.predict``.

    Raises ``CaptureError`` where the model itself fails on the inputs.
    """
    with blaming(model, step.in_backward):
        return predict(model, inputs, step, workspace_bytes=workspace, attribute=attribute, probe=probe, noted=noted)


@contextmanager
def original_simulated(
    model: nn.Module, inputs: Inputs, step: Step, workspace: int
) -> Iterator[Callable[[], Timeline]]:
    """Gives what returns the timeline of the model as it is, by submodule; until it is asked, libraries set up.

    Raises what ``simulate_original`` raises.
    """
    transients, noted = step.target.transients(device_of(model, inputs)), Noted()
    look = partial(simulate_original, model, inputs, step, workspace, attribute=True)
    if transients is None or not transients.sets_up:
        timeline = look()
        yield lambda: timeline
        return
    with ExitStack() as stack:
        beside = SettingUp()
        with blaming(model, step.in_backward), warnings.catch_warnings(), suppress(DataDependentError, FallbackWarning):
            warnings.simplefilter("error", FallbackWarning)
            beside = stack.enter_context(setting_up(model, inputs, step, transients, noted))

        def once_set_up() -> Timeline:
            beside.wait()
            return look(noted=noted)

        yield once_set_up


@contextmanager
def blaming(model: nn.Module, in_backward: bool = False) -> Iterator[None]:
    """Let what a step of the model raises on the example inputs be a ``CaptureError`` that says whose fault it is.

    Where the optimizer steps ``in_backward``, it is to blame for a parameter that is written too early.
    """
    try:
        with untold_failures():
            yield
    except (MemrewriteError, torch.OutOfMemoryError):  # nobody is to blame for a device that is too small
        raise
    except Exception as error:
        name = type(model).__name__
        if sentence := refusal(name, error):
            raise CaptureError(sentence) from error
        if _MIXED in str(error):
            raise UsageError(
                f"Some parameters of {name} are tensor parallel and others are not, which an optimizer on CUDA does "
                "not take in one; give every module with parameters a style, or an optimizer with foreach=False."
            ) from error
        if in_backward and _WRITTEN in str(error):
            raise UsageError(
                f"{name} uses a parameter in backward after that has its gradient (as weight.detach() does), so that "
                "no optimizer can step while backward runs; take its step as a whole or in groups."
            ) from error
        raise CaptureError(_blamed(name, error)) from error


def _blamed(name: str, error: Exception) -> str:
    """Which part of a step of the model called ``name`` failed, how and where."""
    codes = {frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)}
    reason = first_line(error).replace("'FakeTensor'", "'Tensor'")
    what = f"{type(error).__name__}: {reason}" + (f" (at {place})" if (place := line_of(error)) else "")
    if codes & _OPTIMIZER:
        return (
            f"The optimizer fails with {what}; give one that takes the parameters of {name}, and steps without a "
            "closure."
        )
    if _BACKWARD in codes and _WITHOUT_GRADIENT in reason:
        return f"The loss of {name} requires no gradient; give a loss_fn that computes with what trains."
    if _LOSS in codes and not codes & {_FORWARD, _BACKWARD}:
        mend = "give a function of the model's output"
        if _OF_OTHERS in reason:
            mend = "take gradients by inputs in forward, as a step has inputs of its own"
        return f"loss_fn fails on what {name} gives with {what}; {mend}."
    return (
        f"{name} fails on the example inputs with {what}; give inputs that the model takes (arguments by name as "
        "example_kwargs)."
    )
