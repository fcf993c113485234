"""How a framework calls a model: with arguments of its own, on batches of its own making."""

from collections.abc import Callable
from typing import Any

from torch import nn

from memrewrite.records.errors import UsageError
from memrewrite.state.random_state import preserved_rng
from memrewrite.workload.step import Inputs


class _CalledError(Exception):
    def __init__(self, inputs: Inputs) -> None:
        super().__init__()
        self.inputs = inputs


def first_call(module: nn.Module, run: Callable[[], object]) -> Inputs:
    """What ``module`` is called with first while ``run()`` runs, which ends there, before forward.

    The random state stays as it is, so that training goes as it would have gone.
    Raises ``UsageError`` where ``run()`` ends by itself, without that call.
    """

    def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise _CalledError(Inputs(args, kwargs))

    hook = module.register_forward_pre_hook(stop, prepend=True, with_kwargs=True)
    try:
        with preserved_rng(list(module.parameters())):
            run()
    except _CalledError as call:
        return call.inputs
    finally:
        hook.remove()
    raise UsageError(f"The training step does not call {type(module).__name__}; name the module that it calls.")
