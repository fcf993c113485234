"""Targets: the grammar, the search for a model and its inputs, and a sentence for every way to be wrong."""

import os
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from memrewrite.process.child import environment
from memrewrite.records.errors import DoesNotFitError, MemrewriteError, TargetError, UsageError
from memrewrite.simulate.fake.batch import at_batch, part_of
from memrewrite.workload.inputs import RandomInput, from_texts, normalise, suggestion, to_device, with_batch_size
from memrewrite.workload.step import Inputs
from memrewrite.workload.target import Loaded, importable, load

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 2)

    def forward(self, x, scale=1.0):
        return self.fc(x) * scale
"""
WIDE = """
class Wide(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc = nn.Linear(width, width)
"""
INPUTS = "\ndef get_inputs():\n    return torch.ones(3, 4)\n"
PAIR = "\ndef pair():\n    return Net(), (torch.ones(3, 4),)\n"


def loaded_targets() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] in ("net", "net_layers", "pkg_under_test")]


@pytest.fixture(autouse=True)
def _clean_modules() -> Iterator[None]:
    """Targets of other tests are put aside meanwhile."""
    others = {name: sys.modules.pop(name) for name in loaded_targets()}
    path = list(sys.path)
    yield
    assert sys.path == path
    for name in loaded_targets():
        del sys.modules[name]
    sys.modules.update(others)


def write(folder: Path, text: str, name: str = "net.py") -> str:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return str(file)


@pytest.mark.parametrize(
    ("code", "attribute", "name"),
    [
        (NET + INPUTS, ":Net", "net.py:Net"),
        (NET + INPUTS, "", "net.py:Net"),
        (NET + INPUTS + "net = Net()\n", ":net", "net.py:net"),
        (NET + INPUTS + "def make(width=3):\n    return Net()\n", ":make", "net.py:make"),
        (NET + PAIR, ":pair", "net.py:pair"),
        (NET + WIDE + INPUTS + "get_model = Net\n", "", "net.py:get_model"),
        (NET + WIDE + INPUTS + "model = Net()\ndef build_model():\n    return model\n", "", "net.py:build_model"),
        (NET + WIDE + INPUTS + "model = Net()\n", "", "net.py:model"),
        (NET + INPUTS + "class Zoo:\n    tiny = Net\n", ":Zoo.tiny", "net.py:Zoo.tiny"),
        (NET + INPUTS + "from torch.nn import Sequential, Linear\n", "", "net.py:Net"),
        (NET + INPUTS + "Alias = Net\n", "", "net.py:Alias"),
    ],
    ids=[
        "class",
        "only-class",
        "instance",
        "factory",
        "pair",
        "get_model",
        "build_model",
        "model",
        "dotted",
        "imported",
        "alias",
    ],
)
def test_the_model_is_found(tmp_path: Path, code: str, attribute: str, name: str) -> None:
    loaded = load(write(tmp_path, code) + attribute)
    assert type(loaded.module).__name__ == "Net"
    assert loaded.name == name
    assert loaded.module(*loaded.inputs.args, **loaded.inputs.kwargs).shape == (3, 2)


def test_a_package_is_looked_up_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, NET + INPUTS, "pkg_under_test/zoo.py")
    write(tmp_path, "", "pkg_under_test/__init__.py")
    monkeypatch.chdir(tmp_path)
    loaded = load("pkg_under_test.zoo:Net")
    assert (loaded.name, loaded.folder) == ("Net", tmp_path)


def test_imports_beside_the_file_work_and_the_module_can_be_pickled(tmp_path: Path) -> None:
    write(tmp_path, NET, "net_layers.py")
    loaded = load(write(tmp_path, "import torch\nfrom net_layers import Net\nget_model = Net" + INPUTS))
    assert type(pickle.loads(pickle.dumps(loaded.module))).__module__ == "net_layers"
    assert loaded.folder == tmp_path


def test_the_module_is_registered_under_the_files_name(tmp_path: Path) -> None:
    loaded = load(write(tmp_path, NET + INPUTS))
    assert type(loaded.module).__module__ == "net"
    assert sys.modules["net"].__file__ == str(tmp_path / "net.py")


def test_a_file_named_like_a_library_module_hides_nothing(tmp_path: Path) -> None:
    loaded = load(write(tmp_path, NET + INPUTS, "random.py"))
    assert type(loaded.module).__module__.startswith("random_")
    assert not str(sys.modules["random"].__file__).startswith(str(tmp_path))


def test_processes_that_are_started_find_no_files_beside_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of which one may be called random.py: a process that loads the target adds their folder itself."""

    def found() -> bool:
        return str(tmp_path) in environment()["PYTHONPATH"].split(os.pathsep)

    with importable(tmp_path):
        assert sys.path[0] == str(tmp_path)
        assert not found()
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(tmp_path))  # as a variable of the user's does
            assert found()


