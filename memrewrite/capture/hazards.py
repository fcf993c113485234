"""What a capture would silently lose, found before it: each is refused by name, none is guessed around.

One rehearsal of forward runs on a fake twin of the model. The functions it calls, the twin's attributes and the random
state afterwards say what happened that no graph of tensor operators can hold.
"""

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from memrewrite.capture.normal import quiet
from memrewrite.capture.state import Attributes, random_state
from memrewrite.errors import CaptureError
from memrewrite.private import FAKE_TENSOR_ERRORS, FakeTensorMode, checkpoint_calls, has_global_module_hooks
from memrewrite.simulate.fake import fake_inputs, fake_twin
from memrewrite.step import Inputs

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_TENSOR_HOOKS = ("register_hook", "register_post_accumulate_grad_hook")
_OF_TORCH = ("torch.utils.checkpoint", "torch._library")  # Functions that belong to what a graph does keep


@dataclass(frozen=True)
class Findings:
    """What is worth knowing about a model that is safe to capture.

    ``notes`` are sentences for the user; ``export_loses`` is what ``torch.export``'s graph would lack, "" if nothing.
    """

    notes: tuple[str, ...] = ()
    export_loses: str = ""


def check(model: nn.Module, inputs: Inputs) -> Findings:
    """Rehearse forward. Raises ``CaptureError`` naming the hazard and its place if there is one."""
    name = type(model).__name__
    _refuse_hooks(model)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    watch = _Watch()
    before = random_state()
    with quiet(), checkpoint_calls() as checkpoints, _function_calls() as functions:
        try:
            with mode:
                twin, given = fake_twin(model, mode), fake_inputs(inputs, mode)
                attributes = Attributes(twin)
                with watch:
                    twin(*given.args, **given.kwargs)
        except CaptureError:
            raise
        except Exception as error:
            raise CaptureError(_failed(name, error)) from error
    if random_state() != before:
        raise CaptureError(
            f"{name} draws from Python's or NumPy's random in forward, or seeds a generator there; "
            "one outcome would be baked in. Draw with torch, or outside forward."
        )
    _refuse_changes(name, attributes)
    if functions:
        raise CaptureError(f"{name} uses the custom autograd.Function {functions[0]}, whose backward a graph loses.")
    if watch.hooked:
        raise CaptureError(f"{name} registers tensor hooks in forward ({watch.hooked}); a captured graph loses them.")
    if watch.inference:
        raise CaptureError(
            f"{name} enters torch.inference_mode in forward ({watch.inference}), which a captured graph loses; "
            "use torch.no_grad there."
        )
    note = "The model's own torch.utils.checkpoint calls are replaced by the plan."
    return Findings((note,) if checkpoints else (), watch.nested)


def _refuse_hooks(model: nn.Module) -> None:
    advice = "would fire while tracing and never again; remove them before optimizing and register them afterwards."
    if has_global_module_hooks():
        raise CaptureError(f"Hooks for all modules are registered (torch.nn.modules.module), which {advice}")
    for path, module in model.named_modules():
        for name in _HOOKS:
            if path and module.__dict__.get(name):
                kind = name.strip("_").replace("_", " ")
                raise CaptureError(f"{path} ({type(module).__name__}) has {kind}, which {advice}")


def _failed(name: str, error: Exception) -> str:
    text = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if not _internal(frame.filename)]
    place = f" at {_place(ours[-1])}" if ours else ""
    if isinstance(error, FAKE_TENSOR_ERRORS):
        return (
            f"{name} lets the values of a tensor decide what Python does{place} ({text}), which no graph can hold; "
            "compute it with tensors (torch.where, masks) or outside forward."
        )
    return f"{name} does not run on the example inputs{place}: {type(error).__name__}: {text}."


def _refuse_changes(name: str, attributes: Attributes) -> None:
    for path, value in attributes.changed():
        what = "a new tensor" if isinstance(value, Tensor) else "a new value"
        raise CaptureError(
            f"{name} assigns {what} to self.{path} in forward; a captured graph would keep the first one for ever. "
            "Update a buffer in place (copy_) instead."
        )


@contextmanager
def _function_calls() -> Iterator[list[str]]:
    """The names of custom ``autograd.Function`` classes applied meanwhile where a gradient may flow."""
    calls: list[str] = []
    apply = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]

    def seen(cls: type, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and not cls.__module__.startswith(_OF_TORCH):
            calls.append(cls.__name__)
        return apply(cls, *args, **kwargs)

    with mock.patch.object(torch.autograd.Function, "apply", classmethod(seen)):
        yield calls


class _Watch(TorchFunctionMode):
    """Sees every torch function of the rehearsal, and in which modes it runs.

    ``hooked`` and ``inference`` are the places of a tensor hook and of a call in inference mode, "" if there are none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.hooked = self.inference = self.nested = ""
        self._outside = (torch.is_inference_mode_enabled(), *_autocast())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _TENSOR_HOOKS:
            self.hooked = self.hooked or _caller()
        if torch.is_inference_mode_enabled() != self._outside[0]:
            self.inference = self.inference or _caller()
        if not self.nested and not torch.is_grad_enabled() and _autocast() != self._outside[1:]:
            self.nested = f"no_grad nested with autocast at {_caller()}"  # it keeps the outer one only
        return func(*args, **(kwargs or {}))


def _autocast() -> tuple[Any, ...]:
    return tuple((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda"))


def _caller() -> str:
    """File and line of the model's code that is running."""
    frames = traceback.extract_stack()
    return next((_place(frame) for frame in reversed(frames) if not _internal(frame.filename)), "")


def _place(frame: traceback.FrameSummary) -> str:
    return f"{os.path.basename(frame.filename)}:{frame.lineno}"


def _internal(file: str) -> bool:
    return file.startswith((os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__))))
