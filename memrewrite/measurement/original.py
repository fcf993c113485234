"""The model as it is: its timeline, and whose fault it is where it does not run."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from memrewrite.measurement.measuring import predict
from memrewrite.records.errors import CaptureError, MemrewriteError, UsageError
from memrewrite.simulate import Timeline
from memrewrite.simulate.fake.refusals import refusal
from memrewrite.workload.inputs import first_line
from memrewrite.workload.step import Inputs, Step

_MIXED = "got mixed torch.Tensor and DTensor"  # as every operator says it that is given both

_WRITTEN = "modified by an inplace operation"


def simulate_original(
    model: nn.Module, inputs: Inputs, step: Step, workspace: int, *, attribute: bool = False, probe: bool = True
) -> Timeline:
    """The timeline of the model as it is, by ``measuring.predict``.

    Raises ``CaptureError`` where the model itself fails on the inputs.
    """
    with blaming(model, step.in_backward):
        return predict(model, inputs, step, workspace_bytes=workspace, attribute=attribute, probe=probe)


@contextmanager
def blaming(model: nn.Module, in_backward: bool = False) -> Iterator[None]:
    """Let what the model itself raises on the example inputs be a ``CaptureError`` that says so.

    Where the optimizer steps ``in_backward``, it is to blame for a parameter that is written too early.
    """
    try:
        yield
    except MemrewriteError:
        raise
    except Exception as error:
        if sentence := refusal(type(model).__name__, error):
            raise CaptureError(sentence) from error
        if _MIXED in str(error):
            raise UsageError(
                f"Some parameters of {type(model).__name__} are tensor parallel and others are not, which an optimizer "
                "on CUDA does not take in one; give every module with parameters a style, or an optimizer with "
                "foreach=False."
            ) from error
        if in_backward and _WRITTEN in str(error):
            raise UsageError(
                f"{type(model).__name__} uses a parameter in backward after that has its gradient (as weight.detach() "
                "does), so that no optimizer can step while backward runs; take its step as a whole or in groups."
            ) from error
        reason = first_line(error)
        raise CaptureError(
            f"{type(model).__name__} fails on the example inputs with {type(error).__name__}: {reason}; "
            "give inputs that the model takes."
        ) from error
