"""What is changed on a model after it was optimized: the result does what the original does then, and says so.

Each row edits the drop-in and a plain twin alike; both are compared bit by bit. Either the original forward runs, with
one warning that names the change, or the change is followed without a word.
"""

import contextlib
import copy
import functools
import gc
import pickle
import sys
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import memrewrite
from memrewrite.artifact.load import load
from memrewrite.artifact.save import save
from memrewrite.records.errors import UsageError
from memrewrite.runtime import dict_versions, guards
from memrewrite.runtime.differences import parted
from memrewrite.runtime.dropin import own
from memrewrite.runtime.promise import FallbackWarning
from tests.support.dropins import assert_same_bits, image, step
from tests.support.models import SwishNet

CLASSES = 4


@dataclass
class Settings:
    """A configuration, as libraries hand it to every module."""

    slope: float = 0.5
    unread: int = 1

    @property
    def power(self) -> int:
        return 2 if self.slope < 1 else 3


class Steeper(Settings):
    @property
    def power(self) -> int:
        return 4


class Options(OrderedDict[str, Any]):
    """A configuration whose items are attributes, too, as those of diffusers are."""

    def __init__(self, **values: Any) -> None:
        super().__init__(values)
        vars(self).update(values)


class Adapted(nn.Module):
    """A layer with adapters by name, built as peft builds it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, CLASSES)
        self.down, self.up = nn.ModuleDict(), nn.ModuleDict()
        self.scaling: dict[str, float] = {}
        self.active = ["default"]
        self.add("default", width)

    def add(self, name: str, width: int) -> None:
        self.down[name], self.up[name] = nn.Linear(width, 2, bias=False), nn.Linear(2, CLASSES, bias=False)
        self.scaling[name] = 2.0

    def forward(self, x: Tensor) -> Tensor:
        out = self.base(x)
        for name in self.active:
            if name in self.down.keys():  # noqa: SIM118  (as peft asks)
                out = out + self.up[name](self.down[name](x)) * self.scaling[name]
        return out


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.conv(x)))


class Net(nn.Module):
    """Reads attributes of most kinds."""

    gain = 1.5
    offset: Tensor

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.config, self.table = Settings(), {"inner": Settings(0.75)}
        self.options: Any = Options(scale=0.5)
        self.items = Options(scale=2.0)
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.body = nn.Sequential(Block(width), Block(width))
        self.stages = nn.ModuleList([Block(width), nn.Identity()])
        self.activation = F.gelu
        self.extras: list[nn.Module] = [nn.Tanh()]
        self.shift = torch.tensor(0.25)
        self.schedule: dict[str, Any] = {"temperature": [1.0, 2.0], "at": 0}
        self.limit = 3
        self.head, self.tail = Adapted(width), nn.ModuleList()
        self.register_buffer("offset", torch.zeros(1))

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image) * self.table["inner"].slope * self.schedule["temperature"][self.schedule["at"]]
        x = x * self.options.scale * self.items["scale"]
        for block in self.stages:
            x = block(self.body(x))
        for extra in (*self.extras, *self.tail):
            x = extra(x)
        x = self.scaled(self.activation(x)) + self.shift + self.offset
        if getattr(self, "doubled", False):
            x = x * 2
        x = F.leaky_relu(x, self.config.slope).clamp(-self.limit, self.limit).abs().pow(self.config.power)
        return self.head(x.mean((2, 3)))

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.gain


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def optimized(model: nn.Module, **options: Any) -> Any:
    return memrewrite.optimize(model, image(4), **{"budget": "min", "verify": False, "exact": True, **options})


def set_item(container: Any, key: Any, value: Any) -> None:
    container[key] = value


def tripled(self: Any, x: Tensor) -> Tensor:
    return x * 3


def wider_adapter(model: Any) -> None:
    torch.manual_seed(1)
    model.head.add("second", 8)
    model.head.active.append("second")


def doubled(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


def another_table(model: Any) -> None:
    vars(model.body)["_modules"] = {**model.body._modules, "1": seeded(lambda: Block(8))}


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return make()


Edit = Callable[[Any], Any]
TOLD: dict[str, tuple[Edit, str]] = {
    "a layer appended": (lambda m: m.body.append(nn.Tanh()), "body.2 is another module"),
    "a layer appended to a list": (lambda m: m.stages.append(nn.Tanh()), "stages.2 is another module"),
    "a layer inserted": (lambda m: m.body.insert(0, nn.Tanh()), "body.0 is another module"),
    "a layer removed": (lambda m: m.body.pop(1), "is another module"),
    "layers swapped": (lambda m: set_item(m.stages, 0, m.stages[1]), "stages.0 is another module"),
    "another activation": (lambda m: setattr(m.body[0], "act", nn.ReLU()), "body.0.act is another module"),
    "stride": (lambda m: setattr(m.stem, "stride", (2, 2)), "stem.stride is (2, 2), captured as (1, 1)"),
    "padding": (lambda m: setattr(m.stem, "padding", (2, 2)), "stem.padding is (2, 2), captured as (1, 1)"),
    "dilation": (lambda m: setattr(m.stem, "dilation", (2, 2)), "stem.dilation is (2, 2), captured as (1, 1)"),
    "forward of a child": (lambda m: setattr(m.body[0].act, "forward", torch.tanh), "body.0.act has another forward"),
    "class of a child": (lambda m: setattr(m.body[0].act, "__class__", nn.ReLU), "is a ReLU, captured as a SiLU"),
    "an item of a list": (lambda m: set_item(m.schedule["temperature"], 0, 0.5), "schedule is {'at': 0"),
    "an item of a dictionary": (lambda m: set_item(m.schedule, "at", 1), "schedule is {'at': 1"),
    "another type of number": (lambda m: setattr(m, "limit", 3.0), "limit is 3.0, captured as 3"),
    "an attribute of the class": (lambda m: setattr(m, "gain", 2.5), "gain is new"),
    "a method of the model": (lambda m: setattr(m, "scaled", torch.tanh), "scaled is new"),
    "an attribute that was asked for": (lambda m: setattr(m, "doubled", True), "doubled is new"),
    "a function": (lambda m: setattr(m, "activation", F.relu), "activation is another object"),
    "a module in a list": (lambda m: set_item(m.extras, 0, nn.ReLU()), "extras is another object"),
    "a configuration": (lambda m: setattr(m.config, "slope", 0.125), "config.slope is 0.125, captured as 0.5"),
    "an object in a dictionary": (
        lambda m: setattr(m.table["inner"], "slope", 0.5),
        "table.inner.slope is 0.5, captured as 0.75",
    ),
    "an attribute of a dictionary": (lambda m: setattr(m.options, "scale", 0.25), "options.scale is 0.25, captured as"),
    "an item of one with attributes": (lambda m: set_item(m.items, "scale", 0.5), "items is another object"),
    "another configuration": (lambda m: setattr(m, "config", Settings(1.5)), "config is another object"),
    "a tensor": (lambda m: setattr(m, "shift", torch.ones(4, 1, 1, 1)), "shift is another object"),
    "scale of an adapter": (lambda m: set_item(m.head.scaling, "default", 0.5), "head.scaling is {'default': 0.5}"),
    "active adapter": (lambda m: m.head.active.clear(), "head.active is [], captured as ['default']"),
    "a second adapter": (wider_adapter, "is another module"),
    "no bias": (lambda m: setattr(m.stem, "bias", None), "stem.bias is nothing, captured as torch.float32 (8,)"),
    "an attribute set past the module": (lambda m: vars(m.stem).update(stride=(2, 2)), "stem.stride is (2, 2)"),
    "a table of modules": (another_table, "body._modules is another dictionary"),
    "an empty list filled at once": (lambda m: m.tail._modules.update({"0": nn.Tanh()}), "tail.0 is another module"),
    "a wider buffer": (lambda m: m.register_buffer("offset", torch.ones(4, 1, 1, 1)), "offset is torch.float32 (4,"),
    "all attributes of a child": (
        lambda m: setattr(m.stem, "__dict__", {**vars(m.stem), "stride": (2, 2)}),
        "stem.__dict__ is another dictionary than at capture",
    ),
    "all attributes of the model": (
        lambda m: object.__setattr__(m, "__dict__", {**vars(m), "limit": 2}),
        "__dict__ is another dictionary than at capture",
    ),
    "all attributes of an object": (
        lambda m: setattr(m.config, "__dict__", {"slope": 0.125}),
        "config.__dict__ is another dictionary than at capture",
    ),
    "class of an object": (
        lambda m: setattr(m.config, "__class__", Steeper),
        "config is a Steeper, captured as a Settings",
    ),
}
FOLLOWED: dict[str, Edit] = {
    "the same rate again": lambda m: setattr(m.body[0].norm, "eps", float("1e-5")),
    "a module nobody calls": lambda m: setattr(m, "auxiliary", nn.Linear(2, 2)),
    "an attribute nobody reads": lambda m: setattr(m.stem, "note", "seen"),
    "a setting nobody reads": lambda m: setattr(m.config, "unread", 2),
    "an item of a dictionary whose attributes are read": lambda m: set_item(m.options, "_class_name", "Net"),
    "other weights": lambda m: setattr(m.stem, "weight", nn.Parameter(m.stem.weight.detach() / 2)),
    "another statistic": lambda m: m.register_buffer("offset", torch.ones(1)),
    "another tensor": lambda m: m.offset.fill_(0.5),
    "a state dictionary": lambda m: m.load_state_dict(seeded(Net).state_dict(), assign=True),
}


@pytest.fixture(scope="module")
def result() -> Any:
    """A drop-in that no test changes: they take copies."""
    made = optimized(net())
    assert own(made) is not None
    return made


def told(module: nn.Module, x: Tensor) -> tuple[dict[str, Any], list[str]]:
    """The numbers of a step, and what the module warned of; an artifact has a class of warnings of its own."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        numbers = step(module, x)
    assert {w.category.__name__ for w in seen} <= {FallbackWarning.__name__}
    return numbers, [str(w.message) for w in seen]


