"""Compiled functions of tensors, called without Dynamo where it has seen such a call."""

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from memrewrite.runtime import kernels
from memrewrite.runtime.kernels import Function, Given, Kernel
from tests.support.compiled import counted_inductor


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounterWithBackend]:
    with torch.no_grad():  # as in a Function
        yield counted_inductor(monkeypatch)


def scaled(given: Given) -> list[Tensor]:
    first, second = given[0], given[1]
    return [first * second.sum(-1, keepdim=True) / first.shape[0], first + second]


def pair(rows: int) -> list[Tensor]:
    return [torch.randn(rows, 3), torch.randn(rows, 3)]


def without_dynamo(kernel: Kernel, given: Given) -> list[Tensor]:
    """What the kernel gives though nothing may look for compiled code."""
    with mock.patch.object(kernel, "_compiled", side_effect=AssertionError("Dynamo was asked")):
        return kernel(given)


@pytest.mark.usefixtures("counter")
def test_a_call_that_was_seen_needs_no_dynamo() -> None:
    kernel = Kernel(scaled, "scaled")
    for rows in (4, 5, 6):  # the third is of code for any number of rows
        kernel(pair(rows))
    for rows in (5, 6, 4):
        given = pair(rows)
        for mine, plain in zip(without_dynamo(kernel, given), kernel.plain(given), strict=True):
            assert torch.equal(mine, plain)
    assert not kernel._calls.made  # nor is a tensor kept


def test_code_serves_every_length_once_two_were_seen(counter: CompileCounterWithBackend) -> None:
    kernel = Kernel(scaled, "scaled")
    for rows in range(4, 12):
        kernel(pair(rows))
    assert counter.frame_count == 2


@pytest.mark.usefixtures("counter")
@pytest.mark.parametrize(
    "changed",
    [
        lambda pair: [pair[0].double(), pair[1]],
        lambda pair: [pair[0].t().contiguous().t(), pair[1]],
        lambda pair: [pair[0][:1], pair[1]],
        lambda pair: [pair[0][:, :1].expand(4, 3), pair[1]],
    ],
    ids=["type", "strides", "rows", "expanded"],
)
def test_another_look_is_looked_at(changed: Callable[[list[Tensor]], list[Tensor]]) -> None:
    kernel, given = Kernel(scaled, "scaled"), pair(4)
    kernel(given)
    other = changed(given)
    with pytest.raises(AssertionError, match="Dynamo was asked"):
        without_dynamo(kernel, other)
    for mine, plain in zip(kernel(other), kernel.plain(other), strict=True):
        assert torch.equal(mine, plain)


@pytest.mark.usefixtures("counter")
@pytest.mark.parametrize(
    "setting", [torch.inference_mode, torch.enable_grad, lambda: torch.autocast("cpu", torch.bfloat16)]
)
def test_other_settings_are_looked_at(setting: Any) -> None:
    kernel, given = Kernel(scaled, "scaled"), pair(4)
    kernel(given)
    with setting(), pytest.raises(AssertionError, match="Dynamo was asked"):
        without_dynamo(kernel, given)


@pytest.mark.usefixtures("counter")
@pytest.mark.parametrize(
    "function",
    [
        lambda given: [given[0].view(-1), given[0] + 1],
        lambda given: [given[0], given[1] * 2],
        lambda given: [given[0] * 2, *[given[1] - 1] * 2],
    ],
    ids=["view", "given", "twice"],
)
def test_results_that_are_views_or_given_stay_so(function: Function) -> None:
    kernel = Kernel(function, "function")
    for _ in range(2):
        given = pair(4)
        mine, plain = kernel(given), kernel.plain(given)
        assert [t.data_ptr() == given[0].data_ptr() for t in mine] == [
            t.data_ptr() == given[0].data_ptr() for t in plain
        ]
        assert all(map(torch.equal, mine, plain))


@pytest.mark.usefixtures("counter")
def test_what_is_missing_is_handed_on() -> None:
    kernel = Kernel(lambda given: [given[0] * 2 if given[1] is None else given[0] + given[1]], "maybe")
    first, second = pair(4)
    for _ in range(2):
        assert torch.equal(kernel([first, None])[0], first * 2)
        assert torch.equal(kernel([first, second])[0], first + second)


@pytest.mark.usefixtures("counter")
def test_parameters_are_tensors_like_others() -> None:
    kernel, given = Kernel(scaled, "scaled"), pair(4)
    kernel(given)
    parameters = [torch.nn.Parameter(t) for t in given]
    for found in (without_dynamo(kernel, parameters), *[kernel(parameters) for _ in range(2)]):
        assert all(map(torch.equal, found, kernel.plain(given)))
    with torch.enable_grad():
        assert not any(t.requires_grad for t in kernel(parameters))


@pytest.mark.usefixtures("counter")
def test_inductor_is_to_compute_again_rather_than_store(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, int]] = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append({name: getattr(torch._inductor.config, name) for name in kernels._SETTINGS})
        return graph.forward

    monkeypatch.setattr(kernels, "Code", backend)
    Kernel(scaled, "scaled")(pair(4))
    assert seen == [kernels._SETTINGS]
    assert all(getattr(torch._inductor.config, name) != value for name, value in kernels._SETTINGS.items())
