"""What both front ends share: the input spec of a call, and a graph brought into the one form of ``Captured``."""

import ast
import contextlib
import inspect
import itertools
import linecache
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.immutable_collections import immutable_dict, immutable_list

from memrewrite.capture.captured import IN_CONDITIONS, Captured, InputSpec, NumberSpec, TensorSpec
from memrewrite.capture.expressions import is_literal
from memrewrite.capture.opaque import behind
from memrewrite.capture.origin import Origin, set_origin
from memrewrite.records.errors import CaptureError, InternalError
from memrewrite.records.lines import is_users
from memrewrite.torch_internals.pytrees import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten
from memrewrite.torch_internals.tracing import module_of, size_conditions
from memrewrite.workload.step import Inputs

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


def bind(model: nn.Module, inputs: Inputs) -> tuple[InputSpec, list[int]]:
    """The spec of the call ``model(*inputs.args, **inputs.kwargs)``, sizes still fixed, and a permutation:
    entry i is the position of spec leaf i among the leaves of ``(args, kwargs)``.

    Raises ``CaptureError`` when the inputs do not fit the signature of ``forward``.
    """
    signature = inspect.signature(model.forward)
    leaves, tree = tree_flatten((inputs.args, inputs.kwargs))
    try:
        args, kwargs = tree_unflatten(range(len(leaves)), tree)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise _untaken(model, (*inputs.args, *inputs.kwargs.values())) from error
    if unknown := [leaf for leaf in leaves if not isinstance(leaf, Tensor) and not is_literal(leaf)]:
        raise _untaken(model, unknown)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise CaptureError(f"The example inputs do not fit forward{signature}: {error}.") from None
    kinds = [signature.parameters[name].kind for name in bound.arguments]
    if not kinds or inspect.Parameter.VAR_POSITIONAL in kinds:
        order, spec = tree_flatten((args, kwargs))
        return InputSpec((), spec, tuple(_leaf_spec(leaves[i]) for i in order)), order
    values = dict(bound.arguments)
    if inspect.Parameter.VAR_KEYWORD in kinds:
        values |= values.popitem()[1]
    order, spec = tree_flatten(tuple(values.values()))
    specs = tuple(_leaf_spec(leaves[i]) for i in order)
    return InputSpec(tuple(values), spec, specs), order


def _untaken(model: nn.Module, given: Sequence[Any]) -> CaptureError:
    kinds = ", ".join(sorted({type(each).__name__ for each in given}))
    return CaptureError(
        f"{type(model).__name__} is called with what no program can take apart ({kinds}); leave that out, or give the "
        "tensors inside and make it of them in forward."
    )


