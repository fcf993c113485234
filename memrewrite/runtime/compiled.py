"""Segments where ``torch.compile`` runs them again, and what of them it does not. Also part of generated models.

Compiled, a segment is one call of ``checkpoint``; an operator in one of its own inside that is treated otherwise.
In there no node may have to run again: the compiler would keep what it reads.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts


def is_compiled() -> bool:
    """Whether a training step is being compiled."""
    return torch.compiler.is_compiling() and torch.is_grad_enabled()


_TO_BACKENDS = ("_torchdynamo_orig_backend", "compiler_fn")  # what Dynamo wraps one in has it by one of these names
_AS_TRACED = {"eager", "eager_noexcept", "eager_debug", "pre_dispatch_eager", "ts"}


def _runs_as_traced() -> bool:
    """Whether the back end is one of PyTorch's for debugging, which run what Dynamo traces as it is.

    ``checkpoint`` then runs a segment again in backward with other random numbers, and updates its buffers twice: under
    ``torch.compile`` it leaves both to AOTAutograd, which such a back end is without.
    Private API: nothing public says which back end is traced for. Read in PyTorch 2.13.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator  # loaded by now, and by nobody else

    dynamo: Any = torch._dynamo
    backend: Any = InstructionTranslator.current_tx().output.compiler_fn
    while any(hasattr(backend, way) for way in _TO_BACKENDS):
        backend = next(getattr(backend, way) for way in _TO_BACKENDS if hasattr(backend, way))
    known = _AS_TRACED & {*dynamo.list_backends(exclude_tags=())}
    return any(backend is dynamo.lookup_backend(name) for name in known)


# What ``torch.compiler.assume_constant_result`` does, but for loading Dynamo: it is asked while Dynamo traces.
vars(_runs_as_traced)["_dynamo_marked_constant"] = True


def run_compiled(run: Callable[..., Any], live_ins: tuple[Any, ...], random: bool) -> Any:
    """``run(*live_ins)``, a segment, of which only its live-ins stay, if the back end can do that; compiled only."""
    if _runs_as_traced():
        return run(*live_ins)
    return _handed_on(checkpoint(run, *live_ins, use_reentrant=False, preserve_rng_state=random))


def _handed_on(outputs: Any) -> Any:
    """What a segment gives, which AOTAutograd then keeps if backward needs it.

    Else it would keep the fewest bytes from which backward can make all it needs: what an earlier segment reads, even
    where several segments run again at once for that.
    """
    if isinstance(outputs, tuple):
        return tuple(map(_handed_on, outputs))
    if not isinstance(outputs, Tensor):
        return outputs
    handed: Callable[..., Tensor] = _HandedOn.apply
    return handed(outputs) if outputs.requires_grad else _part(outputs)


def _part(value: Tensor) -> Tensor:
    """``value``, by an operator that AOTAutograd never runs again and Inductor makes nothing of."""
    return value.unsqueeze(0).unbind()[0]


class _HandedOn(torch.autograd.Function):
    """``_part`` without its backward, which stacks gradients."""

    @staticmethod
    def forward(context: Any, value: Tensor) -> Tensor:
        return _part(value.data)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient


def settled(*values: Any) -> tuple[Any, ...]:
    """``values``, whose gradients are summed up before what comes earlier runs backward.

    Inductor would fuse sums and reductions of several segments' gradients, and so hold what these read all at once.
    """
    if not is_compiled():
        return values
    trained = [isinstance(value, Tensor) and value.requires_grad for value in values]
    settle: Callable[..., tuple[Tensor, ...]] = _Settled.apply
    found = iter(settle(*itertools.compress(values, trained)) if any(trained) else ())
    return tuple(next(found) if here else value for value, here in zip(values, trained, strict=True))


class _Settled(torch.autograd.Function):
    """Dynamo traces ``backward`` with what ``forward`` gives, so that this must not count as a write to its input."""

    @staticmethod
    def forward(context: Any, *values: Tensor) -> tuple[Tensor, ...]:
        return tuple(value.data for value in values)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        torch.ops.memrewrite.settle(list(gradients), [])
        return gradients


def in_turn(value: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """``value`` and ``weight`` for a product, whose backward is through with the value before its gradient is read.

    Inductor would make a value again in the kernel that reads its gradient, and hold both and what these are made of.
    """
    if not (is_compiled() and value.requires_grad and weight.requires_grad):
        return value, weight
    pair: Callable[..., tuple[Tensor, Tensor]] = _InTurn.apply
    return pair(value, weight)


class _InTurn(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, value: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return value.data, weight.data

    @staticmethod
    def backward(context: Any, of_value: Tensor, of_weight: Tensor) -> tuple[Tensor, Tensor]:
        torch.ops.memrewrite.settle([of_value], [of_weight])
        return of_value, of_weight


if not hasattr(torch.ops.memrewrite, "settle"):  # it says that it writes: nothing is moved across it
    tags = (torch.Tag.flexible_layout,)  # or Inductor would copy gradients that lie otherwise than uncompiled
    torch.library.define("memrewrite::settle", "(Tensor(a!)[] gradients, Tensor[] before) -> ()", tags=tags)
    torch.library.impl("memrewrite::settle", "CompositeExplicitAutograd", lambda gradients, before: None)
    torch.library.register_fake("memrewrite::settle", lambda gradients, before: None)
SETTLE = torch.ops.memrewrite.settle.default


def stays(operator: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``operator(*args, **kwargs)``, whose result stays; compiled only."""
    return checkpoint(operator, *args, use_reentrant=False, context_fn=_STAYS, **kwargs)


def may_stay(operator: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """``operator(*args)``, of which stays what would outside of segments; compiled only."""
    return checkpoint(operator, *args, use_reentrant=False, context_fn=_MAY_STAY)


def draw(operator: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``operator(*args, **kwargs)``, which draws so few numbers that they stay where it is compiled.

    To draw them again, compiled code would save the random state and set it, by way of the CPU.
    """
    return stays(operator, args, kwargs) if is_compiled() else operator(*args, **kwargs)


def _all_but_views(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_SAVE if getattr(operator, "is_view", False) else CheckpointPolicy.MUST_SAVE


def _compilers_choice(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_SAVE


_CONTEXTS = functools.partial(create_selective_checkpoint_contexts, allow_cache_entry_mutation=True)
_STAYS = functools.partial(_CONTEXTS, _all_but_views)
_MAY_STAY = functools.partial(_CONTEXTS, _compilers_choice)
