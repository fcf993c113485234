"""An optimizer that steps while backward runs has the bits of one that steps after it, and no gradients are left."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memrewrite
from memrewrite.records.errors import NotEquivalentError, UsageError
from memrewrite.state.bits import same_bits
from memrewrite.torch_internals.spent import Spent
from memrewrite.workload import in_backward
from memrewrite.workload.in_backward import InBackward
from memrewrite.workload.stepspec import StepSpec
from tests.support.dropins import segmented
from tests.workload.test_in_groups import KINDS, Counting, tensors

WIDTH = 40


class Net(nn.Module):
    """Layers whose first parameters, added to the input, have their gradient last and take no saved tensor."""

    def __init__(self, layers: int = 6, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.position = nn.Parameter(torch.randn(width))
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)))
        self.head = nn.Linear(width, width)
        self.head.weight = next(self.layers.parameters())  # used first and last

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layers(x + self.position)) + self.position
        return out


def loss_of(output: Tensor) -> Tensor:
    return output.square().mean()


def trained(optimizer: torch.optim.Optimizer, model: nn.Module, steps: int = 4) -> torch.optim.Optimizer:
    """After some steps under a scheduler."""
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model(torch.ones(3, WIDTH))).backward()
        optimizer.step()
        scheduler.step()
    return optimizer


@pytest.fixture(autouse=True)
def each_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters as small as those of tests are updated one by one."""
    monkeypatch.setattr(in_backward, "MOST", 1)


def given(kind: Any = torch.optim.AdamW, **settings: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Net()
    return model, memrewrite.step_in_backward(kind(model.parameters(), **settings))


@pytest.mark.parametrize("kind", KINDS)
def test_every_optimizer_of_pytorch_takes_the_same_steps_while_backward_runs(kind: Any) -> None:
    plain = Net()
    whole = kind(plain.parameters(), lr=0.01, foreach=True)
    model, optimizer = given(kind, lr=0.01, foreach=True)
    trained(whole, plain)
    trained(optimizer, model)
    for pair in zip(plain.parameters(), model.parameters(), strict=True):
        assert same_bits(*pair)
    for parameter, other in zip(plain.parameters(), model.parameters(), strict=True):
        for name, value in whole.state[parameter].items():
            assert same_bits(value, optimizer.state[other][name])
    assert {**optimizer.param_groups[0], "params": ()} == {**whole.param_groups[0], "params": ()}
    assert isinstance(optimizer, kind)
    assert optimizer.state_dict().keys() == whole.state_dict().keys()


def test_gradients_end_while_backward_runs() -> None:
    model, _ = given()
    there = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: there.append(gradients(model)))
    loss_of(model(torch.ones(3, WIDTH))).backward()
    assert len(there) == len(list(model.parameters()))
    assert max(there) <= 1
    assert gradients(model) == 0


def gradients(model: nn.Module) -> int:
    return sum(p.grad is not None and not isinstance(p.grad, Spent) for p in model.parameters())


