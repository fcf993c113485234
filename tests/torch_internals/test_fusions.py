"""What Inductor fuses where it has to stay within some bytes, seen by the code that it writes for CUDA."""

import contextlib
import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from memrewrite.backends.observed import Seen, seen
from memrewrite.torch_internals.compiled_code import beside, compiled_codes
from memrewrite.torch_internals.fake_tensors import FakeTensorMode
from memrewrite.torch_internals.fusions import Room, fused_within
from tests.support.cuda_code import held_by_cuda_code

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
