"""The fake twin of a module is used again where a pass left it as it was, and nowhere else."""

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from memrewrite import estimate, measure, optimize, verify
from memrewrite.records.errors import UsageError
from memrewrite.search.bench import Bench
from memrewrite.simulate import Twins, run_tracked, simulate
from memrewrite.simulate.fake import fakes
from memrewrite.workload.step import Inputs, Step
from tests.simulate.test_simulate import Keyed, Odd
from tests.support.dropins import segmented

ROWS = Inputs((torch.randn(4, 3),), {})


class Changing(nn.Module):
    """Does something to itself in each call, and from the second call on something else by that."""

    seen: Tensor

    def __init__(self, change: Callable[["Changing"], None], again: Callable[["Changing"], Any]) -> None:
        super().__init__()
        self.layer, self.wide, self.inner = nn.Linear(3, 3), nn.Linear(3, 3000), nn.Sequential(nn.Linear(3, 3))
        self.register_buffer("seen", torch.zeros(3))
        self.calls, self.history, self.last = 0, deque[int](), {"loss": [0]}
        self.keyed: dict[Any, int] = {self.seen: 0}
        self._change, self._again = change, again

    def forward(self, x: Tensor) -> Tensor:
        again = bool(self._again(self))
        self._change(self)
        return self.wide(x).sum() + self.layer(x).sum() if again else self.inner(self.layer(x)).sum()


def counted(module: Changing) -> None:
    module.calls += 1


def longer(module: Changing) -> None:
    module.history.append(1)


def deeper(module: Changing) -> None:
    module.last["loss"].append(1)


def keyed(module: Changing) -> None:
    module.keyed[module.seen] = 1


def named(module: Changing) -> None:
    module.last["more"] = []


def frozen(module: Changing) -> None:
    module.layer.weight.requires_grad_(False)


def evaluated(module: Changing) -> None:
    module.inner.eval()


def resized(module: Changing) -> None:
    module.seen.resize_(6)


def exchanged(module: Changing) -> None:
    module.seen.data = torch.zeros(6)


def marked(module: Changing) -> None:
    module.layer.weight.was_used = True  # type: ignore[attr-defined]


def hooked(module: Changing) -> None:
    if not module.inner[0].weight._backward_hooks:
        module.inner[0].weight.register_hook(lambda gradient: gradient)  # type: ignore[operator]


def hooked_module(module: Changing) -> None:
    if not module.inner._forward_hooks:
        module.inner.register_forward_hook(lambda *_: None)


CHANGES: list[tuple[Callable[[Changing], None], Callable[[Changing], Any]]] = [
    (counted, lambda m: m.calls),
    (longer, lambda m: m.history),
    (deeper, lambda m: len(m.last["loss"]) > 1),
    (keyed, lambda m: m.keyed[m.seen]),
    (named, lambda m: "more" in m.last),
    (frozen, lambda m: not m.layer.weight.requires_grad),
    (evaluated, lambda m: not m.inner.training),
    (resized, lambda m: m.seen.numel() > 3),
    (exchanged, lambda m: m.seen.numel() > 3),
    (marked, lambda m: hasattr(m.layer.weight, "was_used")),
    (hooked, lambda m: m.inner[0].weight._backward_hooks),
    (hooked_module, lambda m: m.inner._forward_hooks),
]


@pytest.mark.parametrize(("change", "again"), CHANGES, ids=[change.__name__ for change, _ in CHANGES])
def test_a_module_that_changes_is_never_simulated_as_it_became(
    change: Callable[[Changing], None], again: Callable[[Changing], Any]
) -> None:
    module, twins = Changing(change, again), Twins()
    expected = simulate(module, ROWS, Step(), steps=1)
    for _ in range(3):
        assert simulate(module, ROWS, Step(), steps=1, twins=twins) == expected


