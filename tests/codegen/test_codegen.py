"""Generated source: what it looks like, that every argument survives it, and how long activations live in it."""

import ast
import builtins
import dataclasses
import enum
import math
import operator
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn

from memrewrite.capture import Captured, InputSpec, TensorSpec, capture
from memrewrite.capture.expressions import literal
from memrewrite.codegen.submodules import Submodules
from memrewrite.codegen.writer import _Writer, function_name, generate
from memrewrite.plan.marks import NO_MARKS
from memrewrite.records.errors import CaptureError
from memrewrite.runtime.dropin import build, program_from
from memrewrite.torch_internals.pytrees import tree_flatten
from memrewrite.workload.step import Inputs
from tests.support.capture_models import CASES
from tests.support.layers import WIDTH, images, mark, model, x
from tests.support.models import make

front_ends = pytest.mark.parametrize("front_end", ["export", "dynamo"])


def captured_by_hand(write: Callable[..., Any], *names: str, constants: dict[str, Tensor] | None = None) -> Captured:
    """A capture whose graph ``write(graph, *placeholders)`` makes; every input is a float tensor of shape (4, 6)."""
    graph = fx.Graph()
    result = write(graph, *[graph.placeholder(name) for name in names])
    graph.output((result,))
    root = nn.Module()
    for name, value in (constants or {}).items():
        root.register_buffer(name, value)
    spec = TensorSpec(torch.float32, "cpu", (4, WIDTH))
    tree = tree_flatten(tuple(range(len(names))))[1]
    inputs = InputSpec(tuple(f"a{i}" for i in range(len(names))), tree, (spec,) * len(names))
    return Captured(fx.GraphModule(root, graph), inputs, tree_flatten(0)[1], constants or {}, {"": True}, True, "hand")


def graph_of(captured: Captured) -> Callable[..., Any]:
    """The function ``graph`` of the generated source."""
    return program_from(generate(captured)[0]).run


# The text.

GOLDEN = """
def segment_0(self, recomputing, conv2d):
    self_norm = self.norm
    add_ = None if recomputing else aten.add_.Tensor(self_norm.num_batches_tracked, 1);  add_ = None  # norm
    batch_norm = aten.batch_norm.default(conv2d, self_norm.weight, self_norm.bias, \
once(self_norm.running_mean, recomputing), once(self_norm.running_var, recomputing), True, 0.1, 1e-05, False);  \
conv2d = None  # norm
    relu = aten.relu.default(batch_norm);  batch_norm = None
    return (relu, )


def graph(self, x):
    conv2d = aten.conv2d.default(x, self.conv.weight);  x = None  # conv
    (relu, ) = run_segment(segment_0, self, conv2d, random=False, reads=('norm.weight', 'norm.bias'));  conv2d = None
    mean = aten.mean.dim(relu, [2, 3]);  relu = None
    return {'features': mean, 'more': (None, 'text', )}
"""


def golden(self: Any, x: Tensor) -> Any:
    return {"features": torch.relu(self.norm(self.conv(x))).mean((2, 3)), "more": (None, "text")}


def test_the_text_of_a_model_with_one_segment() -> None:
    module, inputs = model(golden), Inputs((images(),), {})
    captured = capture(module, inputs, "export")
    marks = mark(module, inputs, captured, "add_", "relu")
    source, constants = generate(captured, marks=marks)
    functions = source[source.index("\ndef segment_0") : source.index("\n\nPROGRAM")]
    assert functions.replace("1e-05, True", "1e-05, False").strip() == GOLDEN.strip()  # whether PyTorch has cuDNN
    assert constants == {}


def test_the_program_says_which_calls_it_is_right_for() -> None:
    module = model(lambda self, x, n=1, t=None: self.linear(x) if x.shape[0] % 2 == 0 else n)
    source, _ = generate(capture(module, Inputs((x(),), {"n": 2}), "export"))
    program = program_from(source)
    size = program.leaves[0][2][0]
    assert program.names == ("x", "n")
    assert program.leaves == ((torch.float32, "cpu", (size, WIDTH)), ("number", int, program.leaves[1][2]))
    assert program.dtype == torch.float32
    assert program.training == {path: True for path, _ in module.named_modules()}
    assert [program.fits(**{size: batch, program.leaves[1][2]: 2}) for batch in (2, 3, 4)] == [True, False, True]


