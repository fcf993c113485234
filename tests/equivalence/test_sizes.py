"""A result whose inputs may be smaller is verified with smaller ones, too."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memrewrite
from memrewrite.equivalence import judging, kernels, verifying
from memrewrite.equivalence.case import Case
from memrewrite.equivalence.reference import double_step
from memrewrite.equivalence.sizes import smaller_inputs
from memrewrite.equivalence.verdict import Verdict
from memrewrite.runtime import fused
from memrewrite.runtime.dropin import programs
from memrewrite.runtime.kernels import Given, Kernel
from memrewrite.workload.step import Inputs, Step
from tests.capture.test_lengths import Text, text
from tests.passes.helpers import WIDTH
from tests.passes.test_fused_chains import Gated

ALSO = ", also at smaller sizes"


def shapes(optimized: nn.Module, inputs: Inputs) -> list[list[list[tuple[int, ...]]]]:
    return [[[tuple(t.shape) for t in each.tensors()] for each in kind] for kind in smaller_inputs(optimized, inputs)]


def test_the_smallest_and_one_in_between_are_compared() -> None:
    ids, mask = text(8, 16)
    optimized = memrewrite.optimize(Text(), (ids, mask), budget="min")
    assert optimized.report.verdict.endswith(ALSO)
    assert shapes(optimized, Inputs((ids, mask), {})) == [
        [[(2, 2), (2, 2)], [(3, 3), (3, 3)], [(2, 4), (2, 4)]],
        [[(4, 8), (4, 8)], [(6, 12), (6, 12)]],
    ]
    assert smaller_inputs(Text(), Inputs((ids, mask), {})) == []


@pytest.mark.parametrize(("wrong", "length"), [(3, 3), (4, 8)])
def test_what_is_wrong_at_a_smaller_size_alone_is_not_equivalent(
    wrong: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = text(8, 16)
    model = Text()
    optimized: Any = memrewrite.optimize(model, inputs, budget="min", verify=False)
    program = programs(optimized)[""]
    run = program.run
    off = {wrong: 2.0}
    monkeypatch.setattr(program, "run", lambda self, ids, mask: run(self, ids, mask) * off.get(ids.shape[0], 1.0))
    verdict = memrewrite.verify(model, optimized, inputs)
    assert not verdict.equivalent
    assert verdict.summary.endswith(f"; for inputs of ({wrong}, {length}), ({wrong}, {length})")


class Contrasted(nn.Module):
    """Compares as many texts as the example has, and does without a mask that masks nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.inner = nn.Embedding(16, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        texts, length = torch.arange(int(ids.shape[0])), torch.arange(ids.shape[1])
        x = torch.tanh(self.inner(self.words(ids).sigmoid()))
        if not isinstance(mask, torch._subclasses.FakeTensor) and bool(mask.all()):
            found = x.mean(1)
        else:
            seen = mask[texts[:, None], length[None]][..., None]
            found = (x * seen).sum(1) / seen.sum(1)
        return functional.cross_entropy(found @ found.T, texts)


def test_a_batch_that_one_input_fixes_is_not_cut_in_another() -> None:
    ids, mask = text(4, 12)
    model = Contrasted()
    optimized = memrewrite.optimize(model, (ids % 16, mask.bool()), budget="min", loss_fn=lambda loss: loss)
    assert shapes(optimized, Inputs((ids, mask), {})) == [
        [[(4, 2), (4, 2)], [(4, 3), (4, 3)], [(4, 3), (4, 3)]],
        [[(4, 6), (4, 6)], [(4, 9), (4, 9)]],
    ]
    assert optimized.report.verdict.endswith(ALSO)
    longer = memrewrite.optimize(
        model, (ids % 16, mask.bool()), loss_fn=lambda loss: loss, dynamic={"ids": {1: (4, 16)}}
    )
    assert longer.report.verdict.endswith(ALSO)


def test_sizes_for_which_forward_does_something_else_are_passed_over() -> None:
    inputs = text(8, 16)
    verdict = memrewrite.optimize(
        Text(multiple=4), inputs, budget="min"
    ).report.verdict  # a fourth of the length, and a half
    assert verdict.endswith(ALSO)


class Short(nn.Module):
    """Has no number where a mask is all zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden = self.linear(x).sigmoid() * 2
        scores = functional.softmax(hidden.masked_fill(mask == 0, -math.inf), -1)
        return (scores * hidden).tanh()


def test_what_is_no_number_in_both_is_the_same() -> None:
    mask = torch.ones(8, 4, dtype=torch.int64)
    mask[:4] = 0
    verdict = memrewrite.optimize(Short(), (torch.randn(8, 4), mask)).report.verdict
    assert verdict.endswith(ALSO)


ROWS = 64
RANGE = {"input": {0: (16, ROWS)}}


def compiled(asked: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[str, set[int]]:
    """The verdict on a plan for CUDA, and the sizes for which kernels of its chains would have been compiled there."""
    torch.manual_seed(0)
    model, x = nn.Sequential(Gated(), Gated()), torch.randn(ROWS, WIDTH)
    options: dict[str, Any] = {"device": "cuda", "optimizer": "sgd", "passes": "all", "dynamic": asked}
    result = memrewrite.optimize(model, x, budget="min", verify=False, **options)
    sizes = set()

    def call(self: Kernel, given: Given) -> list[Tensor]:
        sizes.add(max(len(tensor) for tensor in given if tensor is not None and tensor.dim() > 1))
        return self.plain(given)

    monkeypatch.setattr(fused, "_compiles", lambda tensor: True)
    monkeypatch.setattr(Kernel, "__call__", call)
    verdict = memrewrite.verify(model, result, x, optimizer="sgd")
    assert verdict.equivalent
    assert not verdict.exact
    return verdict.summary, sizes


def test_kernels_verified_at_full_size_are_not_compiled_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    summary, sizes = compiled(None, monkeypatch)
    assert summary.endswith(f"{ALSO} without compiled kernels")
    assert sizes == {ROWS}


def test_kernels_for_sizes_that_were_named_are_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    summary, sizes = compiled(RANGE, monkeypatch)
    assert summary.endswith(ALSO)
    assert sizes == {16, 40, ROWS}


def test_kernels_not_verified_at_full_size_are_at_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(model: nn.Module, inputs: Inputs, *args: Any) -> Any:
        if len(inputs.args[0]) == ROWS:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return double_step(model, inputs, *args)

    monkeypatch.setattr(judging, "double_step", short)
    summary, sizes = compiled(None, monkeypatch)
    assert summary.endswith(f"; verified at batch {ROWS // 2}, as {ROWS} does not fit in memory{ALSO}")
    assert sizes == {2, ROWS // 4, ROWS // 2, ROWS}  # at full size for the first step, which has no reference


def test_where_no_smaller_size_runs_nothing_is_said_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying, "smaller_inputs", lambda rewritten, inputs: [])
    summary, sizes = compiled(None, monkeypatch)
    assert "kernels" not in summary
    assert sizes == {ROWS}


def convolved(dynamic: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[str, list[tuple[int, bool]]]:
    """The verdict on a model of convolutions as where cuDNN plans them, and with which batches that was at work."""
    torch.manual_seed(0)
    layers = nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3), nn.ReLU()
    model, x, ran = nn.Sequential(*layers), torch.randn(8, 2, 8, 8), list[tuple[int, bool]]()
    result = memrewrite.optimize(model, x, budget="min", verify=False, dynamic=dynamic)
    attempt = verifying._attempt

    def noted(case: Case, *args: Any) -> Verdict:
        ran.append((len(case.inputs.args[0]), torch.backends.cudnn.enabled))
        return attempt(case, *args)

    monkeypatch.setattr(verifying, "_attempt", noted)
    monkeypatch.setattr(kernels, "_plans_convolutions", lambda case: True)
    summary = memrewrite.verify(model, result, x).summary
    assert torch.backends.cudnn.enabled
    return summary, ran


def test_convolutions_are_not_planned_for_other_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    summary, ran = convolved(None, monkeypatch)
    assert summary.endswith(f"{ALSO} without cuDNN")
    assert ran == [(8, True), (2, False), (4, False)]


def test_convolutions_are_planned_for_sizes_that_were_named(monkeypatch: pytest.MonkeyPatch) -> None:
    summary, ran = convolved({"input": {0: (2, 8)}}, monkeypatch)
    assert summary.endswith(ALSO)
    assert [on for _, on in ran] == [True] * 3


@pytest.mark.parametrize(
    ("device", "model", "expected"),
    [
        ("cuda", nn.Sequential(nn.Conv1d(1, 1, 1)), True),
        ("cuda", nn.Linear(1, 1), False),
        ("cuda", nn.ModuleList([nn.Conv1d(1, 1, 1), nn.GRU(1, 1)]), False),
        ("", nn.Conv1d(1, 1, 1), False),
    ],
)
def test_cudnn_plans_convolutions_on_cuda(
    device: str, model: nn.Module, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recurrent networks are left to it."""
    devices = tuple(map(torch.device, filter(None, [device])))
    case = Case(model, model, Inputs((), {}), Step(), 1, 0, devices)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    assert kernels._plans_convolutions(case) == expected
    with torch.backends.cudnn.flags(enabled=False):
        assert not kernels._plans_convolutions(case)
