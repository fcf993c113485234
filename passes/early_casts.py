"""What autocast casts for a product is cast before it, so that a segment can keep the cast.

Before::

    add = torch.ops.aten.add.Tensor(conv, x)
    conv_1 = torch.ops.aten.conv2d.default(add, self.weight)

After::

    add = torch.ops.aten.add.Tensor(conv, x)
    as_autocast = as_autocast(add)
    conv_1 = torch.ops.aten.conv2d.default(as_autocast, self.weight)

Autocast casts in the same place, so nothing changes but where a segment may begin: with half of the bytes of a sum in
float32 that nothing else keeps. A cast in the segment of its product is of no use, and is taken away after planning.
"""

from torch import Tensor, fx

from memrewrite.effects import Effects
from memrewrite.passes.spelling import operation
from memrewrite.runtime.segment import IN_AUTOCAST, as_autocast

_PRODUCTS = {operator.overloadpacket.__name__ for operator in IN_AUTOCAST}


def insert(graph_module: fx.GraphModule, effects: Effects) -> None:
    """Spell out each cast of an activation for the one product that reads it, as it was observed in ``effects``.

    Two products have a cast each, which together take as much as what they are made of.
    """
    for node in effects.order:
        if operation(node) in _PRODUCTS:
            for source in node.all_input_nodes:
                if node.args.count(source) == 1 and _is_cast(source, node, effects):
                    with graph_module.graph.inserting_before(node):
                        cast = graph_module.graph.call_function(as_autocast, (source,))
                    cast.meta = {key: node.meta[key] for key in ("module_path", "source") if key in node.meta}
                    node.replace_input_with(source, cast)
    graph_module.recompile()


def drop_needless(graph_module: fx.GraphModule) -> None:
    """Take away each cast that lies in the segment of its product, or in none as that does."""
    for node in graph_module.graph.find_nodes(op="call_function", target=as_autocast):
        (source,) = node.all_input_nodes
        if all(user.meta.get("segment") == node.meta.get("segment") for user in node.users):
            node.replace_all_uses_with(source)
            graph_module.graph.erase_node(node)
    graph_module.recompile()


def _is_cast(source: fx.Node, product: fx.Node, effects: Effects) -> bool:
    """Whether autocast gives ``product`` what ``source`` makes in another type."""
    value, result = source.meta["val"], product.meta["val"]
    if sum(operation(user) in _PRODUCTS for user in source.users) > 1:
        return False
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.dtype == result.dtype:
        return False
    return all(effects.storages[key].origin == "node" for key in effects.of[source].outputs)
