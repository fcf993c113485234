"""A chain of pointwise and row-wise operations as one operator, by ``torch.compile`` on CUDA.

Autograd keeps what the chain is given, as far as its gradients need that; backward makes the rest again in the kernels
that read it. Torch only: this file's text is also pasted into generated models.
"""

import contextlib
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from memrewrite.runtime.cross_entropy import in_autocast
from memrewrite.runtime.segment import autocast_dtype

Chain = Callable[..., Any]
_CHAINS: dict[str, Chain] = {}  # by names, which say what they compute


def fused(chain: Chain, trained: tuple[int, ...], keeps: tuple[int, ...], *given: Tensor) -> Any:
    """``chain(*given)``, a tensor or a tuple of them; those of ``given`` that ``keeps`` counts are kept for backward.

    That is what the gradients of those that ``trained`` counts need; where others need one too, all are kept. Chains
    of one ``__name__`` compute the same. Where a whole model is compiled, compilers fuse what they can.
    """
    if torch.compiler.is_compiling():
        return chain(*given)
    _CHAINS.setdefault(chain.__name__, chain)
    if any(t.requires_grad and i not in trained for i, t in enumerate(given)):
        keeps = tuple(range(len(given)))
    results = _Fused.apply(chain.__name__, keeps, *given)  # type: ignore[no-untyped-call]
    return results[0] if len(results) == 1 else results


def at_once(name: str, chain: Chain, given: list[Tensor]) -> list[Tensor]:
    """The results of ``chain(*given)``, of which autograd knows nothing; ``name`` says what it computes."""
    _CHAINS.setdefault(name, chain)
    results: list[Tensor] = torch.ops.memrewrite.chain(name, given)
    return results


class _Fused(torch.autograd.Function):
    """Keeps some of what it is given; of the others backward needs the shape alone."""

    @staticmethod
    def forward(ctx: Any, name: str, keeps: tuple[int, ...], *given: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*(given[i] for i in keeps))
        ctx.likes = [None if i in keeps else (t.shape, t.dtype, t.device) for i, t in enumerate(given)]
        ctx.chain, ctx.autocast = name, autocast_dtype(given[0].device.type)
        ctx.set_materialize_grads(False)
        return tuple(torch.ops.memrewrite.chain(name, given))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        kept = iter(ctx.saved_tensors)
        given = [next(kept) if like is None else _shaped(*like) for like in ctx.likes]
        wanted = list(ctx.needs_input_grad[2:])
        with in_autocast(given[0], ctx.autocast):
            if torch.is_grad_enabled():  # to be differentiated again
                found = iter(_chain_slopes(_CHAINS[ctx.chain], given, gradients, wanted))
            else:
                found = iter(torch.ops.memrewrite.chain_slopes(ctx.chain, given, gradients, wanted))
        return None, None, *(next(found) if need else None for need in wanted)


def _shaped(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of that shape, of which nobody reads the values."""
    return torch.empty((), dtype=dtype, device=device).expand(shape)


def listed(results: Any) -> list[Tensor]:
    """The results of a chain, of which one alone is a tensor."""
    return list(results) if isinstance(results, tuple) else [results]


def _chain_slopes(
    chain: Chain, given: list[Tensor], gradients: Sequence[Tensor | None], wanted: list[bool]
) -> list[Tensor]:
    """The gradients of those of ``given`` that are ``wanted``, by those of the results that have one."""

    def of_wanted(*values: Tensor) -> tuple[Tensor, ...]:
        found = iter(values)
        results = listed(chain(*(next(found) if need else t for t, need in zip(given, wanted, strict=True))))
        return tuple(result for result, gradient in zip(results, gradients, strict=True) if gradient is not None)

    pull = torch.func.vjp(of_wanted, *(t for t, need in zip(given, wanted, strict=True) if need))[1]
    return list(pull(tuple(gradient for gradient in gradients if gradient is not None)))


def _compiles(tensor: Tensor) -> bool:
    return tensor.is_cuda


@functools.cache
def _compiled(function: Chain, name: str, kinds: tuple[Any, ...]) -> Chain:
    """``function``, compiled once for each of the ``kinds`` that it is called with, whichever model calls it.

    PyTorch's compiler runs a code as it is once it has compiled it a few times, so that each kind has its own.
    """
    code = function.__code__.replace(co_name=f"{name}_{hash(kinds):x}".replace("-", "_"))
    return torch.compile(types.FunctionType(code, function.__globals__, name, None, function.__closure__))


@functools.cache
def _forward_of(name: str) -> Chain:
    chain = _CHAINS[name]
    return lambda given: listed(chain(*given))


@functools.cache
def _slopes_of(name: str) -> Chain:
    chain = _CHAINS[name]
    return lambda given, gradients, wanted: _chain_slopes(chain, given, gradients, wanted)


def _kinds(tensors: Sequence[Tensor | None]) -> tuple[Any, ...]:
    return tuple(None if t is None else (t.dtype, t.dim()) for t in tensors)


def _plain(tensors: Sequence[Tensor | None]) -> list[Any]:
    """The same to a compiler, whether they are parameters or need gradients."""
    return [None if t is None else t.detach() for t in tensors]


@contextlib.contextmanager
def _usual_algorithms() -> Iterator[None]:
    """Without the setting that asks for deterministic ones: a chain's are, and need not be compiled again for it."""
    asked = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if not asked[0]:
        yield
        return
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(asked[0], warn_only=asked[1])


def _run_chain(name: str, given: list[Tensor]) -> list[Tensor]:
    run = _forward_of(name)
    if _compiles(given[0]):
        run = _compiled(run, name, _kinds(given))
    with _usual_algorithms():
        return list(run(_plain(given)))


def _run_slopes(name: str, given: list[Tensor], gradients: Sequence[Tensor | None], wanted: list[bool]) -> list[Tensor]:
    run = _slopes_of(name)
    if _compiles(given[0]):
        run = _compiled(run, f"{name}_slopes", (*_kinds(given), *_kinds(gradients), *wanted))
    with _usual_algorithms():
        return list(run(_plain(given), _plain(gradients), wanted))


def _chain_slopes_on_fakes(
    name: str, given: list[Tensor], gradients: Sequence[Tensor | None], wanted: list[bool]
) -> list[Tensor]:
    return [torch.empty_like(t) for t, need in zip(given, wanted, strict=True) if need]


if not hasattr(torch.ops.memrewrite, "chain"):
    torch.library.define("memrewrite::chain", "(str name, Tensor[] given) -> Tensor[]")
    torch.library.impl("memrewrite::chain", "CompositeExplicitAutograd", _run_chain)
    torch.library.register_fake("memrewrite::chain", lambda name, given: listed(_CHAINS[name](*given)))
    torch.library.define(
        "memrewrite::chain_slopes", "(str name, Tensor[] given, Tensor?[] gradients, bool[] wanted) -> Tensor[]"
    )
    torch.library.impl("memrewrite::chain_slopes", "CompositeExplicitAutograd", _run_slopes)
    torch.library.register_fake("memrewrite::chain_slopes", _chain_slopes_on_fakes)
