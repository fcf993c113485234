"""Snapshots put back what changed, also in containers whose own class refuses to be written or does more."""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn

import memrewrite
from memrewrite.measurement.measuring import preserved_state
from memrewrite.measurement.snapshot import State
from memrewrite.simulate.fake.copier import tensors_of
from memrewrite.state.attributes import Attributes
from memrewrite.state.containers import contents, copied, is_container, put, put_back
from memrewrite.workload.step import Inputs


class Frozen(OrderedDict[str, Any]):
    """As the configurations of diffusers are: whatever would change it raises."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for key, value in self.items():
            setattr(self, key, value)
        vars(self)["frozen"] = True

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError("You cannot change a Frozen instance.")

    __delitem__ = setdefault = pop = update = clear = copy = __reduce_ex__ = _refuse

    def __setitem__(self, name: str, value: Any) -> None:
        if "frozen" in vars(self):
            self._refuse()
        super().__setitem__(name, value)


class Told(list[Any]):
    """Tells of whatever is done to it, as lists do that others watch."""

    told: int = 0

    def _tell(self, method: Callable[..., Any], *args: Any) -> Any:
        self.told += 1
        return method(self, *args)

    def append(self, item: Any) -> None:
        self._tell(list.append, item)

    def extend(self, items: Any) -> None:
        self._tell(list.extend, items)

    def clear(self) -> None:
        self._tell(list.clear)

    def __setitem__(self, place: Any, item: Any) -> None:
        self._tell(list.__setitem__, place, item)

    def __iter__(self) -> Any:
        self.told += 1
        return super().__iter__()


class Slotted(dict[str, Any]):
    __slots__ = ("extra",)


def slotted() -> Slotted:
    made = Slotted(a=1)
    made.extra = "kept"  # type: ignore[attr-defined]
    return made


CONTAINERS: dict[str, Callable[[], Any]] = {
    "dict": lambda: {"b": 1, "a": 2},
    "ordered": lambda: OrderedDict(b=1, a=2),
    "default": lambda: defaultdict(list, {"b": [1]}),
    "list": lambda: [3, 1, 2],
    "set": lambda: {3, 1, 2},
    "deque": lambda: deque([1, 2, 3], maxlen=3),
    "frozen": lambda: Frozen(b=1, a=2),
    "told": lambda: Told([1, 2]),
    "slotted": slotted,
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_contents_are_copied_and_put_back(name: str) -> None:
    made = CONTAINERS[name]()
    before = contents(made)
    twin = copied(made)
    assert type(twin) is type(made)
    assert contents(twin) == before
    assert getattr(twin, "__dict__", {}) == getattr(made, "__dict__", {})
    put(made, [])
    assert contents(made) == []
    assert contents(twin) == before
    put_back(made, before)
    assert contents(made) == before
    assert is_container(made)


def test_what_a_copy_is_made_with_is_kept() -> None:
    assert copied(deque([1, 2, 3], maxlen=3)).maxlen == 3
    assert copied(defaultdict(list))["new"] == []
    assert copied(slotted()).extra == "kept"
    moved = OrderedDict(a=1, b=2)
    moved.move_to_end("a")
    assert contents(moved) == ["b", 2, "a", 1]
    assert not is_container((1, 2))


class Configured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.config = Frozen(width=4, act="silu", sizes=[1, 2])
        self.seen = Told([1])
        self.tables = Frozen(scale=torch.ones(4))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.linear(x)) * self.tables["scale"] * self.config["width"] * vars(self.config)["width"]


class Counting(Configured):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        OrderedDict.__setitem__(self.config, "width", 4 + self.calls)
        self.config["sizes"].append(self.calls)
        return super().forward(x)


SNAPSHOTS: dict[str, Callable[[nn.Module], Callable[[], None]]] = {
    "attributes": lambda module: Attributes(module).restore,
    "state": lambda module: State((module,), ()).restore,
}


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_what_did_not_change_is_left_alone(name: str) -> None:
    module = Configured()
    told = module.seen.told
    SNAPSHOTS[name](module)()
    assert module.seen.told == told
    assert dict(module.config) == {"width": 4, "act": "silu", "sizes": [1, 2]}


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_what_changed_is_put_back_without_the_classes_methods(name: str) -> None:
    module = Counting()
    restore = SNAPSHOTS[name](module)
    module(torch.ones(2, 4))
    restore()
    assert module.calls == module.seen.told == 0
    assert contents(module.seen) == [1]
    assert contents(module.config) == ["width", 4, "act", "silu", "sizes", [1, 2]]


def test_an_input_written_in_place_loses_the_history_it_got() -> None:
    module, x = nn.Linear(4, 4), torch.ones(2, 4)
    with preserved_state(module, Inputs((x,), {})):
        x.add_(module(x))
    assert torch.equal(x, torch.ones(2, 4))
    assert x.grad_fn is None
    assert not x.requires_grad


def test_tensors_in_a_frozen_table_are_found() -> None:
    module = Configured()
    assert any(tensor is module.tables["scale"] for tensor in tensors_of(module))


def test_a_model_with_a_frozen_configuration_is_measured_and_rewritten() -> None:
    module, x = Configured(), torch.ones(2, 4)
    config = dict(module.config)
    assert memrewrite.measure(module, x).peak > 0
    optimized = memrewrite.optimize(module, x)
    assert torch.equal(optimized(x), module(x))
    assert dict(module.config) == config
