"""An activation is marked in place only where nothing reads what it writes over, and numbers stay bit for bit."""

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, fx, nn

from memrewrite.capture import capture
from memrewrite.observe.effects import observe
from memrewrite.passes import inplace_activation
from memrewrite.passes.functionalize import Functionalize
from memrewrite.passes.inplace_activation import InplaceActivation
from memrewrite.plan.marks import Marks, NodeMark
from memrewrite.rewriting.contract import Result
from memrewrite.workload.step import Inputs
from tests.passes.helpers import (
    FRONT_ENDS,
    WIDTH,
    Around,
    assert_same_bits,
    example,
    functional,
    numbers,
    targets,
)

Function = Callable[[Any, Tensor], Any]

MARKED: dict[str, tuple[Function, int]] = {
    "relu": (lambda m, x: F.relu(x), 1),
    "torch.relu": (lambda m, x: torch.relu(x), 1),
    "method": (lambda m, x: x.relu(), 1),
    "module": (lambda m, x: m.relu(x), 1),
    "leaky_relu": (lambda m, x: F.leaky_relu(x, 0.2), 1),
    "sigmoid": (lambda m, x: torch.sigmoid(x), 1),
    "tanh": (lambda m, x: x.tanh(), 1),
    "dropout": (lambda m, x: F.dropout(x, 0.5, True), 1),
    "after an addition": (lambda m, x: F.relu(x + 2 * x), 1),
    "last of two readers": (lambda m, x: x.add(1) + F.relu(x), 1),
    "chain through dropout": (lambda m, x: F.relu(F.dropout(x, 0.5, True)), 2),
    "chain through linear": (lambda m, x: F.relu(m.linear(F.relu(x))), 2),
}


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("name", MARKED)
def test_what_nobody_reads_is_written_over(name: str, front_end: str) -> None:
    function, count = MARKED[name]
    model, x = Around(function), example()
    graph_module, result = functional(model, x, InplaceActivation(), front_end)
    assert (len(result.applied), result.refused) == (count, ())
    assert_same_bits(numbers(graph_module, x, model), numbers(model, x, model))


def test_after_batch_norm_relu_is_in_place() -> None:
    model, x = (
        nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 2, 3)),
        torch.randn(2, 2, 7, 7),
    )
    graph_module, result = functional(model, x, InplaceActivation(), "export")
    assert [a.where.split()[0] for a in result.applied] == ["2"]
    assert "relu_.default" in targets(graph_module)
    before = copy.deepcopy(model.state_dict())
    ours = numbers(graph_module, x, model)
    model.load_state_dict(before)
    assert_same_bits(ours, numbers(model, x, model))


def test_inference_graphs_are_marked_too() -> None:
    model, x = Around(lambda m, x: F.relu(torch.sin(x).exp())), example()
    graph_module = capture(model, Inputs((x,), {})).graph_module
    result = InplaceActivation()(graph_module, observe(graph_module, [x], grad=False))
    assert len(result.applied) == 1
    with torch.no_grad():
        assert torch.equal(graph_module(x)[0], model(x))


def _residual(m: Any, x: Tensor) -> Tensor:
    return F.relu(x) + x


def _saved_by_another(m: Any, x: Tensor) -> Tensor:
    wave = torch.sin(x)
    return F.relu(x) + wave


def _view_read_later(m: Any, x: Tensor) -> Tensor:
    view = x.view(-1)
    return F.relu(x).sum() + view


def _keeps_its_result_now(m: Any, x: Tensor) -> Tensor:
    return F.leaky_relu(F.leaky_relu(x + 1, 0.2), 0.1)