@pytest.mark.parametrize("name", ["constants", "no_grad_region", "namedtuple", "odd_module_names", "checkpoints"])
@front_ends
def test_the_same_model_gives_the_same_text(name: str, front_end: str) -> None:
    case = CASES[name]
    texts = {generate(capture(case.make(), case.inputs(), front_end))[0] for _ in range(2)}
    assert len(texts) == 1
    ast.parse(texts.pop())


def test_another_process_gives_the_same_text() -> None:
    script = """
        from memrewrite.capture import capture
        from memrewrite.codegen.writer import generate
        from tests.support.models import make
        print(generate(capture(*make("transformer")))[0])
    """
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", textwrap.dedent(script)]
    found = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    assert found.strip() == generate(capture(*make("transformer")))[0].strip()


# Names.

ODD = ("self", "lambda", "class", "aten", "torch", "inf", "nan", "getattr", "slice", "complex", "segment_0", "region_1")
RUNTIME = ("once", "run_segment", "swish", "recomputing", "tree_unflatten", "treespec_loads", "importlib", "operator")


def test_no_name_hides_another() -> None:
    names = (*ODD, *RUNTIME, "v", "v_1", "v_2", "_", "__", "é", "print")

    def write(graph: fx.Graph, *inputs: fx.Node) -> Any:
        for node, name in zip(inputs, names, strict=True):
            node.name = name  # past the graph's own care
        total = graph.call_function(operator.add, (inputs[0], float("inf")))
        for node in inputs[1:]:
            total = graph.call_function(operator.add, (total, node))
            total.name = "v"
        clamped = graph.call_function(torch.ops.aten.clamp.default, (total, None, float("inf")))
        return graph.call_function(torch.add, (clamped, float("nan")))

    run = graph_of(captured_by_hand(write, *[f"input_{i}" for i in range(len(names))]))
    assert run(nn.Module(), *[torch.ones(4, WIDTH)] * len(names)).isnan().all()


def test_a_numbered_name_that_is_taken_gets_another_number() -> None:
    def write(graph: fx.Graph, *inputs: fx.Node) -> Any:
        for i, node in enumerate(inputs):
            node.name = f"v_{i}" if i else "v"
        total = inputs[0]
        for node in inputs:
            total = graph.call_function(operator.add, (total, node))
            total.name = "v"
        return total

    run = graph_of(captured_by_hand(write, *[f"input_{i}" for i in range(60)]))
    assert run(nn.Module(), *[torch.ones(4, WIDTH)] * 60).eq(61).all()


@pytest.mark.parametrize("path", ["a-b", "x y", "q'", "é", "0", "class", "a\\b", 'd"q', "a\nb"])
def test_attributes_of_any_name_are_reached(path: str) -> None:
    """Past the front ends, which refuse some of them, no name breaks the text."""
    captured = captured_by_hand(
        lambda graph, a: graph.call_function(operator.add, (a, graph.placeholder("weight"))), "a"
    )
    (weight,) = captured.graph_module.graph.find_nodes(op="placeholder")[1:]
    weight.op, weight.target = "get_attr", f"inner.{path}"
    source, _ = generate(captured)
    owner = nn.Module()
    owner.inner = nn.Module()
    owner.inner.register_parameter(path, nn.Parameter(torch.full((4, WIDTH), 2.0)))
    assert program_from(source).run(owner, torch.ones(4, WIDTH)).eq(3).all()


NAMED: dict[str, tuple[list[str], list[str]]] = {
    "once": (["conv.weight"], ["self.conv.weight"]),
    "of the model itself": (["scale", "scale"], ["self.scale", "self.scale"]),
    "twice": (["norm.weight", "norm.bias"], ["self_norm = self.norm", "self_norm.weight", "self_norm.bias"]),
    "deep": (
        ["a.0.norm.weight", "a.0.norm.bias", "a.0.conv.weight", "b.weight"],
        [
            "self_a_0 = getattr(self.a, '0')",
            "self_a_0_norm = self_a_0.norm",
            "self_a_0_norm.weight",
            "self_a_0_norm.bias",
            "self_a_0.conv.weight",
            "self.b.weight",
        ],
    ),
    "names that are alike": (
        ["a.b.w", "a.b.v", "a_b.w", "a_b.v"],
        ["self_a_b = self.a.b", "self_a_b.w", "self_a_b.v", "self_a_b_1 = self.a_b", "self_a_b_1.w", "self_a_b_1.v"],
    ),
}