def twice(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loss_of(model(torch.ones(3, WIDTH))).backward()


def clipped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def scaled(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)


def filled(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)


def read(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    gradient = next(model.parameters()).grad
    assert gradient is not None
    assert repr(gradient) == f"Spent(({WIDTH},), torch.float32)"
    gradient.norm()


def skipped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    loss_of(model(torch.ones(3, WIDTH))).backward()


def cleared(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    optimizer.step()


def slowed(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = 1e-5
    optimizer.step()


@pytest.mark.parametrize(
    ("what", "why"),
    [
        *((what, "The gradient of a parameter is gone") for what in (twice, clipped, scaled, filled, read)),
        (skipped, "another backward pass came before optimizer.step()"),
        (cleared, "gradients were set or cleared before optimizer.step()"),
        (slowed, "settings such as its learning rate were changed meanwhile"),
    ],
)
def test_what_would_not_be_the_same_step_is_refused(what: Callable[..., None], why: str) -> None:
    model, optimizer = given()
    loss_of(model(torch.ones(3, WIDTH))).backward()
    with pytest.raises(UsageError, match=why):
        what(model, optimizer)


def test_a_closure_and_hooks_see_one_step() -> None:
    plain = Net()
    whole = torch.optim.AdamW(plain.parameters())
    model, optimizer = given()
    seen: list[str] = []
    for each in (whole, optimizer):
        each.register_step_pre_hook(lambda *_: seen.append("before"))
        each.register_step_post_hook(lambda *_: seen.append("after"))
    for each, of in ((whole, plain), (optimizer, model)):
        for _ in range(3):

            def closure(each: Any = each, of: nn.Module = of) -> float:
                each.zero_grad()
                loss = loss_of(of(torch.ones(3, WIDTH)))
                loss.backward()
                return loss.item()

            assert each.step(closure) > 0
    assert seen == ["before", "after"] * 6
    assert all(same_bits(*pair) for pair in zip(plain.parameters(), model.parameters(), strict=True))


def test_what_is_frozen_or_added_later_is_trained() -> None:
    models = Net(), Net()
    for number, model in enumerate(models):
        first, *others = model.parameters()
        last = others.pop()
        first.requires_grad_(False)
        optimizer = torch.optim.SGD([first, *others], lr=0.1)
        optimizer = memrewrite.step_in_backward(optimizer) if number else optimizer
        optimizer.add_param_group({"params": [last], "lr": 0.2})
        trained(optimizer, model, 1)
        first.requires_grad_(True)
        trained(optimizer, model, 2)
    assert all(same_bits(*pair) for pair in zip(*(model.parameters() for model in models), strict=True))


def test_a_copy_steps_for_its_own_parameters() -> None:
    model, optimizer = given()
    trained(optimizer, model, 2)
    both = {"model": model, "optimizer": optimizer}
    for again in (copy.deepcopy(both), pickle.loads(pickle.dumps(both))):
        assert isinstance(again["optimizer"], InBackward)
        trained(again["optimizer"], again["model"], 2)  # type: ignore[arg-type]
        assert gradients(again["model"]) == 0  # type: ignore[arg-type]
        assert tensors(again["optimizer"])  # type: ignore[arg-type]
    expected = Net()
    trained(torch.optim.AdamW(expected.parameters()), expected, 2)
    assert all(same_bits(*pair) for pair in zip(expected.parameters(), model.parameters(), strict=True))


def test_a_model_is_moved_and_cast_after_its_last_step() -> None:
    model, optimizer = given()
    loss_of(model(torch.ones(3, WIDTH))).backward()
    optimizer.step()
    model.to(torch.float64)
    for parameter in model.parameters():
        assert isinstance(parameter.grad, Spent)
        assert parameter.grad.dtype == parameter.dtype == torch.float64
    model.to(torch.float32)
    trained(optimizer, model, 1)
    assert gradients(model) == 0


def test_an_optimizer_that_is_gone_steps_no_more() -> None:
    model, optimizer = given()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    del optimizer
    loss_of(model(torch.ones(3, WIDTH))).backward()
    assert gradients(model) == len(before)
    assert all(same_bits(*pair) for pair in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda p: Counting(p, of_all=True), None),
        (torch.optim.LBFGS, "LBFGS takes no step while backward runs"),
        (
            lambda p: memrewrite.step_in_groups(torch.optim.SGD(p)),
            "The optimizer steps in groups",
        ),
    ],
)
def test_where_the_step_would_be_another_it_is_refused(make: Any, why: str | None) -> None:
    optimizer = make(Net().parameters())
    with pytest.raises(UsageError, match=why or "Counting computes other numbers while backward runs"):
        memrewrite.step_in_backward(optimizer)


class Shift(nn.Module):
    """Adds a parameter, whose gradient takes nothing that a segment has to compute again."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


def mlp(layers: int = 8, width: int = 64) -> nn.Module:
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(width, width), nn.GELU(), Shift(width)) for _ in range(layers)]
    return nn.Sequential(*parts, nn.Linear(width, 8))


INPUTS = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))


def optimized(model: nn.Module, **asked: Any) -> Any:
    return memrewrite.optimize(model, INPUTS, budget="min", optimizer_step="in_backward", **asked)


def test_segments_run_again_before_what_they_read_is_updated() -> None:
    plain, model = mlp(), mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    rewritten = optimized(model, optimizer=optimizer)
    assert isinstance(optimizer, InBackward)
    assert rewritten.report.segments
    assert rewritten.report.verdict.endswith("parameters also of steps while backward runs, also at smaller sizes")
    whole = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for _ in range(3):
        for each, of in ((whole, plain), (optimizer, rewritten)):
            loss_of(of(INPUTS)).backward()
            each.step()
            each.zero_grad()
    assert all(same_bits(*pair) for pair in zip(plain.parameters(), model.parameters(), strict=True))


def test_the_peak_is_predicted_to_the_byte_and_below_that_of_a_step_after_backward() -> None:
    model = mlp()
    rewritten = optimized(model, optimizer="adamw")
    assert any("memrewrite.step_in_backward(optimizer)" in note for note in rewritten.report.notes)
    whole = memrewrite.optimize(model, INPUTS, budget="min", optimizer="adamw").report.predicted_after.peak
    taken = memrewrite.measure(rewritten, INPUTS, optimizer="adamw-in-backward").peak
    assert rewritten.report.predicted_after.peak == taken
    gradients = sum(p.nbytes for p in model.parameters())
    assert whole - taken > 0.5 * gradients
    original = memrewrite.measure(model, INPUTS, optimizer="adamw-in-backward").peak
    assert memrewrite.estimate(model, INPUTS, optimizer="adamw-in-backward").peak.bytes == original


def early(self: InBackward, parameter: Tensor) -> None:
    """Updates without waiting for segments that are to run again."""
    self._waiting[id(parameter)] = parameter
    self._update([parameter])


def doubled(self: InBackward, parameter: Tensor) -> None:
    """Computes other numbers."""
    assert parameter.grad is not None
    parameter.grad.mul_(2)
    early(self, parameter)


def test_a_step_that_is_another_is_not_equivalent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InBackward, "_take", doubled)
    monkeypatch.setattr(in_backward, "check", lambda *_: None)
    with pytest.raises(NotEquivalentError, match="parameter"):
        optimized(mlp())


def test_what_a_segment_reads_may_not_be_written_before_it_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    found = segmented(model, INPUTS, size=6)
    assert found.inside()
    monkeypatch.setattr(InBackward, "_take", early)
    optimizer = memrewrite.step_in_backward(torch.optim.AdamW(model.parameters()))
    assert isinstance(optimizer, InBackward)
    with pytest.raises(RuntimeError, match="was written in place between the forward and the backward pass"):
        loss_of(found.module(INPUTS)).backward()


def test_the_users_optimizer_takes_no_step_of_ours() -> None:
    model = mlp()
    optimizer = memrewrite.step_in_backward(torch.optim.AdamW(model.parameters()))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    rewritten = optimized(model, optimizer=optimizer)
    assert not any("hooks" in note for note in rewritten.report.notes)
    for how in ({}, {"optimizer": optimizer}, {"optimizer": "sgd"}):
        memrewrite.measure(rewritten, INPUTS, **how)
        assert memrewrite.verify(model, rewritten, INPUTS, **how).equivalent
    assert not optimizer.state
    assert all(same_bits(*pair) for pair in zip(before, model.parameters(), strict=True))
    loss_of(rewritten(INPUTS)).backward()
    assert gradients(model) == 0


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"micro_batches": 2}, "a gradient before those of other micro-batches are added"),
        ({"loop": "scaler"}, "a gradient before a scaler looks at it"),
        ({"loop": "zero-in-place"}, "a gradient before it could be filled with zeros"),
        ({"mesh": "ddp=2"}, "a gradient before the processes of a mesh put theirs together"),
        ({"compiled": True}, "gives all gradients as it ends"),
        ({"optimizer": None}, "'in_backward' is for a training step with an optimizer"),
        ({"optimizer": "adamw-grouped"}, "in groups or while backward runs"),
        ({"optimizer": lambda p: Counting(p, of_all=True)}, "computes other numbers while backward runs"),
    ],
)
def test_a_step_that_cannot_be_meant_is_refused(asked: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        optimized(mlp(), **asked)


def test_other_code_in_a_process_has_no_step_while_backward_runs() -> None:
    compiled = torch.compile(mlp(), backend="memrewrite", options={"optimizer": "adamw-in-backward"})
    with pytest.raises(Exception, match="steps while backward runs, which compiled code does not"):
        compiled(INPUTS)


def test_a_parameter_that_is_written_between_recomputation_and_use_is_no_silent_matter() -> None:
    class Apart(nn.Module):
        """Uses a weight where its gradient does not come from."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 64))

        def forward(self, x: Tensor) -> Tensor:
            first = nn.functional.linear(x, self.weight.detach()).tanh()
            return nn.functional.linear(first, self.weight).tanh()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), Apart(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
    with pytest.raises(UsageError, match="Sequential uses a parameter in backward after that has its gradient"):
        optimized(model)
    found = segmented(model, INPUTS, size=6)
    assert found.inside()
    optimizer = memrewrite.step_in_backward(torch.optim.AdamW(model.parameters()))
    assert isinstance(optimizer, InBackward)
    with pytest.raises(RuntimeError, match="was written in place before backward computed with it"):
        loss_of(found.module(INPUTS)).backward()


@pytest.mark.parametrize("name", ["sgd-momentum", "adamw-fused", "tests.workload.test_in_backward:given_by_name"])
def test_every_name_of_an_optimizer_has_one_that_steps_while_backward_runs(name: str) -> None:
    step = StepSpec(optimizer=f"{name}-in-backward").build()
    assert step.in_backward
    assert isinstance(step.make_optimizer(mlp()), InBackward)


def given_by_name(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters)


@pytest.mark.parametrize("name", ["none", "adamw-grouped"])
def test_one_that_has_no_such_step_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"'{name}-in-backward' means nothing: {name} takes no step that could be"):
        StepSpec(optimizer=f"{name}-in-backward").check()


class HandingOn(torch.optim.Optimizer):
    """Has all of another one, as accelerate's optimizers do."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups, self.state = optimizer.param_groups, optimizer.state

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


def test_one_that_hands_on_to_another_lets_that_step_so() -> None:
    plain, model = mlp(), mlp()
    whole, inner = (torch.optim.AdamW(each.parameters()) for each in (plain, model))
    given = HandingOn(inner)
    assert optimized(model, optimizer=given).report.equivalent
    assert isinstance(inner, InBackward)
    assert not isinstance(given, InBackward)
    for each, of in ((whole, plain), (given, model)):
        loss_of(of(INPUTS)).backward()
        assert (gradients(of) == 0) == (of is model)
        each.step()
    assert all(same_bits(*pair) for pair in zip(plain.parameters(), model.parameters(), strict=True))
