"""What Inductor fuses where it has to stay within some bytes, seen by the code that it writes for CUDA."""

import contextlib
import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import memory
from torch._inductor.ir import MultiOutput
from torch.nn import functional as F  # noqa: N812

from memrewrite.backends.observed import Seen, seen
from memrewrite.torch_internals.compiled_code import beside, compiled_codes
from memrewrite.torch_internals.fake_tensors import FakeTensorMode
from memrewrite.torch_internals.fusions import Room, fused_within
from tests.support.cuda_code import held_by_cuda_code, written

ROWS, WIDTH, HIDDEN, RANK = 1024, 16, 512, 4
HALF = ROWS * HIDDEN * 2  # bytes of a value in bf16
SMALL = HALF // 4


def adapted(x: Tensor, low: Tensor, weight: Tensor, adapter: Tensor) -> Tensor:
    """A product in bf16 to which one in float32 is added."""
    return (x @ weight + low @ adapter).to(torch.bfloat16)


def gated(
    x: Tensor, low: Tensor, gate: Tensor, of_gate: Tensor, up: Tensor, of_up: Tensor, down: Tensor
) -> list[Tensor]:
    """A gated MLP with adapters, and its gate, which is kept: 3 halves for what that is the sum of, 1 for itself."""
    whole = adapted(x, low, gate, of_gate)
    return [(F.silu(whole) * adapted(x, low, up, of_up)) @ down, whole]


def held(room: Room | None, run: Callable[..., list[Tensor]] = gated) -> int:
    """The bytes at the peak of the code beyond its results, without those of its inputs."""
    half, whole = torch.bfloat16, torch.float32
    shapes = [((ROWS, WIDTH), half), ((ROWS, RANK), whole)]
    shapes += 2 * [((WIDTH, HIDDEN), half), ((RANK, HIDDEN), whole)] + [((HIDDEN, WIDTH), half)]
    with FakeTensorMode():
        given = [torch.empty(shape, dtype=dtype) for shape, dtype in shapes]
    with contextlib.nullcontext() if room is None else fused_within(room):
        return held_by_cuda_code(run, given)


def test_a_gate_is_made_before_the_products_of_the_other_half() -> None:
    assert held(None) >= 5 * HALF - SMALL
    assert held(lambda backward: 0) <= 3 * HALF + SMALL


@pytest.mark.parametrize(
    "room", [lambda backward: 1 << 40, lambda backward: None, lambda backward: None if not backward else 0]
)
def test_where_there_is_room_kernels_are_fused_as_ever(room: Room) -> None:
    assert held(room) == held(None)


def test_what_is_compiled_beside_a_graph_has_no_room_of_its() -> None:
    with beside():
        assert held(lambda backward: 0) == held(None)


def test_room_for_one_of_two_products_is_made_use_of() -> None:
    """Within what the whole kernel takes it is one, and with a byte less it is not."""
    most = held(None)
    found = [held(functools.partial(room, most + HALF + more)) for more in (SMALL, -SMALL)]  # the gate lives, too
    assert found[0] == most > found[1]


def room(most: int, backward: bool) -> int:
    return most


def joined(x: Tensor, first: Tensor, *others: Tensor) -> list[Tensor]:
    """Layers that are all given what the first one makes, too, joined to what the layer before makes."""
    made = now = x @ first
    for weight in others:
        now = torch.cat([made, now], 1).tanh() @ weight
    return [now]


@pytest.mark.parametrize("halves", [0, 6, 8])
def test_what_is_joined_is_there_once_its_first_part_is(halves: int) -> None:
    """A kernel that writes a value into all that it is joined in lets all of that live from then on."""
    half = torch.bfloat16
    shapes = [(ROWS, WIDTH), (WIDTH, HIDDEN), *[(2 * HIDDEN, HIDDEN)] * 5]
    with FakeTensorMode():
        given = [torch.empty(shape, dtype=half) for shape in shapes]
    with fused_within(lambda backward: halves * HALF):
        assert held_by_cuda_code(joined, given) <= max(halves, 4) * HALF


def convolved(gradient: Tensor, *given: Tensor) -> list[Tensor]:
    """What backward of convolutions gives, with the gradients of their weights, which nothing reads."""
    found = []
    for x in given[:-1]:
        sizes = [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False]
        gradient, of_weight, _ = torch.ops.aten.convolution_backward(gradient.tanh(), x, given[-1], [0], *sizes)
        found.append(of_weight)
    return [gradient, *found]


@pytest.mark.parametrize("room", [lambda backward: 0, lambda backward: None])
def test_all_results_are_taken_at_once(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor may take those that nothing reads where the code ends, and all of them live until then."""

    def late(nodes: list[Any], *rest: Any, **options: Any) -> list[Any]:
        unread = [node for node in nodes if isinstance(node.node, MultiOutput) and node.node.indices[0][1] == 1]
        return [node for node in nodes if node not in unread] + unread

    monkeypatch.setattr(memory, "reorder_for_peak_memory", late)
    with FakeTensorMode():
        given = [*(torch.empty(4, 8, 32, 32) for _ in range(4)), torch.empty(8, 8, 3, 3)]
    taken = re.compile(r"= (?:torch\.ops\.aten\.(convolution_backward)|buf\d+\[(\d)\])")
    found = [called or int(part) for called, part in taken.findall(written(convolved, given))]
    assert found[-3:] == [1, 1, 1]
    with fused_within(room):
        found = [called or int(part) for called, part in taken.findall(written(convolved, given))]
    assert found == ["convolution_backward", 0, 1] * 3


class Adapted(nn.Module):
    """A gated MLP whose gate is given, too: the difference of two products, as is what it gates."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.of_gate, self.up, self.of_up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(4))
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        gate = self.gate(x) - self.of_gate(x)
        return gate, self.down(F.silu(gate) * (self.up(x) - self.of_up(x)))


def trained(room: Room | None) -> tuple[int, list[Tensor]]:
    """The peak of forward in bytes by its code on the CPU, and the gradients."""
    torch.manual_seed(0)
    model, x = Adapted(), torch.randn(ROWS, WIDTH)
    torch._dynamo.reset()
    uncached = torch._functorch.config.patch(enable_autograd_cache=False)
    lean = torch._inductor.config.patch(fx_graph_cache=False, allow_buffer_reuse=False)
    with uncached, lean, compiled_codes() as codes:
        with contextlib.nullcontext() if room is None else fused_within(room):
            gate, result = torch.compile(model)(x)
        (gate.sum() + result.square().sum()).backward()
    found = seen(codes)
    assert isinstance(found, Seen)
    return found.forward, [p.grad for p in model.parameters() if p.grad is not None]


def test_bits_are_the_same() -> None:
    usual, expected = trained(None)
    lean, found = trained(lambda backward: 0)
    assert lean < usual
    assert len(found) == 6
    assert all(map(torch.equal, found, expected))
