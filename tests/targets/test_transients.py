"""What operators take is measured once they are set up, where a step runs them, and no more often than need be."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from memrewrite.targets import transients
from memrewrite.targets.transients import Call, Taken, Transients, Unmeasured

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


def test_a_convolution_takes_what_it_does_of_a_larger_batch() -> None:
    measured: list[Call] = []

    def measure(calls: Sequence[Call]) -> list[Taken]:
        measured.extend(calls)
        return [Taken(call[1][0].shape[0]) for call in calls]

    def lookup(batch: int, func: Any = aten.convolution.default, size: int = 8) -> Taken:
        image, weight, made = torch.empty(batch, 3, size, size), torch.empty(4, 3, 3, 3), torch.empty(batch, 4, 6, 6)
        rest = [1, 1], [0, 0], [1, 1], False, [0, 0], 1
        given: dict[Any, tuple[Any, ...]] = {
            aten.convolution.default: (image, weight, None, *rest),
            aten.convolution_backward.default: (made, image, weight, None, *rest, [True, True, False]),
            aten.relu.default: (image,),
        }
        return table.lookup(func, given[func], {})

    table = Transients(measure)
    functions = aten.convolution.default, aten.convolution_backward.default, aten.relu.default
    for func in functions:
        lookup(8, func)
        lookup(6, func)
    table.probe()
    with table.smaller_batches():
        assert [lookup(batch).bytes for batch in (8, 7, 6, 5)] == [8, 8, 6, 6]
        assert lookup(5, functions[1]).bytes == 6
        unknown = lookup(9), lookup(5, size=10), lookup(5, functions[2])
        assert all(isinstance(each, Unmeasured) for each in unknown)
    assert isinstance(lookup(5), Unmeasured)
    del measured[:]
    table.probe()
    assert len(measured) == 4
    assert lookup(5).bytes == 5
