"""How results of lists are spread is what PyTorch finds of the whole lists."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Replicate

from memrewrite.records.mesh import Fsdp
from memrewrite.torch_internals import spread_lists
from memrewrite.torch_internals.fsdp import without_peers
from tests.support import fsdp

_MESH = Fsdp(11)  # of no other test, as PyTorch remembers what it found
_OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "adamw": lambda tensors: torch.optim.AdamW(tensors, foreach=True),
    "adamw, fused": lambda tensors: torch.optim.AdamW(tensors, fused=True),
    "sgd": lambda tensors: torch.optim.SGD(tensors, momentum=0.9, foreach=True),
}
_CALLS: dict[str, Callable[[list[Any]], Any]] = {
    "norm": lambda tensors: torch._foreach_norm(tensors),
    "scalars": lambda tensors: torch._foreach_mul(tensors, [1.0 + i % 2 for i in range(len(tensors))]),
    "redistributed": lambda tensors: torch._foreach_add(
        tensors, [t.detach().redistribute(placements=[Replicate()]) for t in tensors]
    ),
    **{name: lambda tensors, name=name: _OPTIMIZERS[name](tensors).step() for name in _OPTIMIZERS},  # type: ignore[misc]
}


@pytest.mark.parametrize("name", _CALLS)
def test_of_lists_the_same_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, shortened = spread_lists._found_by, []

    def compared(find: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def found(propagator: Any, schema: Any) -> Any:
            result = made(find)(propagator, schema)
            assert result == find(propagator, schema)
            shortened.append(spread_lists._places(schema))
            return result

        return found

    monkeypatch.setattr(spread_lists, "_found_by", compared)
    with without_peers(_MESH, "cpu") as shard:
        model = fsdp.Net()
        shard(model)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        with spread_lists.alike_found_once(), torch.no_grad():
            _CALLS[name]([*model.parameters()])
    helped = any(places is not None for places in shortened)
    if not helped and torch.__version__ < "2.13":
        pytest.skip("this PyTorch has kept the function it looks with: all is found as before")
    assert helped


def test_a_list_that_is_joined_is_left_as_it_is() -> None:
    with without_peers(_MESH, "cpu") as shard, spread_lists.alike_found_once():
        model = fsdp.Net()
        shard(model)
        weight = model.inward.weight.detach()
        assert torch.cat([weight, weight, weight], 1).shape == (64, 48)
