"""``--diff``: what changed, module by module; what only moved or is dropped elsewhere is no change."""

import pytest
import torch
from torch import Tensor, nn

import memrewrite
from memrewrite.codegen.writer import generate
from memrewrite.report.code_diff import code_diff
from memrewrite.runtime.dropin import programs
from memrewrite.search.regions import find
from memrewrite.workload.step import Inputs, Step

BEFORE = """
import torch

def graph(self, x):
    linear = aten.linear.default(x, self.first.weight);  x = None  # first
    sigmoid = aten.sigmoid.default(linear)  # act
    mul = aten.mul.Tensor(linear, sigmoid);  linear = sigmoid = None  # act
    linear_1 = aten.linear.default(mul, self.second.weight);  mul = None  # second
    return linear_1

PROGRAM = Program(
    names=('x',),
)
"""
AFTER = """
import torch

def segment_0(self, recomputing, linear):
    silu = aten.silu.default(linear);  linear = None  # act
    return (silu, )


def graph(self, x):
    linear = aten.linear.default(x, self.first.weight);  x = None  # first
    (silu, ) = run_segment(segment_0, self, linear, random=False, reads=());  linear = None
    linear_1 = aten.linear.default(silu, self.second.weight);  silu = None  # second
    return linear_1

PROGRAM = Program(
    names=('x', 'y'),
)
"""
EXPECTED = """\
== the model itself
@@ -1,2 +1,5 @@
+def segment_0(self, recomputing, linear):
+    return (silu, )
 def graph(self, x):
+    (silu, ) = run_segment(segment_0, self, linear, random=False, reads=())
     return linear_1

== act
@@ -1,2 +1 @@
-sigmoid = aten.sigmoid.default(linear)
-mul = aten.mul.Tensor(linear, sigmoid)
+silu = aten.silu.default(linear)

== second
@@ -1 +1 @@
-linear_1 = aten.linear.default(mul, self.second.weight)
+linear_1 = aten.linear.default(silu, self.second.weight)"""


def test_module_by_module() -> None:
    assert code_diff({"": BEFORE}, {"": AFTER}) == EXPECTED


def test_the_same_code_and_a_region_that_stayed() -> None:
    assert code_diff({"": BEFORE}, {"": BEFORE}) == ""
    moved = BEFORE.replace(";  x = None  # first", "  # first")
    assert code_diff({"": BEFORE, "left.alone": AFTER}, {"": moved}) == ""


def test_what_is_of_no_submodule_is_the_regions() -> None:
    text = code_diff({"layers.0": BEFORE}, {"layers.0": AFTER})
    heads = [line for line in text.splitlines() if line.startswith("==")]
    assert heads == ["== layers.0", "== act", "== second"]  # comments hold paths in the whole model


def test_paths_in_generated_code_are_those_of_the_model() -> None:
    torch.manual_seed(0)
    model = RegionNet()
    optimized = memrewrite.optimize(model, torch.randn(4, 8), regions=["layers.*"], optimizer="sgd", verify=False)
    found = find(model, Inputs((torch.randn(4, 8),), {}), Step(optimizer=torch.optim.SGD), ["layers.*"]).found
    after = {path: program.source for path, program in programs(optimized).items()}
    text = code_diff({each.path: generate(each.captured, each.prefix)[0] for each in found}, after)
    heads = [line for line in text.splitlines() if line.startswith("==")]
    assert heads == ["== layers.0", "== layers.0.second", "== layers.1", "== layers.1.second"]
    assert text.count("+silu") == 2


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.second(x * torch.sigmoid(x))


class RegionNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Layer(), Layer())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@pytest.mark.parametrize(
    ("comment", "shown"),
    [("'odd name'", "odd name"), (r"'a\x1b[2J'", r"a\x1b[2J"), (r'"it\'s"', "it's")],
    ids=["blank", "escape", "quote"],
)
def test_odd_names_of_modules(comment: str, shown: str) -> None:
    old, new = (f"def graph(self, x):\n    y = {value}  # {comment}\n" for value in (1, 2))
    assert code_diff({"": old}, {"": new}).splitlines()[0] == f"== {shown}"


def test_what_looks_like_a_comment_in_a_text_is_code() -> None:
    old, new = (f"def graph(self, x):\n    y = f('  # {value}')\n" for value in "ab")
    assert code_diff({"": old}, {"": new}).splitlines()[0] == "== the model itself"
