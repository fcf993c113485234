"""``memrewrite.measure`` and ``memrewrite.verify``, and how ``memrewrite`` presents itself."""

import inspect
import pydoc
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memrewrite
from memrewrite.records import errors
from memrewrite.records.errors import MemrewriteError, UsageError
from memrewrite.simulate import simulate
from memrewrite.workload.step import PHASES, Inputs, Step


class ApiNet(nn.Module):
    def __init__(self, wrong: float = 1.0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 32), nn.Linear(32, 4)
        self.wrong = wrong

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        hidden = self.first(x)
        return self.second(hidden * torch.sigmoid(hidden)) * scale * self.wrong


@pytest.fixture
def model() -> ApiNet:
    torch.manual_seed(0)
    return ApiNet()


X = torch.randn(64, 8)


def squared(output: Tensor) -> Tensor:
    return output.square().sum()


def test_measure_takes_what_optimize_takes(model: ApiNet) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    measured = memrewrite.measure(
        model, X, example_kwargs={"scale": 2.0}, optimizer="sgd-momentum", loss_fn=squared, amp="bf16", steps=1
    )
    step = Step("train", lambda p: torch.optim.SGD(p, momentum=0.9), squared, torch.bfloat16)
    simulated = simulate(model, Inputs((X,), {"scale": 2.0}), step)
    assert isinstance(measured, memrewrite.Measured)
    assert (measured.peak, measured.phases) == (simulated.peak, simulated.phases)
    assert [phase for phase, _ in measured.phases] == [*PHASES, *PHASES]
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_inputs_that_all_have_names_need_no_others(model: ApiNet) -> None:
    given: dict[str, Any] = {"example_kwargs": {"x": X, "scale": 2.0}, "optimizer": "sgd"}
    result = memrewrite.optimize(model, budget="min", **given)
    assert memrewrite.measure(result, **given).peak == result.report.predicted_after.peak
    assert memrewrite.estimate(model, **given).peak.bytes == memrewrite.measure(model, **given).peak
    assert memrewrite.verify(model, result, **given).equivalent
    with pytest.raises(errors.CaptureError, match="missing 1 required positional argument: 'x'; give inputs that the "):
        memrewrite.optimize(model)


def test_measure_takes_a_rewritten_model(model: ApiNet) -> None:
    optimized = memrewrite.optimize(model, X, optimizer="sgd", verify=False)
    sizes = [memrewrite.measure(each, (X,), optimizer="sgd", steps=1).peak for each in (model, optimized)]
    assert sizes[1] < sizes[0]


@pytest.mark.parametrize("exact", [False, True])
def test_verify_compares_any_two_modules(model: ApiNet, exact: bool) -> None:
    same, other = ApiNet(), ApiNet(wrong=1.001)
    same.load_state_dict(model.state_dict())
    other.load_state_dict(model.state_dict())
    verdict = memrewrite.verify(model, same, X, exact=exact, steps=2)
    assert isinstance(verdict, memrewrite.Verdict)
    assert (verdict.equivalent, verdict.exact) == (True, True)
    assert {"output", "loss", "gradient", "random state"} <= {check.group for check in verdict.checks}
    verdict = memrewrite.verify(model, other, X, exact=exact, steps=1)
    assert not verdict.equivalent
    assert re.fullmatch(r"not equivalent: .*, error .* values differ\)", verdict.summary)


def test_verify_proves_what_optimize_returned(model: ApiNet) -> None:
    optimized = memrewrite.optimize(model, X, optimizer="sgd", verify=False)
    verdict = memrewrite.verify(model, optimized, X, optimizer="sgd")
    assert (verdict.equivalent, verdict.exact) == (True, False)  # silu in place of the composite


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda net: memrewrite.measure(net, X, mode="inference"), "The model is in train mode; call model.eval"),
        (lambda net: memrewrite.measure(net, X, optimizer="adamx"), "Optimizer 'adamx' is unknown"),
        (lambda net: memrewrite.verify(net, ApiNet().eval(), X), "One model is in train mode and the other is not"),
        (lambda net: memrewrite.verify(net, net, X, steps=0), "Cannot verify over 0 steps"),
    ],
    ids=["mode", "optimizer", "modes-differ", "steps"],
)
def test_what_cannot_be_meant(model: ApiNet, call: Any, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        call(model)


def test_the_functions_share_their_keywords() -> None:
    known = inspect.signature(memrewrite.optimize).parameters
    for function in (memrewrite.measure, memrewrite.verify):
        parameters = inspect.signature(function).parameters
        shared = {"example_inputs", "example_kwargs", "optimizer", "loss_fn", "amp", "mode"}
        assert shared <= parameters.keys() & known.keys()
        for name in parameters.keys() & known.keys():
            assert (parameters[name].annotation, parameters[name].default) == (
                known[name].annotation,
                known[name].default,
            )


def test_all_errors_are_of_one_family_with_a_code_of_their_own() -> None:
    found = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if kind.__module__ == errors.__name__]
    assert [kind for kind in found if not issubclass(kind, MemrewriteError)] == []
    codes = [kind.exit_code for kind in MemrewriteError.__subclasses__() if kind.__module__ == errors.__name__]
    assert len(codes) == len(set(codes)) > 5


def test_help_reads_as_an_introduction() -> None:
    text = pydoc.plain(pydoc.render_doc(memrewrite))
    for word in ('memrewrite.optimize(model, example_inputs, budget="8GB"', "memrewrite.measure(", "optimized.report"):
        assert word in text[:2000]
    assert set(memrewrite.__all__) <= set(dir(memrewrite))
