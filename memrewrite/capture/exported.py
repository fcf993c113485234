"""The leading front end: ``torch.export``, non-strict, in the mode the model is in.

``strict=False`` traces the Python code itself: it kept 98 of 98 timm families and 54 of 61 Hugging Face
architectures whole, where ``fx.symbolic_trace`` kept 78 and 0. Its silent hazards are refused beforehand.
"""

import builtins
import contextlib
import functools
import inspect
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from memrewrite.capture.assigned import Assignments
from memrewrite.capture.assumptions import Assumptions
from memrewrite.capture.captured import Captured
from memrewrite.capture.compiled_calls import told_of_scripted
from memrewrite.capture.finite import Finite
from memrewrite.capture.held import Held, returning
from memrewrite.capture.launches import launches_traced
from memrewrite.capture.normal import attribute, bind, constants, dynamic, rebuild, thawed
from memrewrite.capture.numbers import for_numbers, numbers_in
from memrewrite.capture.opaque import opaque
from memrewrite.capture.varying import Shapes, attempts, ranged
from memrewrite.records.lines import line_now
from memrewrite.records.ranges import Range
from memrewrite.simulate.fake.constant_values import KnownValues, known_values
from memrewrite.torch_internals.logs import nothing_printed, quiet
from memrewrite.torch_internals.number_inputs import fractions_vary, is_open
from memrewrite.torch_internals.operators import (
    OpOverload,
    gives_something,
    is_mutable,
    named_arguments,
    written_arguments,
)
from memrewrite.torch_internals.pytrees import tree_flatten, tree_leaves, tree_unflatten
from memrewrite.torch_internals.size_arithmetic import sizes_remembered
from memrewrite.torch_internals.symbolic_recall import SymbolicRecall
from memrewrite.torch_internals.tracing import (
    code_when_run,
    notes_in_short,
    scripts_in_python,
    settled_on,
    varying_size,
)
from memrewrite.workload.step import Inputs

aten = torch.ops.aten


def capture(
    model: nn.Module,
    inputs: Inputs,
    functions: Sequence[type] = (),
    ranges: Sequence[Range] = (),
    elsewhere: Inputs | None = None,
    held: Sequence[Held] = (),
) -> Captured:
    """Capture through ``torch.export``; the batch size and the lengths of texts stay dynamic where export allows.

    So do sizes that differ ``elsewhere``; those in ``ranges`` have to. Custom ``functions`` stay calls in the graph,
    and what forward leaves in the attributes ``held`` are further outputs.
    """
    *tried, last = attempts(inputs, ranges, elsewhere)
    numbers = numbers_in(inputs)

    def attempted(shapes: Shapes) -> Captured:
        attempt = functools.partial(_attempt, model, functions=functions, ranges=ranges, held=held, varying=shapes)
        if numbers:
            with contextlib.suppress(Exception):  # whatever the reason, then these numbers do not vary
                return for_numbers(model, inputs, numbers, functions, attempt)
        return attempt(inputs)

    for shapes in tried:
        with contextlib.suppress(Exception):  # whatever the reason, the last attempt tells it
            return attempted(shapes)
    return attempted(last)


def _attempt(
    model: nn.Module,
    inputs: Inputs,
    functions: Sequence[type],
    ranges: Sequence[Range],
    held: Sequence[Held],
    varying: Shapes,
    numbers: Collection[int] = (),
) -> Captured:
    settling, noted, assignments = _Settling(), Assumptions(), Assignments(model)
    with assignments.noted(), returning(model, held), _named_keywords(model, inputs), scripts_in_python() as scripted:
        leaves, tree = tree_flatten((inputs.args, inputs.kwargs))
        args, kwargs = tree_unflatten(range(len(leaves)), tree)
        shapes = varying(inspect.signature(model.forward).bind(*args, **kwargs).arguments, numbers)
        with contextlib.ExitStack() as stack:
            if ranges:
                stack.enter_context(settling)
                stack.enter_context(noted.of(model))
            if numbers:
                stack.enter_context(fractions_vary(i in numbers for i, n in enumerate(leaves) if type(n) is float))
            program, exported = _export(model, inputs, shapes, functions)
    found = assignments.added_to(_normal(model, inputs, program, exported))
    found = replace(found, held=tuple(held), exact=not scripted, notes=(*found.notes, *told_of_scripted(scripted)))
    return ranged(found, model, inputs, ranges, settling.lines, noted)