WRONG_TARGETS = {
    "no-file": (NET, "nets.py", "There is no file .*nets.py; did you mean .*net.py"),
    "not-python": (NET, "net.txt", "is not a Python file; give path/model.py"),
    "empty-attribute": (NET, "net.py:", "is not of the form path/model.py"),
    "bad-attribute": (NET, "net.py:a-b", "is not of the form path/model.py"),
    "import-error": ("import torch\nimport not_there\n", "net.py", "line 2: importing it raised ModuleNotFoundError"),
    "syntax-error": ("x = 1\nx = = 2\n", "net.py", "line 2: importing it raised SyntaxError"),
    "relative-import": ("from .layers import Net\n", "net.py", "is given as package.module:attr"),
    "exits": ("\n\nraise SystemExit(3)\n", "net.py", "line 3: importing it raised SystemExit.*__main__"),
    "no-model": ("x = 1\n", "net.py", "defines no get_model, build_model, model or nn.Module subclass"),
    "several": (
        NET + WIDE,
        "net.py",
        "2 nn.Module subclasses; .*\n.*net.py:Net\n.*net.py:Wide needs the argument width",
    ),
    "other-name": (
        NET.replace("class Net", "class _N") + "first = _N()\nlast = _N()\ndel _N",
        "net.py",
        "other names.*\n.*net.py:first",
    ),
    "missing": (NET, "net.py:Nett", "has no 'Nett'; did you mean .*net.py:Net"),
    "missing-far": (NET, "net.py:qqqqq", "has no 'qqqqq'; check the name"),
    "needs-arguments": (NET + WIDE, "net.py:Wide", r"needs the argument width; add a function .* Wide\(\.\.\.\)"),
    "not-a-module": (NET + "x = 1", "net.py:x", "gives an object of type int, not a torch.nn.Module"),
    "makes-no-module": (NET + "def make():\n    return {}", "net.py:make", "of type dict, not a torch.nn.Module"),
    "raises": (
        NET + "def make():\n    return 1 / 0\n",
        "net.py:make",
        "line 13: calling .*:make raised ZeroDivisionError",
    ),
    "no-inputs": (NET, "net.py", r"gives no example inputs; add get_inputs\(\) to it, or say for example --input 8x4$"),
    "inputs-raise": (
        NET + "def get_inputs():\n    raise KeyError('k')",
        "net.py",
        "line 13: calling .*:get_inputs raised KeyError",
    ),
    "inputs-need": (NET + "def get_inputs(a):\n    return a", "net.py", "needs the argument a; give batch_size by"),
    "inputs-batch": (
        NET + "def get_inputs(batch_size):\n    return 1",
        "net.py",
        "needs the argument batch_size; give batch_size by",
    ),
    "inputs-text": (NET + "example_inputs = 'text'", "net.py", "gives an object of type str; give a tensor"),
    "inputs-empty": (NET + "example_inputs = (1, 2)", "net.py", "gives no tensor"),
}