def made(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The twins that are made from here on."""
    found = list[object]()

    class Told(fakes._Twin):
        def __init__(self, module: nn.Module, moved: bool) -> None:
            super().__init__(module, moved)
            found.append(self)

    monkeypatch.setattr(fakes, "_Twin", Told)
    return found


def normalized() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


@pytest.mark.parametrize(
    "module",
    [normalized(), Odd(), Keyed(), nn.Sequential(parametrizations.orthogonal(nn.Linear(3, 3)))],
    ids=["statistics in buffers", "odd attributes", "tensors as keys", "parametrized"],
)
def test_one_twin_serves_passes_that_change_values_alone(module: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    twins, expected = Twins(), simulate(module, ROWS, Step(), steps=1)
    found = made(monkeypatch)
    for _ in range(3):
        assert simulate(module, ROWS, Step(), steps=1, twins=twins) == expected
    assert len(found) == 1


def replaced(module: Any) -> None:
    module[0] = nn.Linear(3, 8, bias=False)


def untrained(module: Any) -> None:
    module[0].weight.requires_grad_(False)


def converted(module: Any) -> None:
    module.double()


def without(module: Any) -> None:
    module[1].running_mean = None
    module[1].running_var = None


def tied(module: Any) -> None:
    module[1].bias = module[0].bias


def in_eval_mode(module: Any) -> None:
    module.eval()


@pytest.mark.parametrize("change", [replaced, untrained, converted, without, tied, in_eval_mode])
def test_a_module_that_was_changed_since_gets_another_twin(
    change: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, twins = normalized(), Twins()
    simulate(module, ROWS, Step(), steps=1, twins=twins)
    inputs = Inputs((ROWS.args[0].double(),), {}) if change is converted else ROWS
    found = made(monkeypatch)
    change(module)
    expected = simulate(module, inputs, Step(), steps=1)
    assert simulate(module, inputs, Step(), steps=1, twins=twins) == expected
    assert len(found) == 2
    other = normalized()
    assert simulate(other, ROWS, Step(), steps=1, twins=twins) == simulate(other, ROWS, Step(), steps=1)


def test_a_drop_in_gets_a_twin_for_each_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its class has more to itself than attributes."""
    module, twins = segmented(normalized(), ROWS.args[0]).module, Twins()
    found = made(monkeypatch)
    first, second = (simulate(module, ROWS, Step(), steps=1, twins=twins) for _ in range(2))
    assert first == second
    assert len(found) == 2


def test_a_twin_of_a_pass_that_failed_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(output: Tensor) -> Tensor:
        raise ZeroDivisionError

    module, twins = normalized(), Twins()
    simulate(module, ROWS, Step(), steps=1, twins=twins)
    found = made(monkeypatch)
    with pytest.raises(ZeroDivisionError):
        simulate(module, ROWS, Step(loss_fn=failing), steps=1, twins=twins)
    simulate(module, ROWS, Step(), steps=1, twins=twins)
    assert len(found) == 1


def test_no_other_twin_while_one_is_in_use() -> None:
    """A loss that simulates the same module finds none that is under way."""
    module, twins = normalized(), Twins()
    alone = simulate(module, ROWS, Step(), steps=1)

    def loss(output: Tensor) -> Tensor:
        assert twins.take(module, False) is not twins.take(module, False)
        return output.sum()

    simulate(module, ROWS, Step(loss_fn=loss), steps=1, twins=twins)
    assert simulate(module, ROWS, Step(), steps=1, twins=twins) == alone


def test_plans_are_those_of_new_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.BatchNorm1d(256), nn.Linear(256, 64)) for _ in range(4)]
    model, looks = nn.Sequential(*layers), list[int]()
    own = Bench.one_pass

    def look(bench: Bench, *asked: Any) -> int:
        looks.append(own(bench, *asked))
        return looks[-1]

    monkeypatch.setattr(Bench, "one_pass", look)

    def planned() -> tuple[Any, ...]:
        looks.clear()
        result = optimize(
            model, (torch.randn(512, 64),), budget="min", device="cuda", verify=False, cache=False, optimizer="sgd"
        )
        return looks[:], result.state_dict().keys(), repr(result.report.to_json())

    found = made(monkeypatch)
    again, several = planned(), len(found)
    monkeypatch.setattr(Twins, "give_back", lambda *_: None)
    assert planned() == again
    assert len(looks) > 1
    assert len(found) - several >= several + len(looks) - 1


class Helper:
    """An object of the user's that has a module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module


class Reaching(nn.Module):
    """Calls its layers by a function, a method or an object that leads to them."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
        old = self.layer.forward
        self.doubled: Any = {
            "a closure": lambda x: self.layer(x) * 2,
            "a list": [lambda x: self.layer(x) * 2],
            "an object": Helper(self.layer),
        }.get(way)
        if way == "a forward of its own":
            self.layer.forward = lambda x: old(x) * 2  # type: ignore[method-assign, assignment]

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.doubled, Helper):
            return self.last(self.doubled.module(x) * 2)
        if isinstance(self.doubled, list):
            return self.last(self.doubled[0](x))
        return self.last(self.layer(x) if self.doubled is None else self.doubled(x))


@pytest.mark.parametrize("way", ["a closure", "a list", "an object", "a forward of its own"])
def test_what_leads_to_the_modules_leads_to_those_of_the_twin(way: str) -> None:
    model, inputs = Reaching(way), Inputs((torch.randn(600, 3),), {})
    step = Step(optimizer=torch.optim.AdamW)
    assert simulate(model, inputs, step).peak == run_tracked(Reaching(way), inputs, step).peak
    assert all(parameter.grad is None for parameter in model.parameters())


HELPER = nn.Linear(3, 3)


class Global(nn.Module):
    """Trains a layer that is none of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = HELPER(self.layer(x))
        return result


@pytest.mark.parametrize("call", [optimize, estimate])
def test_what_trains_and_is_no_parameter_is_refused(call: Any) -> None:
    with pytest.raises(UsageError, match=r"trains tensors that are no parameters .* \(\(3, 3\), \(3,\)\): a global"):
        call(Global(), torch.randn(4, 3))
    assert all(parameter.grad is None for parameter in HELPER.parameters())


def test_a_loss_that_trains_and_counts_is_as_it_was() -> None:
    torch.manual_seed(0)
    discriminator = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    before = [tensor.clone() for tensor in discriminator.buffers()]
    model, x = nn.Sequential(nn.Linear(3, 64), nn.GELU(), nn.Linear(64, 3)), torch.randn(64, 3)

    def loss(images: Tensor) -> Tensor:
        return nn.functional.softplus(-discriminator(images)).mean()

    result = optimize(model, x, budget="min", loss_fn=loss)
    assert measure(result, x, loss_fn=loss, steps=1).peak == result.report.predicted_after.peak
    assert verify(model, result, x, loss_fn=loss)
    assert all(parameter.grad is None for parameter in discriminator.parameters())
    assert all(map(torch.equal, discriminator.buffers(), before))
