"""Mixtures of experts: grouped matrix products, whose shape rule takes bfloat16 alone and whose kernels no float64."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memrewrite
from memrewrite.equivalence.reference import Replay
from memrewrite.simulate import run_tracked, simulate
from memrewrite.torch_internals.fake_tensors import FakeTensorMode, real_rules_on_fake_tensors
from memrewrite.workload.step import Inputs, Step

ENDS = torch.tensor([2, 2, 7, 8], dtype=torch.int32)


class Experts(nn.Module):
    """Every layer sends a quarter of the rows through each of four experts, with a gate that is rewritten."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 64, 64) / 8)
        self.head = nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.arange(1, 5, dtype=torch.int32) * (x.shape[0] // 4)
        for _ in range(8):
            hidden = functional.grouped_mm(x, self.weight, offs=ends)
            x = hidden * torch.sigmoid(hidden)
        return self.head(x)


def test_experts_are_rewritten_proved_and_within_the_budget() -> None:
    torch.manual_seed(0)
    model, inputs = Experts(), Inputs((torch.randn(256, 64),), {})
    step = Step(optimizer=torch.optim.AdamW)
    before = simulate(model, inputs, step)
    budget = int(before.floor + 0.6 * (before.peak - before.floor))
    result = memrewrite.optimize(model, inputs.args, budget=budget)
    assert result.report.equivalent
    assert result.report.predicted_after.peak <= budget
    assert run_tracked(result, inputs, step).peak == result.report.predicted_after.peak


def test_fake_tensors_of_others_follow_pytorchs_own_rule() -> None:
    def own() -> str:
        try:
            return str(functional.grouped_mm(torch.ones(8, 32), torch.ones(4, 32, 16), offs=ends).shape)
        except RuntimeError as error:  # of float32, before PyTorch 2.15
            return str(error).splitlines()[0]

    with FakeTensorMode():
        a, b, ends = torch.ones(8, 16), torch.ones(4, 16, 16), torch.ones(4, dtype=torch.int32)
        before = own()
        with real_rules_on_fake_tensors():
            assert functional.grouped_mm(a, b, offs=ends).shape == (8, 16)
        assert own() == before


SHAPES = {
    "rows": ((8, 4), (4, 4, 12)),
    "columns": ((4, 12, 4), (4, 8)),
    "both": ((4, 8), (8, 4)),
    "none": ((4, 8, 4), (4, 4, 4)),
}


@pytest.mark.parametrize(("left", "right"), SHAPES.values(), ids=SHAPES)
def test_the_reference_computes_them_in_float64(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    a, b = torch.randn(left), torch.randn(right)
    ends = None if len(left) == len(right) == 3 else ENDS
    with Replay([]):
        wide = functional.grouped_mm(a.double(), b.double(), offs=ends)
    assert wide.dtype == torch.float64
    torch.testing.assert_close(wide.float(), functional.grouped_mm(a, b, offs=ends))


class Router(nn.Module):
    """Switch Transformers: forward converts a layer to the type it has, which on fake parameters is a swap."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.linear = self.linear.to(x.dtype)
        return self.linear(torch.tanh(x * 2))


def test_a_layer_converted_in_forward_to_the_type_it_has_is_left_alone() -> None:
    model = Router()
    result = memrewrite.optimize(model, torch.randn(256, 64), budget="100%")
    assert result(torch.ones(2, 64)).equal(model(torch.ones(2, 64)))
