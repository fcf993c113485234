"""Tensors of the model with several names, and parameters of a region that the model reads elsewhere, too: in other
regions, in calls, in Python between them.
"""

from torch import Tensor, fx, nn

from memrewrite.capture.normal import attribute, is_below
from memrewrite.runtime.differences import joined
from memrewrite.runtime.guards import Reads

_KEY = "read elsewhere"  # in a node's meta, which graphs copy with the node


def note_read_elsewhere(graph: fx.Graph, path: str, model: nn.Module) -> None:
    """Say it of the nodes that read those in the graph of the submodule at ``path``."""
    region = model.get_submodule(path)
    calls = [joined(path, node.target) for node in graph.find_nodes(op="call_module")]
    others = {
        id(parameter)
        for name, module in model.named_modules(remove_duplicate=False)
        if not is_below(name, path) or any(is_below(name, call) for call in calls)
        for parameter in module._parameters.values()
        if parameter is not None
    }
    for node in graph.find_nodes(op="get_attr"):
        if id(attribute(region, str(node.target))) in others:
            node.meta[_KEY] = True


def is_read_elsewhere(node: fx.Node) -> bool:
    """Whether a node reads such a parameter."""
    return _KEY in node.meta


def tied(model: nn.Module, graph: fx.Graph, reads: Reads) -> tuple[tuple[str, ...], ...]:
    """The names of each tensor of the model that the graph reads, where it has several: the graph reads it by one.

    A module in several places has the same one in each, whatever becomes of it. What is no parameter or buffer is told
    by the names that forward ``reads``: others are kept to look at, or to go back to.
    """
    read = {(holder, name) for names, holders in reads for holder in holders for name in names}
    names: dict[int, dict[tuple[int, str], str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        others = {name: value for name, value in vars(module).items() if (path, name) in read}
        for key, tensor in {**others, **module._parameters, **module._buffers}.items():
            if isinstance(tensor, Tensor):
                names.setdefault(id(tensor), {}).setdefault((id(module), key), joined(path, key))
    in_graph = dict.fromkeys(id(attribute(model, str(node.target))) for node in graph.find_nodes(op="get_attr"))
    return tuple(tuple(names[each].values()) for each in in_graph if len(names.get(each, ())) > 1)
