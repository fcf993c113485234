"""Training steps as a user takes them, with every number they leave behind, to compare a result with its original."""

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import memrewrite
from memrewrite.capture import Captured, capture
from memrewrite.search import captured as capturing
from memrewrite.simulate.fake.copier import tensors_of
from memrewrite.torch_internals.pytrees import tree_leaves, tree_map
from memrewrite.workload.step import Inputs
from tests.support.dropins import segmented

STEPS = 3


def taken(module: nn.Module, inputs: Callable[[int], Inputs], leaves: bool = True) -> dict[str, Any]:
    """Outputs with their strides, gradients, buffers, written inputs, parameters and random state of three steps.

    ``inputs(k)`` makes those of step k; with ``leaves`` the floating-point ones among them get gradients too.
    """
    torch.manual_seed(5)
    record: dict[str, Any] = {}
    optimizer = torch.optim.SGD(module.parameters(), 0.01, momentum=0.9)
    for k in range(STEPS):
        given = inputs(k)
        sources = [t.requires_grad_(leaves and _differentiable(t)) for t in given.tensors()]
        copies = {id(t): t * 1 if t.requires_grad else t for t in sources}
        args, kwargs = tree_map(lambda leaf, copies=copies: copies.get(id(leaf), leaf), (given.args, given.kwargs))
        output = module(*args, **kwargs)
        for i, leaf in enumerate(tree_leaves(output)):
            record[f"{k} output {i}"] = leaf.detach().clone() if isinstance(leaf, Tensor) else leaf
            record[f"{k} output {i} form"] = _form(leaf)
        record[f"{k} output class"] = type(output)
        loss_of(output).backward()
        record |= {f"{k} gradient {name}": _copy(p.grad) for name, p in module.named_parameters()}
        record |= {f"{k} input gradient {i}": _copy(t.grad) for i, t in enumerate(sources)}
        record |= {f"{k} buffer {name}": b.detach().clone() for name, b in module.named_buffers()}
        record |= {f"{k} input {i}": _copy(copies[id(t)]) for i, t in enumerate(sources)}
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    record |= {f"parameter {name}": p.detach().clone() for name, p in module.named_parameters()}
    return record | {"random state": torch.get_rng_state()}


def loss_of(output: Any) -> Tensor:
    """A loss that weighs every element of every differentiable output differently."""
    parts = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
    parts = [torch.view_as_real(t) if t.is_complex() else t for t in parts]
    return torch.stack([(t.flatten().double() * torch.linspace(0.5, 2, t.numel())).sum() for t in parts]).sum()


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Every value is the same, bit for bit; nan equals nan."""
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        other = theirs[name]
        if isinstance(value, Tensor) and isinstance(other, Tensor):
            torch.testing.assert_close(value, other, rtol=0, atol=0, equal_nan=True, msg=f"{name} differs")
        else:
            assert value == other, f"{name} is {value}, not {other}"


def assert_right(
    model: nn.Module, inputs: Callable[[int], Inputs], *, leaves: Sequence[bool] = (True,), **options: Any
) -> tuple[Any, Any]:
    """Three steps of what ``optimize`` gives, and of segments over all that may move, are those of the original.

    Each time from the same state: once for each of ``leaves``, whether inputs get gradients too. Returns both.
    """
    original, first = copy.deepcopy(model), inputs(0)
    wished = {"budget": "min", "verify": False, **options}
    captured: list[Captured] = []

    def kept(*given: Any, **how: Any) -> Captured:
        captured.append(capture(*given, **how))
        return captured[-1]

    with mock.patch.object(capturing, "capture", kept):  # which takes longest, and is the same for both
        optimized = memrewrite.optimize(original, first.args, example_kwargs=first.kwargs, **wished)
    values = {id(tensor) for tensor in itertools.chain(original.parameters(), original.buffers())}
    if len(captured) == 1 and all(id(tensor) in values for tensor in tensors_of(original)):  # each is put back below
        covered = segmented(original, *first.args, size=100, kwargs=first.kwargs, captured=captured[0]).module
    else:
        covered = segmented(copy.deepcopy(model), *first.args, size=100, kwargs=first.kwargs).module
    for wanted in leaves:
        expected = taken(copy.deepcopy(model), inputs, wanted)
        for ours in (optimized, covered):
            _put_back(ours, model)
            assert_same(taken(ours, inputs, wanted), expected)
    return optimized, covered


@torch.no_grad()
def _put_back(module: nn.Module, state: nn.Module) -> None:
    """Give the parameters and buffers of ``module`` the values that those of ``state`` have."""
    values = dict(itertools.chain(state.named_parameters(), state.named_buffers()))
    for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
        tensor.copy_(values[name])


def _differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def _form(leaf: Any) -> Any:
    return (tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else None
