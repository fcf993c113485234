"""Whose fault it is that a first step fails, in one sentence: the model's, its loss function's or its optimizer's."""

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_upper_left

import memrewrite
from memrewrite.measurement.original import original_simulated, simulate_original
from memrewrite.records.errors import CaptureError, MemrewriteError, UsageError
from memrewrite.simulate.memory.tracker import OPERATOR_WORKSPACE
from memrewrite.targets.eager import Target
from memrewrite.targets.set_up import SettingUp
from memrewrite.targets.transients import Call as Operator
from memrewrite.targets.transients import Taken, Transients
from memrewrite.workload.step import Inputs, Step

Call = Callable[..., Any]
INPUTS = torch.zeros(8, 16, requires_grad=True)  # of the loop, which are none of a step's


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def rows(width: int = 16) -> Tensor:
    return torch.randn(8, width)


def misspelled(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, learning_rate=0.1)  # type: ignore[call-arg]


@pytest.fixture(params=[memrewrite.optimize, memrewrite.estimate], ids=["optimize", "estimate"])
def call(request: pytest.FixtureRequest) -> Call:
    return request.param


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"loss_fn": lambda output: output.logits.mean()},
            r"loss_fn fails on what Sequential gives with AttributeError: 'Tensor' object has no attribute 'logits' "
            r"\(at test_original.py:\d+\); give a function of the model's output.",
        ),
        (
            {"loss_fn": lambda output, target: output.mean() - target},
            "loss_fn fails on what Sequential gives with TypeError: .* missing 1 required positional argument",
        ),
        (
            {"loss_fn": lambda output: output.detach().mean()},
            "The loss of Sequential requires no gradient; give a loss_fn that computes with what trains.",
        ),
        (
            {"optimizer": torch.optim.LBFGS},
            "The optimizer fails with TypeError: .*'closure'; give one that takes the parameters of Sequential, and "
            "steps without a closure.",
        ),
        (
            {"optimizer": misspelled},
            r"The optimizer fails with TypeError: .*'learning_rate' \(at test_original.py:\d+\)",
        ),
        ({"optimizer": torch.optim.Muon}, "The optimizer fails with ValueError: Muon only supports 2D parameters"),
        (
            {"loss_fn": lambda output: torch.autograd.grad(output.sum(), INPUTS, create_graph=True)[0].mean()},
            r"not have been used in the graph.* \(at test_original.py:\d+\); take gradients by inputs in forward, as",
        ),
    ],
    ids=["attribute", "arguments", "no gradient", "closure", "rate", "shapes", "inputs"],
)
def test_what_a_model_is_trained_with_is_to_blame(call: Call, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(CaptureError, match=sentence):
        call(net(), rows(), **{"loss_fn": lambda output: output.mean(), **options})


class Modal(torch.optim.SGD):
    """Steps in train mode alone, as the optimizers of schedulefree, and is made in the other one."""

    training = False

    def train(self) -> None:
        self.training = True

    def step(self, closure: Any = None) -> Any:
        if not self.training:
            raise RuntimeError("Call train() first.")
        return super().step(closure)


def test_an_optimizer_with_modes_is_in_train_mode() -> None:
    model = net()
    result = memrewrite.optimize(model, rows(), budget="min", optimizer=Modal(model.parameters(), momentum=0.9))
    peak = memrewrite.report_of(result).predicted_after.peak
    assert memrewrite.measure(result, rows(), optimizer=Modal).peak <= peak
    assert memrewrite.measure(result, rows(), optimizer="sgd-momentum").peak == peak


@pytest.mark.parametrize(
    ("given", "reason"), [(rows(15), "RuntimeError: .*8, 15.*"), ({"input": rows()}, "TypeError: linear.*")]
)
def test_a_model_is_to_blame_for_what_it_does_not_take(
    call: Call, given: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[logging.LogRecord] = []
    monkeypatch.setattr(logging.getLogger("torch._subclasses.fake_tensor"), "filter", told.append)
    sentence = rf"Sequential fails on the example inputs with {reason}; .* \(arguments by name as example_kwargs\)\."
    with pytest.raises(CaptureError, match=sentence):
        call(net(), given, loss_fn=torch.mean)
    assert not told  # PyTorch has a traceback of its own


@pytest.mark.parametrize(
    "make", [torch.jit.script, lambda module: torch.jit.trace(module, rows())], ids=["script", "trace"]
)
@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_torchscript_is_named(call: Call, make: Callable[[nn.Module], nn.Module]) -> None:
    made = make(net())
    for model, name in ((made, "The model"), (nn.Sequential(nn.Linear(16, 16), made), "1")):
        with pytest.raises(UsageError, match=f"^{name} is TorchScript, .* give the module that it was made from"):
            call(model, rows(), loss_fn=torch.mean)


@pytest.mark.parametrize("ask", [memrewrite.optimize, memrewrite.estimate, memrewrite.measure])
def test_layers_without_a_shape_yet_are_named(ask: Call) -> None:
    model = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyBatchNorm1d())
    with pytest.raises(MemrewriteError, match=r"^0 \(LazyLinear\) has no parameters before it has run once; call the"):
        ask(model, rows(), loss_fn=torch.mean)
    model(rows())
    ask(model, rows(), loss_fn=torch.mean)


class Biased(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + causal_upper_left(8, 16).sum()


def test_a_tensor_of_a_class_of_its_own_is_named(call: Call) -> None:
    model = nn.Sequential(nn.Linear(16, 16), Biased())
    with pytest.raises(CaptureError, match=r"makes a CausalBias of a tensor \(at test_original\.py:\d+\), which one"):
        call(model, rows(), loss_fn=torch.mean)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_what_operators_take_is_measured_once_libraries_are_set_up(
    monkeypatch: pytest.MonkeyPatch, micro_batches: int
) -> None:
    happened: list[str] = []

    def set_up(calls: Sequence[Operator]) -> SettingUp:
        assert torch.ops.aten.mm.default in [func for func, _, _ in calls]
        return SettingUp([lambda: happened.append("set up")])

    def measure(calls: Sequence[Operator]) -> list[Taken]:
        happened.append("measured")
        return [Taken(10**6 if func is torch.ops.aten.mm.default else 0) for func, _, _ in calls]

    table = Transients(measure, set_up)
    monkeypatch.setattr(Target, "transients", lambda self, device, probe=True: table)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: happened.append("emptied"))
    given, before = (net(), Inputs((rows(),), {}), Step(micro_batches=micro_batches), 0), threading.enumerate()
    with original_simulated(*given) as simulated:
        for thread in threading.enumerate():
            if thread not in before:
                thread.join()
        happened.append("meanwhile")
        timeline = simulated()
    assert happened == ["set up", "meanwhile", "measured", "emptied"]
    assert timeline.categories[OPERATOR_WORKSPACE] == 10**6
    assert timeline == simulate_original(*given, attribute=True)
    with original_simulated(*given) as simulated:  # now all is known
        assert simulated() == timeline
    assert len(happened) == 4


def test_a_model_that_fails_does_so_before_anything_else_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Transients(lambda calls: [Taken()] * len(calls), lambda calls: SettingUp())
    monkeypatch.setattr(Target, "transients", lambda self, device, probe=True: table)
    with (
        pytest.raises(CaptureError, match=r"^Sequential fails on the example inputs with RuntimeError: [^()]*; "),
        original_simulated(net(), Inputs((rows(3),), {}), Step(), 0),
    ):
        pytest.fail("It was not asked for its timeline before.")
