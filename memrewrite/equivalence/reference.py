"""The float64 reference of one step: the original in double precision, seeing the same random draws.

The original runs once more in its own precision under ``Recorder``, which keeps the result of every random operator.
Its double copy then runs under ``Replay``: random operators give the recorded results, and every request for a
narrower floating-point type (``x.float()``, ``softmax(dtype=torch.float32)``, ``torch.zeros``) gives float64.
"""

import contextlib
import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memrewrite.equivalence.blocks import Again, repeated_blocks, run_again
from memrewrite.equivalence.trial import EVERYTHING, Kept, Record, take_step
from memrewrite.records.errors import MeasurementError
from memrewrite.runtime.fused import run_plain
from memrewrite.runtime.linear_cross_entropy import LOSS, run_loss
from memrewrite.state.objects import Copies
from memrewrite.torch_internals.fake_tensors import TorchDispatchMode
from memrewrite.torch_internals.operators import is_mutable, named_arguments
from memrewrite.torch_internals.pytrees import tensors_in, tree_map
from memrewrite.workload.step import Inputs, Step

WIDE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}
"""The double-precision type that stands in for each narrower one."""
_FUSED = {"attention": "dropout_p", "_rnn": "dropout"}  # in an operator's name: the argument that makes it random
_COMPOSED: dict[Any, Callable[..., Any]] = {  # our operators, and what they consist of
    LOSS: run_loss,
    torch.ops.memrewrite.chain.default: run_plain,
}
_BITCAST = torch.ops.aten.view.dtype  # reads bytes as another type, so its types are not a matter of precision


class FusedRandomnessError(Exception):
    """A fused operator (``family``: a key of ``_FUSED``) drew random numbers that it does not show."""

    def __init__(self, family: str) -> None:
        super().__init__(family)
        self.family = family


class OtherDrawsError(MeasurementError):
    """A step drew other random numbers than those that were recorded."""


@dataclass(frozen=True)
class Draw:
    """One random operator's name and what it drew."""

    operator: str
    values: tuple[Tensor, ...]


