"""Attributes that forward sets from sizes: a program sets them, too, as other methods read them after the call."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memrewrite
from memrewrite.capture import capture
from memrewrite.records.errors import CaptureError
from memrewrite.workload.step import Inputs

WIDTH = 32


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid(), nn.Linear(WIDTH, WIDTH))
        self.size: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.size = tuple(x.shape)
        result: Tensor = self.layers(x)
        return result


class Net(nn.Module):
    """Sets attributes, those of a submodule among them."""

    def __init__(self, sets: Callable[[Any, Tensor], None], last: Callable[[Tensor], Tensor] = torch.sigmoid) -> None:
        super().__init__()
        self.inner, self.sets, self.last = Inner(), sets, last
        self.found: dict[str, Any] = {}
        self.first: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.sets(self, x)
        return self.last(self.inner(x))


def several(self: Any, x: Tensor) -> None:
    self.shape, self.middle, self.many, self.kind = x.shape, [(x.shape[0] + 1) // 2], x.shape[0] * 2 > 6, "rows"


def an_item(self: Any, x: Tensor) -> None:
    self.found["rows"] = x.shape[0]


def the_first_one(self: Any, x: Tensor) -> None:
    rows = x.shape[0]
    if self.first is None:
        self.first = rows


def fixed(x: Tensor) -> Tensor:
    result: Tensor = checkpoint(torch.sigmoid, x, use_reentrant=True)  # which Dynamo captures
    return result


def attributes(model: nn.Module) -> list[Any]:
    return [getattr(model, name, None) for name in ("shape", "middle", "many", "kind")] + [model.inner.size]


@pytest.mark.parametrize(
    "way", [lambda model: model, copy.deepcopy, lambda model: torch.compile(model, backend="eager")]
)
def test_they_are_those_of_each_call(way: Callable[[Any], Any]) -> None:
    plain, x = Net(several), torch.randn(8, WIDTH)
    planned = way(memrewrite.optimize(copy.deepcopy(plain), x, budget="min"))
    for rows in (8, 3, 5):
        assert torch.equal(plain(x[:rows]), planned(x[:rows]))
        assert attributes(plain) == attributes(planned)
        assert type(planned.middle[0]) is int


def test_they_are_set_where_no_size_varies() -> None:
    plain, x = Net(several, fixed), torch.randn(8, WIDTH)
    planned = memrewrite.optimize(copy.deepcopy(plain), x, budget="min")
    assert torch.equal(plain(x), planned(x))
    assert attributes(plain) == attributes(planned)


def test_the_report_tells_of_those_that_are_not() -> None:
    told = memrewrite.report_of(memrewrite.optimize(Net(an_item), torch.randn(8, WIDTH), budget="min")).notes
    assert told == ("Net sets self.found.rows from sizes in forward, which the program does not; return that instead.",)


def test_what_the_first_call_decides_for_all_is_refused_before_it() -> None:
    x = torch.randn(8, WIDTH)
    with pytest.raises(CaptureError, match=r"Net sets self.first from sizes .* call the model first"):
        capture(Net(the_first_one), Inputs((x,), {}))
    plain = Net(the_first_one)
    planned = memrewrite.optimize(copy.deepcopy(plain), x, budget="min")  # in parts
    for rows in (3, 8):
        assert torch.equal(plain(x[:rows]), planned(x[:rows]))
        assert [plain.first, planned.first] == [3, 3]
    assert memrewrite.optimize(plain, x, budget="min").first == 3
