"""Values that Inductor writes, where it would make them again in each kernel that reads them. PyTorch 2.11 to 2.14.

It has an operation that asks for an order of strides, which it can promise of what is written alone; what has that
order already is not copied.
"""

from torch import fx

from memrewrite.torch_internals.versions import private_imports


def realized(node: fx.Node) -> fx.Node:
    """What stands for ``node``, right after it, and is written; its sizes are numbers."""
    with private_imports():
        from torch._inductor.inductor_prims import force_stride_order
    value = node.meta["val"]
    with node.graph.inserting_after(node):
        made = node.graph.call_function(force_stride_order, (node, list(value.stride())))
    made.meta = {key: each for key, each in node.meta.items() if key in ("val", "tensor_meta", "partitioner_tag")}
    return made