@pytest.mark.parametrize(("code", "target", "sentence"), WRONG_TARGETS.values(), ids=WRONG_TARGETS)
def test_wrong_targets(tmp_path: Path, code: str, target: str, sentence: str) -> None:
    write(tmp_path, code)
    with pytest.raises(TargetError, match=f"(?s){sentence}"):
        load(str(tmp_path / target))


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("torch.nn", "names no model"),
        ("Net", "names no model"),
        (":Net", "not of the form"),
        ("no_such_package.zoo:Net", "No module 'no_such_package.zoo' can be imported"),
        ("torch.no_such_module:Net", "No module 'torch.no_such_module' can be imported"),
        ("torch.nn:Linearr", "has no 'Linearr'; did you mean torch.nn:Linear"),
        ("torch.nn:Linear", "torch.nn:Linear needs the arguments in_features, out_features"),
        ("some/folder:Net", "is not a Python file"),
        ("", "not a Python file"),
    ],
)
def test_wrong_module_targets(target: str, sentence: str) -> None:
    with pytest.raises(TargetError, match=sentence):
        load(target)


def test_the_cause_is_kept(tmp_path: Path) -> None:
    with pytest.raises(TargetError) as caught:
        load(write(tmp_path, "import not_there"))
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
    assert "net" not in sys.modules


X = torch.ones(3, 4)


@pytest.mark.parametrize(
    ("value", "args", "kwargs"),
    [
        (X, 1, []),
        ((X,), 1, []),
        ([X, 2], 2, []),
        ((X, {"scale": X}), 2, []),
        (((X,), {"scale": 2.0}), 1, ["scale"]),
        (([], {"x": X}), 0, ["x"]),
        ({"x": X, "scale": 1.0}, 0, ["x", "scale"]),
        (((X, X), X), 2, []),
    ],
    ids=["tensor", "tuple", "list", "tensor-and-dict", "args-and-kwargs", "list-and-kwargs", "kwargs", "nested"],
)
def test_example_inputs_in_one_form(value: object, args: int, kwargs: list[str]) -> None:
    inputs = normalise(value, "here")
    assert (len(inputs.args), list(inputs.kwargs)) == (args, kwargs)


def take(tmp_path: Path, code: str, *, inputs: tuple[str, ...] = (), batch_size: int | None = None) -> Loaded:
    return load(write(tmp_path, NET + code) + ":Net", inputs, batch_size)


@pytest.mark.parametrize(
    ("code", "batch_size", "rows"),
    [
        (INPUTS, None, 3),
        (INPUTS, 7, 7),
        (INPUTS, 2, 2),
        ("def get_inputs(batch_size=5):\n    return torch.ones(batch_size, 4)", None, 5),
        ("def get_inputs(batch_size=5):\n    return torch.ones(batch_size, 4)", 6, 6),
        ("def get_inputs(batch_size):\n    return torch.ones(batch_size, 4)", 6, 6),
        ("example_inputs = {'x': torch.ones(3, 4)}", 4, 4),
        ("def example_inputs():\n    return [torch.ones(3, 4)]", None, 3),
    ],
    ids=["plain", "longer", "shorter", "own-default", "passed", "passed-required", "value", "callable"],
)
def test_inputs_of_the_file(tmp_path: Path, code: str, batch_size: int | None, rows: int) -> None:
    loaded = take(tmp_path, code, batch_size=batch_size)
    assert loaded.inputs.tensors()[0].shape == (rows, 4)


def test_inputs_on_the_command_line_win(tmp_path: Path) -> None:
    assert take(tmp_path, INPUTS, inputs=("x=5x4",)).inputs.kwargs["x"].shape == (5, 4)


