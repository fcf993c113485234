"""An optimizer that updates parameters while backward runs, so that gradients are never there all at once.

Each update is that of the optimizer's class for some parameters, taken as soon as backward has their gradients, which
end with it. In their place is what says so in one sentence where somebody asks for them: clipping, a scaler, a second
backward pass. A parameter that a checkpoint segment has yet to read, as that runs again, waits until it has.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, distributed, nn

from memrewrite.records.errors import UsageError
from memrewrite.runtime.segment import still_read
from memrewrite.torch_internals.pytrees import tree_map
from memrewrite.torch_internals.spent import Spent
from memrewrite.workload.narrowed import Narrowed, O, check, narrowed, parts
from memrewrite.workload.optimizers import OptimizerFactory, hands_on, optimizers_like, parameters_in

MOST = 16 * 2**20
"""Bytes of gradients that wait at most for others before parameters are updated together,"""
SHARE = 32
"""and that part of all gradients at most."""
_NOT_STEPPED = (
    "The optimizer steps while backward runs (step_in_backward), and {what}: that update cannot be taken back. Call "
    "optimizer.step() after each backward pass, and change its settings and gradients only after that."
)


class InBackward(Narrowed):
    """What an optimizer's class has before its own where it steps while backward runs."""

    state: Any

    def begin(self) -> None:
        """Nothing has been updated yet."""
        self._lock = threading.Lock()  # backward has a thread for each device
        self._updated: dict[int, Tensor] = {}  # since the last step
        self._waiting: dict[int, Tensor] = {}
        self._settings: list[Any] = []

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as the class does."""
        super().add_param_group(param_group)  # type: ignore[misc]
        if self._attached:
            self._attach(self.param_groups[-1]["params"])

    def attach(self) -> None:
        """From now on step while backward runs."""
        self._attached = True
        self._attach(self.parameters)

    @contextlib.contextmanager
    def while_backward(self) -> Iterator[None]:
        """Step meanwhile."""
        handles = self._hooks(self.parameters)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @property
    def parameters(self) -> list[Tensor]:
        """All of them."""
        return parameters_in(self.param_groups)

    def _attach(self, parameters: Iterable[Tensor]) -> None:
        for handle in self._hooks(parameters):
            weakref.finalize(self, handle.remove)

    def _hooks(self, parameters: Iterable[Tensor]) -> list[Any]:
        """Those on the parameters; what is frozen has none, and is updated at the end if that changes."""
        mine = weakref.ref(self)

        def accumulated(parameter: Tensor) -> None:
            if (optimizer := mine()) is not None:
                optimizer._take(parameter)

        return [p.register_post_accumulate_grad_hook(accumulated) for p in parameters if p.requires_grad]

    def _take(self, parameter: Tensor) -> None:
        """The gradient of a parameter is there."""
        with self._lock:
            _refuse_processes()
            if id(parameter) in self._updated:
                raise UsageError(_NOT_STEPPED.format(what="another backward pass came before optimizer.step()"))
            self._waiting[id(parameter)] = parameter
            if _bytes(self._waiting.values()) < self._size:
                return
            read = still_read()
            ready = [each for each in self._waiting.values() if id(each) not in read]
            if ready and _bytes(ready) >= self._size:
                self._update(ready)

    @torch.no_grad()
    def _update(self, ready: list[Tensor]) -> None:
        """The step of the class for these parameters, whose gradients are gone then."""
        self._refuse_other_settings()
        own: Any = self._of.step
        if getattr(own, "hooked", False):  # by PyTorch, to call what is registered to be called once a step
            own = own.__wrapped__
        with self._with(self._with_only(set(map(id, ready)))):
            own(self)
        self._settings = self._now()
        for parameter in ready:
            parameter.grad = Spent(parameter)
            self._updated[id(parameter)] = self._waiting.pop(id(parameter))

    def _with_only(self, taken: set[int]) -> list[dict[str, Any]]:
        """The groups with those of their parameters."""
        some = ((group, [p for p in group["params"] if id(p) in taken]) for group in self.param_groups)
        return [part for group, parameters in some if parameters for part in parts(group, [parameters])]

    def _around(self, step: Callable[..., Any], closure: Callable[[], Any] | None = None) -> Any:
        """What is left of the step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if any(not isinstance(parameter.grad, Spent) for parameter in self._updated.values()):
            raise UsageError(_NOT_STEPPED.format(what="gradients were set or cleared before optimizer.step()"))
        self._refuse_other_settings()
        left = {id(p) for p in self.parameters if p.grad is not None and not isinstance(p.grad, Spent)}
        with self._with(self._with_only(left)):
            step()
        self._updated, self._waiting, self._settings = {}, {}, []
        return loss

    def _refuse_other_settings(self) -> None:
        """Raise ``UsageError`` if settings are others than at the first update of the step."""
        if self._updated and self._now() != self._settings:
            raise UsageError(_NOT_STEPPED.format(what="settings such as its learning rate were changed meanwhile"))

    def _now(self) -> list[Any]:
        """Its settings: of tensors among them, which they are and how often they were written."""

        def said(value: Any) -> Any:
            return (id(value), value._version) if isinstance(value, Tensor) else value

        return [tree_map(said, {k: v for k, v in group.items() if k != "params"}) for group in self.param_groups]


