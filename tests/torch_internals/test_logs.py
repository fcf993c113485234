"""Front ends are quiet while they are asked, and heard again afterwards."""

import logging

import pytest

from memrewrite.torch_internals.logs import quiet


@pytest.mark.parametrize("name", ["torch.export", "torch._export.non_strict_utils", "torch._dynamo.utils"])
def test_nothing_is_logged_meanwhile(name: str) -> None:
    logger = logging.getLogger(name)
    with quiet():
        assert not logger.isEnabledFor(logging.WARNING)
    assert logger.isEnabledFor(logging.WARNING)
