"""Hand-written activations that save two to four times their input become the native operation, which saves it once.

Before::

    return 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x**3)))

After::

    return torch.ops.aten.gelu.default(x, approximate="tanh")

Likewise ``x * 0.5 * (1 + erf(x / sqrt(2)))`` (gelu), ``x * relu6(x + 3) / 6`` and ``x * hardsigmoid(x)`` (hardswish)
and ``x * tanh(softplus(x))`` (mish). A product is compared as number and factors, an argument as a polynomial in ``x``,
so the order of operands and where constants stand do not matter. The erf form stays where its native kernel is worse.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from memrewrite.observe.effects import Effects
from memrewrite.passes.matching import erase, inherit, obstacle, shared
from memrewrite.passes.spelling import number, operand, operands, operation, options, tensor
from memrewrite.rewriting.contract import Findings, Result

# oneDNN's kernel: twice the error of the written-out form in float32, nan for +inf where the form gives +inf.
_POOR_ERF = (("cpu", torch.float32), ("cpu", torch.bfloat16))
Polynomial = dict[int, float]  # power -> coefficient
aten = torch.ops.aten


@dataclass(frozen=True)
class Composites:
    """Hand-written GELU (tanh and erf), hard-swish and Mish become the native operation."""

    name: ClassVar[str] = "composites"
    exact: ClassVar[bool] = False

    def __call__(self, graph_module: fx.GraphModule, effects: Effects) -> Result:
        """Rewrite every composite whose intermediates nothing else uses."""
        findings = Findings()
        accepted = []
        for found in _outermost(effects.order):
            if reason := check(found, effects):
                findings.refuse(found.root, reason)
            else:
                accepted.append(found)
                findings.apply(found.root, f"written-out {found.native.title} becomes the native operation")
        for found in reversed(accepted):  # so that no match reads a root that is gone already
            rewrite(found)
        return findings.finish(graph_module)


@dataclass(frozen=True)
class Native:
    """A native activation; ``gate(number, node, x)`` tells whether ``number * x * node`` is it (its nodes) or not."""

    title: str
    target: Any
    kwargs: dict[str, Any]
    gate: Callable[[float, fx.Node, fx.Node], list[fx.Node] | None]


@dataclass(frozen=True)
class Found:
    """A match; ``inner`` are the nodes between ``x`` and ``root``."""

    root: fx.Node
    x: fx.Node
    inner: tuple[fx.Node, ...]
    native: Native


def match(root: fx.Node) -> Found | None:
    """The composite that ``root`` multiplies out, whichever of its factors is ``x``."""
    if operation(root) not in ("mul", "div"):
        return None
    for x in dict.fromkeys(_parts(root)):
        coefficient, factors, products = _product(root, x)
        if len(factors) != 2 or x not in factors:
            continue
        gate = factors[1] if factors[0] is x else factors[0]
        if not isinstance(gate, fx.Node):  # a complex number
            continue
        for native in NATIVES:
            inner = native.gate(coefficient, gate, x)
            if inner is not None:
                nodes = dict.fromkeys((*products, *inner))
                return Found(root, x, tuple(node for node in nodes if node not in (root, x)), native)
    return None


def check(found: Found, effects: Effects) -> str | None:
    """Why the match has to stay written out; None if it need not."""
    value = tensor(found.x)
    if found.native.title == "erf GELU" and value is not None and (value.device.type, value.dtype) in _POOR_ERF:
        return f"On a CPU the native GELU of {value.dtype} is less accurate than erf written out, and nan for infinity."
    return shared(found.inner, found.root) or obstacle(effects, found.root, found.inner, found.x)


def rewrite(found: Found) -> None:
    """Put the native operation in the root's place and erase the pattern."""
    with found.root.graph.inserting_before(found.root):
        new = found.root.graph.call_function(found.native.target, (found.x,), found.native.kwargs)
    inherit(new, found.root)
    pattern = {found.root, *found.inner}
    erase(node for node in reversed(list(found.root.graph.nodes)) if node in pattern)


def _outermost(order: tuple[fx.Node, ...]) -> list[Found]:
    """Every match that is not part of a larger one, in execution order."""
    matches: list[Found] = []
    inside: set[fx.Node] = set()
    for root in reversed(order):
        found = match(root) if root not in inside else None
        if found is not None:
            inside.update(found.inner)
            matches.append(found)
    return matches[::-1]


def _tanh_gelu(coefficient: float, gate: fx.Node, x: fx.Node) -> list[fx.Node] | None:
    slope = math.sqrt(2 / math.pi)
    return _half_of_one_plus("tanh", {1: slope, 3: slope * 0.044715}, coefficient, gate, x)


def _erf_gelu(coefficient: float, gate: fx.Node, x: fx.Node) -> list[fx.Node] | None:
    return _half_of_one_plus("erf", {1: math.sqrt(0.5)}, coefficient, gate, x)


def _hard_swish(coefficient: float, gate: fx.Node, x: fx.Node) -> list[fx.Node] | None:
    if operation(gate) == "hardsigmoid":
        return [gate] if operand(gate) is x and _plain(gate) and _close(coefficient, 1) else None
    clipped = operation(gate) == "relu6" and _plain(gate)
    clipped |= operation(gate) in ("hardtanh", "clamp") and bool(options(gate)) and _plain(gate, 0, 6, length=2)
    inner = [gate]
    if not clipped or not _close(coefficient, 1 / 6) or not _same(_polynomial(operand(gate), x, inner), {0: 3, 1: 1}):
        return None
    return inner


