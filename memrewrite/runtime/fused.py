"""A chain of pointwise and row-wise operations as one operator, by ``torch.compile`` on CUDA.

Autograd keeps what the chain is given, as far as its gradients need that; backward makes the rest again in the kernels
that read it. Torch only: this file's text is also pasted into generated models.
"""

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from memrewrite.runtime.cross_entropy import in_autocast
from memrewrite.runtime.kernels import Kernel
from memrewrite.runtime.segment import autocast_dtype

Chain = Callable[..., Any]
CHAINS: dict[str, Chain] = {}  # by names, which say what they compute
_spared: list[set[str]] = []  # for each ``uncompiled`` under way, the chains that were not compiled therefore


def fused(chain: Chain, trained: tuple[int, ...], keeps: tuple[int, ...], *given: Tensor) -> Any:
    """``chain(*given)``, a tensor or a tuple of them; those of ``given`` that ``keeps`` counts are kept for backward.

    That is what the gradients of those that ``trained`` counts need; where others need one too, all are kept. Chains
    of one ``__name__`` compute the same. Where a whole model is compiled, compilers fuse what they can.
    """
    if torch.compiler.is_compiling():
        return chain(*given)
    _name(chain.__name__, chain)
    if any(t.requires_grad and i not in trained for i, t in enumerate(given)):
        keeps = tuple(range(len(given)))
    results = _Fused.apply(chain.__name__, keeps, *given)  # type: ignore[no-untyped-call]
    return results[0] if len(results) == 1 else results


def at_once(name: str, chain: Chain, given: list[Tensor]) -> list[Tensor]:
    """The results of ``chain(*given)``, of which autograd knows nothing; ``name`` says what it computes."""
    _name(name, chain)
    results: list[Tensor] = torch.ops.memrewrite.chain(name, given)
    return results


def _name(name: str, chain: Chain) -> None:
    """Have the chain be the one of that name, unless there is one.

    Kernels are kept for other processes by a chain's code: one that calls a graph, and has none, gives way to one that
    was written.
    """
    known = CHAINS.setdefault(name, chain)
    if known is not chain and calls_a_graph(known) and not calls_a_graph(chain):
        CHAINS[name] = chain


def calls_a_graph(chain: Chain) -> bool:
    """Whether it computes a graph that it holds, and has no code of its own."""
    return getattr(chain, "calls_a_graph", False)


class _Fused(torch.autograd.Function):
    """Keeps some of what it is given; of the others backward needs the shape alone."""

    @staticmethod
    def forward(ctx: Any, name: str, keeps: tuple[int, ...], *given: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*(given[i] for i in keeps))
        ctx.likes = [None if i in keeps else (t.shape, t.dtype, t.device) for i, t in enumerate(given)]
        ctx.orders = [_order(t) if need else () for t, need in zip(given, ctx.needs_input_grad[2:], strict=True)]
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
                found = iter(_chain_slopes(CHAINS[ctx.chain], given, gradients, wanted))
            else:
                orders = [dim for order, need in zip(ctx.orders, wanted, strict=True) if need for dim in order]
                found = iter(torch.ops.memrewrite.chain_slopes(ctx.chain, given, gradients, wanted, orders))
        return None, None, *(next(found) if need else None for need in wanted)


