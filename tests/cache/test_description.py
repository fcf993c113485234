"""What counts of a model and what does not: a table of edits that make it another one, and of those that do not."""

import functools
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memrewrite.cache.description import Description, IndescribableError

GAIN = 2.0
TABLE = torch.arange(3.0)
OPTIONS: dict[str, Any] = {"bias": [1, 2]}


def scaled(x: Tensor) -> Tensor:
    return x * GAIN


def twice(x: Tensor) -> Tensor:
    return scaled(x) + TABLE.sum() + len(OPTIONS["bias"])


class Settings:
    def __init__(self) -> None:
        self.rate = 0.5


class Part(nn.Module):
    kept: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("kept", torch.zeros(4))
        self.settings, self.sizes, self.raw = Settings(), [3, 5], {"table": torch.ones(2)}
        self.act: Callable[[Tensor], Tensor] = torch.relu

    def forward(self, x: Tensor) -> Tensor:
        return self.act(twice(self.linear(x))) + self.helper(x)

    def helper(self, x: Tensor) -> Tensor:
        return self.other(x) + self.kept


def described(model: Any, **how: Any) -> str:
    found = Description()
    found.add("model", model, **how)
    return found.digest()


def _tie(model: Part) -> None:
    model.other.weight = model.linear.weight


def _share(model: Part) -> None:
    model.other.weight.data = model.linear.weight.data.view(4, 4)


def _replace_forward(model: Part) -> None:
    model.forward = types.MethodType(lambda self, x: self.linear(x), model)  # type: ignore[method-assign]


EDITS: dict[str, Callable[[Part], Any]] = {
    "an attribute of a submodule": lambda model: setattr(model.linear, "in_features", 5),
    "an attribute of an object": lambda model: setattr(model.settings, "rate", 0.25),
    "a list": lambda model: model.sizes.append(1),
    "True for 1": lambda model: setattr(model, "sizes", [3, True]),
    "a tensor in a dictionary": lambda model: model.raw["table"].add_(1),
    "a function": lambda model: setattr(model, "act", torch.tanh),
    "a lambda": lambda model: setattr(model, "act", lambda x: x + 1),
    "another lambda": lambda model: setattr(model, "act", lambda x: x + 2),
    "a partial": lambda model: setattr(model, "act", functools.partial(torch.add, other=1)),
    "another partial": lambda model: setattr(model, "act", functools.partial(torch.add, other=2)),
    "forward on the object": _replace_forward,
    "a child more": lambda model: model.add_module("more", nn.ReLU()),
    "a child of another class": lambda model: setattr(model, "other", nn.Identity()),
    "the mode of a submodule": lambda model: model.other.eval(),
    "a frozen parameter": lambda model: model.linear.weight.requires_grad_(False),
    "a type": lambda model: model.linear.double(),
    "strides": lambda model: setattr(model.linear.weight, "data", model.linear.weight.data.t().contiguous().t()),
    "a gradient": lambda model: setattr(model.linear.weight, "grad", torch.zeros(4, 4)),
    "a tied parameter": _tie,
    "shared memory": _share,
    "no bias": lambda model: setattr(model.linear, "bias", None),
    "a buffer that is not saved": lambda model: model._non_persistent_buffers_set.add("kept"),
    "a hook": lambda model: model.linear.register_forward_hook(lambda *args: None),
    "a hook on a tensor": lambda model: model.linear.weight.register_hook(lambda grad: grad),
}


def test_edits_make_another_model() -> None:
    found = {"as it is": described(Part())}
    for name, edit in EDITS.items():
        model = Part()
        edit(model)
        found[name] = described(model)
    assert [name for name in found if sum(found[name] == other for other in found.values()) > 1] == []


REPLACED: dict[str, tuple[Any, str, Any]] = {
    "a number that code names": (sys.modules[__name__], "GAIN", 3.0),
    "a tensor that code names": (sys.modules[__name__], "TABLE", torch.arange(4.0)),
    "what a list that code names holds": (sys.modules[__name__], "OPTIONS", {"bias": [1]}),
    "a function that a function names": (sys.modules[__name__], "scaled", lambda x: x),
    "a method": (Part, "helper", lambda self, x: x),
    "an attribute of the class": (Part, "new", 1),
    "a function of PyTorch's": (nn.Linear, "forward", lambda self, x: x),
}


@pytest.mark.parametrize("name", REPLACED)
def test_what_code_leads_to_counts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = described(Part())
    owner, attribute, value = REPLACED[name]
    monkeypatch.setattr(owner, attribute, value, raising=False)
    assert described(Part()) != before
    monkeypatch.undo()
    assert described(Part()) == before


def test_a_variable_of_the_environment_that_code_asks_for_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    def forward(x: Tensor) -> Tensor:
        return x if os.environ.get("MEMREWRITE_TEST_FAST") else -x

    before = described(forward)
    monkeypatch.setenv("MEMREWRITE_TEST_FAST", "1")
    assert described(forward) != before


