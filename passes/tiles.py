"""A token-wise part that is wider inside than at its ends, an MLP say, runs some rows at a time.

Before::

    gate = torch.ops.aten.silu.default(torch.ops.aten.linear.default(x, self.gate))
    up = torch.ops.aten.linear.default(x, self.up)
    return torch.ops.aten.linear.default(torch.ops.aten.mul.Tensor(gate, up), self.down)

After::

    return in_tiles(chain_9b1f0c52d3aa, (0,), (1, 2, 3), 1024, x, self.gate, self.up, self.down)

Its inner width then never exists for all rows, neither forward nor backward, which makes each piece again. Weights get
the sum of the gradients of all pieces, so it is done only where nothing else makes a step fit.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from math import ceil
from operator import getitem
from typing import Any, ClassVar

from torch import fx

from memrewrite.observe.effects import Effects
from memrewrite.passes.chunked_cross_entropy import VIEWS
from memrewrite.passes.groups import Group, as_it_is, bytes_of, is_pointwise, is_trained, obstacle, put
from memrewrite.passes.spelling import operand, operation, tensor
from memrewrite.records.graph_calls import TiledCall
from memrewrite.rewriting.contract import Findings, Result
from memrewrite.torch_internals.pytrees import tensors_in

_PRODUCTS = {"linear": 0, "mm": 0, "matmul": 0, "addmm": 1}  # the place of their rows among their arguments
_NORMS = ("layer_norm", "rms_norm")
_PICKS = {"chunk": 2, "split": 2, "split_with_sizes": 2, "slice": 1}  # the place of the dimension among theirs
_WORTH = 2  # times the bytes at the ends, inside
_PIECES = 8  # at most: more of them take time and hardly any memory less
_ALIGNED = 8


@dataclass(frozen=True)
class Tiles:
    """Each piece has ``rows`` rows at least, and so many that what is inside of it takes what the ends take."""

    name: ClassVar[str] = "tiles"
    exact: ClassVar[bool] = False
    rows: int

    def __call__(self, graph_module: fx.GraphModule, effects: Effects) -> Result:
        """Rewrite what lies between products that make rows wider and those that make them narrow again."""
        findings = Findings()
        accepted: list[tuple[Part, int]] = []
        for part in _parts(effects):
            if part.inside < _WORTH * part.ends or part.count <= self.rows:
                continue
            share = max(part.ends / part.inside, 1 / _PIECES)
            rows = max(ceil(part.count * share / _ALIGNED) * _ALIGNED, self.rows)
            if reason := _obstacle(part):
                findings.refuse(part.outputs[0], reason)
            else:
                accepted.append((part, rows))
                findings.apply(part.outputs[0], f"a part of {part.count} rows runs {rows} of them at a time")
        replaced: dict[fx.Node, fx.Node] = {}
        for part, rows in accepted:
            replaced |= put(graph_module.graph, part, partial(_call, part, rows), replaced, _copy)
        return findings.finish(graph_module)


Reads = tuple[tuple[fx.Node, ...], tuple[fx.Node, ...]]
"""What a node reads row by row, and what whole."""


@dataclass(frozen=True)
class Part(Group):
    """What makes each of ``count`` rows of its results of the same row of some of its inputs."""

    count: int

    @cached_property
    def inputs(self) -> tuple[fx.Node, ...]:
        """What they read that is not among them, but for the sizes of views, which rows alone do not need."""
        read = (each for node in self.members for kind in self._reads[node] for each in kind)
        return tuple(dict.fromkeys(each for each in read if each not in self.members))

    @cached_property
    def in_rows(self) -> tuple[int, ...]:
        """Which inputs these are, those first that have the sizes of the results."""
        found = [i for i, node in enumerate(self.inputs) if node in self._read(0)]
        return tuple(sorted(found, key=lambda i: _sizes(self.inputs[i]) != _sizes(self.outputs[0])))

    @cached_property
    def weights(self) -> tuple[int, ...]:
        """Which inputs products alone read, whole."""
        others = {given for node in self.members if _rows_of(node) is None for given in node.all_input_nodes}
        return tuple(i for i, node in enumerate(self.inputs) if i not in self.in_rows and node not in others)

    @cached_property
    def ends(self) -> int:
        """The bytes of what it is given in rows, of what it gives, and of one weight's gradient, before it is added."""
        weights = (self.inputs[i] for i in self.weights)
        added = max((bytes_of(node) for node in weights if node.meta["val"].requires_grad), default=0)
        return sum(bytes_of(node) for node in (*(self.inputs[i] for i in self.in_rows), *self.outputs)) + added

    @cached_property
    def inside(self) -> int:
        """The bytes of what it makes on the way."""
        made = (node for node in self.members if node not in self.outputs and self.effects.of[node].moved)
        return sum(map(bytes_of, made))

    @cached_property
    def read_both_ways(self) -> set[fx.Node]:
        """What it is given in rows, and reads whole as well."""
        return self._read(0) & self._read(1)

    def _read(self, kind: int) -> set[fx.Node]:
        return {each for reads in self._reads.values() for each in reads[kind]}

    @cached_property
    def _reads(self) -> dict[fx.Node, Reads]:
        return {node: _reads(node, self.count, self.effects) or ((), ()) for node in self.members}


