"""Submodules with hooks, or that no graph can hold, stay calls in one graph of the whole model and one plan."""

import copy
import itertools
import pickle
import random
from abc import ABC
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memrewrite
from memrewrite.artifact.save import save
from memrewrite.runtime.dropin import programs
from memrewrite.simulate import run_tracked
from memrewrite.workload.step import Inputs, Step
from tests.support.layers import nameless
from tests.support.steps import assert_same, taken

WIDTH = 32
Sign = nameless("Sign")  # under no name of a module, so that no program can call it


class Odd(nn.Module):
    """A module without submodules that does what no graph can hold."""

    count: Tensor

    def __init__(self, function: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.function, self.calls = function, 0
        self.weight = nn.Parameter(torch.rand(WIDTH))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Any:
        return self.function(self, x * scale)


class Net(nn.Module):
    """Plain layers before and after an odd one."""

    def __init__(self, odd: nn.Module) -> None:
        super().__init__()
        self.before, self.after = (nn.ModuleList([self.layer() for _ in range(2)]) for _ in range(2))
        self.odd, self.head = odd, nn.Linear(WIDTH, 4)

    @staticmethod
    def layer() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Sigmoid(), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.before:
            x = x + layer(x)
        x = self.odd(x, scale=0.5) if isinstance(self.odd, Odd) else self.odd(x)
        x = x["hidden"][0] if isinstance(x, dict) else x
        for layer in self.after:
            x = x + layer(x)
        result: Tensor = self.head(x)
        return result


def branch_on_values(self: Any, x: Tensor) -> Tensor:
    return x * self.weight if float(x.detach().mean()) > 0 else x - self.weight


def dropout_behind_a_branch(self: Any, x: Tensor) -> Tensor:
    return torch.dropout((x * self.weight).tanh().exp(), 0.5, True) if float(x.detach().mean()) < 1e9 else x


def rows_chosen_by_values(self: Any, x: Tensor) -> Tensor:
    result = x.clone()
    rows = (x[:, 0] > 0).nonzero()[:, 0]
    result[rows] = x[rows] * self.weight
    return result


def loop_of_unknown_length(self: Any, x: Tensor) -> Tensor:
    while float(x.detach().abs().max()) > 1:
        x = x * 0.9 * self.weight.clamp(0.5, 1)
    return x


def layer_drop(self: Any, x: Tensor) -> Tensor:
    return x if random.random() < 0.5 else x * self.weight  # noqa: S311  (any draw)


def step_counter(self: Any, x: Tensor) -> Tensor:
    self.calls += 1
    return x * self.weight / self.calls


def buffer_reassigned(self: Any, x: Tensor) -> Tensor:
    self.count = self.count + 1
    return x * self.weight / self.count


def nameless_function(self: Any, x: Tensor) -> Tensor:
    result: Tensor = Sign.apply(x * self.weight)
    return result


def tensor_hook(self: Any, x: Tensor) -> Tensor:
    hidden = x * self.weight
    hidden.register_hook(lambda gradient: gradient * 2)
    return hidden


def checkpointed_draw(self: Any, x: Tensor) -> Tensor:
    if float(x.detach().sum()) > 1e9:
        return x
    result: Tensor = checkpoint(lambda x: torch.dropout(x * self.weight, 0.5, True).tanh(), x, use_reentrant=False)
    return result


def nested(self: Any, x: Tensor) -> dict[str, Any]:
    self.calls += 1
    return {"hidden": [x * self.weight, None], "rest": (x.detach().sum(),)}


def one_number_for_all_rows(self: Any, x: Tensor) -> dict[str, Any]:
    self.calls += 1
    return {"hidden": [x * self.weight], "logarithm": self.weight.abs().log().sum().expand(len(x))}


def in_place(self: Any, x: Tensor) -> Tensor:
    self.calls += 1
    return x.mul_(self.weight.detach())


def memory_handed_on(self: Any, x: Tensor) -> Tensor:
    return x * torch.from_numpy(numpy.tanh(x.detach().numpy())) + self.weight


@torch.library.custom_op("memrewrite_tests::kept_without_rule", mutates_args=())
def without_rule(x: Tensor) -> Tensor:
    """An operator that has no rule for fake tensors."""
    return x.abs()


def operator_without_rule(self: Any, x: Tensor) -> Tensor:
    return x * without_rule(x.detach()) + self.weight


def sparse_weight(self: Any, x: Tensor) -> Tensor:
    """As adapters of a few of a weight's numbers make it."""
    places = torch.arange(WIDTH).expand(2, WIDTH)
    weight = torch.ones(WIDTH, WIDTH) + torch.sparse_coo_tensor(
        places, self.weight.exp(), (WIDTH, WIDTH), check_invariants=False
    )
    return torch.nn.functional.linear(x, weight)


FUNCTIONS = [
    sparse_weight,
    memory_handed_on,
    operator_without_rule,
    branch_on_values,
    dropout_behind_a_branch,
    rows_chosen_by_values,
    loop_of_unknown_length,
    layer_drop,
    step_counter,
    buffer_reassigned,
    nameless_function,
    tensor_hook,
    checkpointed_draw,
    nested,
    one_number_for_all_rows,
    in_place,
]


def net(odd: nn.Module) -> Net:
    torch.manual_seed(0)
    model = Net(odd).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.rand(parameter.shape) - 0.3)
    return model