def test_the_files_inputs_win_over_the_pair(tmp_path: Path) -> None:
    loaded = load(write(tmp_path, NET + PAIR + "example_inputs = torch.ones(9, 4)") + ":pair")
    assert loaded.inputs.tensors()[0].shape == (9, 4)


def test_random_inputs_repeat_themselves() -> None:
    first = from_texts(("8x4", "8x3:int64:50"), nn.Identity())
    with torch.device("meta"):  # whatever the default is
        second = from_texts(("8x4", "8x3:int64:50"), nn.Identity())
    assert all(map(torch.equal, first.tensors(), second.tensors()))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("32x3x224x224", RandomInput(None, (32, 3, 224, 224), torch.float32, None)),
        ("x=8:bfloat16", RandomInput("x", (8,), torch.bfloat16, None)),
        ("ids=8x128:int64", RandomInput("ids", (8, 128), torch.int64, 2)),
        ("ids=8x128:int64:50257", RandomInput("ids", (8, 128), torch.int64, 50257)),
        ("m=8:bool", RandomInput("m", (8,), torch.bool, None)),
        ("8:uint8:256", RandomInput(None, (8,), torch.uint8, 256)),
    ],
)
def test_input_grammar(text: str, wanted: RandomInput) -> None:
    assert RandomInput.parse(text) == wanted
    drawn = wanted.draw(torch.Generator().manual_seed(0))
    assert (drawn.shape, drawn.dtype) == (wanted.sizes, wanted.dtype)
    assert wanted.below is None or 0 <= int(drawn.min()) <= int(drawn.max()) < wanted.below


