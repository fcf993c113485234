"""What backward writes, though kernels that read it could make it: fewer bytes, and the same bits."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from memrewrite.backends import entry, partition
from memrewrite.backends.facts import Facts
from memrewrite.backends.observed import Seen, seen
from memrewrite.backends.partition import Partition
from memrewrite.backends.stored import _OnTheWay
from memrewrite.torch_internals.compiled_code import compiled_codes
from tests.support.divided import Divided

ROWS, WIDTH, HIDDEN = 512, 16, 256
BUFFER = ROWS * HIDDEN * 4


class Adapted(nn.Module):
    """An MLP of sums of two products, as of a frozen weight and an adapter; ``kind`` says how these are read."""

    def __init__(self, kind: str = "gated") -> None:
        super().__init__()
        self.kind = kind
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False).requires_grad_(False) for _ in range(2))
        self.less = nn.Linear(WIDTH, 4, bias=False)
        self.of_gate, self.of_up = (nn.Linear(4, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        low = self.less(x)
        part = self.of_gate(low)
        gate, up = self.gate(x) + part, self.up(x) + self.of_up(low)
        made = {
            "gated": lambda: gate.sigmoid() * gate * up,  # both sums are read by several kernels of backward
            "part": lambda: gate.sigmoid() * gate * part,  # what the gate is the sum of is read besides
            "alone": lambda: self.gate(x).sigmoid() * self.up(x),  # products alone, of which each is as large
            "once": lambda: 2 * gate,  # written for the product that reads it
        }[self.kind]()
        return x + self.down(made)


class Chain(nn.Module):
    def __init__(self, kind: str = "gated", blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Adapted(kind) for _ in range(blocks)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x).square().sum()


def facts(kind: str) -> Facts:
    divided = Divided(Chain(kind, blocks=1), "min", fused=True)
    divided.step(torch.randn(ROWS, WIDTH))
    assert divided.partition.options is not None
    return divided.partition.options.frontier.facts


@pytest.mark.parametrize(("kind", "count"), [("gated", 2), ("part", 0), ("alone", 0), ("once", 0)])
def test_sums_are_written_that_are_read_again_and_stand_for_more(kind: str, count: int) -> None:
    known = facts(kind)
    written = [known.nodes[i] for i in known.stored]
    assert [node.target for node in written] == [torch.ops.aten.add.Tensor] * count
    assert all(known.sizes[i] == BUFFER for i in known.stored)


class Shifted(nn.Module):
    """The loss of a language model, of the logits of all words but the last one of each text."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        labels = torch.zeros(x.shape[0] * (x.shape[1] - 1), dtype=torch.long)
        return nn.functional.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), labels)


def test_a_copy_of_nearly_all_is_not_written_beside_what_it_is_of() -> None:
    """It would lie there with all logits, and their gradient."""
    divided = Divided(Shifted(), "100%", fused=True)
    divided.step(torch.randn(8, 64, WIDTH))
    assert divided.partition.options is not None
    known = divided.partition.options.frontier.facts
    assert any(node.target is torch.ops.aten.clone.default for node in known.nodes)
    assert not known.stored


def test_ways_that_meet_again_are_followed_to_where_they_do() -> None:
    """0 is read by 1 and 2, these by 3, and that by 4 and 5, of which 4 alone is made where it is read, by 5."""
    readers = [[1, 2], [3], [3], [4, 5], [5], []]
    known: Any = SimpleNamespace(nodes=range(6), makes=[(i,) for i in range(6)])
    on_the_way = _OnTheWay(known, readers, [1, 2, 3, 4])
    assert [node for node in range(1, 6) if on_the_way(node, 0)] == [3, 5]
    assert [node for node in range(1, 6) if on_the_way(node, 3)] == [5]
    assert not any(on_the_way(node, 5) for node in range(6))  # nobody reads it


class Convolved(nn.Module):
    """A sum of two products that convolutions read, which lie in memory as these choose."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (nn.Conv2d(3, 8, 3, padding=1, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        made = self.one(x) + self.other(x)
        return (made.sigmoid() * made).sum()


def test_what_convolutions_give_lies_as_they_choose() -> None:
    divided = Divided(Convolved(), "min", fused=True)
    divided.step(torch.randn(2, 3, 16, 16))
    assert divided.partition.options is not None
    known = divided.partition.options.frontier.facts
    assert known.stored == frozenset()
    assert any(node.target is torch.ops.aten.add.Tensor for node in known.nodes)


def test_what_any_number_of_rows_makes_is_not() -> None:
    """The strides that it is written with would be sizes that nothing is known of."""
    divided = Divided(Chain(blocks=1), "min", fused=True, dynamic=True)
    divided.step(torch.randn(ROWS, WIDTH))
    assert divided.partition.options is not None
    assert divided.partition.options.frontier.facts.stored == frozenset()


def trained(stores: bool) -> tuple[Seen, int, list[Tensor]]:
    """What the lowest plan's code takes and what was foreseen, in bytes, and the gradients."""
    torch.manual_seed(0)
    model, x = Chain(blocks=2), torch.randn(ROWS, WIDTH)
    torch._dynamo.reset()
    made: list[Partition] = []
    real = Partition.chosen

    def chosen(self: Partition, *args: Any) -> object:
        made.append(self)
        return real(self, *args)

    none: Any = mock.patch.object(partition, "stored", return_value=frozenset())
    uncached = torch._functorch.config.patch(enable_autograd_cache=False)
    lean, told = torch._inductor.config.patch(fx_graph_cache=False), mock.patch.object(Partition, "chosen", chosen)
    with uncached, lean, told, nullcontext() if stores else none, compiled_codes() as codes:
        options: Any = {"budget": "min", "optimizer": "sgd"}
        torch.compile(model, backend=entry.memrewrite, options=options)(x).backward()
    found = seen(codes)
    assert isinstance(found, Seen)
    assert made[0].foreseen is not None
    return found, made[0].foreseen.after - made[0].base, [p.grad for p in model.parameters() if p.grad is not None]


def test_code_takes_fewer_bytes_with_the_same_bits() -> None:
    (less, told, same), (usual, _, gradients) = trained(stores=True), trained(stores=False)
    narrow = ROWS * 4 * 4  # an adapter's narrow product: by as much the two plans differ besides
    assert max(less.forward, less.backward) <= max(usual.forward, usual.backward) - BUFFER + narrow
    assert max(less.forward, less.backward) <= told
    assert len(same) == len(gradients) > 0
    assert all(torch.equal(a, b) for a, b in zip(same, gradients, strict=True))