def batch(rows: int = 64, seed: int = 0) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def three_steps(model: nn.Module, rows: tuple[int, ...] = (64, 48, 9)) -> dict[str, Any]:
    random.seed(4)
    record = taken(model, lambda k: Inputs((batch(rows[k % 3], k),), {}))
    return {**record, "python": random.getstate()}


def optimized(model: nn.Module, **options: Any) -> Any:
    given: dict[str, Any] = {"budget": "70%", "optimizer": "sgd", "verify": False, **options}
    return memrewrite.optimize(model, batch(), **given)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_it_is_a_call_in_one_plan_for_the_whole_model(function: Callable[[Any, Tensor], Any]) -> None:
    model = net(Odd(function))
    result = optimized(copy.deepcopy(model))
    assert list(programs(result)) == [""]
    assert "self.odd(" in programs(result)[""].source
    assert result.report.segments
    assert any(note.startswith("odd (Odd) stays a call that the model makes: ") for note in result.report.notes)
    assert_same(three_steps(result), three_steps(model))


class Abstract(ABC, Odd):
    """Its objects are laid out as those of ``ABC``, not of ``nn.Module``."""


def test_a_submodule_of_an_abstract_class_is_one_too() -> None:
    model = net(Abstract(branch_on_values))
    result = optimized(copy.deepcopy(model))
    assert "self.odd(" in programs(result)[""].source
    assert_same(three_steps(result), three_steps(model))


@pytest.mark.parametrize("function", [branch_on_values, step_counter, tensor_hook], ids=lambda f: f.__name__)
def test_the_promised_peak_is_the_real_one(function: Callable[[Any, Tensor], Any]) -> None:
    result = optimized(net(Odd(function)))
    step = Step(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3))
    inputs = Inputs((batch(),), {})
    assert run_tracked(result, inputs, step).peak == result.report.predicted_after.peak <= result.report.budget


@pytest.mark.parametrize("function", [layer_drop, step_counter], ids=lambda f: f.__name__)
def test_it_runs_once_a_step(function: Callable[[Any, Tensor], Any]) -> None:
    runs: list[int] = []

    def counted(self: Any, x: Tensor) -> Any:
        runs.append(1)
        return function(self, x)

    result = optimized(net(Odd(counted)))
    runs.clear()
    for _ in range(3):
        result(batch()).sum().backward()
    assert len(runs) == 3


def random_rate(self: Any, x: Tensor) -> Tensor:
    return x * random.random()  # noqa: S311  (any draw)


def numpy_rate(self: Any, x: Tensor) -> Tensor:
    return x * float(numpy.random.rand())


def halved_or_not(self: Any, x: Tensor) -> Tensor:
    return x * 0.5 if float(x.detach().mean()) > 0 else x * 1.0


class Returning(nn.Module):
    """Returns what comes of an odd one, so that only what that gives is left to run again."""

    def __init__(self, odd: nn.Module) -> None:
        super().__init__()
        self.odd, self.first, self.second = odd, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.first(self.odd(x))
        return self.second(hidden), hidden


