"""Pointwise and row-wise operations between products become one, which keeps what it is given and nothing between.

Before::

    h = torch.ops.aten.to.dtype(x, torch.float32)
    r = torch.ops.aten.rsqrt.default(torch.ops.aten.mean.dim(torch.ops.aten.pow.Tensor_Scalar(h, 2), [-1], True))
    return torch.ops.aten.mul.Tensor(self.weight, torch.ops.aten.to.dtype(h * r, torch.bfloat16))

After::

    return fused(chain_5d1e3a90b2c4, (0, 1), x, self.weight)

Norms, gates, rotary embeddings, soft caps, whatever they are called: what runs between two products without random
numbers or writes. On CUDA the chain and its backward are compiled, so that nothing between its ends is written out;
intermediates then have more digits than the type that they are rounded to otherwise.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from typing import ClassVar

import torch
from torch import Tensor, fx

from memrewrite.observe.effects import Effects
from memrewrite.passes.groups import Group, as_it_is, computes_each_number, obstacle, put
from memrewrite.passes.linear_cross_entropy import match
from memrewrite.passes.spelling import CASTS, operand, operation, tensor
from memrewrite.records.graph_calls import ChainCall
from memrewrite.rewriting.contract import Findings, Result
from memrewrite.torch_internals.pytrees import tensors_in

_REDUCTIONS = ("mean", "sum", "amax", "amin", "var")
_VIEWS = ("view", "reshape", "unsqueeze", "squeeze", "transpose", "permute", "slice", "select", "expand")
_WORTH = 0.75  # of the bytes that the nodes read and write one by one


@dataclass(frozen=True)
class FusedChains:
    """Every chain that reads and writes clearly less at once, and of which autograd then keeps no more, becomes one."""

    name: ClassVar[str] = "fused_chains"
    exact: ClassVar[bool] = False

    def __call__(self, graph_module: fx.GraphModule, effects: Effects) -> Result:
        """Rewrite the chains between products."""
        findings = Findings()
        of_losses = {node for loss in filter(None, map(match, effects.order)) for node in loss.inner}
        groups = (Chain(effects, members) for members in _between_products(effects, of_losses))
        chains = [chain for group in groups for chain in _parts(group)]
        accepted = []
        for chain in (chain for chain in chains if chain.outputs and chain.is_worth_it):
            if reason := obstacle(chain):
                findings.refuse(chain.members[-1], reason)
            else:
                accepted.append(chain)
                findings.apply(chain.members[-1], f"{chain.computing} operations on {_shape(chain)} become one")
        replaced: dict[fx.Node, fx.Node] = {}
        for chain in accepted:
            replaced |= put(graph_module.graph, chain, partial(_call, chain), replaced, _without_autocast)
        return findings.finish(graph_module)


@dataclass(frozen=True)
class Chain(Group):
    """Nodes that could run at once."""

    @cached_property
    def trained(self) -> tuple[int, ...]:
        """Which inputs need a gradient."""
        return tuple(i for i, node in enumerate(self.inputs) if node.meta["val"].requires_grad)

    @cached_property
    def keeps(self) -> tuple[int, ...]:
        """Which inputs backward needs: autograd keeps these of them now, or what is made of them."""
        of = self.effects.of
        needed = {node for node in self.members if of[node].outputs & self._saved or of[node].saved - of[node].reads}
        for node in reversed(self.members):
            if node in needed:
                needed.update(node.all_input_nodes)
        return tuple(i for i, node in enumerate(self.inputs) if node in needed or of[node].outputs & self._saved)

    @cached_property
    def keeps_less(self) -> int:
        """The bytes of activations that autograd keeps less of."""
        after = {key for i in self.keeps for key in self.effects.of[self.inputs[i]].outputs}
        return self._bytes(self._saved) - self._bytes(after)

    @cached_property
    def _saved(self) -> frozenset[int]:
        return frozenset(key for node in self.members for key in self.effects.of[node].saved)

    def _bytes(self, keys: Iterable[int]) -> int:
        """The bytes of those storages that are activations and that nothing else has autograd keep."""
        members, storages = set(self.members), self.effects.storages
        own = (key for key in keys if not self.effects.savers[key] - members)
        return sum(storages[key].bytes for key in own if storages[key].origin in ("node", "input"))

    @property
    def computing(self) -> int:
        """How many of them are no views."""
        return sum(self.effects.of[node].moved > 0 for node in self.members)

    @property
    def is_worth_it(self) -> bool:
        """Whether less memory is read and written, and no more is kept."""
        alone = sum(self.effects.of[node].moved for node in self.members)
        at_once = sum(node.meta["val"].nbytes for node in (*self.inputs, *self.outputs))
        return self.computing > 1 and at_once <= _WORTH * alone and self.keeps_less >= 0


def _between_products(effects: Effects, left: set[fx.Node]) -> list[tuple[fx.Node, ...]]:
    """The nodes that could run at once: they read each other, and nothing else runs between them.

    Each node has a depth, how many nodes of other kinds lie on the longest way to it: what reads each other at one
    depth has none between. Nodes that are ``left`` are of other kinds. What no gradient comes to, and nothing that it
    is made of, lies on no way from one to another.
    """
    depth: dict[fx.Node, int] = {}
    groups: dict[fx.Node, list[fx.Node]] = {}
    trained: set[fx.Node] = set()
    for node in effects.order:
        before = max((depth[given] for given in node.all_input_nodes), default=0)
        could = node not in left and _could_be_fused(node, effects)
        needs = any(value.requires_grad for value in tensors_in(node.meta["val"]))
        if needs or any(given in trained for given in node.all_input_nodes):
            trained.add(node)
        depth[node] = before if could or node.op == "get_attr" or node not in trained else before + 1
        if could:
            group = [node]
            for given in node.all_input_nodes:
                if given in groups and depth[given] == depth[node] and groups[given] is not group:
                    group = [*groups[given], *group]
                    groups.update(dict.fromkeys(group, group))
            groups.update(dict.fromkeys(group, group))
    position = effects.position
    distinct = {id(group): group for group in groups.values()}
    return [tuple(sorted(group, key=position.__getitem__)) for group in distinct.values()]


def _could_be_fused(node: fx.Node, effects: Effects) -> bool:
    """Whether a node computes each number, or each row, of a tensor by itself, and does nothing else."""
    facts, value = effects.of[node], tensor(node)
    if value is None or facts.random or facts.writes or facts.flops or facts.opaque or not value.requires_grad:
        return False
    given = [tensor(each) for each in node.all_input_nodes]
    if not given or any(each is None or each.device != value.device for each in given):
        return False
    if value.dtype == torch.float64 or value.layout is not torch.strided:
        return False
    name, first = operation(node), tensor(operand(node))
    if computes_each_number(node):
        return True
    if name == "cat":
        return all(each.dim() == value.dim() for each in given if each is not None)
    if first is None:
        return False
    if name in _REDUCTIONS:
        return value.shape == (*first.shape[:-1], 1) and first.dim() > 1
    return name in _VIEWS and bool(facts.outputs & facts.reads)


def _parts(chain: Chain) -> Iterator[Chain]:
    """The chain without views at its ends, which cost nothing, and a result must not be a view.

    It is parted where autograd keeps less of what runs first than of what that is made of, such as of a sum.
    """
    while needless := next(filter(partial(_needless, chain), chain.members), None):
        chain = chain.without({needless})
    first: dict[fx.Node, set[fx.Node]] = {}  # each node with all that it is made of, as long as nothing of it is kept
    for node in chain.members:
        given = [each for each in node.all_input_nodes if each in chain.members]
        if chain.effects.of[node].saved or any(each not in first for each in given):
            continue
        first[node] = {node}.union(*(first[each] for each in given))
        rest = chain.without(first[node])
        if rest.keeps_less > chain.keeps_less:
            yield from _parts(chain.without(set(rest.members)))
            yield from _parts(rest)
            return
    yield chain


def _needless(chain: Chain, node: fx.Node) -> bool:
    """Whether a node is a view at one end of the chain; of all its input, at the beginning."""
    facts = chain.effects.of[node]
    if not facts.outputs & facts.reads:
        return False
    if all(user not in chain.members for user in node.users):
        return True
    is_first = all(given not in chain.members for given in node.all_input_nodes)
    return is_first and node.meta["val"].numel() == operand(node).meta["val"].numel()


def _call(chain: Chain, graph: fx.GraphModule) -> ChainCall:
    return ChainCall(graph, chain.trained, chain.keeps)


def _without_autocast(graph: fx.Graph, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    """A copy that casts what it is given as autocast does, which does not look into a chain."""
    value, given = tensor(node), [each for each in node.all_input_nodes if _is_float(each)]
    copy = as_it_is(graph, node, copies)
    if operation(node) in CASTS or value is None or not value.is_floating_point() or not given:
        return copy
    types = [each.meta["val"].dtype for each in given if each.meta["val"].dim()] or [given[0].meta["val"].dtype]
    if reduce(torch.promote_types, types) == value.dtype:
        return copy
    with graph.inserting_before(copy):
        for each in given:
            if each.meta["val"].dtype != value.dtype:
                cast = graph.call_function(torch.ops.aten.to.dtype, (copies[each], value.dtype))
                copy.replace_input_with(copies[each], cast)
    return copy


def _is_float(node: fx.Node) -> bool:
    value = tensor(node)
    return value is not None and value.is_floating_point()


def _shape(chain: Chain) -> str:
    value: Tensor = chain.outputs[-1].meta["val"]
    return f"{tuple(map(int, value.shape))}"