def test_values_of_parameters_and_buffers_do_not_count() -> None:
    model = Part()
    before = described(model)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.add_(1)
    assert described(model) == before


def test_by_form_no_value_counts() -> None:
    target = torch.zeros(3)
    assert described((target, 1), values=False) == described((target + 1, 1), values=False)
    assert described((target, 1)) != described((target + 1, 1))
    assert described((target, 1), values=False) != described((target, 2), values=False)
    assert described((target, target), values=False) != described((target, target + 1), values=False)


def test_what_has_no_description_is_refused() -> None:
    model = Part()
    model.sizes = iter([1])  # type: ignore[assignment]
    with pytest.raises(IndescribableError, match="list_iterator"):
        described(model)


class Only:
    __slots__ = ()

    def __reduce__(self) -> str:
        return "ONLY"


def test_the_only_one_of_a_class_is_described_by_it() -> None:
    """As ``typing.NoDefault`` is, which type variables hold."""
    first, again, other = Part(), Part(), Part()
    first.default, again.default, other.default = Only(), Only(), None  # type: ignore[assignment]
    assert described(first) == described(again) != described(other)


def test_what_is_made_in_c_is_refused() -> None:
    model = Part()
    model.library = torch.library.Library("described", "FRAGMENT").m  # type: ignore[assignment]
    with pytest.raises(IndescribableError, match="_DispatchModule"):
        described(model)


def test_an_operator_of_ones_own_is_described_by_its_functions() -> None:
    def operator(factor: float) -> Any:
        def scaled(x: Tensor) -> Tensor:
            return x * factor

        operator = torch.library.custom_op("described::scaled", scaled, mutates_args=())
        operator.register_fake(torch.empty_like)
        return operator

    found = []
    for factor in (2.0, 2.0, 3.0):
        model = Part()
        model.operator = operator(factor)
        found.append(described(model))
    assert found[0] == found[1] != found[2]


def test_what_leads_too_far_is_refused() -> None:
    model = Part()
    model.sizes = [object() for _ in range(200_001)]  # type: ignore[misc]
    with pytest.raises(IndescribableError, match="more than 200000"):
        described(model)


MODEL = """
import torch
from torch import nn

{before}
NAMES = {{"relu", "tanh", "silu"}}

def helper(x):{comment}
    return x + {number} if "relu" in NAMES or "x" in {{"a", "b", "c"}} else x

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.kinds = nn.Linear(2, 2), {{torch.float32, torch.float64, int, str}}

    def forward(self, x):
        return helper(self.fc(x))
"""


def digest_elsewhere(folder: Path, seed: int, **how: Any) -> str:
    """The description of the model in a process of its own, where texts hash to other numbers."""
    parts = {"before": "", "comment": "", "number": 1, **how}
    (folder / "net.py").write_text(MODEL.format(**parts))
    code = (
        "import sys; sys.path.insert(0, '.'); from net import Net; from memrewrite.cache.description import *;"
        "found = Description(); found.add('model', Net()); print(found.digest())"
    )
    environment = {**__import__("os").environ, "PYTHONHASHSEED": str(seed), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_other_processes_find_the_same_and_lines_and_comments_do_not_count(tmp_path: Path) -> None:
    first = digest_elsewhere(tmp_path, 1)
    assert digest_elsewhere(tmp_path, 2, before="UNUSED = 3\n\n", comment="  # a word") == first
    assert digest_elsewhere(tmp_path, 1, number=2) != first


def test_of_an_installed_package_its_files_count_and_what_was_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site-packages" / "some_layers"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from .layers import Layer\n")
    (package / "more.py").write_text("")
    (package / "layers.py").write_text(
        "from torch import nn\nSESSION = 'a'\ndef half(x):\n    return x / 2\nclass Layer(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.word = len(SESSION)\n"
        "    def forward(self, x):\n        return half(x)\n    def save(self):\n        pass\n"
    )
    monkeypatch.syspath_prepend(str(package.parent))
    layers: Any = __import__("some_layers.layers").layers
    from memrewrite.cache import libraries

    class Mine(layers.Layer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()

    before = described(Mine())
    monkeypatch.setattr(layers, "SESSION", "b")  # another in each process, and for those who make layers alone
    assert described(Mine()) == before
    before = described(layers.Layer())
    monkeypatch.setattr(layers, "half", lambda x: x)
    assert described(layers.Layer()) != before
    monkeypatch.undo()
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setattr(layers.Layer, "save", lambda self: None)  # which forward does not call
    assert described(layers.Layer()) == before
    (package / "more.py").write_text("x = 1\n")
    libraries.stamp.cache_clear()
    assert described(layers.Layer()) != before
    for name in [name for name in sys.modules if name.startswith("some_layers")]:
        del sys.modules[name]