REFUSED: dict[str, tuple[Function, str]] = {
    "residual": (_residual, "reads its input"),
    "model returns it": (lambda m, x: (F.relu(x), x), "The model returns its input"),
    "producer keeps its result": (lambda m, x: F.relu(x.exp()), "keeps its result for its gradient"),
    "another keeps it": (_saved_by_another, "for its gradient"),
    "view": (lambda m, x: F.relu(x.view(-1)), "is a view of"),
    "transposed": (lambda m, x: torch.tanh(x.t()), "is a view of"),
    "expanded": (lambda m, x: F.relu(x.mean(0, keepdim=True).expand(5, -1)), "is a view of"),
    "part": (lambda m, x: F.relu(x.chunk(2)[0]), "is a view of"),
    "view read later": (_view_read_later, "later"),
    "parameter": (lambda m, x: x * F.relu(m.betas), "lies in a parameter"),
    "buffer": (lambda m, x: x * F.relu(m.scale), "lies in a buffer"),
    "elu": (lambda m, x: F.elu(x), "rounds differently"),
    "negative slope": (lambda m, x: F.leaky_relu(x, -0.1), "negative slope"),
}


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("trap", REFUSED)
def test_traps_are_refused_with_a_sentence(trap: str, front_end: str) -> None:
    function, sentence = REFUSED[trap]
    model, x = Around(function), example()
    graph_module, result = functional(model, x, InplaceActivation(), front_end)
    assert not result.applied
    assert [sentence in refused.reason for refused in result.refused] == [True], result.refused
    assert_same_bits(numbers(graph_module, x, model), numbers(model, x, model))


class OnItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(F.relu(x))


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_the_callers_tensor_is_never_written(front_end: str) -> None:
    model, x = OnItsInput(), example()
    graph_module, result = functional(model, x, InplaceActivation(), front_end)
    assert [r.reason.partition("lies")[2] for r in result.refused] == [" in an input of the model."]
    before = x.clone()
    graph_module(x)
    assert torch.equal(x, before)


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_one_relu_object_at_a_safe_and_an_unsafe_place(front_end: str) -> None:
    model, x = Around(lambda m, x: m.linear(F.relu(m.relu(x.clone()) + x)) + _residual_through(m, x)), example()
    graph_module, result = functional(model, x, InplaceActivation(), front_end)
    assert (len(result.applied), len(result.refused)) == (2, 1)
    assert isinstance(model.relu, nn.ReLU)
    assert_same_bits(numbers(graph_module, x, model), numbers(model, x, model))


def _residual_through(m: Any, x: Tensor) -> Tensor:
    y = x * 2
    return torch.relu(y) + y


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_marking_one_activation_counts_for_the_next(front_end: str) -> None:
    model, x = Around(_keeps_its_result_now), example()
    graph_module, result = functional(model, x, InplaceActivation(), front_end)
    assert len(result.applied) == 1
    assert "keeps its result for its gradient" in result.refused[0].reason
    assert_same_bits(numbers(graph_module, x, model), numbers(model, x, model))


@pytest.mark.parametrize("activation", [F.hardtanh, F.relu6], ids=lambda f: f.__name__)
def test_clipping_is_marked_unless_autograd_would_copy_its_input(activation: Callable[[Tensor], Tensor]) -> None:
    model, x = Around(lambda m, x: activation(x)), example()
    graph_module, result = functional(model, x, InplaceActivation(), "export")
    assert all("autograd would copy" in refused.reason for refused in result.refused)
    assert len(result.applied) + len(result.refused) == 1
    assert_same_bits(numbers(graph_module, x, model), numbers(model, x, model))
    graph_module = capture(model, Inputs((x,), {})).graph_module
    assert InplaceActivation()(graph_module, observe(graph_module, [x], grad=False)).modified


@pytest.mark.parametrize("activation", [F.silu, F.gelu, F.mish, F.hardswish, F.softplus], ids=lambda f: f.__name__)
def test_what_would_be_copied_is_no_candidate(activation: Callable[[Tensor], Tensor]) -> None:
    model, x = Around(lambda m, x: activation(x)), example()
    _, result = functional(model, x, InplaceActivation(), "export")
    assert (result.applied, result.refused) == ((), ())


def _marked_with(segments: dict[str, int]) -> Result:
    model, x = Around(lambda m, x: F.relu(m.linear(F.relu(x + 1)) * 2)), example()
    graph_module = capture(model, Inputs((x,), {})).graph_module
    marks = Marks(tuple((name, NodeMark((number,))) for name, number in segments.items()))
    return InplaceActivation(marks)(graph_module, observe(graph_module, [x]))


