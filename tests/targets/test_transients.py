"""What operators take is measured once they are set up, where a step runs them, and no more often than need be."""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from memrewrite.records.tensor_like import TensorLike
from memrewrite.targets import transients
from memrewrite.targets.set_up import SettingUp
from memrewrite.targets.transients import NOTHING, Call, Taken, Transients, Unmeasured

aten = torch.ops.aten


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
    asked = [aten.mm.default, aten.relu.default, aten.convolution.default, aten.mm.default, aten.convolution.default]
    found = transients._measured(torch.device("cuda"), [(func, (), {}) for func in asked])
    assert times == [2, 2, 2, 1, 2]
    assert [each.spare for each in found] == [False, False, True, False, True]


def test_operators_of_backward_run_where_autograd_runs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, bool]] = []
    within = [False]

    def in_backward(device: torch.device, run: Callable[[], Any]) -> Any:
        within[0] = True
        found = run()
        within[0] = False
        return found

    def run(device: torch.device, history: Recorded, func: Any, *call: Any) -> tuple[int, int, int]:
        ran.append((func.__name__, within[0]))
        return 0, 0, 0

    monkeypatch.setattr(transients, "recorded_allocations", lambda device: nullcontext(Recorded()))
    monkeypatch.setattr(transients, "_run", run)
    monkeypatch.setattr(transients, "_in_backward", in_backward)
    asked = [aten.convolution_backward.default, aten.convolution.default]
    transients._measured(torch.device("cuda"), [(func, (), {}) for func in asked])
    assert ran == [("convolution_backward.default", True), ("convolution.default", False)]


@pytest.mark.parametrize("how", [nullcontext, torch.no_grad, torch.inference_mode])
def test_what_runs_in_backward_gives_what_it_finds(how: Callable[[], Any]) -> None:
    def run() -> tuple[bool, bool]:
        return torch._C._current_autograd_node() is not None, torch.is_grad_enabled()

    with how():
        assert transients._in_backward(torch.device("cpu"), run) == (True, False)


def test_what_is_reserved_for_operators_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def run(device: torch.device, history: Recorded, func: Any, *call: Any) -> tuple[int, int, int]:
        ran.append(func.__name__)
        return 0, 0, 0

    monkeypatch.setattr(transients, "recorded_allocations", lambda device: nullcontext(Recorded()))
    monkeypatch.setattr(transients, "_run", run)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: ran.append("empty_cache"))
    transients._measured(torch.device("cuda"), [(func, (), {}) for func in (aten.mm.default, aten.relu.default)])
    assert ran == ["mm.default", "relu.default", "empty_cache"]


def given(batch: int, size: int = 8) -> dict[Any, tuple[Any, ...]]:
    image, made, weight = torch.empty(batch, 3, size, size), torch.empty(batch, 4, 6, 6), torch.empty(4, 3, 3, 3)
    rest = [1, 1], [0, 0], [1, 1], False, [0, 0], 1
    heads = torch.empty(batch, 2, size, 16)
    return {
        aten.convolution.default: (image, weight, None, *rest),
        aten.convolution_backward.default: (made, image, weight, None, *rest, [True, True, False]),
        aten._scaled_dot_product_flash_attention.default: (heads, heads, heads),
        torch.ops.memrewrite.chain.default: ("norm", [heads, weight[0, 0]]),
        aten.relu.default: (image,),
    }


PLANNED = [func for func in given(8) if func is not aten.relu.default]


@pytest.mark.parametrize("func", PLANNED, ids=str)
def test_what_is_planned_for_each_batch_takes_what_it_does_of_a_larger_one(func: Any) -> None:
    measured: list[Call] = []

    def measure(calls: Sequence[Call]) -> list[Taken]:
        measured.extend(calls)
        return [Taken(batch_of(call)) for call in calls]

    def lookup(batch: int, func: Any = func, size: int = 8) -> Taken:
        return table.lookup(func, given(batch, size)[func], {})

    table = Transients(measure)
    for each in (func, aten.relu.default):
        lookup(8, each)
        lookup(6, each)
    table.probe()
    with table.smaller_batches():
        assert [lookup(batch).bytes for batch in (8, 7, 6, 5)] == [8, 8, 6, 6]
        unknown = lookup(9), lookup(5, size=10), lookup(5, aten.relu.default)
        assert all(isinstance(each, Unmeasured) for each in unknown)
    assert isinstance(lookup(5), Unmeasured)
    del measured[:]
    table.probe()
    assert len(measured) == 4
    assert lookup(5).bytes == 5


def test_views_are_not_measured() -> None:
    measured: list[Call] = []

    def measure(calls: Sequence[Call]) -> list[Taken]:
        measured.extend(calls)
        return [Taken(512)] * len(calls)

    table, x = Transients(measure), torch.empty(4, 8)
    for func, *args in (
        (aten.slice.Tensor, 0, 0, 2),
        (aten.t.default,),
        (aten.split.Tensor, 2),
        (aten.detach.default,),
    ):
        assert table.lookup(func, (x, *args), {}) is NOTHING
    table.lookup(aten.relu_.default, (x,), {})
    table.probe()
    assert [func for func, *_ in measured] == [aten.relu_.default]


def test_a_convolution_is_another_where_its_weight_is() -> None:
    table = Transients(lambda calls: [Taken(512, (1024, 512, -2))] * len(calls))
    image, weight, *rest = given(8)[aten.convolution.default]
    table.lookup(aten.convolution.default, (image, weight, *rest), {})
    table.probe()
    with table.smaller_batches():
        assert table.lookup(aten.convolution.default, (image[:4], weight, *rest), {}) == Taken(512)
        other = table.lookup(aten.convolution.default, (image[:4], weight[:2], *rest), {})
        assert isinstance(other, Unmeasured)


def batch_of(call: Call) -> int:
    return next(each.shape[0] for each in transients._leaves(call[1]) if isinstance(each, TensorLike))


def test_what_sets_libraries_up_runs_once_in_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, bool]] = []

    def once(func: Any, *call: Any) -> None:
        ran.append((func.__name__, threading.current_thread() is threading.main_thread()))

    monkeypatch.setattr(transients, "_once", once)
    monkeypatch.setattr(transients, "_in_backward", lambda device, run: run())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: ran.append(("empty_cache", True)))
    asked = [aten.mm.default, aten.convolution.default, aten.convolution_backward.default, aten.convolution.default]
    with transients._setting_up(torch.device("cuda"), [(func, (), {}) for func in asked]) as begun:
        for thread in begun._threads:
            thread.join()
    *others, last = ran
    names = "convolution.default", "convolution.default", "convolution_backward.default"
    assert sorted(others) == [(name, False) for name in names]
    assert last == ("empty_cache", True)


def test_nothing_more_begins_once_it_is_waited_for() -> None:
    ran, there = list[int](), threading.Event()

    def first() -> None:
        there.wait()
        while not setting_up._waited_for:
            time.sleep(0.001)
        ran.append(1)
        raise RuntimeError("which whoever measures it is told")

    setting_up = SettingUp([first, lambda: ran.append(2)], [])
    there.set()
    setting_up.wait()
    assert ran == [1]