@pytest.mark.parametrize("name", NAMED)
def test_submodules_that_are_needed_twice_get_names(name: str) -> None:
    paths, expected = NAMED[name]
    captured = captured_by_hand(lambda graph, a: a, "a")
    submodules, found = Submodules(paths, _Writer(captured, "", NO_MARKS).unique), []
    for path in paths:
        expression = submodules.attribute(path)
        found += [*submodules.lines(), expression]
    assert found == expected


def test_each_function_names_submodules_for_itself() -> None:
    module, inputs = model(lambda self, x: self.linear(self.linear(x).sigmoid()).sigmoid()), Inputs((x(),), {})
    captured = capture(module, inputs, "export")
    marks = mark(module, inputs, captured, "linear_1", "sigmoid_1")
    source, _ = generate(captured, marks=marks)
    assert source.count("    self_linear = self.linear\n") == 2
    assert torch.equal(build(module, program_from(source), {})(x()), module(x()))


# Arguments.


class Kind(enum.IntEnum):
    MEAN = 1


class Word(enum.StrEnum):
    NONE = "none"


LITERALS: dict[str, tuple[Any, str]] = {
    "inf": (math.inf, "inf"),
    "minus-inf": (-math.inf, "-inf"),
    "nan": (math.nan, "nan"),
    "minus-zero": (-0.0, "-0.0"),
    "denormal": (1e-310, "1e-310"),
    "exact": (0.1 + 0.2, "0.30000000000000004"),
    "large": (2**80, str(2**80)),
    "bool": (True, "True"),
    "none": (None, "None"),
    "ellipsis": (..., "..."),
    "quotes": ('it\'s "so"\n\\', repr('it\'s "so"\n\\')),
    "complex": (complex(-0.0, math.nan), "complex(-0.0, nan)"),
    "dtype": (torch.bfloat16, "torch.bfloat16"),
    "layout": (torch.strided, "torch.strided"),
    "memory-format": (torch.channels_last, "torch.channels_last"),
    "device": (torch.device("cuda", 3), "torch.device('cuda')"),
    "int-enum": (Kind.MEAN, "1"),
    "str-enum": (Word.NONE, "'none'"),
    "numpy-float": (np.float64(0.5), "0.5"),
    "numpy-str": (np.str_("a"), "'a'"),
}


@pytest.mark.parametrize("name", LITERALS)
def test_a_literal_is_read_back_as_itself(name: str) -> None:
    value, text = LITERALS[name]
    assert literal(value) == text
    back = eval(text, {"torch": torch, "inf": math.inf, "nan": math.nan})  # noqa: S307  (our own text)
    if isinstance(value, torch.device):
        assert back.type == value.type
    else:
        assert str(back) == str(np.asarray(value)) if name.startswith("numpy") else back == value or value != value


@pytest.mark.parametrize("value", [object(), torch.ones(2), torch.Generator(), b"bytes", range(2)], ids=type)
def test_what_has_no_literal_is_refused(value: Any) -> None:
    with pytest.raises(CaptureError, match=f"of type {type(value).__name__}, which cannot be written as source"):
        literal(value)


INDEXING: dict[str, Any] = {
    "slice": (slice(1, None, 2), slice(None)),
    "ellipsis": (..., slice(None, 2)),
    "none": (None, 0),
    "list": ([0, 2],),
    "nested": (slice(None, -1), [1, 0, 3]),
}


@pytest.mark.parametrize("name", INDEXING)
def test_indices_survive(name: str) -> None:
    def write(graph: fx.Graph, a: fx.Node) -> Any:
        return graph.call_function(operator.getitem, (a, INDEXING[name]))

    assert torch.equal(graph_of(captured_by_hand(write, "a"))(nn.Module(), x()), x()[INDEXING[name]])


def test_nodes_inside_slices_and_dictionaries_survive() -> None:
    def write(graph: fx.Graph, a: fx.Node) -> Any:
        rows = graph.call_function(torch.ops.aten.sym_size.int, (a, 0))
        half = graph.call_function(operator.floordiv, (rows, 2))
        part = graph.call_function(operator.getitem, (a, (slice(half, rows, None), slice(None))))
        twice = graph.call_function(operator.mul, (half, 2))
        padded = graph.call_function(torch.nn.functional.pad, (part, (0, 0, 0, half)), {"value": math.inf})
        return graph.call_method("view", (padded, twice, -1))

    found = graph_of(captured_by_hand(write, "a"))(nn.Module(), x())
    assert torch.equal(found, torch.cat([x()[2:], torch.full((2, WIDTH), math.inf)]))


# What can and cannot be written.