def _mish(coefficient: float, gate: fx.Node, x: fx.Node) -> list[fx.Node] | None:
    softplus: Any = operand(gate)
    if operation(gate) != "tanh" or operation(softplus) != "softplus" or not _plain(softplus, 1, 20):
        return None
    return [gate, softplus] if operand(softplus) is x and _close(coefficient, 1) else None


NATIVES = (
    Native("tanh GELU", aten.gelu.default, {"approximate": "tanh"}, _tanh_gelu),
    Native("erf GELU", aten.gelu.default, {}, _erf_gelu),
    Native("hard-swish", aten.hardswish.default, {}, _hard_swish),
    Native("Mish", aten.mish.default, {}, _mish),
)


def _half_of_one_plus(
    function: str, argument: Polynomial, coefficient: float, gate: fx.Node, x: fx.Node
) -> list[fx.Node] | None:
    """The nodes of ``gate`` when ``coefficient * gate`` is ``0.5 * (1 + function(argument))``."""
    inner: list[fx.Node] = []
    offset, scale, core = _affine(gate, inner)
    if operation(core) != function or not _close(coefficient * offset, 0.5) or not _close(coefficient * scale, 0.5):
        return None
    inner.append(core)
    return inner if _same(_polynomial(operand(core), x, inner), argument) else None


def _parts(node: fx.Node, depth: int = 4) -> Iterator[fx.Node]:
    """The nodes multiplied (and divided by numbers) into ``node``, at most ``depth`` products down."""
    for part in operands(node) if depth and operation(node) in ("mul", "div") else ():
        if isinstance(part, fx.Node):
            yield part
            yield from _parts(part, depth - 1)


def _product(value: Any, x: fx.Node) -> tuple[float, list[fx.Node], list[fx.Node]]:
    """``value`` as number times factors, taken apart no further than ``x``, and the products it was made by."""
    if number(value):
        return float(value), [], []
    given = operands(value) if value is not x and operation(value) in ("mul", "div") else ()
    if len(given) != 2 or (operation(value) == "div" and not (number(given[1]) and given[1])):
        return 1.0, [value], []
    (a, left, above), (b, right, below) = (_product(part, x) for part in given)
    return a / b if operation(value) == "div" else a * b, left + right, [value, *above, *below]


def _affine(node: fx.Node, inner: list[fx.Node]) -> tuple[float, float, fx.Node]:
    """``node`` as ``offset + scale * core``; the nodes passed on the way are added to ``inner``."""
    given = operands(node) if operation(node) in ("add", "mul", "div") else ()
    if len(given) != 2 or number(given[0]) == number(given[1]) or (operation(node) == "div" and not number(given[1])):
        return 0.0, 1.0, node
    constant, rest = (given[0], given[1]) if number(given[0]) else (given[1], given[0])
    inner.append(node)
    offset, scale, core = _affine(rest, inner)
    if operation(node) == "add":
        return offset + constant, scale, core
    factor = constant if operation(node) == "mul" else 1 / constant
    return offset * factor, scale * factor, core


def _polynomial(value: Any, x: fx.Node, inner: list[fx.Node]) -> Polynomial | None:
    """``value`` as a polynomial in ``x``, None when it is none; the nodes passed on the way are added to ``inner``."""
    if number(value) or value is x:
        return {1: 1.0} if value is x else {0: float(value)}
    given = operands(value) if operation(value) in _ARITHMETIC else ()
    if not 1 <= len(given) <= 2:
        return None
    inner.append(value)
    if operation(value) == "pow":
        return _power(_polynomial(given[0], x, inner), given[1])
    terms = [_polynomial(part, x, inner) for part in given]
    known = [term for term in terms if term is not None]
    return _ARITHMETIC[operation(value)](*known) if len(known) == len(terms) == 2 else None


def _sum(a: Polynomial, b: Polynomial, sign: float = 1.0) -> Polynomial:
    return {power: a.get(power, 0.0) + sign * b.get(power, 0.0) for power in a.keys() | b.keys()}


def _times(a: Polynomial, b: Polynomial) -> Polynomial:
    result: Polynomial = {}
    for p, u in a.items():
        for q, v in b.items():
            result[p + q] = result.get(p + q, 0.0) + u * v
    return result


def _over(a: Polynomial, b: Polynomial) -> Polynomial | None:
    return _times(a, {0: 1 / b[0]}) if b.keys() == {0} and b[0] else None


def _power(a: Polynomial | None, exponent: Any) -> Polynomial | None:
    if a is None or not number(exponent) or exponent not in (1, 2, 3):
        return None
    result: Polynomial = {0: 1.0}
    for _ in range(int(exponent)):
        result = _times(result, a)
    return result


_ARITHMETIC: dict[str, Callable[[Polynomial, Polynomial], Polynomial | None]] = {
    "add": _sum,
    "sub": lambda a, b: _sum(a, b, -1.0),
    "mul": _times,
    "div": _over,
    "pow": _times,  # by its exponent, see _power
}


def _plain(node: fx.Node, *defaults: float, length: int = 0) -> bool:
    """Whether the options of ``node`` (``inplace=False`` aside) are the first ``length`` or more of ``defaults``."""
    given = [option for option in options(node) if option is not False]
    return len(given) >= length and given == list(defaults[: len(given)])


def _same(a: Polynomial | None, b: Polynomial) -> bool:
    return a is not None and all(_close(a.get(power, 0.0), b.get(power, 0.0)) for power in a.keys() | b.keys())


def _close(a: float, b: float) -> bool:
    """Whether two constants are one number in float32."""
    return math.isclose(a, b, rel_tol=2**-23)
