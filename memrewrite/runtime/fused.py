"""A chain of pointwise and row-wise operations as one operator, by ``torch.compile`` on CUDA.

Autograd keeps what the chain is given, as far as its gradients need that; backward makes the rest again in the kernels
that read it. Torch only: this file's text is also pasted into generated models.
"""

import functools
import types
from collections.abc import Callable, Sequence
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


def _listed(results: Any) -> list[Tensor]:
    return list(results) if isinstance(results, tuple) else [results]


def _chain_slopes(
    chain: Chain, given: list[Tensor], gradients: Sequence[Tensor | None], wanted: list[bool]
) -> list[Tensor]:
    """The gradients of those of ``given`` that are ``wanted``, by those of the results that have one."""

    def of_wanted(*values: Tensor) -> tuple[Tensor, ...]:
        found = iter(values)
        results = _listed(chain(*(next(found) if need else t for t, need in zip(given, wanted, strict=True))))
        return tuple(result for result, gradient in zip(results, gradients, strict=True) if gradient is not None)

    pull = torch.func.vjp(of_wanted, *(t for t, need in zip(given, wanted, strict=True) if need))[1]
    return list(pull(tuple(gradient for gradient in gradients if gradient is not None)))


@functools.cache
def _compiled(name: str) -> Callable[[list[Tensor]], list[Tensor]]:
    """A chain on CUDA; compiled once, whichever model it is called in."""
    chain = _CHAINS[name]

    def run(given: list[Tensor]) -> list[Tensor]:
        return _listed(chain(*given))

    return torch.compile(_with_own_code(run, name))


@functools.cache
def _compiled_slopes(name: str) -> Callable[..., list[Tensor]]:
    chain = _CHAINS[name]

    def run(given: list[Tensor], gradients: Sequence[Tensor | None], wanted: list[bool]) -> list[Tensor]:
        return _chain_slopes(chain, given, gradients, wanted)

    return torch.compile(_with_own_code(run, f"{name}_chain_slopes"))


def _with_own_code(function: Any, name: str) -> Any:
    """The same function, which PyTorch's compiler takes for another: it compiles each code a few times at most."""
    code = function.__code__.replace(co_name=name)
    return types.FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)


def _run_chain(name: str, given: list[Tensor]) -> list[Tensor]:
    return _compiled(name)(given) if given[0].is_cuda else _listed(_CHAINS[name](*given))


def _run_slopes(name: str, given: list[Tensor], gradients: Sequence[Tensor | None], wanted: list[bool]) -> list[Tensor]:
    run = _compiled_slopes(name) if given[0].is_cuda else functools.partial(_chain_slopes, _CHAINS[name])
    return run(given, gradients, wanted)


def _chain_slopes_on_fakes(
    name: str, given: list[Tensor], gradients: Sequence[Tensor | None], wanted: list[bool]
) -> list[Tensor]:
    return [torch.empty_like(t) for t, need in zip(given, wanted, strict=True) if need]


if not hasattr(torch.ops.memrewrite, "chain"):
    torch.library.define("memrewrite::chain", "(str name, Tensor[] given) -> Tensor[]")
    torch.library.impl("memrewrite::chain", "CompositeExplicitAutograd", _run_chain)
    torch.library.register_fake("memrewrite::chain", lambda name, given: _listed(_CHAINS[name](*given)))
    torch.library.define(
        "memrewrite::chain_slopes", "(str name, Tensor[] given, Tensor?[] gradients, bool[] wanted) -> Tensor[]"
    )
    torch.library.impl("memrewrite::chain_slopes", "CompositeExplicitAutograd", _run_slopes)
    torch.library.register_fake("memrewrite::chain_slopes", _chain_slopes_on_fakes)