def _parts(effects: Effects) -> Iterator[Part]:
    """Every part from products that make rows wider, or from what is not done row by row, to narrower rows again."""
    done: set[fx.Node] = set()
    for last in effects.order:
        wide = _rows_of(last)
        if wide is None or last in done or _widening(last) >= 0:
            continue
        starts = tuple(operand(wide).users) if wide.target is getitem else (wide,)
        members = _down_to_products(starts, _count(last), effects)
        if not members and len(starts) > 1:  # not all of several results are a part's, this one may be
            starts = (wide,)
            members = _down_to_products(starts, _count(last), effects)
        done |= members
        waiting = [*starts]
        while members and waiting:
            node = waiting.pop()
            reads = None if node in members else _reads(node, _count(last), effects)
            # What is read after the part begins to be narrow has to be there as a whole.
            if reads is not None and all(user in members or user < wide for user in node.users):
                members.add(node)
                waiting += [] if _widening(node) > 0 else reads[0]
        while torn := {node for node in members if node.target is getitem and operand(node) not in members}:
            members -= torn  # one of several results of what stays outside is what the part is given
        part = Part(effects, tuple(sorted(members)), _count(last))
        if part.outputs:  # none are of what nobody reads
            yield part


def _down_to_products(wide: tuple[fx.Node, ...], count: int, effects: Effects) -> set[fx.Node]:
    """What reads wide rows, down to products that make them narrow; nothing where some of it is anything else."""
    found: set[fx.Node] = set()
    waiting = [user for node in wide for user in node.users]
    while waiting:
        node = waiting.pop()
        is_product = _rows_of(node) is not None
        if _reads(node, count, effects) is None or (is_product and _widening(node) >= 0):
            return set()
        found.add(node)
        waiting += [] if is_product else [user for user in node.users if user not in found]
    return found


def _reads(node: fx.Node, count: int, effects: Effects) -> Reads | None:
    """What a node of ``count`` rows reads; None where it does not make each row of those at the same place."""
    facts, given = effects.of[node], node.all_input_nodes
    if node.op not in ("call_function", "call_method") or facts.random or facts.writes or facts.opaque:
        return None
    if not given or _count(node) != count:
        return None
    if _keeps_rows(node) or _picks(node):
        return ((operand(node),), ()) if _count(operand(node)) == count else None
    if any(tensor(each) is None for each in given):
        return None
    rows = _rows_of(node) or (operand(node) if _normalizes_rows(node) else None)
    if rows is not None:
        return ((rows,), tuple(each for each in given if each is not rows)) if _count(rows) == count else None
    if not is_pointwise(node):
        return None
    in_rows = tuple(each for each in given if _count(each) == count)
    whole = tuple(each for each in given if each not in in_rows)
    return (in_rows, whole) if in_rows and all(each.meta["val"].dim() <= 1 for each in whole) else None


