"""The training step a budget speaks of; simulation, measuring and verification all run this one.

Inputs on the device, forward under ``amp``, loss, backward, optimizer step, ``zero_grad(set_to_none=True)``. Where
gradients are accumulated, forward, loss and backward are taken several times before the optimizer's step.
In inference mode the step is one forward under ``torch.no_grad``.
"""

import contextlib
import functools
import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from memrewrite.errors import UsageError
from memrewrite.private import tree_leaves

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Phase = Literal["data", "forward", "loss", "backward", "step"]
PHASES: tuple[Phase, ...] = ("data", "forward", "loss", "backward", "step")


@dataclass(frozen=True)
class Inputs:
    """The example inputs of one step: what ``module(*args, **kwargs)`` is called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def tensors(self) -> list[Tensor]:
        """Every tensor in the inputs, in flattening order."""
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]

    @property
    def batch_size(self) -> int:
        """The most frequent size of dimension 0, the first of those on a tie; 0 where no tensor has one."""
        sizes = Counter(tensor.shape[0] for tensor in self.tensors() if tensor.dim() and tensor.shape[0])
        return sizes.most_common(1)[0][0] if sizes else 0


@dataclass(frozen=True)
class Step:
    """How one step is taken. ``optimizer`` None counts no optimizer state; ``amp`` None runs without autocast.

    ``as_cuda`` plans for CUDA on tensors that lie on the CPU: what runs on fake tensors runs as it does on CUDA; what
    runs on real ones runs on the CPU as ever. ``compiled`` plans for ``torch.compile``, which casts to a wider type
    wherever that is read, so that such a tensor counts as what it is made of, and hands zeros to backward as gradients
    of what is given besides the loss. Gradients of ``micro_batches`` forward and backward passes add up before the
    optimizer's step, each pass over the same inputs.
    """

    mode: Literal["train", "inference"] = "train"
    optimizer: OptimizerFactory | None = None
    loss_fn: Callable[[Any], Tensor] | None = None
    amp: torch.dtype | None = None
    as_cuda: bool = False
    compiled: bool = False
    micro_batches: int = 1

    def shortest(self) -> "Step":
        """The shortest step that takes as much memory: third and later micro-batches find what the second found."""
        return replace(self, micro_batches=min(self.micro_batches, 2))

    def device_type(self, module: nn.Module, inputs: Inputs) -> str:
        """``"cuda"`` or ``"cpu"``: what the step is planned for."""
        return "cuda" if self.as_cuda else device_type(module, inputs)

    def make_optimizer(self, module: nn.Module) -> torch.optim.Optimizer | None:
        """The optimizer over the parameters that train, or None where there is nothing to train."""
        trained = [p for p in module.parameters() if p.requires_grad]
        if self.mode == "inference" or self.optimizer is None or not trained:
            return None
        return self.optimizer(trained)

    def run(
        self,
        module: nn.Module,
        inputs: Inputs,
        optimizer: torch.optim.Optimizer | None,
        on_phase: Callable[[Phase], None] = lambda phase: None,
    ) -> Tensor | None:
        """Take one step; ``on_phase`` is called as each phase ends. Returns the detached loss (None in inference).

        Micro-batches before the last one belong to its first phase.
        """
        if self.mode == "inference":
            on_phase("data")
            with torch.no_grad(), autocast(self.amp, device_type(module, inputs)):
                module(*inputs.args, **inputs.kwargs)
                on_phase("forward")
            return None
        for _ in range(self.micro_batches - 1):
            self._pass(module, inputs, lambda phase: None)
        value = self._pass(module, inputs, on_phase)
        if optimizer is not None:
            self.update(optimizer)
            on_phase("step")
            optimizer.zero_grad(set_to_none=True)
        else:
            on_phase("step")
            module.zero_grad(set_to_none=True)
        return value

    def _pass(self, module: nn.Module, inputs: Inputs, on_phase: Callable[[Phase], None]) -> Tensor:
        """Forward, loss and backward; returns the detached loss."""
        on_phase("data")
        with autocast(self.amp, device_type(module, inputs)):
            output = module(*inputs.args, **inputs.kwargs)
            on_phase("forward")
            loss = (self.loss_fn or default_loss)(output)
            on_phase("loss")
        del output
        self.backward(loss)
        on_phase("backward")
        return loss.detach()

    def backward(self, loss: Tensor) -> None:
        """Make the gradients of ``loss``; a loop that does more than that overrides it."""
        loss.backward()

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the optimizer take its step; likewise."""
        optimizer.step()


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Let the module be in eval mode; afterwards every submodule has its own flag again."""
    flags = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, flag in flags:
            part.training = flag


def optimizers_like(optimizer: torch.optim.Optimizer) -> OptimizerFactory:
    """A factory of optimizers of that class with the settings of its first group; the optimizer itself is not touched.

    Raises ``UsageError`` where the class takes more than its settings.
    """
    signature = inspect.signature(type(optimizer))
    settings = {**optimizer.defaults, **optimizer.param_groups[0]}
    known = {name: settings[name] for name in signature.parameters if name in settings and name != "params"}
    try:
        signature.bind([], **known)
    except TypeError as error:
        raise UsageError(
            f"{type(optimizer).__name__} cannot be made again from its settings ({error}); give a factory, "
            "lambda parameters: ..., as the optimizer."
        ) from error
    return functools.partial(type(optimizer), **known)


def autocast(amp: torch.dtype | None, device: str, cached: bool = True) -> contextlib.AbstractContextManager[Any]:
    """``torch.autocast`` for ``amp``, or nothing; ``cached`` says whether it keeps its casts of weights."""
    return torch.autocast(device, amp, cache_enabled=cached) if amp is not None else contextlib.nullcontext()


def device_of(module: nn.Module, inputs: Inputs) -> torch.device:
    """Where the first parameter (else the first input) lies."""
    return next((t.device for t in itertools.chain(module.parameters(), inputs.tensors())), torch.device("cpu"))


def device_type(module: nn.Module, inputs: Inputs) -> str:
    """``"cuda"`` or ``"cpu"``: that of ``device_of``."""
    return device_of(module, inputs).type


def default_loss(output: Any) -> Tensor:
    """``output.loss`` when there is one, else the sum over floating-point outputs of their float32 mean."""
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    means = [t.float().mean() for t in tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]
    if not means:
        raise UsageError("The model returns no floating-point tensor to take a loss of; pass --loss module:function.")
    return torch.stack(means).sum() if len(means) > 1 else means[0]
