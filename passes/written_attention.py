"""Attention that a model writes itself: a product, a softmax of its rows, and a product with values.

Scores are of every two places of a text. Of some texts, heads or rows at a time, they never exist for all of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from math import ceil
from typing import Any

import torch
from torch import fx

from memrewrite.observe.effects import Effects
from memrewrite.passes.groups import Group, as_it_is, bytes_of, is_pointwise, is_trained, obstacle
from memrewrite.passes.matching import erase
from memrewrite.passes.spelling import by_name, operand, operation, tensor
from memrewrite.records.graph_calls import PiecedCall
from memrewrite.torch_internals.pytrees import tree_leaves

DROPOUT = "It drops some of what it attends to at random."
_PRODUCTS = {"matmul": 0, "bmm": 0, "baddbmm": 1}  # the place of what they multiply among their arguments
_ROWS = -2  # the dimension of rows, which one matrix of a product has
_VIEWS = ("view", "reshape", "flatten")
_WORTH = 2  # times the bytes at the ends, inside
_PIECES = 16  # at most: with more of them kernels have little to do
_ENOUGH = 8  # of them, so that no other dimension is looked for


@dataclass(frozen=True)
class WrittenAttention(Group):
    """From the product of queries and keys, ``first``, to that with values, which is the last of the members.

    What is ``unread`` is made of members, and nobody reads it.
    """

    first: fx.Node
    softmax: fx.Node
    unread: frozenset[fx.Node]

    @cached_property
    def inputs(self) -> tuple[fx.Node, ...]:
        """What they read that is not among them, but for the sizes of views."""
        of_each = ([operand(node)] if _regroups(node) else node.all_input_nodes for node in self.members)
        return tuple(given for given in dict.fromkeys(chain.from_iterable(of_each)) if given not in self.members)

    @cached_property
    def outputs(self) -> tuple[fx.Node, ...]:
        """Those that others read."""
        inside = {*self.members, *self.unread}
        return tuple(node for node in self.members if not inside.issuperset(node.users))

    @property
    def scores(self) -> int:
        """The bytes of what it makes of every two places."""
        return bytes_of(self.softmax)

    @property
    def is_worth_it(self) -> bool:
        """Whether what it makes on the way is much more than what lies at its ends."""
        return self._inside >= _WORTH * self._ends

    def obstacle(self) -> str | None:
        """Why it has to stay whole; None if it need not."""
        if any(self.effects.of[node].random for node in self.members):
            return DROPOUT
        if used := next((node for node in self.outputs if node is not self.members[-1]), None):
            return f"Its intermediate {used.name} is used elsewhere, so it has to be there as a whole."
        if not self._apart:
            return "What it is given does not lie in the places of its scores."
        return obstacle(self, trained=is_trained(self.effects))

    def call(self, graph: fx.GraphModule) -> PiecedCall:
        """What computes its graph in ``pieces``."""
        return PiecedCall(graph, self._apart[self._dim], self._dim, self.pieces)

    def copy(self, graph: fx.Graph, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
        """The copy of a member; views name no size that varies, or that is another in a piece."""
        if not _regroups(node):
            return as_it_is(graph, node, copies)
        one = graph.call_function(torch.ops.aten.flatten.using_ints, (copies[operand(node)], 0, _ROWS - 1))
        _, *sizes = node.meta["val"].shape[:_ROWS]
        return graph.call_function(torch.ops.aten.unflatten.int, (one, 0, [-1, *map(int, sizes)])) if sizes else one

    @property
    def pieces(self) -> int:
        """So many that a piece makes on the way what lies at the ends, if there may be."""
        return min(self._wanted, self._count(self._dim))

    def erase_unread(self) -> None:
        """Take out what nobody reads."""
        erase(sorted(self.unread, reverse=True))

    @cached_property
    def _ends(self) -> int:
        """The bytes of queries, keys, values and results."""
        return sum(map(bytes_of, (*_factors(self.first), _factors(self.members[-1])[1], self.members[-1])))

    @cached_property
    def _inside(self) -> int:
        """The bytes of what it makes on the way."""
        return sum(bytes_of(node) for node in self.members[:-1] if self.effects.of[node].moved)

    @property
    def _dim(self) -> int:
        """The dimension of texts, counted from the last one; that of heads or rows, if there are too few texts."""
        many = (dim for dim in self._apart if self._count(dim) >= min(self._wanted, _ENOUGH))
        return next(many, max(self._apart, key=self._count))

    @cached_property
    def _apart(self) -> dict[int, tuple[int, ...]]:
        """Which inputs have the places that the scores have in a dimension, by the dimensions that can be divided."""
        rank = self.softmax.meta["val"].dim()
        dims = [_ROWS] if any(map(_regroups, self.members)) else range(-rank, _ROWS + 1)
        found = {dim: self._apart_in(dim) for dim in dims if self._count(dim) > 1}
        return {dim: apart for dim, apart in found.items() if apart is not None}

    def _apart_in(self, dim: int) -> tuple[int, ...] | None:
        """Those of one dimension; None where an input has other places in it."""
        whole, apart = set[fx.Node](), set[fx.Node]()
        for product in (self.first, self.members[-1]):
            lies = _lies_along(product, dim)
            if lies is None or not lies[0]:
                return None
            first, second = _factors(product)
            apart.add(first)
            (apart if lies[1] else whole).add(second)
        if whole & apart:
            return None
        for node in (each for each in self.inputs if each not in whole):
            given = tensor(node)
            places = 0 if given is None else given.shape[dim] if given.dim() >= -dim else 1
            if places not in (1, self._count(dim)):
                return None
            apart |= {node} if places > 1 else set()
        return tuple(i for i, node in enumerate(self.inputs) if node in apart)

    @cached_property
    def _wanted(self) -> int:
        return min(ceil(self._inside / max(self._ends, 1)), _PIECES)

    def _count(self, dim: int) -> int:
        return int(self.softmax.meta["val"].shape[dim])


def written_attention(effects: Effects) -> Iterator[WrittenAttention]:
    """All that is written so, whether it can run in pieces or not."""
    unread = _unread(effects)
    for node in effects.order:
        if operation(node) == "softmax" and _of_rows(node) and (found := _around(node, effects, unread)) is not None:
            yield found


def _around(softmax: fx.Node, effects: Effects, unread: set[fx.Node]) -> WrittenAttention | None:
    """What leads from one product to a softmax, and from there to another; None where that is anything else."""
    before = _leading(softmax, effects)
    products = [node for node in before if _factors(node)]
    members, waiting, last = {*before, softmax}, [*softmax.users], set[fx.Node]()
    while waiting:
        node = waiting.pop()
        factors = _factors(node)
        if factors and factors[0] in members and factors[1] not in members:
            last.add(node)
        elif node not in members and _is_inside(node, softmax, effects):
            members.add(node)
            waiting += node.users
    if len(products) != 1 or len(last) != 1:
        return None
    leading = {*last}
    for node in sorted(members, reverse=True):
        leading |= {node} if not leading.isdisjoint(node.users) else set()
    members &= leading
    of_members, waiting = set[fx.Node](), [user for node in members for user in node.users if user in unread]
    while waiting:
        of_members.add(node := waiting.pop())
        waiting += node.users
    return WrittenAttention(effects, (*sorted(members), *last), products[0], softmax, frozenset(of_members))


def _leading(softmax: fx.Node, effects: Effects) -> set[fx.Node]:
    """The products of two factors that a softmax comes of, and what lies between."""
    found: dict[fx.Node, bool] = {}  # whether it comes of a product

    def leads(node: fx.Node) -> bool:
        if node not in found:
            found[node] = bool(_alike(node, softmax) and _factors(node))
            if not found[node] and _is_inside(node, softmax, effects):
                leading = [leads(each) for each in node.all_input_nodes]  # all are looked at
                found[node] = any(leading)
        return found[node]

    leads(operand(softmax))
    return {node for node, leading in found.items() if leading}


def _is_inside(node: fx.Node, softmax: fx.Node, effects: Effects) -> bool:
    """Whether a node makes numbers of scores, each of those at its place."""
    if node.op not in ("call_function", "call_method") or not _alike(node, softmax):
        return False
    facts, drops = effects.of[node], operation(node) == "dropout"
    ours = is_pointwise(node) or drops or operation(node) == "type_as" or _regroups(node)
    return ours and not (facts.writes or facts.opaque or (facts.random and not drops))


def _alike(node: fx.Node, softmax: fx.Node) -> bool:
    """Whether it has as many of the same matrices."""
    value, scores = tensor(node), softmax.meta["val"]
    return value is not None and value.numel() == scores.numel() and value.shape[_ROWS:] == scores.shape[_ROWS:]


def _regroups(node: fx.Node) -> bool:
    """Whether it sees the same matrices in other dimensions, whose sizes but the first one are written in the model."""
    value, given = tensor(node), tensor(operand(node)) if operation(node) in _VIEWS else None
    if value is None or given is None or given.dim() < 3 or value.dim() < 3 or node.kwargs:
        return False
    sizes = tree_leaves(node.args[1:])[1 : value.dim() + _ROWS]
    fixed = all(isinstance(size, int) and size > 0 for size in sizes) and operation(node) != "flatten"
    return value.shape[_ROWS:] == given.shape[_ROWS:] and (fixed or value.dim() == 3)


def _unread(effects: Effects) -> set[fx.Node]:
    """What nobody reads, and does nothing but make it."""
    found: set[fx.Node] = set()
    for node in reversed(effects.order):
        facts, calls = effects.of[node], node.op in ("call_function", "call_method")
        if calls and not (facts.random or facts.writes or facts.opaque or node.is_impure()):
            found |= {node} if found.issuperset(node.users) else set()
    return found


def _factors(node: fx.Node) -> tuple[fx.Node, ...]:
    """The two that a node multiplies, matrix by matrix; none of any other node."""
    place, letters = _PRODUCTS.get(operation(node)), _letters(node)
    if place is None and letters is None:
        return ()
    factors: Any = node.args[1] if place is None else node.args[place : place + 2]
    values = [tensor(factor) for factor in factors]
    if len(values) != 2 or any(value is None or value.dim() < 3 for value in values):
        return ()
    first, second = (value.shape[:-2] for value in values if value is not None)
    alike = place is None or first == second
    return tuple(each for each in factors if isinstance(each, fx.Node)) if alike else ()


def _lies_along(product: fx.Node, dim: int) -> tuple[bool, bool] | None:
    """Whether the factors have the places in a dimension that the result has; None where one has them elsewhere."""
    if (letters := _letters(product)) is None:
        return True, dim < _ROWS
    *factors, result = letters
    letter = result[dim]
    if any(each.count(letter) > 1 or (letter in each and each[dim:][:1] != letter) for each in factors):
        return None
    first, second = (letter in each for each in factors)
    return first, second


def _letters(node: fx.Node) -> tuple[str, str, str] | None:
    """What an einsum of two factors calls their dimensions and those of its result, equally many; None of another."""
    if operation(node) != "einsum" or not isinstance(node.args[0], str):
        return None
    of, _, result = node.args[0].replace(" ", "").partition("->")
    first, _, second = of.partition(",")
    alike = len(first) == len(second) == len(result) and (first + second + result).isalpha()
    return (first, second, result) if alike else None


def _of_rows(softmax: fx.Node) -> bool:
    """Whether a softmax is one of rows, of several matrices of them."""
    value = tensor(softmax)
    rank = 0 if value is None else value.dim()
    return rank > 2 and by_name(softmax, ("self", "dim")).get("dim") in (-1, rank - 1)