@pytest.mark.parametrize("function", [random_rate, numpy_rate], ids=lambda f: f.__name__)
def test_what_draws_outside_pytorch_is_never_run_again(function: Callable[[Any, Tensor], Any]) -> None:
    def build(function: Callable[[Any, Tensor], Any]) -> nn.Module:
        torch.manual_seed(0)
        return Returning(Odd(function))

    def steps(model: nn.Module) -> dict[str, Any]:
        numpy.random.seed(0)
        return three_steps(model)

    assert optimized(build(halved_or_not), budget="min", optimizer="none").report.segments
    result = optimized(build(function), budget="min", optimizer="none")
    assert not result.report.segments
    assert_same(steps(result), steps(build(function)))


@pytest.mark.parametrize("function", [branch_on_values, dropout_behind_a_branch], ids=lambda f: f.__name__)
def test_what_repeats_and_leaves_no_trace_may_run_again(function: Callable[[Any, Tensor], Tensor]) -> None:
    runs: list[int] = []

    def counted(self: Any, x: Tensor) -> Any:
        runs.append(1)
        return function(self, x).sigmoid().exp() * self.weight

    model, plain = (net(Odd(counted)) for _ in range(2))
    result = optimized(model, budget="min")
    assert "self.odd(" in programs(result)[""].source
    for each in (plain, result):
        runs.clear()
        torch.manual_seed(1)
        each(batch()).sum().backward()
        each.zero_grad(set_to_none=True)
    assert len(runs) > 1
    assert_same(three_steps(result), three_steps(plain))
    for each in (result, plain):
        each.odd.weight.requires_grad_(False)
    with pytest.warns(memrewrite.FallbackWarning, match=r"odd\.weight was trained, or frozen"):
        assert_same(three_steps(result), three_steps(plain))


def weight_from_the_first_batch(self: Any, x: Tensor) -> Tensor:
    if not self.calls:
        self.calls = 1
        self.weight.data.copy_(x.detach().std(0))
    return x * self.weight


def count_in_a_parameter(self: Any, x: Tensor) -> Tensor:
    self.weight.data.add_(1)
    return x.tanh().exp() if float(x.detach().sum()) < 1e9 else x


@pytest.mark.parametrize("function", [weight_from_the_first_batch, count_in_a_parameter], ids=lambda f: f.__name__)
def test_what_it_writes_to_parameters_is_put_back_and_written_once_a_step(
    function: Callable[[Any, Tensor], Tensor],
) -> None:
    model = net(Odd(function))
    plain = copy.deepcopy(model)
    result = optimized(model, budget="min")
    assert result.report.segments
    assert_same(dict(model.named_parameters()), dict(plain.named_parameters()))
    assert_same(three_steps(result), three_steps(plain))


@pytest.mark.parametrize("amp", [None, torch.bfloat16], ids=["float32", "autocast"])
def test_it_is_verified(amp: torch.dtype | None) -> None:
    result = optimized(net(Odd(branch_on_values)), verify=True, amp=amp)
    assert list(programs(result)) == [""]
    assert result.report.equivalent


def by_pickle(result: nn.Module, folder: Path) -> nn.Module:
    return pickle.loads(pickle.dumps(result))


def by_copy(result: nn.Module, folder: Path) -> nn.Module:
    return copy.deepcopy(result)


def by_artifact(result: nn.Module, folder: Path) -> nn.Module:
    save(result, folder / "out")
    return memrewrite.load(folder / "out", net(Odd(step_counter)))


@pytest.mark.parametrize("way", [by_pickle, by_copy, by_artifact])
def test_it_travels(way: Callable[[nn.Module, Path], nn.Module], tmp_path: Path) -> None:
    arrived = way(optimized(net(Odd(step_counter))), tmp_path)
    assert list(programs(arrived)) == [""]
    assert_same(three_steps(arrived), three_steps(net(Odd(step_counter))))


def test_it_may_be_changed_as_it_is_called_and_not_replaced() -> None:
    model, plain = net(Odd(step_counter)), net(Odd(step_counter))
    result = optimized(model)
    for each in (result, plain):
        each.odd.calls = 5
    assert_same(three_steps(result), three_steps(plain))
    for each in (result, plain):
        each.odd = nn.Tanh()
    with pytest.warns(memrewrite.FallbackWarning, match="odd"):
        assert_same(three_steps(result), three_steps(plain))


