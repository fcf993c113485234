"""How many results there are may be decided by values that no input decides, where a plan knows them, too."""

import pytest
import torch
from torch import Tensor, nn

import memrewrite
from memrewrite.capture import capture
from memrewrite.records.errors import CaptureError
from memrewrite.workload.step import Inputs
from tests.support.steps import assert_right


class Crops(nn.Module):
    """Runs images of one size at a time, however many in a row have it; what is wanted of two has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 8, 3, padding=1))
        self.frozen = nn.Conv2d(3, 8, 1)

    def forward(self, crops: list[Tensor]) -> Tensor:
        with torch.no_grad():
            wanted = self.at_once(self.frozen, crops[:2])
        return self.at_once(self.backbone, crops).square().mean() - wanted.mean()

    def at_once(self, part: nn.Module, crops: list[Tensor]) -> Tensor:
        sizes = torch.tensor([x.shape[-1] for x in crops])
        parts, start = [], 0
        for end in torch.unique_consecutive(sizes, return_counts=True)[1].cumsum(0):
            parts.append(part(torch.cat(crops[start:end])).mean((2, 3)))
            start = end
        return torch.cat(parts)


class EverySecond(nn.Module):
    """Keeps every second of what a layer gives."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[:, torch.nonzero(torch.arange(8) % 2 == 0).flatten()].tanh()


class Chosen(EverySecond):
    """Keeps what a constant says."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[:, torch.tensor([True, False] * 4).nonzero().flatten()].tanh()


def crops(batch: int = 2) -> Inputs:
    sizes = (8, 8, 4, 4, 4)
    return Inputs(([torch.randn(batch, 3, size, size) for size in sizes],), {})


def test_crops_of_several_sizes_are_one_graph() -> None:
    optimized, _ = assert_right(Crops(), lambda k: crops(), leaves=(False,))
    report = memrewrite.report_of(optimized)
    assert report is not None
    assert report.config["regions"] == [""]
    assert "unique" not in capture(Crops(), crops()).graph_module.code


def test_what_numbers_alone_decide_is_known_to_the_plan_too() -> None:
    assert_right(EverySecond(), lambda k: Inputs((torch.randn(4, 8),), {}))


def test_what_a_constant_decides_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"Chosen lets the values of a constant decide how many .* test_sized.py:"):
        memrewrite.optimize(Chosen(), torch.randn(4, 8), budget="min")
