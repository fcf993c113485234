"""What a capture would silently lose, found before it: each is refused by name, none is guessed around.

One rehearsal of forward runs on a fake twin of the model; afterwards the autograd graph, the twin's attributes and the
random state say what happened that no graph of tensor operators can hold.
"""

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from memrewrite.errors import CaptureError
from memrewrite.private import FakeTensorMode, checkpoint_calls, tree_leaves
from memrewrite.simulate.fake import fake_inputs, fake_twin
from memrewrite.step import Inputs

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def check(model: nn.Module, inputs: Inputs) -> tuple[str, ...]:
    """Notes worth telling about a model that is safe to capture. Raises ``CaptureError`` naming the hazard if not."""
    for path, module in model.named_modules():
        for name in _HOOKS:
            if path and module.__dict__.get(name):
                raise CaptureError(
                    f"{path} ({type(module).__name__}) has {name.strip('_').replace('_', ' ')}, which would fire once "
                    "while tracing and never again; remove them before optimizing and register them afterwards."
                )
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    twin = fake_twin(model, mode)
    before = _state(twin)
    python = random.getstate()
    watch = _TensorHooks()
    with mode, watch, checkpoint_calls() as checkpoints:
        try:
            given = fake_inputs(inputs, mode)
            output = twin(*given.args, **given.kwargs)
        except CaptureError:
            raise
        except Exception as error:
            raise CaptureError(_failed(model, error)) from error
    if random.getstate() != python:
        raise CaptureError(f"{type(model).__name__} draws from Python's random in forward; one path would be baked in.")
    _refuse_changes(model, before, _state(twin))
    _refuse_functions(model, output)
    if watch.used:
        raise CaptureError(f"{type(model).__name__} registers tensor hooks in forward; a captured graph loses them.")
    if checkpoints:
        return ("The model's own torch.utils.checkpoint calls are replaced by the plan.",)
    return ()


def _failed(model: nn.Module, error: Exception) -> str:
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"{type(model).__name__} does not run on the example inputs: {type(error).__name__}: {text}."


def _state(twin: nn.Module) -> dict[str, Any]:
    """Every attribute of every submodule: plain values by value, tensors by identity."""
    state: dict[str, Any] = {}
    for path, module in twin.named_modules():
        for name, value in {**module.__dict__, **module._buffers, **module._parameters}.items():
            if isinstance(value, Tensor):
                state[f"{path}.{name}"] = value
            elif isinstance(value, int | float | str | bytes | bool | tuple | list | dict) and not name.startswith("_"):
                state[f"{path}.{name}"] = repr(value)
    return state


def _refuse_changes(model: nn.Module, before: dict[str, Any], after: dict[str, Any]) -> None:
    for key in dict.fromkeys([*before, *after]):
        old, new = before.get(key), after.get(key)
        if old is new or (not isinstance(old, Tensor) and not isinstance(new, Tensor) and old == new):
            continue
        what = "a new tensor" if isinstance(new, Tensor) else "a new value"
        raise CaptureError(
            f"{type(model).__name__} assigns {what} to self.{key.lstrip('.')} in forward; a captured graph would keep "
            "the first one for ever. Update a buffer in place (copy_) instead."
        )


def _refuse_functions(model: nn.Module, output: Any) -> None:
    """Custom ``autograd.Function``: export traces through its forward and loses its backward."""
    queue = [leaf.grad_fn for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
    seen = set(queue)
    while queue:
        node = queue.pop()
        name = type(node).__name__.removesuffix("Backward")
        if isinstance(node, torch.autograd.function.BackwardCFunction) and name != "CheckpointFunction":
            raise CaptureError(
                f"{type(model).__name__} uses the custom autograd.Function {name}, "
                "whose backward a captured graph loses."
            )
        new = {child for child, _ in node.next_functions if child is not None} - seen
        seen |= new
        queue.extend(new)


class _TensorHooks(TorchFunctionMode):
    """Sees ``register_hook`` on tensors."""

    used = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("register_hook", "register_post_accumulate_grad_hook"):
            self.used = True
        return func(*args, **(kwargs or {}))
