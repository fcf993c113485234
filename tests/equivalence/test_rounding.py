"""What is rounding alone is judged by more than one run of the original, and what is wrong stays wrong."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memrewrite.equivalence import judging
from memrewrite.equivalence.compare import Comparison
from memrewrite.equivalence.verdict import Verdict, concluded
from memrewrite.equivalence.verifying import verify
from memrewrite.workload.step import Inputs, Step
from tests.support.verification import rewrite

STEP = Step(loss_fn=lambda output: (output**2).sum())


class Narrow(nn.Module):
    """Convolutions of two channels with biases before batch normalization: gradients that are zero in mathematics."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 2, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2), nn.SiLU()) for _ in range(4)
        )
        self.head = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x) + self.gated(x)
        return self.head(x.mean((2, 3)))

    def gated(self, x: Tensor) -> Tensor:
        return x * x.sigmoid()


def verdicts(seeds: range, **methods: Any) -> list[Verdict]:
    found = []
    for seed in seeds:
        torch.manual_seed(seed)
        model = Narrow()
        inputs = Inputs((torch.randn(2, 3, 16, 16),), {})
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        found.append(verify(model, rewrite(model, **methods), inputs, STEP, exact=False))
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    return found


def test_what_is_rounding_alone_is_judged_by_several_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two values, the error of one run is no measure: by that alone, half of the seeds are refused."""
    seeds = range(20)
    found = verdicts(seeds, gated=lambda self, x: nn.functional.silu(x))
    assert all(verdict.equivalent and not verdict.exact for verdict in found), [verdict.summary for verdict in found]
    monkeypatch.setattr(judging, "ROUNDING_RUNS", 0)
    assert not all(verdict.equivalent for verdict in verdicts(seeds, gated=lambda self, x: nn.functional.silu(x)))


class Attending(nn.Module):
    """Attends to two tokens, which under autocast makes most gradients of the keys' bias zero to the last bit."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.keys, self.values, self.wide, self.head = (nn.Linear(16, 16) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        found = torch.softmax(self.queries(x) @ self.keys(x).mT / 4, -1) @ self.values(x)
        return self.head(self.gated(self.wide(found)))

    def gated(self, x: Tensor) -> Tensor:
        return x * x.sigmoid()


def attending(seed: int, **methods: Any) -> Verdict:
    torch.manual_seed(seed)
    model, step = Attending(), Step(loss_fn=lambda output: output.float()[:, -1].square().mean(), amp=torch.bfloat16)
    return verify(model, rewrite(model, **methods), Inputs((torch.randn(2, 2, 16),), {}), step, exact=False)


def test_what_is_zero_by_luck_is_judged_by_several_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = (39, 51, 56, 136)  # of which the original has all zeros
    found = [attending(seed, gated=lambda self, x: nn.functional.silu(x)) for seed in seeds]
    assert all(verdict.equivalent for verdict in found), [verdict.summary for verdict in found]
    monkeypatch.setattr(judging, "ROUNDING_RUNS", 0)
    assert not all(attending(seed, gated=lambda self, x: nn.functional.silu(x)).equivalent for seed in seeds)


@pytest.mark.parametrize(
    "gated",
    [
        lambda self, x: x.relu(),
        lambda self, x: Shifted.apply(nn.functional.silu(x), 0.3),  # type: ignore[no-untyped-call]
    ],
    ids=["another activation", "gradient"],
)
def test_what_is_wrong_under_autocast_is_refused_all_the_same(gated: Any) -> None:
    assert not any(attending(seed, gated=gated).equivalent for seed in range(5))


class Shifted(torch.autograd.Function):
    """Gives the gradient a mean that it does not have."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: float) -> Tensor:
        ctx.share = share
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient + ctx.share * gradient.abs().mean(), None


@pytest.mark.parametrize(
    "gated",
    [
        lambda self, x: x * (1.0001 * x).sigmoid(),
        lambda self, x: x.relu(),
        lambda self, x: Shifted.apply(nn.functional.silu(x), 1e-4),  # type: ignore[no-untyped-call]
    ],
    ids=["slope", "another activation", "gradient"],
)
def test_what_is_wrong_is_refused_all_the_same(gated: Any) -> None:
    assert not any(verdict.equivalent for verdict in verdicts(range(5), gated=gated))


def test_the_largest_error_of_the_original_counts_of_what_does_not_pass_by_its_own() -> None:
    bias, weight = ("gradient", "bias"), ("gradient", "weight")
    exact = {bias: torch.zeros(2, dtype=torch.float64), weight: torch.ones(1000, dtype=torch.float64)}

    def run(error: float, other: float = 1e-7) -> dict[Any, Any]:
        return {bias: torch.full((2,), error), weight: torch.full((1000,), 1 + other)}

    comparison = Comparison(half=False)
    comparison.add_step(run(1e-8), run(1e-6))
    comparison.add_reference(run(1e-8), run(1e-6), exact)
    assert not comparison.passed()
    comparison.add_rounding(run(1e-8), [run(4e-7, other=1e-2), run(6e-7), run(5e-7)], exact)
    found = {verdict.name: verdict for verdict in comparison.verdicts()}
    assert found["bias"].passed
    assert found["bias"].reference_error == pytest.approx(6e-7)
    assert "1.7 times the original's own with other last bits in its weights" in concluded(comparison, 1, None).summary
    assert found["weight"].reference_error < 1e-6