class Recorder(TorchDispatchMode):
    """Keeps what every random operator draws, in ``draws``, on the CPU or ``near`` where it was drawn.

    Raises ``FusedRandomnessError`` when a fused attention or recurrent operator with dropout is met.
    """

    def __init__(self, near: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws: list[Draw] = []
        self._kept = Kept(near=near)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator; keep its results if it is random."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not _is_random(func, args, kwargs):
            return result
        family = next((name for name in _FUSED if name in func.name()), None)
        if family is not None:
            raise FusedRandomnessError(family)
        drawn = (named_arguments(func, args, kwargs)["noise"],) if "rrelu" in func.name() else result
        if "native_dropout" in func.name():
            drawn = result[1]  # the mask
        values = tuple(map(self._kept.copy, tensors_in(drawn)))
        self.draws.append(Draw(func.name(), values))
        return result


class Replay(TorchDispatchMode):
    """Gives random operators their recorded results and computes everything else in double precision."""

    def __init__(self, draws: list[Draw]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws, self._next = draws, 0

    @property
    def left(self) -> int:
        """The number of draws that nothing was given yet."""
        return len(self._draws) - self._next

    def marked(self) -> Again:
        """What draws again from here on, as often as it is asked to, and goes on afterwards where it was."""
        return functools.partial(self._from, self._next)

    @contextlib.contextmanager
    def _from(self, place: int) -> Iterator[None]:
        before, self._next = self._next, place
        try:
            yield
        finally:
            self._next = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator in double precision, or give what it drew when it was recorded."""
        kwargs = kwargs or {}
        if func is not _BITCAST:
            args, kwargs = tree_map(_widened_type, (args, kwargs))
        if _is_random(func, args, kwargs):
            return self._replayed(func, args, kwargs)
        if not is_mutable(func):
            args, kwargs = _same_precision(args, kwargs)
        if func in _COMPOSED:  # its own casts are to be widened, too
            with self:
                return _COMPOSED[func](*args, **kwargs)
        if func is torch.ops.aten._grouped_mm.default:
            given = named_arguments(func, args, kwargs)
            return _grouped_product(given["self"], given["mat2"], given["offs"])
        return func(*args, **kwargs)

    def _replayed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        draw = self._draws[self._next] if self._next < len(self._draws) else None
        self._next += 1
        if draw is None or draw.operator != func.name():
            raise OtherDrawsError(
                f"The float64 reference drew {func.name()} where the original drew "
                f"{draw.operator if draw else 'nothing'}, so the two cannot be compared; verify with exact=True."
            )
        given = named_arguments(func, args, kwargs)
        subject: Tensor | None = next((a for a in args if isinstance(a, Tensor)), None)
        device = subject.device if subject is not None else kwargs.get("device")
        values = tuple(t.to(device, WIDE.get(t.dtype, t.dtype)) for t in draw.values)
        if "native_dropout" in func.name() and subject is not None:
            scale = 0.0 if given["p"] == 1 else 1 / (1 - given["p"])
            return subject * values[-1] * scale, values[-1]
        if "rrelu" in func.name() and subject is not None:
            given["noise"].copy_(values[0])
            scaled = subject * values[0]
            return subject.copy_(scaled) if func.name().split(".")[0].endswith("_") else scaled
        if is_mutable(func) and subject is not None:
            return subject.copy_(values[0])
        return values[0] if len(values) == 1 else values


def double_step(
    original: nn.Module,
    inputs: Inputs,
    step: Step,
    draws: list[Draw],
    devices: tuple[torch.device, ...],
    input_gradients: bool,
    kept: Kept = EVERYTHING,
    unfit: Collection[type] | None = None,
) -> Record:
    """What the step computes in float64 with the recorded draws; makes one copy of the model and frees it.

    Where ``unfit`` classes are given, repeated blocks of all others run again in backward, which takes less memory.
    Gradients are where they are made, wherever the rest is ``kept``.
    Raises ``MeasurementError`` when the model does not run in float64; also, with such blocks, ``UnfitError`` when one
    may not run again, and ``OtherDrawsError`` when the model runs some again itself, and draws less where they do, too.
    """
    with double_or_refused(
        "The original", "so changed arithmetic cannot be judged; use only exact rewrites (exact=True)."
    ):
        model = double_copy(original)
        blocks = [] if unfit is None else repeated_blocks(model, unfit)
        with in_double(draws) as replay, run_again(blocks, replay.marked):
            plain = dataclasses.replace(step, amp=None, optimizer=None)
            taken = dataclasses.replace(kept, gradients="taken")
            given = Inputs(*tree_map(Copies(_widened).of, (inputs.args, inputs.kwargs)))
            record = take_step(model, given, plain, None, devices, input_gradients, taken)
            if blocks and replay.left:
                raise OtherDrawsError(f"With blocks that run again, {replay.left} random operators were not run.")
            return record


@contextlib.contextmanager
def double_or_refused(what: str, then: str) -> Iterator[None]:
    """Raise ``MeasurementError`` where ``what`` fails in float64; ``then`` says what follows from that."""
    try:
        yield
    except (MeasurementError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise MeasurementError(f"{what} does not run in float64 ({type(error).__name__}: {error}), {then}") from error


@contextlib.contextmanager
def in_double(draws: list[Draw]) -> Iterator[Replay]:
    """All that is computed here is computed in float64, with the recorded draws."""
    with _double_by_default(), Replay(draws) as replay:
        yield replay


def double_copy(module: nn.Module) -> nn.Module:
    """A structural copy of the module with every floating-point tensor in double precision, ties kept."""
    memo: dict[int, Any] = {}
    for child in module.modules():
        for value in vars(child).values():
            for tensor in value.values() if isinstance(value, dict) else [value]:
                if isinstance(tensor, Tensor) and id(tensor) not in memo:
                    memo[id(tensor)] = _doubled(tensor)
    return copy.deepcopy(module, memo)


def _doubled(tensor: Tensor) -> Tensor:
    return leaf_like(tensor, tensor.detach().to(WIDE.get(tensor.dtype, tensor.dtype), copy=True))


def leaf_like(tensor: Tensor, data: Tensor) -> Tensor:
    """``data`` as what ``tensor`` is: a parameter or not, with the same wish for a gradient."""
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(data, requires_grad=tensor.requires_grad)
    return data.requires_grad_(tensor.requires_grad)


@contextlib.contextmanager
def _double_by_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _is_random(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return False
    given = named_arguments(func, args, kwargs)
    if given.get("train") is False or given.get("training") is False:
        return False
    return all(name not in func.name() or bool(given.get(argument)) for name, argument in _FUSED.items())


def _grouped_product(a: Tensor, b: Tensor, ends: Tensor | None) -> Tensor:
    """A grouped matrix product, whose kernels take no float64; rows or columns that no group has are zero."""
    if ends is None:
        return a @ b
    bounds = [0, *ends.tolist()]
    groups = [slice(start, end) for start, end in itertools.pairwise(bounds)]
    if a.dim() == b.dim():
        return torch.stack([a[:, group] @ b[group] for group in groups])
    if a.dim() == 2:
        rows = [a[group] @ matrix for group, matrix in zip(groups, b, strict=True)]
        return torch.cat([*rows, a.new_zeros(len(a) - bounds[-1], b.shape[-1])])
    columns = [matrix @ b[:, group] for group, matrix in zip(groups, a, strict=True)]
    return torch.cat([*columns, a.new_zeros(a.shape[1], b.shape[1] - bounds[-1])], 1)


def _widened(value: Any) -> Any:
    return value.to(WIDE[value.dtype]) if isinstance(value, Tensor) and value.dtype in WIDE else value


def _widened_type(value: Any) -> Any:
    return WIDE.get(value, value) if isinstance(value, torch.dtype) else value


def _same_precision(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Widen the tensors the double copy does not own (loss weights, tables) where they meet double-precision ones."""
    kinds = {leaf.dtype for leaf in tensors_in((args, kwargs))}
    mixed = kinds & set(WIDE) and kinds & set(WIDE.values())
    return tree_map(_widened, (args, kwargs)) if mixed else (args, kwargs)
