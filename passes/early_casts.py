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
An input is there anyway, and its cast takes room besides; but of an image that convolutions read, Inductor may hold a
copy in their layout, in float32.
"""

import itertools

from torch import Tensor, fx

from memrewrite.capture.origin import origin, set_origin
from memrewrite.observe.effects import Effects
from memrewrite.passes.spelling import operation
from memrewrite.plan.marks import Marks
from memrewrite.runtime.segment import IN_AUTOCAST, as_autocast

_PRODUCTS = {operator.overloadpacket.__name__ for operator in IN_AUTOCAST}


def insert(graph_module: fx.GraphModule, effects: Effects) -> bool:
    """Spell out each cast of an activation for the one product that reads it, as it was observed in ``effects``.

    Two products have a cast each, which together take as much as what they are made of. Says whether there are any.
    """
    casts = []
    for node in effects.order:
        if operation(node) in _PRODUCTS:
            for source in node.all_input_nodes:
                if node.args.count(source) == 1 and _is_cast(source, node, effects):
                    casts.append(_cast(source, node, node))
    graph_module.recompile()
    return bool(casts)


def insert_for_inputs(graph_module: fx.GraphModule, effects: Effects, marks: Marks) -> bool:
    """Spell out the cast of each input that only one product reads, before its segment; whether there are any."""
    casts = []
    first: dict[int, fx.Node] = {}  # of each outermost segment
    for node in effects.order:
        if not marks[node.name].segment:
            continue
        place = first.setdefault(marks[node.name].segment[0], node)
        for source in node.all_input_nodes if operation(node) in _PRODUCTS else ():
            alone = len(source.users) == node.args.count(source) == 1
            if source.op == "placeholder" and alone and _is_narrower(node, source):
                casts.append(_cast(source, node, place))
    graph_module.recompile()
    return bool(casts)


def drop_needless(graph_module: fx.GraphModule, marks: Marks) -> bool:
    """Take away each cast that lies in the segment of its product, or in none as that does; whether there are any.

    Some let go of what they cast before the product runs.
    """
    casts = graph_module.graph.find_nodes(op="call_function", target=as_autocast)
    alike = [all(marks[user.name].segment == marks[cast.name].segment for user in cast.users) for cast in casts]
    for cast in itertools.compress(casts, alike):
        (source,) = cast.all_input_nodes
        cast.replace_all_uses_with(source)
        graph_module.graph.erase_node(cast)
    graph_module.recompile()
    return any(alike)


def _cast(source: fx.Node, product: fx.Node, place: fx.Node) -> fx.Node:
    """A cast of ``source`` before ``place``, which ``product`` reads instead of it."""
    with place.graph.inserting_before(place):
        cast = place.graph.call_function(as_autocast, (source,))
    set_origin(cast, origin(product))
    product.replace_input_with(source, cast)
    return cast


def _is_cast(source: fx.Node, product: fx.Node, effects: Effects) -> bool:
    """Whether autocast gives ``product``, and no other product, what ``source`` makes in another type."""
    if sum(operation(user) in _PRODUCTS for user in source.users) > 1 or not _is_narrower(product, source):
        return False
    return all(effects.storages[key].origin == "node" for key in effects.of[source].outputs)


def _is_narrower(product: fx.Node, source: fx.Node) -> bool:
    """Whether a product of the floating-point ``source`` has another type."""
    value = source.meta["val"]
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != product.meta["val"].dtype