class _Settling(TorchFunctionMode):
    """Notes for each number that an open size was settled on which line of the user's did it; "" where no call did."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[int, str] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        size = varying_size((args, kwargs))  # asked for before, as the call may leave none that varies
        before = set() if size is None else settled_on(size)
        result = func(*args, **(kwargs or {}))
        self.lines |= dict.fromkeys(before - self.lines.keys(), "")
        after = set() if size is None else settled_on(size)
        self.lines |= dict.fromkeys(after - self.lines.keys(), line_now())
        return result


def _normal(model: nn.Module, inputs: Inputs, program: ExportedProgram, exported: fx.GraphModule) -> Captured:
    spec, order = bind(model, inputs)
    placeholders = [n for n in exported.graph.nodes if n.op == "placeholder"]
    raw = tree_leaves((inputs.args, inputs.kwargs))
    tensors = [placeholders[i] for i in order if isinstance(raw[i], Tensor)]
    out_spec = program.call_spec.out_spec
    vary = {k: placeholders[i] for k, i in enumerate(order) if is_open(placeholders[i].meta.get("val"))}
    given = [*tensors, *vary.values()]
    fixed = {node: leaf for node, leaf in zip(placeholders, raw, strict=True) if node not in given}

    def replace(graph: fx.Graph, node: fx.Node, values: dict[fx.Node, Any]) -> bool:
        if node.op != "placeholder":
            return _copies_itself(node)
        if node is placeholders[0]:  # placeholders in the order of the spec, constants as what they are
            for each in given:
                values[each] = graph.node_copy(each)
        values.update({n: leaf for n, leaf in fixed.items() if n is node})
        return True

    for graph in _graphs(exported):
        _keep_casts(graph)
        _drop_aliases(graph)
        _drop_questions(graph)
        _choose_kernels_late(graph)
    _read_buffers_themselves(exported)
    module = rebuild(exported.graph, exported, model, replace, outputs=lambda graph, results: results)
    return Captured(
        graph_module=module,
        inputs=dynamic(spec, [n.meta["val"].shape for n in tensors], {i: n.meta["val"] for i, n in vary.items()}),
        output_tree=thawed(out_spec) if isinstance(model, fx.GraphModule) else out_spec,
        constants=constants(module, model),
        training={path: child.training for path, child in model.named_modules()},
        differentiable=model.training,
        front_end="export",
    )


class _CastsStayApart(TorchFunctionMode):
    """Casts through an alias what a cast does not change, because that returns its input itself.

    So does ``contiguous``, which then is not even recorded, though the inputs of another call may lie otherwise.
    The tracer would take all later uses of that input for uses of the cast, which under autocast has another type.
    PyTorch lets no alias be detached in place, as it does what ``torch.tensor`` makes of a size that varies; where
    there is no gradient, nothing is to be done. Once the model has asked for one of ``values`` that sizes decide,
    nothing is called any more: export is in vain.
    """

    def __init__(self, values: KnownValues) -> None:
        super().__init__()
        self._values = values

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._values.check()
        if func is Tensor.detach_ and not args[0].requires_grad:
            return args[0]
        func = aten.contiguous.default if func is Tensor.contiguous else func
        if func in _CASTS and isinstance(args[0], Tensor) and not _changes(func, args, kwargs or {}):
            args = (torch.ops.aten.alias.default(args[0]), *args[1:])
        return func(*args, **(kwargs or {}))


_TO_ONE_TYPE = {
    Tensor.float: torch.float32,
    Tensor.half: torch.float16,
    Tensor.bfloat16: torch.bfloat16,
    Tensor.double: torch.float64,
}
_CASTS = (aten.contiguous.default, Tensor.to, Tensor.type, Tensor.type_as, *_TO_ONE_TYPE)


def _changes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a cast is known to give another type."""
    given = (_TO_ONE_TYPE.get(func), *args[1:], *kwargs.values())
    wanted = [each.dtype if isinstance(each, Tensor) else each for each in given]
    return any(isinstance(each, torch.dtype) and each != args[0].dtype for each in wanted)


def _drop_aliases(graph: fx.Graph) -> None:
    """Cast what ``_CastsStayApart`` made an alias of."""
    for node in list(graph.nodes):
        if node.target is aten.alias.default and all(user.target in _CAST_TARGETS for user in node.users):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


_CAST_TARGETS = [
    aten.contiguous.default,
    *(getattr(aten.to, name) for name in aten.to.overloads()),
    aten.type_as.default,
    aten._assert_tensor_metadata.default,  # which export puts before each
]


def _drop_questions(graph: fx.Graph) -> None:
    """Leave out what was computed only to be asked for a number that is known: each would wait for the device.

    So is what raised an error that forward caught: it gave nothing, and would raise it again. Of several results that
    an operator gives, those that nobody takes stand in its way.
    """
    unused = [node for node in graph.nodes if not node.users and any(needless(node) for needless in _NEEDLESS)]
    while unused:
        node = unused.pop()
        before = node.all_input_nodes
        graph.erase_node(node)
        unused += [n for n in before if not n.users and _only_computes(n.target)]


def _is_question(node: fx.Node) -> bool:
    return node.target in _QUESTIONS and not isinstance(node.meta.get("val"), torch.SymInt)


def _failed(node: fx.Node) -> bool:
    gives = isinstance(node.target, OpOverload) and gives_something(node.target)
    return gives and node.meta.get("val") is None


def _only_computes(target: Any) -> bool:
    seeded = torch.Tag.nondeterministic_seeded
    computes = isinstance(target, OpOverload) and not is_mutable(target) and seeded not in target.tags
    return computes or target is operator.getitem


_NEEDLESS = (_is_question, _failed, lambda node: node.target is operator.getitem)  # the last takes one of several
_QUESTIONS = tuple(getattr(aten, name).default for name in ("item", "_local_scalar_dense", "equal", "all", "any"))


