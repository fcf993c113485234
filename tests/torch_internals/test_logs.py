"""Front ends are quiet while they are asked, and heard again afterwards."""

import logging

import pytest
import torch
from torch import Tensor, nn

from memrewrite.capture import exported
from memrewrite.torch_internals.logs import quiet
from memrewrite.workload.step import Inputs


@pytest.mark.parametrize("name", ["torch.export", "torch._export.non_strict_utils", "torch._dynamo.utils"])
def test_nothing_is_logged_meanwhile(name: str) -> None:
    logger = logging.getLogger(name)
    with quiet():
        assert not logger.isEnabledFor(logging.WARNING)
    assert logger.isEnabledFor(logging.WARNING)


class Asking(nn.Module):
    """Asks a tensor that it is given for a number."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x[0, 0].item() > 0 else x


def test_a_graph_that_export_gives_up_is_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Exception, match="data-dependent"):
        exported.capture(Asking(), Inputs((torch.randn(4, 4),), {}))
    assert capsys.readouterr() == ("", "")
