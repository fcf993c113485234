"""Several graphs of one model: earlier ones leave room for what later ones keep."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memrewrite
from memrewrite.backends import entry
from memrewrite.backends.partition import Partition
from tests.backends.test_partition import Block


class Three(nn.Module):
    """Three graphs of three blocks each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Sequential(*(Block(32) for _ in range(3))) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        x = self.second(x)
        torch._dynamo.graph_break()
        result: Tensor = self.third(x)
        return result.square().mean()


def trained(model: Three, x: Tensor, budget: str | int) -> tuple[Tensor, Any]:
    """The loss of a step, and the report."""
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=entry.memrewrite, options={"optimizer": "none", "budget": budget})
    loss: Tensor = compiled(x)
    loss.backward()
    model.zero_grad()
    return loss.detach(), memrewrite.report_of(compiled)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo's own, where it resumes
def test_the_step_stays_within_the_budget(partitions: list[Partition]) -> None:
    """No graph is left without room by those before it."""
    torch.manual_seed(0)
    model, x = Three(), torch.randn(4, 64, 32)
    expected, report = trained(model, x, "100%")
    usual = report.peak
    assert len(report.graphs) == 3
    assert [each.lives.later for each in partitions] == [2.0, 1.0, 0.0]
    for share in (0.8, 0.6):
        loss, report = trained(model, x, int(share * usual))
        assert torch.equal(loss, expected)
        assert report.peak <= share * usual
