"""What operators take is measured once they are set up."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from memrewrite.targets import transients


class Recorded:
    """A history in which nothing was asked for."""

    def course(self, first: int, last: int) -> tuple[int, ...]:
        return ()


def test_what_ran_before_is_set_up_unless_a_library_plans_each_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    times: list[int] = []

    def run(*call: Any) -> tuple[int, int, int]:
        times.append(call[-1])
        return 0, 0, 0

    monkeypatch.setattr(transients, "recorded_allocations", lambda device: nullcontext(Recorded()))
    monkeypatch.setattr(transients, "_run", run)
    aten = torch.ops.aten
    asked = [aten.mm.default, aten.relu.default, aten.convolution.default, aten.mm.default, aten.convolution.default]
    found = transients._measured(torch.device("cuda"), [(func, (), {}) for func in asked])
    assert times == [2, 2, 2, 1, 2]
    assert [each.spare for each in found] == [False, False, True, False, True]
