"""What compiled kernels write over: fewer bytes, and the same bits."""

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from memrewrite.backends.observed import Seen, seen
from memrewrite.torch_internals.compiled_code import compiled_codes
from memrewrite.torch_internals.written_over import written_over

ROWS, WIDTH, HIDDEN = 512, 16, 256
BUFFER = ROWS * HIDDEN * 4


class Gated(nn.Module):
    """An MLP whose backward makes three values of its width of three such values; ``mixed`` puts these together."""

    def __init__(self, mixed: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down, self.mixed = nn.Linear(HIDDEN, WIDTH, bias=False), mixed

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.mixed(self.gate(x), self.up(x))).square().sum()


def turned(gate: Tensor, up: Tensor) -> Tensor:
    """Where an element is read for another one, too."""
    first, second = gate.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1) * up + gate


def normed(gate: Tensor, up: Tensor) -> Tensor:
    """Where all of a row is read before any of it is written."""
    return gate * (gate * up).mean(dim=-1, keepdim=True) + up


SCALES = torch.rand(2 * 12, HIDDEN, generator=torch.Generator().manual_seed(0)).split(1)


def scaled(gate: Tensor, up: Tensor) -> Tensor:
    """So often that Inductor makes a value of its own of what is read so far, in the same kernel."""
    mixed = gate + up
    for scale in SCALES:
        mixed = mixed * scale
    return mixed


MIXED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "product": torch.mul,
    "relu": lambda gate, up: gate.relu() * up,
    "turned": turned,
    "normed": normed,
    "transposed": lambda gate, up: (gate.t() * up.t()).t().contiguous() * up,
    "scaled": scaled,
    "softmax": lambda gate, up: gate.softmax(dim=0) * up,
}


def taken(mixed: Callable[[Tensor, Tensor], Tensor], over: bool) -> tuple[int, list[Tensor]]:
    """The peak of backward in bytes, and the gradients."""
    torch.manual_seed(0)
    model, x = Gated(mixed), torch.randn(ROWS, WIDTH)
    torch._dynamo.reset()
    uncached = torch._functorch.config.patch(enable_autograd_cache=False)
    lean = torch._inductor.config.patch(fx_graph_cache=False, allow_buffer_reuse=False)
    with uncached, lean, compiled_codes() as codes:
        with written_over() if over else contextlib.nullcontext():
            loss = torch.compile(model)(x)
        loss.backward()
    found = seen(codes)
    assert isinstance(found, Seen)
    return found.backward, [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("name", MIXED)
def test_bits_are_the_same(name: str) -> None:
    before, usual = taken(MIXED[name], over=False)
    after, gradients = taken(MIXED[name], over=True)
    assert after <= before
    assert len(gradients) == 3
    assert all(map(torch.equal, gradients, usual))


def test_three_gradients_lie_in_what_they_are_made_of() -> None:
    """Of the product, which the relu makes anew, and of both of its factors: there is no fourth buffer."""
    assert taken(MIXED["relu"], over=True)[0] < 3.5 * BUFFER < taken(MIXED["relu"], over=False)[0]
