"""A forward that asks how tensors lie in memory: the program is right for what lies as at capture only."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import memrewrite
from memrewrite.records.errors import CaptureError
from memrewrite.runtime.promise import FallbackWarning

SAID = "it asks how tensors lie in memory"
LAST = torch.channels_last


class Net(nn.Module):
    """Does something else with an image whose channels come last in memory."""

    def __init__(self, asks: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.asks, self.first, self.second = asks, nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.second(self.first(x).sigmoid()).sigmoid()
        return hidden * 2 if self.asks(hidden) else hidden


def by_format(x: Tensor) -> bool:
    return x.is_contiguous(memory_format=LAST)


def by_strides(x: Tensor) -> bool:
    return x.stride()[1] == 1


def by_order(x: Tensor) -> bool:
    return x.dim_order() == (0, 2, 3, 1)


def never(x: Tensor) -> bool:
    return False


def made(asks: Callable[[Tensor], bool]) -> tuple[Net, nn.Module, Tensor]:
    torch.manual_seed(0)
    model, x = Net(asks), torch.randn(4, 3, 12, 12)
    plain = copy.deepcopy(model)
    planned = memrewrite.optimize(model, x, budget="min")
    assert memrewrite.report_of(planned).changed
    return plain, planned, x


@pytest.mark.parametrize("asks", [by_format, by_strides, by_order])
def test_what_lies_otherwise_runs_the_original(asks: Callable[[Tensor], bool]) -> None:
    plain, planned, x = made(asks)
    for like in (x, x[:3], torch.randn(2, 3, 12, 12)):  # without a warning
        assert torch.equal(plain(like), planned(like))
    with pytest.warns(FallbackWarning, match=SAID):
        assert torch.equal(plain(x.to(memory_format=LAST)), planned(x.to(memory_format=LAST)))


def test_weights_that_lie_otherwise_run_the_original() -> None:
    plain, planned, x = made(by_format)
    for model in (plain, planned):
        model.to(memory_format=LAST)  # type: ignore[call-overload]
    with pytest.warns(FallbackWarning, match=SAID):
        assert torch.equal(plain(x), planned(x))


def test_where_nothing_asks_it_does_not_matter() -> None:
    plain, planned, x = made(never)
    for model in (plain, planned):
        model.to(memory_format=LAST)  # type: ignore[call-overload]
    assert torch.equal(plain(x.to(memory_format=LAST)), planned(x.to(memory_format=LAST)))


def test_compiled_calls_ask_too() -> None:
    plain, planned, x = made(by_format)
    compiled = torch.compile(planned, backend="eager")
    assert torch.equal(plain(x), compiled(x))
    with pytest.warns(FallbackWarning, match=SAID):
        assert torch.equal(plain(x.to(memory_format=LAST)), compiled(x.to(memory_format=LAST)))


def test_a_view_that_cannot_be_may_be_caught() -> None:
    class Caught(Net):
        def forward(self, x: Tensor) -> Tensor:
            hidden = super().forward(x).transpose(1, 3)
            try:
                return hidden.view(-1)
            except RuntimeError:
                return hidden.reshape(-1)

    model, x = Caught(never), torch.randn(4, 3, 12, 12)
    planned = memrewrite.optimize(copy.deepcopy(model), x, budget="min")
    assert memrewrite.report_of(planned).changed
    assert torch.equal(model(x), planned(x))  # without a warning


def test_where_a_tensor_begins_is_refused() -> None:
    model = Net(lambda x: x.storage_offset() > 0)
    with pytest.raises(CaptureError, match=r"asks where in its memory a tensor begins \(at test_layouts.py:\d+\)"):
        memrewrite.optimize(model, torch.randn(4, 3, 12, 12), budget="min")