def before_copy(result: nn.Module, edit: Edit) -> nn.Module:
    edit(result)
    return copy.deepcopy(result)


def before_pickle(result: nn.Module, edit: Edit) -> nn.Module:
    edit(result)
    twin: nn.Module = pickle.loads(pickle.dumps(result))
    return twin


def at_once(result: nn.Module, edit: Edit) -> nn.Module:
    edit(result)
    return result


@pytest.mark.parametrize("when", [at_once, before_copy, before_pickle], ids=lambda when: when.__name__)
@pytest.mark.parametrize("name", TOLD)
def test_an_edit_runs_the_original_and_is_named_once(
    name: str, when: Callable[[nn.Module, Edit], nn.Module], result: Any
) -> None:
    edit, reason = TOLD[name]
    plain, twin = net(), copy.deepcopy(result)
    assert told(twin, image(4))[1] == []
    edit(plain)
    twin = when(twin, edit)
    numbers, texts = told(twin, image(4))
    assert_same_bits(numbers, step(plain, image(4)))
    assert len(texts) == 1, texts
    assert texts[0].startswith("Optimized Net ran its original forward: ")
    assert reason in texts[0]
    assert told(twin, image(4))[1] == []


@pytest.mark.parametrize("name", FOLLOWED)
def test_an_edit_that_changes_nothing_or_is_looked_up_is_followed(name: str, result: Any) -> None:
    plain, twin = net(), copy.deepcopy(result)
    for model in (plain, twin):
        FOLLOWED[name](model)
    numbers, texts = told(twin, image(4))
    assert texts == []
    assert_same_bits(numbers, step(plain, image(4)))
    guards = own(twin)
    assert guards is not None
    assert guards.guards is not None
    assert guards.guards.hold(), "what was followed is what calls are compared with from then on"