def number(self: Any, x: Tensor) -> Any:
    self.calls += 1
    return {"hidden": [x * self.weight], "calls": self.calls}


def test_those_that_are_never_called_are_no_matter() -> None:
    def build() -> Net:
        model = net(Odd(branch_on_values))
        model.unused = nn.ModuleList([Odd(branch_on_values), nn.ReLU()])  # before the other in no order of calls
        model.unused[1].register_forward_hook(lambda module, args, output: output * 2)
        model._modules = {"unused": model._modules.pop("unused"), **model._modules}
        return model

    result = optimized(build())
    assert list(programs(result)) == [""]
    assert not any("unused" in note for note in result.report.notes)
    assert_same(three_steps(result), three_steps(build()))


@pytest.mark.parametrize("hooked", ["1.1", "3.0"])
def test_sizes_that_have_ranges_vary_around_it(hooked: str) -> None:
    """Also where it has strides and makes other sizes of them."""

    def build() -> nn.Sequential:
        torch.manual_seed(0)
        strides = [1, 1, 1, 2]
        layers = [nn.Conv2d(3 if i == 0 else 8, 8, 3, stride, padding=1) for i, stride in enumerate(strides)]
        blocks = [nn.Sequential(layer, nn.SiLU()) for layer in layers]
        model = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))
        model.get_submodule(hooked).register_forward_hook(lambda module, args, output: output * 2)
        return model

    x = torch.randn(4, 3, 32, 32)
    result, plain = memrewrite.optimize(build(), x, budget="80%", dynamic={"input": {2: (8, 32), 3: (8, 32)}}), build()
    assert list(programs(result)) == [""]
    for size in ((4, 3, 32, 32), (4, 3, 20, 27), (2, 3, 8, 9)):
        given = torch.randn(size)
        found = []
        for each in (result, plain):
            each.zero_grad()
            each(given).sum().backward()
            found.append([parameter.grad for parameter in each.parameters()])
        assert all(map(torch.equal, *found))


class Chosen(Net):
    """Goes by the rows of its input that values choose."""

    def __init__(self, heads: bool) -> None:
        super().__init__(Odd(lambda self, x: x[x[:, 0] > x[:, 1]]))
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        rows: Tensor = super().forward(x)
        return rows.view(rows.shape[0], 2, 2).tanh() if self.heads else rows.tanh()


@pytest.mark.parametrize("heads", [False, True])
def test_sizes_that_values_decide_are_those_of_each_call(heads: bool) -> None:
    torch.manual_seed(0)
    model = Chosen(heads)
    result = optimized(copy.deepcopy(model), budget="min")
    assert ("" in programs(result)) is not heads
    for rows in (batch(seed=1), batch(seed=2), batch(9)):
        assert torch.equal(result.eval()(rows), model.eval()(rows))


def test_a_model_that_asks_for_gradients_has_weights_inside_of_one() -> None:
    class Asking(Net):
        def forward(self, x: Tensor) -> Tensor:
            hidden: Tensor = super().forward(x)
            return hidden * 2 if hidden.requires_grad else hidden

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Odd(loop_of_unknown_length)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.inner(x) if float(x.detach().mean()) < 1e9 else x
            return result

    torch.manual_seed(0)
    planned = memrewrite.optimize(Asking(Holder()), torch.randn(64, WIDTH), budget="min")  # proved without a warning
    assert memrewrite.report_of(planned).changed


def test_one_that_gives_numbers_stays_between_regions() -> None:
    result = optimized(net(Odd(number)))
    assert len(programs(result)) > 1
    assert any("assigns a new value to self.odd.calls" in note for note in result.report.notes)
    assert_same(three_steps(result), three_steps(net(Odd(number))))


def of(gradients: Any) -> Tensor:
    return gradients[0]


