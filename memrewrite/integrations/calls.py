"""How a framework calls a model: with arguments of its own, on batches of its own making."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from memrewrite.records.errors import UsageError
from memrewrite.state.random_state import preserved_rng
from memrewrite.workload.step import Inputs


class _CalledError(Exception):
    def __init__(self, inputs: Inputs) -> None:
        super().__init__()
        self.inputs = inputs


def first_call(module: nn.Module, run: Callable[[], object]) -> Inputs:
    """What ``module`` is called with first while ``run()`` runs, which ends there, before forward.

    Calls without gradients, as those that generate what a policy learns from, go on, and count where there is no other.
    The random state stays as it is, so that training goes as it would have gone.
    Raises ``UsageError`` where ``run()`` ends by itself, without that call, and where it steps an optimizer before.
    """
    name = type(module).__name__
    without_gradients: list[Inputs] = []

    def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            raise _CalledError(Inputs(args, kwargs))
        without_gradients.append(Inputs(args, dict(kwargs)))

    def refuse(*given: object) -> None:
        if without_gradients:
            raise _CalledError(without_gradients[0])
        raise UsageError(
            f"The training step steps an optimizer before it calls {name}, which cannot be tried; optimize {name} by "
            "memrewrite.optimize before training."
        )

    hooks = [
        module.register_forward_pre_hook(stop, prepend=True, with_kwargs=True),
        register_optimizer_step_pre_hook(refuse),
    ]
    try:
        with preserved_rng(list(module.parameters())):
            run()
    except _CalledError as call:
        return call.inputs
    except Exception:  # whatever is wrong with what comes after the call
        if not without_gradients:
            raise
    finally:
        for hook in hooks:
            hook.remove()
    if without_gradients:
        return without_gradients[0]
    raise UsageError(f"The training step does not call {name}; name the module that it calls.")