FUNCTIONS: dict[str, tuple[Any, str]] = {
    "aten": (torch.ops.aten.add.Tensor, "aten.add.Tensor"),
    "namespace": (torch.ops.prims.sin.default, "torch.ops.prims.sin.default"),
    "packet": (torch.ops.aten.add, "torch.ops.aten.add"),
    "torch": (torch.sigmoid, "torch.sigmoid"),
    "functional": (torch.nn.functional.gelu, "torch.nn.functional.gelu"),
    "operator": (operator.mul, "operator.mul"),
    "math": (math.floor, "math.floor"),
    "builtin": (max, "builtins.max"),
    "linalg": (torch.linalg.norm, "torch._C._linalg.linalg_norm"),
    "fft": (torch.fft.fft, "torch._C._fft.fft_fft"),
    "special": (torch.special.expit, "torch._C._special.special_expit"),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_named(name: str) -> None:
    function, text = FUNCTIONS[name]
    assert function_name(function) == text
    named = {"torch": torch, "aten": torch.ops.aten, "operator": operator, "math": math, "builtins": builtins}
    assert eval(text, named) is function  # noqa: S307  (our own text)


def unknown(value: Tensor) -> Tensor:
    return value


def test_an_unknown_function_is_refused_by_name() -> None:
    captured = captured_by_hand(lambda graph, a: graph.call_function(unknown, (a,)), "a")
    with pytest.raises(CaptureError, match=r"The graph calls <function unknown at .*, which cannot be written"):
        generate(captured)


def test_a_node_of_another_kind_is_refused_by_name() -> None:
    captured = captured_by_hand(lambda graph, a: graph.call_function(torch.sin, (a,)), "a")
    (node,) = captured.graph_module.graph.find_nodes(op="call_function", target=torch.sin)
    node.op, node.target, node.name = "placeholder_of_a_kind", "inner", "inner"
    with pytest.raises(CaptureError, match=r"The graph has a placeholder_of_a_kind node \(inner\)"):
        generate(captured)


def test_a_class_no_module_holds_is_refused_by_name() -> None:
    class Hidden(NamedTuple):
        value: Tensor

    with pytest.raises(CaptureError, match=r"forward takes or returns a Hidden, which .* define the class at the top"):
        generate(capture(model(lambda self, x: Hidden(self.linear(x))), Inputs((x(),), {})))


class Cache:
    """As transformers' caches are: tensors in an object that is no tree."""

    def __init__(self, keys: Tensor) -> None:
        self.keys = keys


@pytest.mark.parametrize("made", [Cache, lambda keys: [keys, Cache(keys)]], ids=["alone", "in a list"])
def test_a_cache_that_is_returned_is_told_of_and_what_to_do(made: Any) -> None:
    with pytest.raises(CaptureError, match=r"of type Cache, which [^;]*; do without .*use_cache = False\)\.$"):
        generate(
            capture(model(lambda self, x: {"out": self.linear(x), "cache": made(self.other(x))}), Inputs((x(),), {}))
        )


@dataclasses.dataclass
class Pair:
    first: Tensor
    second: Tensor | None = None


def test_a_dataclass_that_is_returned_is_told_to_be_registered_and_how() -> None:
    def written() -> None:
        generate(capture(model(lambda self, x: Pair(self.linear(x))), Inputs((x(),), {})))

    with pytest.raises(CaptureError, match=r"of type Pair, .*register_dataclass with a serialized_type_name\)\.$"):
        written()
    torch.export.register_dataclass(Pair, serialized_type_name="tests.Pair")
    written()


def test_an_enum_as_a_key_is_refused_and_an_integer_is_not() -> None:
    module = model(lambda self, x: {3: self.linear(x)})
    captured = capture(module, Inputs((x(),), {}))
    assert build(module, program_from(generate(captured)[0]), {})(x()).keys() == {3}
    odd = model(lambda self, x: {object: self.linear(x)})
    with pytest.raises(CaptureError, match="cannot be written as source"):
        generate(capture(odd, Inputs((x(),), {})))


@front_ends
def test_constants_are_in_no_listing(front_end: str) -> None:
    case = CASES["constants"]
    module = case.make()
    source, constants = generate(capture(module, case.inputs(), front_end))
    assert all(name in source for name in constants)
    optimized = build(module, program_from(source), constants)
    assert optimized.state_dict().keys() == module.state_dict().keys()
    assert dict(optimized.named_buffers()).keys() == dict(module.named_buffers()).keys()
    assert all(getattr(optimized, name) is tensor for name, tensor in constants.items())