def test_an_edit_that_is_taken_back_runs_the_program_again(result: Any) -> None:
    twin = copy.deepcopy(result)
    twin.stem.padding = (2, 2)
    assert len(told(twin, image(4))[1]) == 1
    copied = copy.deepcopy(twin)
    for module in (twin, copied):
        module.stem.padding = (1, 1)
        kept = own(module)
        assert kept is not None
        assert kept.guards is not None
        assert kept.guards.changed() == kept.broken == ""


def test_a_method_of_a_class_replaced(result: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, twin = net(), copy.deepcopy(result)
    monkeypatch.setattr(nn.SiLU, "forward", tripled)
    numbers, texts = told(twin, image(4))
    assert "SiLU.forward is another than at capture" in texts[0]
    assert_same_bits(numbers, step(plain, image(4)))


class Resized(nn.Module):
    """Sets an attribute in forward before another module reads it, as Swin Transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.side = nn.Conv2d(3, 4, 3, padding=1), 0

    def forward(self, image: Tensor) -> Tensor:
        self.side = image.shape[-1]
        return torch.tanh(self.conv(image)).view(len(image), 4, self.side, self.side).mean((2, 3))


@pytest.mark.parametrize("name", ["stride", "a layer removed", "an item of a list", "a table of modules"])
def test_edits_are_seen_where_dictionaries_have_no_versions(
    name: str, result: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert dict_versions.version_of is not None or sys.version_info[:3] == (3, 13, 0)
    monkeypatch.setattr(guards, "version_of", None)
    test_an_edit_runs_the_original_and_is_named_once(name, before_copy, result)


def test_what_forward_sets_itself_is_no_edit() -> None:
    torch.manual_seed(0)
    model = Resized()
    twin = optimized(model)
    wide = torch.randn(4, 3, 6, 6)
    with pytest.warns(FallbackWarning, match="an input is"):
        twin(wide)
    assert twin.side == 6
    numbers, texts = told(twin, image(4))
    assert texts == []
    assert_same_bits(numbers, step(model, image(4)))


def settled(module: nn.Module) -> guards.Guards:
    """The guards of a drop-in, after calls that changed nothing."""
    kept = own(module)
    assert kept is not None
    assert kept.guards is not None
    for _ in range(3):
        assert kept.guards.hold()
    return kept.guards


@pytest.mark.parametrize("name", TOLD)
def test_an_edit_after_many_calls_is_noticed_at_once(name: str, result: Any) -> None:
    """And stays so: the first look at what has changed must not be taken for the last."""
    twin = copy.deepcopy(result)
    found = settled(twin)
    TOLD[name][0](twin)
    assert [found.hold() for _ in range(3)] == [False] * 3
    assert TOLD[name][1] in found.changed()


@pytest.mark.parametrize("name", ["a wider buffer", "no bias", "other weights"])
def test_an_edit_beside_one_that_nobody_reads_is_noticed(name: str, result: Any) -> None:
    """What is written to counts: tables are looked at whenever anything was, by whatever reads the clock between."""
    twin, other = copy.deepcopy(result), copy.deepcopy(result)
    found, beside = settled(twin), settled(other)
    (TOLD[name][0] if name in TOLD else FOLLOWED[name])(twin)
    other.stem.stride = (1, 1)
    assert beside.hold()
    assert [found.hold() for _ in range(3)] == [False] * 3


def test_a_list_emptied_and_filled_at_once(result: Any) -> None:
    twin = copy.deepcopy(result)
    found = settled(twin)
    twin.tail.append(nn.Tanh())
    del twin.tail._modules["0"]
    assert found.hold()
    assert settled(twin) is found
    twin.tail._modules.update({"0": nn.Tanh()})
    assert not found.hold()


class Gated(nn.Module):
    """Asks for something that most of its kind have not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate = getattr(self, "gate", None)
        y: Tensor = self.linear(x)
        y = y * torch.sigmoid(y)
        return y if gate is None else y * (gate(x) if isinstance(gate, nn.Module) else gate)


WIDTH = 4
ADDED: dict[str, Callable[[Any], None]] = {
    "child": lambda inner: inner.add_module("gate", nn.Sigmoid()),
    "buffer": lambda inner: inner.register_buffer("gate", torch.tensor(0.5)),
    "parameter": lambda inner: inner.register_parameter("gate", nn.Parameter(torch.tensor(0.5))),
    "attribute": lambda inner: setattr(inner, "gate", 0.5),
}


@pytest.mark.parametrize("add", ADDED.values(), ids=ADDED)
def test_what_forward_asked_for_and_did_not_find_is_added(add: Callable[[Any], None]) -> None:
    model, x = nn.Sequential(Gated(), nn.SiLU()), torch.randn(3, WIDTH)
    result: Any = memrewrite.optimize(model, x, verify=False, budget="min")
    twin = copy.deepcopy(model)
    assert own(result) is not None
    for each in (result, twin):
        add(each[0])
    with pytest.warns(FallbackWarning, match="gate is new"):
        assert torch.equal(result(x), twin(x))


class SetUp(nn.Tanh):
    """Notes in its first forward that it is set up, as models of transformers do that record what layers give."""

    def forward(self, x: Tensor) -> Tensor:
        if not getattr(self, "ready", False):
            self.ready = True
        return super().forward(x)


def test_what_forward_sets_up_itself_is_not_there_before() -> None:
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), SetUp()), torch.randn(3, WIDTH)
    result: Any = memrewrite.optimize(model, x, verify=False, budget="min")
    numbers, texts = told(result, x)
    assert texts == []
    assert_same_bits(numbers, step(copy.deepcopy(model), x))
    model(x)  # sets up what the two share
    assert "1.ready is new" in told(result, x)[1][0]


