"""What a generated program says of itself beside its code: the calls it is right for, and what it promises."""

from typing import Any

from memrewrite.capture.captured import Captured, NumberSpec, TensorSpec
from memrewrite.capture.expressions import Trees, literal, nested
from memrewrite.plan.marks import Marks
from memrewrite.runtime.matching import name_of_class


def program(captured: Captured, prefix: str, marks: Marks) -> str:
    """The statement that makes the ``Program`` of a captured graph, whose function is there already."""
    leaves = [*map(_leaf, captured.inputs.leaves)]
    trees = Trees(f"{prefix}INPUT_")
    tree = nested(captured.inputs.tree, ["0"] * captured.inputs.tree.num_leaves, trees)
    shapes = [leaf.shape for leaf in captured.inputs.leaves if isinstance(leaf, TensorSpec)]
    numbers = {number.name for number in captured.inputs.numbers}
    sizes = sorted({size for shape in shapes for size in shape if isinstance(size, str)} | numbers)
    conditions = " and ".join(f"({condition})" for condition in captured.inputs.conditions)
    fits = f"\n    fits=lambda {', '.join(sizes)}: {conditions}," if conditions else ""
    planned = f"\n    planned={dict(marks.holds_for or captured.inputs.example)!r}," if captured.inputs.example else ""
    ranges = f"\n    ranges={captured.inputs.bounds!r}," if captured.inputs.ranges else ""
    promise = f"\n    budget={marks.budget},\n    strict={marks.strict}," if marks.budget else ""
    gradients = f"\n    gradients={captured.gradients!r}," if captured.gradients else ""
    layouts = f"\n    layouts={captured.layouts!r}," if captured.layouts is not None else ""
    returns = f"\n    returns={captured.returns!r}," if captured.returns != "all" else ""
    divided = f"\n    divided={captured.divided!r}," if captured.divided else ""
    tied = f"\n    tied={captured.tied!r}," if captured.tied else ""
    shared = f"\n    shared={captured.inputs.shared!r}," if captured.inputs.shared is not None else ""
    types = "\n    types=True," if captured.types else ""
    values = "".join(f"({owner!r}, {name!r}, {text}), " for owner, name, text in captured.assigned)
    sets = f"\n    sets=lambda {', '.join(sizes)}: ({values})," if values else ""
    holds = f"\n    holds={captured.held!r}," if captured.held else ""
    constants = "\n".join(trees.lines())
    reads = "".join(f"\n        {row!r}," for row in captured.reads)
    look = "".join(f"\n        {each}," for each in captured.looks)
    same = " and".join(f"\n        {each} {_same(each)} then[{i}]" for i, each in enumerate(captured.looks)) or "True"
    return f"""

{constants}PROGRAM = Program(
    names={captured.inputs.parameters!r},
    tree=tree_structure({tree}),
    leaves=({"".join(leaf + ", " for leaf in leaves)}),
    training={captured.training!r},
    differentiable={captured.differentiable!r},
    dtype={captured.dtype},
    autocast={captured.autocast!r},
    reads=({reads}
    ),
    look=lambda self: ({look}
    ),
    same=lambda self, then: ({same}
    ),
    run={prefix}graph,{fits}{planned}{ranges}{promise}{shared}{gradients}{layouts}{types}{sets}{holds}{returns}{divided}{tied}
)
"""


def _leaf(leaf: Any) -> str:
    """How a program says what an input must be."""
    if isinstance(leaf, TensorSpec):
        return f"({leaf.dtype}, {leaf.device_type!r}, {leaf.shape!r})"
    if isinstance(leaf, NumberSpec):
        return f"('number', {type(leaf.example).__name__}, {leaf.name!r})"
    own = type(leaf).__module__ not in ("builtins", "torch")  # an enum's or NumPy's
    return f"('constant', {literal(leaf)}{f', {name_of_class(type(leaf))!r}' if own else ''})"


def _same(look: str) -> str:
    """How what was looked at is compared: types by identity, as Dynamo of 2.11 takes ``==`` for that of the type's own
    instances where it defines one."""
    return "is" if look.startswith("type(") else "=="
