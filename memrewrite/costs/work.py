"""What a step does outside the graph, the loss and the optimizer, counted on fake tensors: bytes and operators."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from memrewrite.observe.effects import Effects
from memrewrite.simulate.fake.fakes import on_fakes, put_back
from memrewrite.torch_internals.fake_tensors import FAKE_TENSOR_ERRORS, FakeTensor, TorchDispatchMode
from memrewrite.torch_internals.foreach import foreach_on_fake_tensors
from memrewrite.torch_internals.operators import written_arguments
from memrewrite.torch_internals.pytrees import tensors_in, tree_iter, tree_map
from memrewrite.workload.step import Inputs, Step, autocast, default_loss
from memrewrite.workload.surroundings import surroundings_put_back


class Work(TorchDispatchMode):
    """Counts while it is active: ``moved``, the bytes that operators read and write, and the ``operators`` themselves.

    Views move nothing. The bytes of what is written in place count twice.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.moved = self.operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = {id(t): t for t in tensors_in((args, kwargs))}
        storages = {id(t.untyped_storage()) for t in given.values()}
        written = [t for t in tensors_in(written_arguments(func, args, kwargs)) if t.nbytes]
        written += [t for t in tensors_in(result) if id(t.untyped_storage()) not in storages]
        if written:
            self.moved += sum(t.nbytes for t in [*given.values(), *written])
            self.operators += 1
        return result


def of_optimizer(model: nn.Module, inputs: Inputs, step: Step) -> Work:
    """The work of a steady step's optimizer; none where it cannot run on fake tensors."""
    work = Work()
    try:
        with put_back(step.stepped_beside), foreach_on_fake_tensors(), on_fakes(model, inputs) as (twin, _):
            if (optimizer := step.make_optimizer(twin)) is None:
                return work
            for parameter in twin.parameters():
                parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
            optimizer.step()  # makes its state
            with work:
                optimizer.step()
    except FAKE_TENSOR_ERRORS:
        return Work()
    return work


def of_loss(effects: Effects, restored: Callable[[Any], Any], step: Step, device: str) -> Work:
    """The work of the loss, forward and backward; ``restored`` makes the model's output of the graph's.

    None where the loss depends on values.
    """
    work = Work()
    leaves = tree_map(_leaf, effects.order[-1].meta["val"])
    fakes = [value for value in tree_iter(leaves) if isinstance(value, FakeTensor)]
    trained = [value for value in fakes if value.requires_grad]
    if step.mode == "inference" or not trained:
        return work
    try:
        with surroundings_put_back((), step.loss_fn), fakes[0].fake_mode, work:
            with autocast(step.amp, device):
                loss = (step.loss_fn or default_loss)(restored(leaves))
            if loss.requires_grad:
                torch.autograd.grad(loss, trained, allow_unused=True)
    except FAKE_TENSOR_ERRORS:
        return Work()
    return work


def _leaf(value: Any) -> Any:
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value
