"""Values of tensors whose sizes vary, by their first two rows.

Along a dimension of symbolic size a value has two rows, and each further one differs from the one before as the second
does from the first: equal rows, or the consecutive numbers that ``arange`` gives. That holds for any number of rows, so
what follows from it does, too.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from memrewrite.torch_internals.operators import OpOverload, named_arguments
from memrewrite.torch_internals.pytrees import tensors_in, tree_iter

# What they do to two rows they do to any number of them: these whatever is in the rows, ...
_MOVES = {"alias", "cat", "clone", "detach", "permute", "select", "slice", "transpose", "unsqueeze"}
_LINEAR = {"add", "cumsum", "mul", "neg", "rsub", "sub", "_to_copy"}  # these to whole numbers, ...
_EVEN = {"all", "any", "cumsum", "_to_copy"}  # and these to equal rows, as all pointwise operators do.
_ALONG = {"cat", "cumsum", "select", "slice"}  # Along a dimension that varies they need another rule.

Values = Mapping[Tensor, tuple[Tensor, Any]]
Compute = Callable[[Any, Any], Any]


def symbolic(tensor: Any) -> bool:
    """Whether a size of ``tensor`` varies."""
    return isinstance(tensor, Tensor) and bool(_varying(tensor))


def has_symbols(tree: Any) -> bool:
    """Whether there is a number that varies."""
    return any(isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool) for leaf in tree_iter(tree))


def two_rows(shape: Sequence[int]) -> list[int]:
    """The shape of a value."""
    return [2 if isinstance(size, torch.SymInt) else size for size in shape]


def value_by_rows(func: OpOverload, name: str, call: Any, result: Tensor, values: Values, compute: Compute) -> Any:
    """The value of what a function gave for tensors with known ``values``; None where two rows do not tell it.

    ``call`` are its arguments; ``compute`` gives what it gives for the values of such arguments.
    """
    given = named_arguments(func, *call)
    if name == "arange":
        start, step = given.get("start", 0), given.get("step", 1)
        if not type(start) is type(step) is int:
            return None
        return start + step * torch.arange(2, dtype=result.dtype, device="cpu")
    if name == "expand":
        return compute((call[0][0], two_rows(call[0][1])), {})
    if name == "repeat":
        return compute((call[0][0], two_rows(call[0][1])), {}) if _makes_rows(*call[0]) else None
    tensors = tensors_in(call)
    if name in _ALONG and any(isinstance(tensor.shape[given["dim"]], torch.SymInt) for tensor in tensors):
        return _along(name, given, result, values, lambda: compute(*call))
    if has_symbols(call):
        return None
    uneven = [tensor for tensor in tensors if not _even(values[tensor][0], _varying(tensor))]
    whole = all(tensor.dtype in (torch.int32, torch.int64) for tensor in [*tensors, result])
    sure = name in _MOVES or (name in _LINEAR and whole and not (name == "mul" and len(uneven) > 1))
    even = not uneven and (name in _EVEN or torch.Tag.pointwise in func.tags)
    return compute(*call) if sure or even else None


def _makes_rows(tensor: Tensor, repeats: Sequence[int]) -> bool:
    """Whether to repeat it so makes rows that vary of one, and rows that vary already stay."""
    sizes = [1] * (len(repeats) - tensor.dim()) + [*tensor.shape]
    pairs = zip(sizes, repeats, strict=True)
    return all(
        type(count) is int and count == 1 if isinstance(size, torch.SymInt) else type(count) is int or size == 1
        for size, count in pairs
    )


def _along(name: str, given: dict[str, Any], result: Tensor, values: Values, computed: Callable[[], Any]) -> Any:
    """What goes along a dimension that varies."""
    dim = given["dim"]
    if name == "cat":
        rows = computed()
        steps = rows.long().diff(dim=dim)
        varies = [isinstance(tensor.shape[dim], torch.SymInt) for tensor in given["tensors"]]
        last = varies[-1] and sum(varies) == 1
        goes_on = bool((steps == steps.narrow(dim, 0, 1)).all()) and (last or not steps.any())
        return rows.narrow(dim, 0, 2).clone() if goes_on else None
    rows = values[given["self"]][0]
    even = _even(rows, [dim])
    if name == "cumsum":
        return computed() if even else None
    start, step = (given["index"], 0) if name == "select" else (given["start"] or 0, given["step"])
    if not even and not (type(start) is type(step) is int and start >= 0):
        return None
    count = 1 if name == "select" else two_rows(result.shape)[dim]
    numbers = torch.arange(count, device="cpu")
    wanted = torch.zeros_like(numbers) if even else start + step * numbers
    first, second = rows.long().split(1, dim)
    shape = [1] * rows.dim()
    shape[dim] = count
    found = (first + (second - first) * wanted.view(shape)).to(rows.dtype)
    return found.select(dim, 0) if name == "select" else found


def _varying(tensor: Tensor) -> list[int]:
    return [dim for dim, size in enumerate(tensor.shape) if isinstance(size, torch.SymInt)]


def _even(value: Tensor, dims: Sequence[int]) -> bool:
    return all(torch.equal(value.narrow(dim, 0, 1), value.narrow(dim, 1, 1)) for dim in dims)