def _shaped(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of that shape, of which nobody reads the values."""
    return torch.empty((), dtype=dtype, device=device).expand(shape)


def _order(tensor: Tensor) -> tuple[int, ...]:
    """Its dimensions as they lie in memory, the outermost first; as they are counted where some share memory."""
    strides = tensor.stride()
    dims = range(len(strides))
    return tuple(dims) if 0 in strides else tuple(sorted(dims, key=strides.__getitem__, reverse=True))


def _places(order: Sequence[int]) -> list[int]:
    """Where each dimension is in ``order``."""
    return [order.index(dim) for dim in range(len(order))]


def _each(orders: Sequence[int], tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, Sequence[int]]]:
    """Each tensor with its part of ``orders``, those of all of them one after the other.

    Models that were written before there were orders give none.
    """
    start = 0
    for tensor in tensors:
        yield tensor, orders[start : start + tensor.dim()] if orders else range(tensor.dim())
        start += tensor.dim()


def listed(results: Any) -> list[Tensor]:
    """The results of a chain, of which one alone is a tensor."""
    return list(results) if isinstance(results, tuple) else [results]


def _chain_slopes(
    chain: Chain, given: Sequence[Tensor], gradients: Sequence[Tensor | None], wanted: list[bool]
) -> list[Tensor]:
    """The gradients of those of ``given`` that are ``wanted``, by those of the results that have one."""

    def of_wanted(*values: Tensor) -> tuple[Tensor, ...]:
        found = iter(values)
        results = listed(chain(*(next(found) if need else t for t, need in zip(given, wanted, strict=True))))
        return tuple(result for result, gradient in zip(results, gradients, strict=True) if gradient is not None)

    pull = torch.func.vjp(of_wanted, *(t for t, need in zip(given, wanted, strict=True) if need))[1]
    return list(pull(tuple(gradient for gradient in gradients if gradient is not None)))


def _compiles(tensor: Tensor) -> bool:
    return tensor.is_cuda and has_triton()


@functools.cache
def has_triton() -> bool:
    """Whether there is the language that ``torch.compile`` writes kernels for a GPU in."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _forward_of(name: str, chain: Chain) -> Kernel:
    return Kernel(lambda given: listed(chain(*given)), name)


@functools.cache
def _slopes_of(name: str, chain: Chain, count: int, wanted: tuple[bool, ...], orders: tuple[int, ...]) -> Kernel:
    """The gradients of the ``wanted`` of ``count`` tensors, by these and the gradients of the results.

    They lie in memory as ``orders`` says: as the tensors do, so that views that these are of others need no copy of
    them.
    """
    asked = list(wanted)

    def slopes(given: Sequence[Any]) -> list[Tensor]:
        found = _chain_slopes(chain, given[:count], given[count:], asked)
        return [
            slope.permute(list(order)).contiguous().permute(_places(order)) for slope, order in _each(orders, found)
        ]

    return Kernel(slopes, f"{name}_slopes")


@contextlib.contextmanager
def uncompiled() -> Iterator[set[str]]:
    """Run chains as they are meanwhile, in all threads, as backward has its own; gives those compiled otherwise."""
    _spared.append(set())
    try:
        yield _spared[-1]
    finally:
        _spared.pop()


def kernel_for(
    name: str,
    given: list[Tensor],
    gradients: Sequence[Tensor | None] = (),
    wanted: list[bool] | None = None,
    orders: Sequence[int] = (),
) -> tuple[Kernel, list[Tensor | None]]:
    """What computes a chain, or the gradients that are ``wanted``, and all that it is given."""
    if wanted is None:
        return _forward_of(name, CHAINS[name]), [*given]
    return _slopes_of(name, CHAINS[name], len(given), tuple(wanted), tuple(orders)), [*given, *gradients]


def _run(name: str, kernel: Kernel, given: Sequence[Any]) -> list[Tensor]:
    if not _compiles(given[0]):
        return kernel.plain(given)
    if not _spared:
        return kernel(given)
    _spared[-1].add(name)
    return kernel.plain(given)


def _run_chain(name: str, given: list[Tensor]) -> list[Tensor]:
    return _run(name, *kernel_for(name, given))


def run_plain(name: str, given: list[Tensor]) -> list[Tensor]:
    """What a chain gives, uncompiled."""
    return listed(CHAINS[name](*given))


def _run_slopes(
    name: str, given: list[Tensor], gradients: Sequence[Tensor | None], wanted: list[bool], orders: Sequence[int] = ()
) -> list[Tensor]:
    return _run(name, *kernel_for(name, given, gradients, wanted, orders))


def _chain_slopes_on_fakes(
    name: str, given: list[Tensor], gradients: Sequence[Tensor | None], wanted: list[bool], orders: Sequence[int] = ()
) -> list[Tensor]:
    asked = [t for t, need in zip(given, wanted, strict=True) if need]
    return [t.new_empty([t.shape[d] for d in order]).permute(_places(order)) for t, order in _each(orders, asked)]


if not hasattr(torch.ops.memrewrite, "chain"):
    torch.library.define("memrewrite::chain", "(str name, Tensor[] given) -> Tensor[]")
    torch.library.impl("memrewrite::chain", "CompositeExplicitAutograd", _run_chain)
    torch.library.register_fake("memrewrite::chain", run_plain)
    slopes = "(str name, Tensor[] given, Tensor?[] gradients, bool[] wanted, int[] orders=[]) -> Tensor[]"
    torch.library.define("memrewrite::chain_slopes", slopes)
    torch.library.impl("memrewrite::chain_slopes", "CompositeExplicitAutograd", _run_slopes)
    torch.library.register_fake("memrewrite::chain_slopes", _chain_slopes_on_fakes)