@pytest.mark.parametrize(
    ("texts", "sentence"),
    [
        (("3,4",), "not of the form"),
        (("",), "not of the form"),
        (("3x",), "not of the form"),
        (("-3x4",), "not of the form"),
        (("3X4",), "not of the form"),
        (("1a=3x4",), "not of the form"),
        (("3x4:",), "not of the form"),
        (("3x4:float23",), "unknown dtype 'float23'; did you mean 'float3?2?"),
        (("3x0",), "size of zero"),
        (("3x4:float32:7",), "only integer dtypes take a bound"),
        (("3x4:int64:0",), "bound 0"),
        (("3x4:int8:1000",), "bound 1000, which int8 cannot"),
        (("inputt=3x4",), "Identity.forward has no parameter 'inputt'; did you mean 'input'"),
        (("input=3x4", "input=3x4"), "given twice"),
        (("999999999999x999999:float64",), "cannot be made here"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else "",
)
def test_wrong_input_texts(texts: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        from_texts(texts, nn.Identity())


def test_resizing_keeps_what_is_not_the_batch() -> None:
    image = torch.arange(16.0).reshape(2, 2, 2, 2).contiguous(memory_format=torch.channels_last)
    inputs = Inputs((image, torch.ones(5, 2), torch.tensor(1.0), "text"), {"y": torch.ones(2, requires_grad=True)})
    resized = with_batch_size(inputs, 3)
    assert [tuple(tensor.shape) for tensor in resized.tensors()] == [(3, 2, 2, 2), (5, 2), (), (3,)]
    assert resized.args[0].is_contiguous(memory_format=torch.channels_last)
    assert resized.args[0].untyped_storage().nbytes() == 3 * 8 * 4
    assert torch.equal(resized.args[0][2], image[0])
    assert resized.args[3] == "text"
    assert resized.kwargs["y"].is_leaf
    assert resized.kwargs["y"].requires_grad


@pytest.mark.parametrize(
    "change",
    [
        lambda inputs: with_batch_size(inputs, 5),
        lambda inputs: to_device(inputs, torch.device("cpu")),
        lambda inputs: at_batch(inputs, 5),
        lambda inputs: part_of(inputs, 0.5),
    ],
    ids=["resized", "on-device", "at-batch", "part"],
)
def test_a_tensor_that_is_given_twice_stays_one(change: Callable[[Inputs], Inputs]) -> None:
    """Forward may ask for it, as ``nn.MultiheadAttention`` does to project queries, keys and values at once."""
    given, other = torch.ones(4, 2), torch.ones(4, 2)
    changed = change(Inputs((given, other), {"key": given}))
    assert changed.kwargs["key"] is changed.args[0]
    assert changed.args[1] is not changed.args[0]


@pytest.mark.parametrize(
    ("inputs", "size"), [(Inputs((X,), {}), 0), (Inputs((torch.tensor(1.0),), {}), 4)], ids=["zero", "no-batch"]
)
def test_no_batch_to_set(inputs: Inputs, size: int) -> None:
    with pytest.raises(UsageError, match="Batch size"):
        with_batch_size(inputs, size)


@pytest.mark.parametrize("size", [10**11, 10**13, 10**20])
def test_a_batch_that_no_memory_holds_does_not_fit(size: int) -> None:
    with pytest.raises(DoesNotFitError, match=f"Inputs of batch size {size} cannot be made here: .*; give a smaller"):
        with_batch_size(Inputs((torch.ones(4, 2),), {}), size)


@pytest.mark.parametrize(
    ("text", "said"),
    [("raise RuntimeError('of no use')", "RuntimeError: of no use"), ("raise SystemExit(3)", "SystemExit: 3")],
)
def test_a_package_that_fails_when_it_is_imported(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_package").mkdir()
    (tmp_path / "broken_package" / "__init__.py").write_text(text)
    (tmp_path / "broken_package" / "inside.py").write_text("model = None")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TargetError, match=f"importing it raised {said}"):
        load("broken_package.inside:model")


class _Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(99, 4)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.table(input_ids) * attention_mask[..., None] * scale


@pytest.mark.parametrize(
    ("module", "line"),
    [
        (nn.Linear(7, 2), "--input 8x7"),
        (nn.Conv2d(5, 2, 3), "--input 8x5x224x224"),
        (nn.ReLU(), "--input 8x3x224x224"),
        (_Tokens(), "--input input_ids=8x128:int64:99 --input attention_mask=8x128:int64"),
    ],
    ids=["linear", "conv", "none", "tokens"],
)
def test_the_suggested_line_can_be_pasted(module: nn.Module, line: str) -> None:
    assert suggestion(module) == line
    texts = tuple(text for text in line.split() if text != "--input")
    inputs = from_texts(texts, module)
    module(*inputs.args, **inputs.kwargs)


def test_every_error_is_for_the_user() -> None:
    assert issubclass(TargetError, UsageError)
    assert issubclass(UsageError, MemrewriteError)
    assert TargetError.exit_code == 2


@pytest.mark.parametrize("parse", ["parse_args()", "parse_known_args()[0]"])
def test_a_target_that_reads_the_command_line_finds_none_of_ours(
    tmp_path: Path, parse: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = f"""
import argparse, sys
parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=4)

def get_model():
    assert sys.argv == [__file__]
    return nn.Linear(parser.{parse}.width, 2)

early = parser.{parse}
"""
    ours = ["memrewrite", "optimize", "net.py", "--width", "8"]
    monkeypatch.setattr(sys, "argv", ours)
    found = load(write(tmp_path, "from torch import nn\nimport torch\n" + script + INPUTS))
    assert found.module.in_features == 4
    assert sys.argv == ours


def test_a_file_of_a_package_is_told_by_its_module(tmp_path: Path) -> None:
    for place in ("src/pkg_under_test", "src/pkg_under_test/models"):
        write(tmp_path, "", f"{place}/__init__.py")
    file = write(tmp_path, "from ..layers import Net\n", "src/pkg_under_test/models/net.py")
    with pytest.raises(TargetError) as caught:
        load(file)
    hint = f"give pkg_under_test.models.net:attr, with {tmp_path / 'src'} as the current folder or on PYTHONPATH."
    assert str(caught.value).endswith(hint)