@pytest.mark.parametrize(
    ("segments", "applied"),
    [
        ({}, 2),
        ({"add": 0, "relu": 0}, 2),
        ({"relu": 0}, 1),
        ({"add": 0}, 1),
        ({"add": 0, "relu": 1, "linear_1": 1, "mul": 1, "relu_1": 1}, 1),
        ({"add": 0, "relu": 0, "linear_1": 0, "mul": 0, "relu_1": 1}, 1),
    ],
    ids=["none", "within", "reader inside", "maker inside", "two segments", "last alone"],
)
def test_a_segment_is_never_written_into_from_outside(segments: dict[str, int], applied: int) -> None:
    result = _marked_with(segments)
    assert len(result.applied) == applied
    assert all("in another checkpoint segment" in refused.reason for refused in result.refused)
    assert len(result.applied) + len(result.refused) == 2


def test_a_segments_input_is_kept_for_its_second_run() -> None:
    model, x = Around(lambda m, x: _read_in_a_segment(x + 1)), example()
    graph_module = capture(model, Inputs((x,), {})).graph_module
    marks = Marks((("mul", NodeMark((0,))),))
    result = InplaceActivation(marks)(graph_module, observe(graph_module, [x]))
    assert [r.reason for r in result.refused] == [
        "Its input is also used by mul in another checkpoint segment, which may run again."
    ]


def _read_in_a_segment(y: Tensor) -> Tensor:
    scaled = y * 3
    return F.relu(y) + scaled


OPERATIONS: tuple[Callable[..., Tensor], ...] = (
    F.relu,
    F.leaky_relu,
    F.relu6,
    F.elu,
    F.silu,
    F.dropout,
    torch.sigmoid,
    torch.tanh,
    torch.sin,
    torch.relu_,
    torch.neg,
    torch.add,
    torch.mul,
    lambda x: x.view(x.shape),
    lambda x: x * 2,
    lambda x: x.t().contiguous().t(),
)


def _program(seed: int) -> Function:
    """A random straight-line program: each step reads one or two earlier values; several values are returned."""
    draw = random.Random(seed)  # noqa: S311
    steps = []
    for index in range(draw.randint(3, 9)):
        operation = draw.choice(OPERATIONS)
        width = 2 if operation in (torch.add, torch.mul) else 1
        steps.append((operation, [draw.randint(max(0, index - 2), index) for _ in range(width)]))
    returned = sorted({len(steps), draw.randint(1, len(steps))})

    def function(m: Any, x: Tensor) -> tuple[Tensor, ...]:
        values = [x]
        for operation, sources in steps:
            values.append(operation(*(values[source] for source in sources)))
        return tuple(values[position] for position in returned)

    return function


def _outcome(module: nn.Module, x: Tensor, owner: nn.Module) -> dict[str, Tensor] | None:
    try:
        return numbers(module, x, owner)
    except RuntimeError:  # an original that writes over what its gradient needs
        return None


@pytest.mark.parametrize("seed", range(60))
def test_random_programs_keep_every_bit(seed: int) -> None:
    model, x = Around(_program(seed)), example()
    original = _outcome(model, x, model)
    graph_module, _ = functional(model, x, InplaceActivation(), "export")
    if original is not None:
        assert_same_bits(numbers(graph_module, x, model), original)


def test_without_its_check_the_pass_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inplace_activation, "check", lambda *arguments: None)
    wrong = 0
    for function, _ in REFUSED.values():
        model, x = Around(function), example()
        before = {name: p.detach().clone() for name, p in model.state_dict().items()}
        original = numbers(model, x, model)
        graph_module: fx.GraphModule = capture(model, Inputs((x,), {})).graph_module
        for graph_pass in (Functionalize(), InplaceActivation()):
            graph_pass(graph_module, observe(graph_module, [x]))
        marked = _outcome(graph_module, x, model)
        wrong += marked is None or any(not torch.equal(marked[name], original[name]) for name in original)
        model.load_state_dict(before)
    assert wrong >= 8