def while_backward(optimizer: torch.optim.Optimizer | None) -> contextlib.AbstractContextManager[None]:
    """Around a backward pass of ours, in which the optimizer may step; the user's own hooks are off there."""
    return optimizer.while_backward() if isinstance(optimizer, Narrowed) else contextlib.nullcontext()


def step_in_backward(optimizer: O) -> O:
    """Let ``optimizer`` update each parameter as soon as backward has its gradient; returns the optimizer.

    ``optimizer.step()`` after each backward pass does what is left. Gradients end as they are used: whatever asks for
    them later (clipping, a gradient scaler, accumulation, a second backward pass, the norm that transformers' Trainer
    logs) gets a ``UsageError``, and so does a backward pass whose step was left out, or before which settings were
    changed. State, groups and ``state_dict`` stay as they are; of one that hands on to another, as accelerate's does,
    it is that other that steps so. Raises ``UsageError`` where that step would not have the same bits, where several
    processes train together, and for an optimizer that steps in groups.
    """
    if isinstance(optimizer, InBackward):
        return optimizer
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, torch.optim.Optimizer) and hands_on(optimizer, inner):
        step_in_backward(inner)
        return optimizer
    if isinstance(optimizer, Narrowed):
        raise UsageError("The optimizer steps in groups; step_in_backward takes one that does not yet.")
    _refuse_processes()
    check_in_backward(optimizers_like(optimizer), parameters_in(optimizer.param_groups))
    made: Any = stepping_in_backward(optimizer)
    made.attach()
    return optimizer


def stepping_in_backward(optimizer: O) -> O:
    """The optimizer, which takes its step so in backward passes of ours alone; nothing is tried."""
    size = sum(parameter.nbytes for parameter in parameters_in(optimizer.param_groups))
    return narrowed(optimizer, InBackward, min(MOST, size // SHARE))


def check_in_backward(make: OptimizerFactory, parameters: list[nn.Parameter]) -> None:
    """Raise ``UsageError`` where updates of one parameter, of small ones like these, have other bits."""
    check(make, parameters, InBackward, "while backward runs")


def gradient_of(parameter: Tensor) -> Tensor | None:
    """Its gradient, if that is there."""
    return None if isinstance(parameter.grad, Spent) else parameter.grad


def _bytes(parameters: Iterable[Tensor]) -> int:
    return sum(parameter.grad.nbytes for parameter in parameters if parameter.grad is not None)


def _refuse_processes() -> None:
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise UsageError(
            "step_in_backward is for one process: in several, gradients are put together after backward has made them."
        )