Hook = Callable[[nn.Module, list[Any]], Any]
HOOKS: dict[str, Hook] = {
    "forward": lambda m, seen: m.register_forward_hook(lambda m, a, o: seen.append(float(o.detach().sum()))),
    "forward that changes the output": lambda m, seen: m.register_forward_hook(lambda m, a, o: o * 2),
    "forward with keywords": lambda m, seen: m.register_forward_hook(lambda m, a, k, o: o + 1, with_kwargs=True),
    "before, changing the input": lambda m, seen: m.register_forward_pre_hook(lambda m, a: (a[0] * 3,)),
    "backward": lambda m, seen: m.register_full_backward_hook(lambda m, gi, go: seen.append(float(of(go).sum()))),
    "backward that changes": lambda m, seen: m.register_full_backward_hook(lambda m, gi, go: (of(gi) * 2,)),
    "before backward": lambda m, seen: m.register_full_backward_pre_hook(lambda m, go: (of(go) * 0.5,)),
}


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("layer", [nn.Tanh, nn.ReLU, lambda: nn.BatchNorm1d(WIDTH), lambda: nn.Dropout(0.3)])
def test_hooks_fire_as_they_did(kind: str, layer: Callable[[], nn.Module]) -> None:
    seen: tuple[list[Any], list[Any]] = ([], [])
    models = [net(layer()) for _ in seen]
    for model, each in zip(models, seen, strict=True):
        HOOKS[kind](model.odd, each)
    result = optimized(models[0])
    assert list(programs(result)) == [""]
    assert result.report.segments
    for each in seen:
        each.clear()
    assert_same(three_steps(result), three_steps(models[1]))
    assert seen[0] == seen[1]


def test_a_relu_with_a_hook_may_write_its_input() -> None:
    models = [net(nn.ReLU(inplace=True)) for _ in range(2)]
    for model in models:
        model.odd.register_forward_hook(lambda module, args, output: None)
    result = optimized(models[0])
    assert list(programs(result)) == [""]
    assert_same(three_steps(result), three_steps(models[1]))


def test_features_collected_by_hooks_on_every_activation() -> None:
    features: list[Tensor] = []
    layers = ([nn.Linear(WIDTH, WIDTH), nn.SiLU()] for _ in range(12))
    model, plain = (nn.Sequential(*itertools.chain(*itertools.islice(layers, 6))) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    for each in (model, plain):
        for layer in list(each)[1::2]:
            layer.register_forward_hook(lambda module, args, output: features.append(output))
    result = optimized(model, budget=None)
    found = []
    for each in (result, plain):
        features.clear()
        each(batch())
        loss = torch.stack([feature.square().mean() for feature in features]).sum()
        found.append([*torch.autograd.grad(loss, [*each.parameters()]), *(f.detach() for f in features)])
    assert len(found[0]) == 18
    assert all(map(torch.equal, *found))


class Remembers(nn.Module):
    """Takes what it gave last time into account, and branches on values."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.last is None else x + self.last
        self.last = x.exp() if float(x.detach().mean()) < 1e9 else x
        return self.last


class Forgets(Net):
    """Lets what it has inside begin anew in each step."""

    def forward(self, x: Tensor) -> Tensor:
        self.odd.last = None  # type: ignore[assignment]
        return super().forward(x)


def test_what_is_assigned_to_one_from_outside_is_in_no_graph() -> None:
    """It looks as if it changed nothing, where what the submodule itself assigns is not seen."""
    torch.manual_seed(0)
    model, x = Forgets(Remembers()), torch.randn(16, WIDTH)
    result = memrewrite.optimize(copy.deepcopy(model), x, budget="min")
    assert "" not in result.report.config["regions"]
    ours, theirs = (taken(each, lambda step: Inputs((x.clone(),), {})) for each in (result, model))
    assert_same(ours, theirs)


class Gated(nn.Module):
    """Two layers with ``x * sigmoid(x)`` between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        result: Tensor = self.second(x * torch.sigmoid(x))
        return result


@pytest.mark.filterwarnings("ignore")  # of torch.ao, which is deprecated
def test_layers_with_packed_weights_stay_calls() -> None:
    model = torch.ao.quantization.quantize_dynamic(Gated().eval(), {nn.Linear})
    x = torch.randn(64, 16)
    result = memrewrite.optimize(model, x, budget="min", exact=True)
    with torch.no_grad():
        assert torch.equal(result(x), model(x))
    assert memrewrite.estimate(model, x).peak.bytes == memrewrite.measure(model, x).peak
    assert memrewrite.measure(result, x).peak == result.report.predicted_after.peak < memrewrite.measure(model, x).peak