def _export(
    model: nn.Module, inputs: Inputs, shapes: Any, functions: Sequence[type]
) -> tuple[ExportedProgram, fx.GraphModule]:
    """What export gives, and its graph."""
    with (
        quiet(),
        nothing_printed(),
        _unmarked(inputs.tensors()),
        opaque(functions) as calls,
        launches_traced(calls),
        SymbolicRecall(),
        known_values() as values,
        _CastsStayApart(values),
        Finite(),
        code_when_run(),
        notes_in_short(),
        sizes_remembered(),
        mock.patch.object(builtins, "len", _length),
    ):
        try:
            given = inputs.of_a_run()
            program = torch.export.export(model, given.args, given.kwargs, dynamic_shapes=shapes, strict=False)
        finally:
            values.check()  # whatever forward made of what it was told
    with code_when_run():
        exported = program.module(check_guards=False)  # as the input spec is checked at every call
    if not isinstance(exported, fx.GraphModule):
        raise TypeError(f"export gave a {type(exported).__name__}")
    calls.settle(_graphs(exported))
    return program, exported


def _length(value: Any, of_python: Callable[[Any], int] = len) -> Any:
    """What ``len`` gives, and of a tensor its first size: Python makes a number of it, and none that varies."""
    return value.shape[0] if isinstance(value, Tensor) and value.dim() else of_python(value)


@contextlib.contextmanager
def _named_keywords(model: nn.Module, inputs: Inputs) -> Iterator[None]:
    """Meanwhile forward names in its signature what the call gives it as ``**kwargs``.

    torch 2.13's export counts such arguments twice where it is told which sizes may vary, and fails.
    """
    signature = inspect.signature(model.forward)
    named = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    given = [name for name in inputs.kwargs if name not in {p.name for p in named}]
    if not given:
        yield
        return
    own, original = vars(model).get("forward"), model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    extra = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in given]
    vars(forward)["__signature__"] = signature.replace(parameters=[*named, *extra])
    vars(model)["forward"] = forward
    try:
        yield
    finally:
        del vars(model)["forward"]
        if own is not None:
            vars(model)["forward"] = own


@contextlib.contextmanager
def _unmarked(tensors: list[Tensor]) -> Iterator[None]:
    """Undo what is noted on tensors meanwhile: sizes that export takes for dynamic it marks, also for the next time."""
    before = [(tensor, dict(vars(tensor))) for tensor in tensors]
    try:
        yield
    finally:
        for tensor, attributes in before:
            vars(tensor).clear()
            vars(tensor).update(attributes)


def _graphs(exported: fx.GraphModule) -> list[fx.Graph]:
    """The graph and the bodies of its higher-order operators."""
    return [module.graph for module in exported.modules() if isinstance(module, fx.GraphModule)]


def _keep_casts(graph: fx.Graph) -> None:
    """Let autocast regions keep the weights they cast, as PyTorch does by default: export notes that none is kept."""
    for node in graph.nodes:
        if node.target is torch.ops.higher_order.wrap_with_autocast:
            node.update_arg(3, None)


_LINEAR = {aten.upsample_bilinear2d.vec: "bilinear", aten.upsample_trilinear3d.vec: "trilinear"}


def _choose_kernels_late(graph: fx.Graph) -> None:
    """Call the Python functions that take another kernel under ``torch.use_deterministic_algorithms``.

    The operator that export saw stands for one kernel, on CUDA one whose gradients differ from run to run.
    """
    for node in graph.nodes:
        if node.target in _LINEAR:
            given = named_arguments(node.target, node.args, node.kwargs)
            node.kwargs = {
                "size": given["output_size"],
                "scale_factor": given["scale_factors"],
                "mode": _LINEAR[node.target],
                "align_corners": given["align_corners"],
            }
            node.target, node.args = functional.interpolate, (given["input"],)
        elif node.target is aten.pad.default and "replicate" in node.args:
            node.target = functional.pad


def _copies_itself(node: fx.Node) -> bool:
    """What export makes of ``self.buffer += 1``: after the update, the buffer is copied into itself.

    That changes no value, but autograd takes it for a write to what it has saved.
    """
    return node.target is aten.copy_.default and _written(node.args[0]) is _written(node.args[1])


def _read_buffers_themselves(exported: fx.GraphModule) -> None:
    """Let what comes after an update of a buffer read the buffer: that is the tensor that the update returns.

    A layer that is called twice counts its batches twice, and export would have the second call add to the first sum.
    """
    for node in exported.graph.nodes:
        root = _written(node)
        if root is node or root.op != "get_attr" or isinstance(attribute(exported, root.target), nn.Parameter):
            continue
        for user in [user for user in node.users if not _copies_itself(user)]:
            user.replace_input_with(node, root)


def _written(node: Any) -> Any:
    """The node whose tensor a chain of in-place operations, or those with ``out=``, returns."""
    while isinstance(node.target, OpOverload):
        written = written_arguments(node.target, node.args, node.kwargs)
        if len(written) != 1 or not isinstance(written[0], fx.Node):
            break
        node = written[0]
    return node