def _normalizes_rows(node: fx.Node) -> bool:
    sizes: Any = node.args[1] if operation(node) in _NORMS and len(node.args) > 1 else ()
    return len(sizes) == 1


def _keeps_rows(node: fx.Node) -> bool:
    """Whether a node gives the rows that it is given, maybe counted in other dimensions."""
    if operation(node) not in (*VIEWS, "dropout"):
        return False
    before, after = tensor(operand(node)), tensor(node)
    if before is None or after is None or before.dtype != after.dtype:
        return False
    return before.shape[-1:] == after.shape[-1:]


def _picks(node: fx.Node) -> bool:
    """Whether a node gives the same parts of every row."""
    if len(node.all_input_nodes) > 1:  # sizes that vary
        return False
    if node.target is getitem:
        return isinstance(operand(node).meta["val"], list | tuple)
    name, before = operation(node), tensor(operand(node)) if operation(node) in _PICKS else None
    return before is not None and _dim(node, _PICKS[name]) in (-1, before.dim() - 1)


def _dim(node: fx.Node, place: int) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get("dim", 0)


def _rows_of(node: fx.Node) -> fx.Node | None:
    """What is multiplied by a matrix, for a product that does so; None for any other node."""
    place = _PRODUCTS.get(operation(node))
    if place is None or len(node.args) <= place:
        return None
    found: fx.Node = node.args[place]  # type: ignore[assignment]
    others = [tensor(given) for given in node.all_input_nodes if given is not found]
    return found if sorted(-1 if other is None else other.dim() for other in others) in ([2], [1, 2]) else None


def _widening(node: fx.Node) -> int:
    """By how many numbers a product makes rows wider, or, below 0, narrower; 0 for any other node."""
    rows = _rows_of(node)
    return 0 if rows is None else _width(node) - _width(rows)


def _width(node: fx.Node) -> int:
    return int(node.meta["val"].shape[-1])


def _sizes(node: fx.Node) -> tuple[int, ...]:
    """The sizes of what has rows, but for their width; none for several results, which have to be there as a whole."""
    value = tensor(node)
    return () if value is None else tuple(value.shape[:-1])


def _count(node: fx.Node) -> int:
    """How many rows a node has, 0 where there are none, or not equally many in all of its results."""
    shapes = {value.shape[:-1] for value in tensors_in(node.meta["val"]) if value.dim() > 1}
    return next(iter(shapes)).numel() if len(shapes) == 1 else 0


def _obstacle(part: Part) -> str | None:
    """Why a part cannot run some rows at a time; None if it can."""
    inner = (node for node in part.outputs if any(user in part.members for user in node.users))
    if used := next(inner, None):
        return f"Its intermediate {used.name} is used elsewhere, so it has to be there as a whole."
    if both := next(iter(part.read_both_ways), None):
        return f"It reads {both.name} row by row and as a whole."
    if any(_sizes(node) != _sizes(part.inputs[part.in_rows[0]]) for node in part.outputs):
        return "No tensor that it is given has its rows in the places of those of its results."
    return obstacle(part, trained=is_trained(part.effects))


def _call(part: Part, rows: int, graph: fx.GraphModule) -> TiledCall:
    return TiledCall(graph, part.in_rows, part.weights, rows)


def _copy(graph: fx.Graph, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    """The copy that does of rows in two dimensions what the node does."""
    if _keeps_rows(node):
        return copies[operand(node)]
    copy = as_it_is(graph, node, copies)
    if (place := _PICKS.get(operation(node))) is not None:
        if len(node.args) > place:
            copy.update_arg(place, -1)
        else:
            copy.update_kwarg("dim", -1)
    return copy