def leaf_tensors(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    """The tensor inputs in the order of the captured graph's placeholders."""
    _, order = bind(model, inputs)
    leaves = tree_leaves((inputs.args, inputs.kwargs))
    return [leaves[i] for i in order if isinstance(leaves[i], Tensor)]


def example_of(captured: Captured, model: nn.Module, inputs: Inputs) -> list[Any]:
    """The tensors and numbers for the placeholders of a captured graph, in order."""
    return [*leaf_tensors(model, inputs), *(number.example for number in captured.inputs.numbers)]


def _leaf_spec(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return TensorSpec(leaf.dtype, leaf.device.type, tuple(leaf.shape))


def batch_size(inputs: Inputs) -> int | None:
    """The first size above 1 that most tensor inputs have, None where there is none; positions, say, have no batch."""
    sizes = Counter(t.shape[0] for t in inputs.tensors() if t.dim() > 0 and t.shape[0] > 1)
    return sizes.most_common(1)[0][0] if sizes else None


def rebuild(
    source: fx.Graph,
    root: nn.Module,
    model: nn.Module,
    replace: Callable[[fx.Graph, fx.Node, dict[fx.Node, Any]], bool],
    outputs: Callable[[fx.Graph, Any], Sequence[Any]],
) -> fx.GraphModule:
    """Copy ``source`` into a plain graph.

    ``replace(graph, node, values)`` may put its own value for a node into ``values`` and return True;
    ``outputs`` turns the output's argument, already in values of the new graph, into the flat sequence of results.
    """
    _drop_assertions_in_bodies(root, source)
    graph = fx.Graph()
    graph.output(tuple(outputs(graph, copy_into(graph, source, {}, replace))))
    paths = [str(node.target) for node in graph.find_nodes(op="call_module")]
    kept = {path: behind(model.get_submodule(path)) for path in paths}
    for path, child in kept.items():
        _put(root, path, child)
    module = module_of(root, graph, type(model).__name__)
    theirs = {id(inner) for child in kept.values() for inner in child.modules()}
    for inner in module.modules():
        if id(inner) not in theirs:
            inner.training = model.training
    graph.lint()
    return module


def thawed(tree: TreeSpec) -> TreeSpec:
    """The structure of what an ``fx.GraphModule`` returns: export names dictionaries and lists as graphs hold them."""

    def plain(value: Any) -> Any:
        if isinstance(value, immutable_dict):
            return {key: thaw(item) for key, item in value.items()}
        return [*map(thaw, value)] if isinstance(value, immutable_list) else value

    def thaw(value: Any) -> Any:
        return tree_map(plain, value, is_leaf=lambda each: isinstance(each, immutable_dict | immutable_list))

    return tree_flatten(thaw(tree_unflatten(range(tree.num_leaves), tree)))[1]


def _put(root: nn.Module, path: str, module: nn.Module) -> None:
    """Let ``root`` have this submodule at a dotted path."""
    *above, name = path.split(".")
    owner = root
    for part in above:
        if not hasattr(owner, part):
            owner.add_module(part, nn.Module())
        owner = getattr(owner, part)
    owner.add_module(name, module)


def copy_into(
    graph: fx.Graph,
    source: fx.Graph,
    values: dict[fx.Node, Any],
    replace: Callable[[fx.Graph, fx.Node, dict[fx.Node, Any]], bool],
) -> Any:
    """Copy the nodes of ``source`` to the end of ``graph``; ``values`` maps those that are there. Returns the result.

    Assertions are left out: the input spec is checked at every call instead.
    """
    for node in source.nodes:
        if node.op == "output":
            return fx.map_arg(node.args[0], lambda n: values[n])
        if node in values or replace(graph, node, values) or _is_assertion(node):
            continue
        if "functorch" in str(getattr(node.target, "__module__", "")):
            place = f" (at {line})" if (line := _source(node)) else ""
            raise CaptureError(f"torch.func transforms{place} cannot be run node by node; compute without them.")
        values[node] = graph.node_copy(node, lambda n: values[n])
        path = str(node.target) if node.op == "call_module" else _module_path(node)
        set_origin(values[node], Origin(path, _source(node)))
    raise InternalError("A front end gave a graph without an output.")


def constants(graph_module: fx.GraphModule, model: nn.Module) -> dict[str, Tensor]:
    """The tensors the graph refers to that are not the model's: made from Python values while it was traced."""
    found = {}
    for node in graph_module.graph.find_nodes(op="get_attr"):
        value = attribute(graph_module, node.target)
        if isinstance(value, Tensor) and attribute(model, node.target) is not value:
            found[node.target] = value
    return found


@contextlib.contextmanager
def forward_alone(model: nn.Module) -> Iterator[None]:
    """Meanwhile a call of ``model`` runs its forward and not what its class does around that.

    A drop-in is of that class, which goes on doing it around the program: in the program it would be done twice.
    """
    kind = type(model)
    if kind.__call__ is nn.Module.__call__:
        yield
        return
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    model.__class__ = type(kind.__name__, (kind,), {"__call__": nn.Module.__call__, **names})
    try:
        yield
    finally:
        model.__class__ = kind


def first_dtype(model: nn.Module) -> torch.dtype | None:
    """The dtype of the model's first parameter, None if it has none."""
    return next((parameter.dtype for parameter in model.parameters()), None)


def attribute(module: nn.Module, path: str) -> Any:
    """The object at a dotted path, None when there is none."""
    value: Any = module
    for name in path.split("."):
        value = getattr(value, name, None)
    return value


def is_below(path: str, above: str) -> bool:
    """Whether a path is another one or leads further from there."""
    return not above or path == above or path.startswith(f"{above}.")


def dynamic(
    spec: InputSpec,
    shapes: Sequence[Sequence[int | torch.SymInt]],
    numbers: Mapping[int, torch.SymInt | torch.SymFloat] = MappingProxyType({}),
) -> InputSpec:
    """The spec with the sizes that a front end left symbolic named by their symbol, and what it assumed about them.

    So are the ``numbers`` it left symbolic, by their places among the leaves.
    Raises ``ValueError`` where that speaks of anything else.
    """
    names = [tuple(_size(size) for size in shape) for shape in shapes]
    symbolic = {size for shape in names for size in shape if isinstance(size, str)} | {*map(str, numbers.values())}
    given = itertools.chain(*shapes, numbers.values())
    open_sizes: list[Any] = [size for size in given if str(size) in symbolic]
    conditions = size_conditions(open_sizes[0]) if open_sizes else []
    nodes = (node for text in (*symbolic, *conditions) for node in ast.walk(ast.parse(text)))
    named = {node.id for node in nodes if isinstance(node, ast.Name)}
    if not named <= {*symbolic, *IN_CONDITIONS} or not all(map(str.isidentifier, symbolic)):
        raise ValueError(f"a condition on sizes that are no inputs': {conditions}")
    remaining = iter(names)
    leaves = tuple(
        TensorSpec(leaf.dtype, leaf.device_type, next(remaining))
        if isinstance(leaf, TensorSpec)
        else NumberSpec(str(numbers[i]), leaf)
        if i in numbers
        else leaf
        for i, leaf in enumerate(spec.leaves)
    )
    fixed = (leaf.shape for leaf in spec.leaves if isinstance(leaf, TensorSpec))
    sizes = (pair for shape, sizes in zip(names, fixed, strict=True) for pair in zip(shape, sizes, strict=True))
    example = {name: size for name, size in sizes if isinstance(name, str) and isinstance(size, int)}
    return replace(spec, leaves=leaves, conditions=tuple(conditions), example=tuple(example.items()))


def _size(size: int | torch.SymInt) -> int | str:
    """A number, also where a front end settled on it after having left it open, or the name of an open size."""
    return int(text) if (text := str(size)).isdigit() else text


def _is_assertion(node: fx.Node) -> bool:
    name = getattr(node.target, "__name__", str(node.target))
    return not node.users and ("_assert" in name or "sym_constrain" in name)


def _drop_assertions_in_bodies(root: nn.Module, graph: fx.Graph) -> None:
    """Erase them from the graphs that higher-order operators run: in a dtype, say, that autocast may change."""
    for node in graph.find_nodes(op="get_attr"):
        body = attribute(root, node.target)
        if isinstance(body, fx.GraphModule):
            _drop_assertions_in_bodies(body, body.graph)
            for inner in [*filter(_is_assertion, body.graph.nodes)]:
                body.graph.erase_node(inner)
            body.recompile()


def _module_path(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    path = next(reversed(stack.values()))[0] if stack else ""
    path = re.sub(r"^L\['\w+'\]\.?", "", path)
    path = re.sub(r"\['?([^'\]]+)'?\]", r".\1", path)
    skip = ("", "_modules", "_empty_nn_module_stack_from_metadata_hook")
    return ".".join(part for part in path.split(".") if part not in skip)


def _source(node: fx.Node) -> str:
    frames = list(_FRAME.finditer(node.meta.get("stack_trace") or ""))
    ours = [f for f in frames if is_users(f["file"]) and linecache.getline(f["file"], 1)]
    return f"{os.path.basename(ours[-1]['file'])}:{ours[-1]['line']}" if ours else ""
