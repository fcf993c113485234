"""``--diff``: what changed, module by module; what only moved or is dropped elsewhere is no change."""

import pytest

from memrewrite.report.code_diff import code_diff

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


def test_a_region_names_its_modules_by_their_path_in_the_model() -> None:
    text = code_diff({"layers.0": BEFORE}, {"layers.0": AFTER})
    assert [line for line in text.splitlines() if line.startswith("==")] == [
        "== layers.0",
        "== layers.0.act",
        "== layers.0.second",
    ]


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
