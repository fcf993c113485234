"""What holds for every pass: one name in every spelling, a docstring that is true, and honesty about what changed."""

import dataclasses
import importlib
import inspect
import pathlib
import re
import textwrap
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import memrewrite.passes
from memrewrite.observe.effects import observe
from memrewrite.passes.chunked_cross_entropy import ChunkedCrossEntropy
from memrewrite.passes.composites import Composites
from memrewrite.passes.functionalize import Functionalize
from memrewrite.passes.inplace_activation import InplaceActivation
from memrewrite.passes.linear_cross_entropy import LinearCrossEntropy
from memrewrite.passes.swish import Swish
from memrewrite.rewriting.contract import Pass
from memrewrite.runtime.cross_entropy import chunked_cross_entropy
from memrewrite.runtime.linear_cross_entropy import linear_cross_entropy
from memrewrite.runtime.swish import swish
from memrewrite.search import registry
from tests.passes.helpers import assert_same_bits, numbers, rewrite
from tests.support.models import MODELS, make

FOLDER = pathlib.Path(memrewrite.passes.__path__[0])
MODULES = [importlib.import_module(f"memrewrite.passes.{path.stem}") for path in sorted(FOLDER.glob("[a-z]*.py"))]
GRAPH_PASSES: list[Pass] = [
    Functionalize(),
    Swish(),
    Composites(),
    ChunkedCrossEntropy(elements=4),
    LinearCrossEntropy(elements=4),
    InplaceActivation(),
]
graph_passes = pytest.mark.parametrize("graph_pass", GRAPH_PASSES, ids=lambda p: p.name)


def pass_class(module: ModuleType) -> Any:
    """The pass a file of ``passes/`` defines, None for the helpers."""
    own = [c for _, c in inspect.getmembers(module, inspect.isclass) if c.__module__ == module.__name__]
    found = [c for c in own if isinstance(getattr(c, "name", None), str) and hasattr(c, "exact")]
    assert len(found) <= 1, f"{module.__name__} defines several passes"
    return found[0] if found else None


PASS_MODULES = [module for module in MODULES if pass_class(module) is not None]
pass_modules = pytest.mark.parametrize("module", PASS_MODULES, ids=lambda m: m.__name__.rpartition(".")[2])


def test_the_registry_knows_every_pass() -> None:
    assert {pass_class(module).name for module in PASS_MODULES} == {Functionalize.name, *registry.NAMES}


@pass_modules
def test_file_class_and_name_are_one(module: ModuleType) -> None:
    found = pass_class(module)
    stem = module.__name__.rpartition(".")[2]
    assert found.name == stem
    assert found.__name__ == "".join(word.capitalize() for word in stem.split("_"))
    assert (FOLDER.resolve().parent / "tests" / "passes" / f"test_{stem}.py").is_file()


@pass_modules
def test_a_pass_is_a_frozen_dataclass_with_documented_parts(module: ModuleType) -> None:
    found = pass_class(module)
    assert isinstance(found.exact, bool)
    assert dataclasses.is_dataclass(found)
    frozen: Any = object.__new__(pass_class(module))
    with pytest.raises(dataclasses.FrozenInstanceError):
        frozen.name = "other"
    assert re.search(r"^Before:.*^After:", module.__doc__ or "", re.DOTALL | re.MULTILINE)


def test_the_folder_cannot_be_imported_under_another_name() -> None:
    source = (FOLDER / "__init__.py").read_text()
    with pytest.raises(ImportError, match=r"Import this package as memrewrite\.passes"):
        exec(compile(source, "passes", "exec"), {"__name__": "passes"})  # noqa: S102


class Example(nn.Module):
    """What the docstrings' code runs in."""

    def __init__(self, forward: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = forward
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.beta = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("labels", torch.tensor([1, 0, 3]))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x * 1)


def one_call(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of ours as the single call that its pass puts."""
    return lambda x, *args: x.tracer.create_proxy("call_function", function, (x, *args), {})


def example(docstring: str, title: str) -> fx.GraphModule:
    """The code under ``title`` in a docstring, as a graph."""
    match = re.search(rf"^{title}::\n\n((?:    .*\n|\n)+)", docstring + "\n", re.MULTILINE)
    assert match is not None, f"no {title} code"
    ours = (swish, chunked_cross_entropy, linear_cross_entropy)
    scope: dict[str, Any] = {"torch": torch} | {f.__name__: one_call(f) for f in ours}
    body = textwrap.indent(textwrap.dedent(match[1]), "    ")
    exec(f"def forward(self, x):\n{body}", scope)  # noqa: S102 (the code is our own docstring)
    model = Example(scope["forward"])
    return fx.symbolic_trace(model)


def calls(graph_module: fx.GraphModule) -> list[tuple[Any, ...]]:
    """Every call with its arguments, nodes by their place, so that names do not matter."""
    nodes = [node for node in graph_module.graph.nodes if node.op != "get_attr"]
    place = {node: nodes.index(node) if node in nodes else node.target for node in graph_module.graph.nodes}
    spelled = [fx.node.map_arg((n.args, n.kwargs), lambda n: (place[n],)) for n in nodes]
    return [(node.op, node.target, *arguments) for node, arguments in zip(nodes, spelled, strict=True)]


@graph_passes
def test_before_becomes_after(graph_pass: Pass) -> None:
    docstring = inspect.getmodule(type(graph_pass)).__doc__ or ""
    before, after = example(docstring, "Before"), example(docstring, "After")
    x = torch.randn(3, 4)
    result = graph_pass(before, observe(before, [x]))
    assert result.modified
    assert calls(before) == calls(after)


@graph_passes
@pytest.mark.parametrize("name", MODELS)
def test_a_pass_says_what_it_changed_and_changes_it_once(graph_pass: Pass, name: str) -> None:
    model, inputs = make(name)
    rewrite(model, inputs.args[0], [graph_pass])
    if isinstance(graph_pass, Functionalize):
        return
    rewrite(model, inputs.args[0], [Functionalize(), graph_pass])


@pytest.mark.parametrize("name", MODELS)
def test_exact_passes_keep_every_bit_of_every_model(name: str) -> None:
    (model, inputs), (twin, _) = make(name), make(name)
    x = inputs.args[0]
    graph_module, _ = rewrite(model, x, [graph_pass for graph_pass in GRAPH_PASSES if graph_pass.exact])
    original, _ = rewrite(twin, x, [])
    assert_same_bits(numbers(graph_module, x, model), numbers(original, x, twin))
