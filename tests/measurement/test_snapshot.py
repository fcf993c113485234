"""What runs change of a model is put back where it lies, sizes too; what has no memory is not asked for any."""

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import memrewrite
from memrewrite.measurement.measuring import preserved_state
from memrewrite.measurement.snapshot import State
from memrewrite.records.errors import CaptureError
from memrewrite.workload.step import Inputs

WIDTH = 32


class Observed(nn.Module):
    """Quantizes its weight as ``torch.ao`` does while it trains: the operator gives its statistics their sizes."""

    low: Tensor
    high: Tensor
    scale: Tensor
    zero: Tensor
    on: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        for name in ("low", "high"):
            self.register_buffer(name, torch.zeros(0))
        self.register_buffer("scale", torch.ones(WIDTH))
        self.register_buffer("zero", torch.zeros(WIDTH, dtype=torch.int32))
        self.register_buffer("on", torch.ones(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        statistics = self.low, self.high, self.scale, self.zero
        weight = torch.fused_moving_avg_obs_fake_quant(
            self.inner.weight, self.on, self.on, *statistics, 0.01, -128, 127, 0, True, True
        )
        return nn.functional.linear(x, weight, self.inner.bias)


def test_buffers_that_forward_gives_a_size_have_none_again() -> None:
    module, x = Observed(), torch.randn(4, WIDTH)
    for _ in range(2):
        with preserved_state(module, Inputs((x,), {})):
            module(x)
            assert module.low.shape == module.high.shape == (WIDTH,)
        assert module.low.shape == module.high.shape == (0,)


class Asked(Observed):
    """Stays a call, as it looks at a value."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.on[0] == 1 else x


@pytest.mark.parametrize("kind", [Observed, Asked])
def test_a_model_with_such_a_part_is_rewritten_and_can_still_run(kind: type[Observed]) -> None:
    x = torch.randn(64, WIDTH)
    model = nn.Sequential(nn.Linear(WIDTH, 8 * WIDTH), nn.GELU(), nn.Linear(8 * WIDTH, WIDTH), kind())
    report = memrewrite.optimize(model, x, budget="min", exact=True).report
    assert report.verdict.startswith("bit-equal")
    assert model[3].low.shape == (0,)
    model(x)


class Ensemble(nn.Module):
    """Several networks in one call, by one without memory that is no submodule."""

    base: nn.Linear

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, WIDTH, WIDTH))
        self.__dict__["base"] = nn.Linear(WIDTH, WIDTH, bias=False, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(lambda weight: functional_call(self.base, {"weight": weight}, x))(self.weight)


def test_parameters_without_memory_are_not_asked_where_they_lie() -> None:
    with pytest.raises(CaptureError, match=r"torch\.func transforms"):
        memrewrite.optimize(Ensemble(), torch.randn(4, WIDTH), budget="min")


class Momentum(nn.Module):
    """Has a slow copy of its weight, which forward replaces, and one that lies in the same memory."""

    row: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.quick, self.slow = nn.Linear(8 * WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, 8 * WIDTH).requires_grad_(False)
        self.register_buffer("row", self.slow.weight.detach()[0])

    def forward(self, x: Tensor) -> Tensor:
        self.slow.weight.data = 0.9 * self.slow.weight.data + 0.1 * self.quick.weight.data
        return self.quick(x) * self.slow(x)


def test_what_forward_replaces_counts_once_and_is_put_back() -> None:
    module, x = Momentum(), torch.randn(4, 8 * WIDTH)
    del module.row
    weight = module.slow.weight.detach().clone()
    peak = memrewrite.estimate(module, x, optimizer="sgd").peak.bytes
    assert memrewrite.measure(module, x, optimizer="sgd", steps=1).peak == peak
    assert torch.equal(module.slow.weight, weight)


@pytest.mark.parametrize("near", [False, True])
def test_of_what_inputs_are_parts_of_no_more_is_kept(near: bool) -> None:
    data, module = torch.zeros(1000, WIDTH), nn.Linear(WIDTH, WIDTH)
    x, y, own = data[10:20], data[15:30, ::2], module.weight.detach()[:2]
    state = State((module,), (), [x, y, own], near=near)
    kept = sum(each.saved.nbytes() for each in state._bytes.values())
    assert kept == (20 * WIDTH - 1) * 4 + module.weight.nbytes + (module.bias.nbytes if module.bias is not None else 0)
    before = module.weight.detach().clone()
    for tensor in (x, y, own, module.weight.detach()):
        tensor.fill_(1.0)
    data[0] = 2.0  # by somebody else
    state.restore()
    assert torch.equal(module.weight, before)
    assert torch.equal(data.sum(1), torch.tensor([2.0 * WIDTH] + [0.0] * 999))


def test_what_lies_in_the_same_memory_does_so_again() -> None:
    module, x = Momentum(), torch.randn(4, 8 * WIDTH)
    with preserved_state(module, Inputs((x,), {})):
        module(x)
        del module.row
        module.slow.weight.data = module.slow.weight.data.clone()
    assert module.slow.weight.data_ptr() == module.row.data_ptr()
    assert torch.equal(module.slow.weight[0], module.row)