class Parity(tuple[int, ...]):
    """A pair that says nothing of its length, as e3nn's representations do."""

    def __len__(self) -> int:
        raise NotImplementedError


class OfParity(nn.Tanh):
    def __init__(self) -> None:
        super().__init__()
        self.parity = Parity((1, 2))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.parity[1]


def test_a_tuple_that_has_no_length_is_not_asked_for_it() -> None:
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), OfParity()), torch.randn(3, WIDTH)
    result: Any = memrewrite.optimize(model, x, verify=False, budget="min")
    assert_same_bits(told(result, x)[0], step(copy.deepcopy(model), x))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_weights_that_are_computed_once_for_several_calls() -> None:
    """``parametrize.cached`` is no attribute of the model: spectral normalization then takes one step for all calls."""
    torch.manual_seed(0)
    model = nn.Sequential(parametrizations.spectral_norm(nn.Linear(16, 64)), nn.Tanh(), nn.Linear(64, 16), nn.Tanh())
    result: Any = memrewrite.optimize(copy.deepcopy(model), torch.randn(32, 16), verify=False, budget="min")
    for module, count in ((copy.deepcopy(result), 1), (result, 0)):
        x, ours, theirs = torch.randn(32, 16), copy.deepcopy(module), copy.deepcopy(model)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always", FallbackWarning)
            for each in (ours, theirs):
                with parametrize.cached() if count else contextlib.nullcontext():
                    (each(x).square().mean() + each(2 * x).mean()).backward()
        assert ["within parametrize.cached()" in str(w.message) for w in seen] == [True] * count
        assert_same_bits(ours.state_dict(), theirs.state_dict())
        grads = [[p.grad for p in each.parameters()] for each in (ours, theirs)]
        assert all(a is not None and a.equal(b) for a, b in zip(*grads, strict=True))


