"""An output that is made when it is first used: logits beside a loss, which few loops look at.

Until then it is its shape, type and device, and what it is made of: a value that the program has anyway, and weights.
Whatever asks for its numbers gets an ordinary tensor, with the gradient that the model's own output has. What is made
of each row by itself does not ask for them: that is written down, and makes some rows at a time once it comes to a
number a row, such as a loss.

This file needs torch only, because its text is also pasted into generated models.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from memrewrite.runtime.cross_entropy import in_autocast
from memrewrite.runtime.lazy_tensor import KNOWN, Change, LazyOutput
from memrewrite.runtime.output_rows import SCALED, SCALED_IN_PLACE, OutputRows
from memrewrite.runtime.output_source import OutputSource
from memrewrite.runtime.row_expressions import (
    BEST,
    EACH,
    LOGARITHMS,
    LOSSES,
    MOVES,
    OF_NUMBERS,
    VIEWS,
    Expression,
    Rows,
    expressed,
)
from memrewrite.runtime.segment import OWN, autocast_dtype

Types = tuple[tuple[torch.dtype | None, torch.dtype, torch.dtype], ...]
InRows = tuple[tuple[tuple[Any, ...], ...], int, bool]


def lazy_output(
    module: nn.Module,
    make: Callable[..., Tensor],
    sizes: Sequence[int],
    types: Types,
    names: Sequence[str],
    in_rows: InRows | None,
    *of: Tensor,
) -> Tensor:
    """``make(*of)``, which runs once the result is used; the first of them is a value, the others have ``names``.

    With ``in_rows`` it is the product of the value with a weight, and its bias, and those steps: losses are then made
    so many rows at a time, or fused, as by ``linear_cross_entropy``. Of ``sizes``, -1 is that of the value's first
    dimension, -2 of its second. ``types`` say what type the result is of under autocast to the first type, None for
    without, if the value is of the second. Where it is of none of these, in inference mode, which counts no writes, and
    where compilers look, the result is made at once.
    """
    value = of[0]
    counted = not torch.compiler.is_compiling() and not torch.is_inference_mode_enabled()
    autocast = autocast_dtype(value.device.type)
    found = [result for cast, given, result in types if (cast, given) == (autocast, value.dtype)] if counted else []
    if not found or any(tensor.is_inference() for tensor in of):
        return make(*of)
    shape = torch.Size(size if size >= 0 else value.shape[-1 - size] for size in sizes)
    promise = getattr(type(module), OWN).promise
    source = OutputSource(make, of, ("what it is made of", *names), shape, found[0], autocast, promise)
    result = LazyOutput.of_source(source, of)
    if in_rows is not None:
        layout = torch.empty(shape, dtype=source.dtype, device="meta")
        result._rows = OutputRows(value, of[1], of[2] if len(of) > 2 else None, *in_rows, layout)
    return result


def _in_rows(func: Any, output: Any, *rest: Any, **kwargs: Any) -> LazyOutput | None:
    """What ``func`` makes of an output, not there yet either; None where its rows are no rows of the output."""
    rows = _rows_now(output) if func in LOGARITHMS else output.rows if isinstance(output, LazyOutput) else None
    plain = all(value is None or isinstance(value, _PLAIN_ARGUMENTS) for value in tree_leaves((rest, kwargs)))
    if rows is None or not plain or (func in (Tensor.to, Tensor.type) and [*map(type, rest)] != [torch.dtype]):
        return None

    autocast = output._source.autocast  # which it may be made outside of

    def change(tensor: Tensor) -> Tensor:
        with in_autocast(tensor, autocast):
            changed: Tensor = func(tensor, *rest, **kwargs)
        return changed

    with _disable_current_modes():
        layout = rows.layout if func in LOGARITHMS else change(rows.layout)
    if layout is rows.layout and func not in LOGARITHMS:
        return output
    if (after := rows.after(func, change, layout, (rest, kwargs))) is None:
        return None
    if func in LOGARITHMS or (isinstance(rows, Expression) and not layout._is_view()):
        return _of_rows(after, [output])
    result = output.then(change, after.layout)
    if output.requires_grad and result._view is not None and not torch.is_grad_enabled():
        with torch._C.DisableTorchFunctionSubclass():
            result.requires_grad_()  # as PyTorch's views are then
        result._leaf = True
    result._rows = after
    return result


def _of_rows(rows: Rows, outputs: Sequence[LazyOutput]) -> LazyOutput:
    """What such rows of outputs are, which nobody has written yet."""
    source = OutputSource.of_rows(rows, [output._source for output in outputs])
    result = LazyOutput.of_source(source, rows.tensors)
    result._rows = rows
    found: LazyOutput = _noted(outputs, result)
    return found


def _scaled_in_place(func: Any, output: Any, number: Any = None, *more: Any, **options: Any) -> LazyOutput | None:
    """An output, or a view of one, of another scale from now on, not there yet either; None of other changes.

    Whatever else is a view of the same is made whole, if it is used.
    """
    rows = output.rows if isinstance(output, LazyOutput) else None
    if not isinstance(rows, OutputRows) or more or options or type(number) not in (int, float):
        return None
    views = [output]
    while views[-1]._view is not None:
        views.append(views[-1]._view[0])
    source = output._source
    first = None if source.output is None else source.output()
    if views[-1] is not first or (first.requires_grad and not torch.is_grad_enabled()):
        return None

    changes = [each._view[1] for each in reversed(views) if each._view is not None]
    for count, each in enumerate(reversed(views)):
        each.written(_scale(func, number, changes[count:]))
    source.write(_scale(func, number, changes))
    output._rows, output._seen = rows.stepped(SCALED_IN_PLACE[func], number), source.writes
    return output


def _scale(func: Any, number: float, changes: Sequence[Change]) -> Callable[[Tensor], Any]:
    """What scales such a view of a tensor."""
    return lambda whole: func(functools.reduce(lambda tensor, change: change(tensor), changes, whole), number)


def _expression(func: Any, *args: Any, **kwargs: Any) -> Tensor | None:
    """What ``func`` makes of outputs and of tensors beside them, not there yet either; None where it is no rows."""
    given = tree_map(lambda each: each.made() if _is_there(each) else each, (args, kwargs))
    outputs = [each for each in tree_leaves(given) if isinstance(each, LazyOutput)]
    rows = {id(each): _rows_now(each) for each in outputs}
    autocast = {output._source.autocast for output in outputs}
    if len(autocast) != 1 or None in rows.values():
        return None
    args, kwargs = tree_map(lambda each: rows.get(id(each), each), given)
    for output in outputs if func in LOSSES else ():
        output._source.refuse_changed()
    with in_autocast(outputs[0], *autocast):
        found = expressed(func, args, kwargs)
        if isinstance(found, Tensor):
            return _noted(outputs, found)
    return None if found is None else _of_rows(found, outputs)


def _picked(_: Any, output: Any, index: Any) -> Tensor | None:
    """The rows that tensors choose, not there yet either, or one number of each; None of other choices."""
    rows = output.rows if isinstance(output, LazyOutput) else None
    places = [*index] if isinstance(index, tuple) else [index]
    while len(places) > 1 and (places[-1] is Ellipsis or places[-1] == slice(None)):
        places.pop()
    if rows is None or any(type(each) is not Tensor for each in places):
        return None
    if len(places) < output.dim():
        found = rows.picked((*places,))
        return None if found is None else _of_rows(found, [output])
    *places, words = places
    chosen: Any = _picked(_, output, (*places,)) if places else None
    if chosen is None or words.dtype != torch.int64 or words.shape != chosen.shape[:-1]:
        return None
    words = words.where(words >= 0, words + output.shape[-1])
    numbers: Tensor = chosen.gather(-1, words.unsqueeze(-1)).squeeze(-1)
    return numbers


def _broadcast(_: Any, *tensors: Any) -> Any:
    """Tensors of the size of the outputs among them; None where these would be of another."""
    sizes = {each.shape for each in tensors if isinstance(each, LazyOutput)}
    if len(sizes) != 1 or torch.broadcast_shapes(*(each.shape for each in tensors)) not in sizes:
        return None
    return tuple(each if isinstance(each, LazyOutput) else each.expand(*sizes) for each in tensors)


def _detached(func: Any, output: LazyOutput) -> LazyOutput | None:
    """The same without a gradient, its rows too."""
    if (rows := output.rows) is None:
        return None
    with torch._C.DisableTorchFunctionSubclass():
        alone = func(output) if output._view is None else None
    result = LazyOutput(output._source, rows.layout, (output, func)) if alone is None else alone
    result._rows = rows
    return result


def _loss(func: Any, output: Any, target: Any, size_average: Any, reduce: Any, **options: Any) -> Tensor | None:
    """Cross-entropy of an output that is not there, some rows at a time; None where it has to be there."""
    rows = _rows_now(output)
    if rows is None or size_average is not None or reduce is not None:
        return None
    output._source.refuse_changed()
    target = target.made() if isinstance(target, LazyOutput) else target
    logits = rows.before_logarithms() if func is functional.nll_loss else rows
    with in_autocast(output, output._source.autocast):
        if isinstance(logits, OutputRows) and logits.fit(target, options["reduction"]):
            return _noted([output], logits.loss(target, **options))
        return _noted([output], rows.loss_of_each(func, target, **options))


def _of_each_row(func: Any, output: Any, *given: Any, **options: Any) -> Tensor | None:
    """A number for each row of an output that is not there, some rows at a time; None where it has to be there."""
    if (rows := _rows_now(output)) is None:
        return None
    output._source.refuse_changed()
    made = rows.gather if func in _GATHER else rows.best if func in BEST else rows.each
    with in_autocast(output, output._source.autocast):
        return _noted([output], made(func, *given, **options))


def _parts(func: Any, output: Any, *given: Any, dim: int = 0, chunks: Any = ()) -> tuple[Tensor, ...] | None:
    """Its parts, not there yet either; None where their rows are no rows of the output."""
    rows = output.rows if isinstance(output, LazyOutput) else None
    given = given if chunks == () else (chunks, *given)
    size, *others = given if func in _SPLIT or func in _CHUNK else (1, *given)
    if rows is None or dim or any(others) or type(size) is not int or size < 1:
        return None
    if func in _CHUNK:
        size = -(-max(len(output), 1) // size)
    if func in _SPLIT or func in _CHUNK:
        return tuple(output[i : i + size] for i in range(0, max(len(output), 1), size))
    return tuple(output[i] for i in range(len(output))) if output.dim() > 2 else None


def _noted(outputs: Sequence[LazyOutput], found: Any) -> Any:
    """What was made of rows of outputs, through which no gradient comes to these."""
    if any(isinstance(made, Tensor) and made.requires_grad for made in tree_leaves(found)):
        for output in outputs:
            output._source.lose()
    return found


def _is_there(value: Any) -> bool:
    return isinstance(value, LazyOutput) and value.is_there


def _rows_now(output: Any) -> Any:
    """The rows of an output that is not there, under the autocast that it is of; outside of it, as accelerate leaves it
    with the model, those that were cast, or compared: they are of a type that it leaves alone."""
    if not isinstance(output, LazyOutput):
        return None
    autocast = autocast_dtype(output.device.type)
    left = autocast is None and output.dtype not in (torch.float16, torch.bfloat16)
    return output.rows if left or autocast == output._source.autocast else None


def _refuse_lost(func: Any, *given: Any, **options: Any) -> None:
    """Raise where the gradient of an output is asked for after a loss of its rows, through which none comes to it."""
    for output in tree_leaves((given, options)):
        if isinstance(output, LazyOutput) and output._source.lost:
            name = output._source.promise.name
            raise RuntimeError(
                f"The gradient of an output of {name} was asked for after its loss, or what leads to that, which is "
                "made some rows at a time: ask for it before (retain_grad, register_hook), or optimize with "
                "returns='all'."
            )


def made_when_used(kind: type) -> bool:
    """Whether this is the type of outputs that are made when they are used; artifacts have one of their own."""
    return kind.__name__ == "LazyOutput" and hasattr(kind, "lazily_held")


_PLAIN_ARGUMENTS = (int, float, slice, type(...), torch.dtype, torch.Size)
_OF_ROWS = (*MOVES, *VIEWS, *SCALED, *LOGARITHMS, Tensor.to, Tensor.type, Tensor.float, Tensor.half, Tensor.bfloat16)
_GATHER = (Tensor.gather, torch.gather)
_SPLIT, _CHUNK = (Tensor.split, torch.split), (Tensor.chunk, torch.chunk)
for _how, _funcs in (
    (_loss, (functional.cross_entropy, functional.nll_loss)),
    (_detached, (Tensor.detach,)),
    (_of_each_row, (*EACH, *BEST, *_GATHER)),
    (_parts, (Tensor.unbind, torch.unbind, *_SPLIT, *_CHUNK)),
    (_in_rows, _OF_ROWS),
    (_scaled_in_place, SCALED_IN_PLACE),
    (_picked, (Tensor.__getitem__,)),
    (_broadcast, (torch.broadcast_tensors,)),
    (_expression, OF_NUMBERS),
    (_refuse_lost, (torch.autograd.grad, Tensor.retain_grad, Tensor.register_hook)),
):
    KNOWN |= {func: (*KNOWN.get(func, ()), _how) for func in _funcs}
