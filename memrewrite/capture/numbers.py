"""Numbers among the inputs that may vary: a step, a temperature, the longest of packed texts.

    def forward(self, x, temperature): return self.head(x) / temperature     # one graph for all

Tracing has a symbol for each, as for a size. Code may take another way for that than for a number (``isinstance(step,
int)``), so the graph is held against what is captured for other numbers, in which its own are put.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from memrewrite.capture.captured import Captured, InputSpec, NumberSpec, TensorSpec
from memrewrite.capture.hazards import refuse_kept
from memrewrite.capture.normal import bind
from memrewrite.capture.varying import function
from memrewrite.torch_internals.pytrees import tree_flatten, tree_leaves, tree_unflatten
from memrewrite.workload.step import Inputs


def numbers_in(inputs: Inputs) -> frozenset[int]:
    """The positions of numbers among the leaves of ``(args, kwargs)``."""
    leaves = tree_leaves((inputs.args, inputs.kwargs))
    return frozenset(i for i, leaf in enumerate(leaves) if type(leaf) in (int, float) and math.isfinite(leaf))


def for_numbers(
    model: nn.Module,
    inputs: Inputs,
    numbers: frozenset[int],
    functions: Sequence[type],
    attempt: Callable[..., Captured],
) -> Captured:
    """What an attempt gives in which these numbers vary, or those of them that can; custom ``functions`` are calls.

    Raises ``ValueError`` where none can, or the graph for all is not the one for each.
    """
    found = attempt(inputs, numbers=numbers)
    _, order = bind(model, inputs)
    for _ in range(2):
        places = {order[i]: leaf.name for i, leaf in enumerate(found.inputs.leaves) if isinstance(leaf, NumberSpec)}
        chosen = _others(found.inputs)
        names = {*chosen, *dict(found.inputs.example)} - _deciding(found)
        varying = frozenset(place for place, name in places.items() if name in names)
        if len(varying) in (0, len(places)):
            break
        found = attempt(inputs, numbers=varying)
    changed = {place: chosen[name] for place, name in places.items() if name in chosen}
    other = partial(_with_numbers, others=changed)
    if not varying or not _is_for(found, chosen, attempt(other(inputs), numbers=varying - {*changed})):
        raise ValueError("for other numbers it is another graph")
    refuse_kept(model, inputs, functions, other)
    return found


def _with_numbers(inputs: Inputs, others: Mapping[int, float]) -> Inputs:
    """The inputs with other numbers at these positions."""
    leaves, tree = tree_flatten((inputs.args, inputs.kwargs))
    return Inputs(*tree_unflatten([others.get(i, leaf) for i, leaf in enumerate(leaves)], tree))


def _deciding(captured: Captured) -> set[str]:
    """The names of numbers that decide sizes which are no input's: a plan for these is none for others."""
    of_inputs = {size for leaf in captured.inputs.leaves if isinstance(leaf, TensorSpec) for size in leaf.shape}
    values = (node.meta.get("val") for node in captured.graph_module.graph.nodes)
    sizes = {str(size) for value in values if isinstance(value, Tensor) for size in value.shape}
    return {number.name for number in captured.inputs.numbers} & set(re.findall(r"\w+", " ".join(sizes))) - of_inputs


def _others(spec: InputSpec) -> dict[str, float]:
    """Another number for each that may vary and is no size, by name; not for those that conditions leave no other."""
    sizes = dict(spec.example)
    example = {number.name: number.example for number in spec.numbers if number.name not in sizes}
    holds = function(spec, " and ".join(f"({text})" for text in spec.conditions) or "True")
    found = {}
    for name, number in example.items():
        tried = (each for each in _near(number) if holds(**{**sizes, name: each}))
        if (other := next(tried, None)) is not None:
            found[name] = other
    return found if holds(**{**sizes, **found}) else {}


def _near(number: float) -> Iterator[float]:
    """Numbers of the same type, none of them what code takes for special (0, 1, whole ones of fractions)."""
    tried = (number + 1, number - 1, number + 2, 2 * number + 3, number // 2)
    yield from (each for each in tried if each not in (0, 1, number)) if isinstance(number, int) else ()
    yield from (0.7 * number, 1.3 * number, number + 0.3, number - 0.3) if isinstance(number, float) else ()


def _is_for(captured: Captured, numbers: Mapping[str, float], other: Captured) -> bool:
    """Whether a graph with these for its numbers is the ``other`` one, which was captured for them."""
    alike = [*captured.constants] == [*other.constants]
    alike = alike and all(map(torch.equal, captured.constants.values(), other.constants.values()))
    return alike and _lines(captured, numbers) == _lines(other, {})


def _lines(captured: Captured, numbers: Mapping[str, float]) -> list[str]:
    """What the nodes of a graph do, where its numbers are these, and those that are computed of them what they are."""
    given = iter([numbers.get(number.name, number.example) for number in captured.inputs.numbers])
    left = sum(isinstance(leaf, TensorSpec) for leaf in captured.inputs.leaves)
    values: dict[fx.Node, Any] = {}
    lines: list[str] = []
    for node in captured.graph_module.graph.nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        left -= node.op == "placeholder"
        sources = [values[each] for each in node.all_input_nodes]
        if node.op == "placeholder" and left < 0:
            values[node] = next(given)
        elif node.op == "call_function" and sources and all(type(each) in (int, float, bool) for each in sources):
            values[node] = node.target(*args, **kwargs)
        else:
            values[node] = f"%{len(lines)}"
            where = node.target if node.op != "get_attr" else _body(captured, str(node.target))
            lines.append(f"{node.op} {'' if node.op == 'placeholder' else where} {args} {kwargs}")
    return lines


def _body(captured: Captured, path: str) -> str:
    """The path of an attribute, or the code of the graph that is there."""
    owner, _, name = path.rpartition(".")
    found = getattr(captured.graph_module.get_submodule(owner), name)
    return found.code if isinstance(found, fx.GraphModule) else path