def test_another_table_of_hooks(result: Any) -> None:
    plain, twin = net(), copy.deepcopy(result)
    settled(twin)
    for model in (plain, twin):
        model.stem._forward_hooks = OrderedDict({1: doubled})
    numbers, texts = told(twin, image(4))
    assert "stem has a hook" in texts[0]
    assert_same_bits(numbers, step(plain, image(4)))


@pytest.mark.parametrize("part", ["", "stem", "config", "body.0.act"])
def test_equal_attributes_in_another_dictionary(part: str, result: Any) -> None:
    """Which nobody watches: what is written there later would go unseen."""
    twin = copy.deepcopy(result)
    found = settled(twin)
    owner = functools.reduce(getattr, filter(None, part.split(".")), twin)
    object.__setattr__(owner, "__dict__", dict(vars(owner)))
    assert [found.hold() for _ in range(3)] == [False] * 3
    assert found.changed() == f"{part}.__dict__ is another dictionary than at capture".removeprefix(".")


def test_a_table_of_hooks_that_is_put_there_empty_and_used_later(result: Any) -> None:
    twin = copy.deepcopy(result)
    found = settled(twin)
    twin.stem._forward_hooks = OrderedDict()
    assert found.hold()
    twin.stem.register_forward_hook(doubled)
    assert not found.hold()


@pytest.mark.skipif(sys.version_info < (3, 12) or sys.version_info[:3] == (3, 13, 0), reason="versions without a clock")
def test_training_asks_for_no_versions(result: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that a plain loop does writes where forward reads."""
    twin = copy.deepcopy(result)
    optimizer = torch.optim.AdamW(twin.parameters())
    asked: list[int] = []

    def version(table: dict[str, Any]) -> int:
        asked.append(1)
        assert dict_versions.version_of is not None
        return dict_versions.version_of(table)

    def one_step() -> None:
        twin(image(4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        one_step()
    monkeypatch.setattr(guards, "version_of", version)
    for _ in range(3):
        one_step()
    assert asked == []


def frozen(part: Callable[[Any], Any], on: bool = False) -> Edit:
    return lambda model: part(model).requires_grad_(on)


FROZEN: dict[str, tuple[Edit, bool]] = {  # whether it is told
    "everything before the head": (
        lambda m: [p.requires_grad_("head" in name) for name, p in m.named_parameters()],
        False,
    ),
    "the first layers": (lambda m: [part.requires_grad_(False) for part in (m.stem, m.body[0])], True),
    "weights of convolutions": (
        lambda m: [p.requires_grad_(False) for p in m.parameters() if p.dim() == 4],
        True,
    ),
    "normalizations": (lambda m: [p.requires_grad_(False) for n, p in m.named_parameters() if "norm" in n], True),
}


@pytest.fixture(scope="module")
def larger() -> Any:
    """A drop-in for larger images, of which tests take copies."""
    return memrewrite.optimize(net(), torch.randn(16, 3, 16, 16), budget="min", verify=False, exact=True)


@pytest.mark.parametrize("name", FROZEN)
def test_freezing_afterwards_takes_no_more_than_the_original(name: str, larger: Any) -> None:
    freeze, expected = FROZEN[name]
    plain, twin, x = net(), copy.deepcopy(larger), torch.randn(16, 3, 16, 16)
    for model in (plain, twin):
        freeze(model)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        twin(x).square().mean().backward()
    assert bool(seen) == expected
    assert all("was trained, or frozen, after it was planned" in str(w.message) for w in seen)
    plain(x).square().mean().backward()
    gradients = ({name: p.grad for name, p in model.named_parameters()} for model in (twin, plain))
    assert_same_bits(*gradients)
    ours, theirs = (memrewrite.measure(model, x, optimizer="none").peak for model in (twin, plain))
    assert ours <= theirs


def test_unfreezing_afterwards() -> None:
    def make() -> Net:
        model = net()
        model.body.requires_grad_(False)
        return model

    plain, twin = make(), optimized(make())
    assert told(twin, image(4))[1] == []
    for model in (plain, twin):
        model.requires_grad_()
    numbers, texts = told(twin, image(4))
    assert len(texts) == 1
    assert_same_bits(numbers, step(plain, image(4)))


@pytest.mark.parametrize("budget", ["min", "1GB"])
def test_layers_that_train_later_are_told_of_where_the_budget_does_not_hold(budget: str) -> None:
    model, x = net(), torch.randn(16, 3, 16, 16)
    model.stem.requires_grad_(False)
    twin = memrewrite.optimize(model, x, budget=budget, optimizer="none", verify=False)
    twin.requires_grad_()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            twin(x).square().mean().backward()
    peak = memrewrite.measure(twin, x, optimizer="none").peak
    told = f"which was frozen when it was planned; optimize again for a plan. A step takes {peak / 1e6:.2f} MB"
    assert [str(w.message) for w in seen if told not in str(w.message)] == []
    assert len(seen) == (budget == "min")


def test_a_drop_in_that_is_gone_keeps_nothing() -> None:
    twin = optimized(net())
    weight = weakref.ref(twin.stem.weight)
    gc.collect()
    gc.disable()
    try:
        del twin
        assert weight() is None
    finally:
        gc.enable()


# What compiled code follows: it looks parameters and tables up, and guards tensors itself.
QUIET = {"a tensor", "no bias", "a table of modules", "a wider buffer"}


@pytest.mark.parametrize("name", TOLD)
def test_compiled_code_is_guarded_too(name: str, result: Any) -> None:
    torch.compiler.reset()  # else the limit of recompilations is reached, and nothing is compiled any more
    plain, twin = net(), copy.deepcopy(result)
    compiled: Any = torch.compile(twin, backend="eager")
    with torch.no_grad():
        compiled(image(4))
        for model in (plain, twin):
            model.load_state_dict(net().state_dict())
            TOLD[name][0](model)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            ours = compiled(image(4))
        assert ours.equal(plain(image(4)))
        assert sum(w.category is FallbackWarning for w in seen) == (name not in QUIET)


class Tied(nn.Module):
    """A head with the weight of the stem, and one without a weight of its own that lies in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mix = nn.Conv2d(3, 3, 3, padding=1, bias=False), nn.Conv2d(3, 3, 3, padding=1, bias=False)
        self.head, self.again = nn.Conv2d(3, 3, 3, padding=1, bias=False), self.mix
        self.head.weight = self.stem.weight

    def forward(self, image: Tensor) -> Tensor:
        x = torch.tanh(self.mix(torch.tanh(self.stem(image))))
        return self.head(torch.tanh(self.again(x))).mean((2, 3))


def untie(model: Any) -> None:
    model.head.weight = nn.Parameter(model.head.weight.detach() / 2)


def assign_each(model: Any) -> None:
    model.load_state_dict({name: value / 2 for name, value in model.state_dict().items()}, assign=True)


@pytest.fixture(scope="module")
def of_tied() -> Any:
    return optimized(seeded(Tied))


@pytest.mark.parametrize("when", [at_once, before_copy, before_pickle], ids=lambda when: when.__name__)
@pytest.mark.parametrize("edit", [untie, assign_each])
def test_a_weight_that_is_no_longer_tied(edit: Edit, when: Callable[[Any, Edit], Any], of_tied: Any) -> None:
    plain, twin = seeded(Tied), copy.deepcopy(of_tied)
    assert told(twin, image(4))[1] == []
    plain = when(plain, edit)
    twin = when(twin, edit)
    numbers, texts = told(twin, image(4))
    assert_same_bits(numbers, step(plain, image(4)))
    assert [text.partition(": ")[2] for text in texts] == [
        "stem.weight and head.weight are two parameters, captured as one."
    ]
    for model in (plain, twin):
        model.head.weight = model.stem.weight
    tied = own(twin)
    assert tied is not None
    assert tied.guards is not None
    assert tied.guards.changed() == parted(tied.owners, type(twin)._memrewrite.tied) == ""
    assert_same_bits(step(twin, image(4)), step(plain, image(4)))


class Scaled(nn.Module):
    """Two layers with one table: a buffer of both, or an attribute; a third only keeps it."""

    def __init__(self, buffer: bool) -> None:
        super().__init__()
        table = torch.rand(3, 1, 1)
        self.stem, self.mix = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
        for layer in (self.stem, self.mix):
            (layer.register_buffer if buffer else functools.partial(setattr, layer))("table", table)
        self.first = table

    def forward(self, image: Tensor) -> Tensor:
        x = torch.tanh(self.stem(image) * self.stem.table)
        return torch.tanh(self.mix(x) * self.mix.table).mean((2, 3))


SCALED = {"a buffer": functools.partial(Scaled, True), "an attribute": functools.partial(Scaled, False)}


@pytest.fixture(scope="module", params=SCALED)
def of_scaled(request: pytest.FixtureRequest) -> Any:
    make = SCALED[request.param]
    return make, optimized(seeded(make))


def part(model: Any) -> None:
    model.mix.table = model.mix.table / 2


def part_first(model: Any) -> None:
    model.stem.table = model.stem.table / 2


@pytest.mark.parametrize("when", [at_once, before_copy, before_pickle], ids=lambda when: when.__name__)
@pytest.mark.parametrize("edit", [part, part_first])
def test_a_tensor_that_is_no_longer_that_of_another_module(
    edit: Edit, when: Callable[[Any, Edit], Any], of_scaled: Any
) -> None:
    plain, twin = seeded(of_scaled[0]), copy.deepcopy(of_scaled[1])
    assert told(twin, image(4))[1] == []
    plain = when(plain, edit)
    twin = when(twin, edit)
    numbers, texts = told(twin, image(4))
    assert_same_bits(numbers, step(plain, image(4)))
    assert [text.partition(": ")[2] for text in texts] == ["stem.table and mix.table are two tensors, captured as one."]


def test_a_tensor_that_forward_does_not_read_may_be_another(of_scaled: Any) -> None:
    twin = copy.deepcopy(of_scaled[1])
    twin.first = twin.first / 2
    assert told(twin, image(4))[1] == []


@pytest.mark.parametrize("of_buffer", [False, True])
def test_a_weight_is_no_longer_tied_where_the_result_is_compiled(of_tied: Any, of_buffer: bool) -> None:
    torch.compiler.reset()
    make, edit = (SCALED["a buffer"], part) if of_buffer else (Tied, untie)
    plain, twin = seeded(make), optimized(seeded(make)) if of_buffer else copy.deepcopy(of_tied)
    compiled: Any = torch.compile(twin, backend="eager")
    for untied in (False, True):
        for model in (plain, twin) if untied else ():
            edit(model)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            ours = compiled(image(4))
        assert ours.equal(plain(image(4)))
        assert sum(w.category is FallbackWarning for w in seen) == untied


@pytest.mark.parametrize("name", ["an item of a list", "a configuration", "scale of an adapter"])
def test_an_artifact_knows_what_its_model_was_captured_with(name: str, result: Any, tmp_path: Path) -> None:
    edit, reason = TOLD[name]
    save(result, tmp_path / "out")
    plain, same, other = net(), load(tmp_path / "out", net()), net()
    assert told(same, image(4))[1] == []
    for model in (plain, other):
        edit(model)
    numbers, texts = told(load(tmp_path / "out", other), image(4))
    assert_same_bits(numbers, step(plain, image(4)))
    assert len(texts) == 1
    assert reason in texts[0]


class Quantized(Tensor):
    """A weight in eighths, of which products alone are known, as those of libraries that quantize."""

    def __new__(cls, eighths: Tensor) -> "Quantized":
        made: Quantized = Tensor._make_wrapper_subclass(cls, eighths.shape, dtype=torch.float32)
        made.eighths = eighths
        return made

    eighths: Tensor

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["eighths"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: None, *sizes: Any) -> "Quantized":
        return cls(inner["eighths"])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            return F.linear(args[0], args[1].eighths / 8, *args[2:])
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore
        if func is torch.ops.aten.detach.default:
            return cls(args[0].eighths)
        raise NotImplementedError(f"{func} of a quantized weight")


@pytest.mark.parametrize("compiled", [False, True])
def test_a_weight_that_is_quantized_afterwards(compiled: bool) -> None:
    model, x = SwishNet(width=8, depth=2).eval(), torch.randn(64, 8)
    result = memrewrite.optimize(model, x, budget="min")
    layer: Any = model.layers[1]
    layer.weight = nn.Parameter(Quantized((layer.weight.detach() * 8).round()), requires_grad=False)
    call = torch.compile(result, backend="eager", fullgraph=True) if compiled else result
    change = "what it was captured with" if compiled else "layers.1.weight is a Quantized of torch.float32"
    with torch.no_grad(), pytest.warns(FallbackWarning, match=change):
        assert torch.equal(call(x), model(x))
    for function in (memrewrite.estimate, memrewrite.measure, memrewrite.optimize):
        with pytest.raises(UsageError, match=r"^layers\.1\.weight is a tensor of a class of its own \(Quantized\)"):
            function(model, x)
