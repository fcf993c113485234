"""A part of a model some rows, texts or heads at a time: what is large inside of it never exists whole.

Rows are those of a token-wise part, an MLP say; texts and heads those of attention that a model writes itself. Autograd
keeps what the part is given. Backward makes one piece again, and its gradients, before it comes to the next one, as
tiled MLPs do that are written by hand (arXiv 2506.13996). The gradients of weights are sums over the pieces, whose last
bits are others. Torch only: this file's text is also pasted into generated models.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memrewrite.runtime.cross_entropy import in_autocast
from memrewrite.runtime.fused import listed
from memrewrite.runtime.segment import as_autocast, autocast_dtype

Gradients = list[Tensor | None]


def in_tiles(
    part: Callable[..., Any], in_rows: tuple[int, ...], weights: tuple[int, ...], rows: int, *given: Tensor
) -> Any:
    """``part(*given)``, a tensor or a tuple of them, made ``rows`` rows at a time.

    Each row, what lies along the last dimension, of the tensors of ``given`` that ``in_rows`` counts gives that row of
    the results, whose other sizes are those of the first of them. The others are read whole; those that ``weights``
    counts, by products alone.
    """
    return _made(_Tiles(part, in_rows, weights, rows, autocast_dtype(given[in_rows[0]].device.type)), given)


def in_pieces(part: Callable[..., Any], apart: tuple[int, ...], dim: int, pieces: int, *given: Tensor) -> Any:
    """``part(*given)``, a tensor or a tuple of them, made in about ``pieces`` along the dimension ``dim``, below 0.

    What lies at one place there of the tensors of ``given`` that ``apart`` counts, which have as many places, gives
    that place of the results. The others are read whole.
    """
    first = given[apart[0]]
    length = max(1, -(-first.shape[dim] // pieces))
    return _made(_Tiles(part, apart, (), length, autocast_dtype(first.device.type), dim), given)


def _made(tiles: "_Tiles", given: tuple[Tensor, ...]) -> Any:
    if torch.compiler.is_compiling():  # compilers have it whole, and fuse what they can
        return tiles.part(*given)
    # What is kept is kept before anything runs, so that a segment which ends with this need not run it again.
    held = _Held.apply(tiles, *given)  # type: ignore[no-untyped-call]
    results = _Run.apply(tiles, held, given)  # type: ignore[no-untyped-call]
    return results[0] if len(results) == 1 else results


@dataclass
class _Tiles:
    """One call; ``gradients`` are those of the results, while backward comes from them to those of what was given.

    Where there is a ``dim``, rows are what lies along it.
    """

    part: Callable[..., Any]
    in_rows: tuple[int, ...]
    weights: tuple[int, ...]
    rows: int
    autocast: torch.dtype | None
    dim: int | None = None
    gradients: tuple[Tensor | None, ...] = ()

    def run(self, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The results."""
        results: list[Tensor] = []
        for some, piece in self._pieces(self._as_read([t.detach() for t in given])):
            for i, made in enumerate(listed(self.part(*piece))):
                if i == len(results):
                    results.append(made.new_empty(self._sizes(made, given[self.in_rows[0]])))
                self._some(self._rows(results[i]), some).copy_(made)
                del made
        return tuple(results)

    def slopes(self, given: tuple[Tensor, ...], gradients: tuple[Tensor | None, ...], wanted: list[bool]) -> Gradients:
        """The gradients of those of ``given`` that are ``wanted``, of which those of weights are added up in place."""
        of_rows = {i: given[i].new_empty(given[i].shape) for i in self.in_rows if wanted[i]}
        leaves = [self._leaf(i, t).requires_grad_(wanted[i]) for i, t in enumerate(given)]
        whole = [leaf for i, leaf in enumerate(leaves) if wanted[i] and i not in of_rows]
        coming = [None if gradient is None else self._rows(gradient) for gradient in gradients]
        with torch.enable_grad():
            read = self._as_read([leaf.to(t.dtype) for leaf, t in zip(leaves, given, strict=True)])
        for some, piece in self._pieces(read):
            for i in of_rows:
                piece[i] = piece[i].detach().requires_grad_()
            with torch.enable_grad():
                results = listed(self.part(*piece))
            ends = zip(results, coming, strict=True)
            pairs = [(r, self._some(g, some)) for r, g in ends if g is not None and r.requires_grad]
            del results, ends
            torch.autograd.backward(*_unzipped(pairs), inputs=[*(piece[i] for i in of_rows), *whole])
            del pairs
            for i, slope in of_rows.items():
                found, there = piece[i].grad, self._some(self._rows(slope), some)
                there.zero_() if found is None else there.copy_(found)
        sums = (None if leaf.grad is None else leaf.grad.to(t.dtype) for leaf, t in zip(leaves, given, strict=True))
        return [of_rows.get(i, total) for i, total in enumerate(sums)]

    def _leaf(self, i: int, given: Tensor) -> Tensor:
        """What stands for a tensor that is given: of one that pieces along a dimension read whole, as keys and values
        of rows are, gradients are summed in float32, as a product of all rows does."""
        whole = self.dim is not None and i not in self.in_rows and given.is_floating_point()
        return given.detach().to(torch.promote_types(given.dtype, torch.float32)) if whole else given.detach()

    def _as_read(self, given: list[Tensor]) -> list[Tensor]:
        """The same with weights as autocast gives them to products, once for all rows."""
        return [as_autocast(t) if i in self.weights else t for i, t in enumerate(given)]

    def _pieces(self, given: list[Tensor]) -> Iterator[tuple[slice, list[Tensor]]]:
        rows = {i: self._rows(given[i]) for i in self.in_rows}
        count = rows[self.in_rows[0]].shape[self.dim or 0]
        for start in range(0, max(count, 1), self.rows):
            some = slice(start, min(start + self.rows, count))
            yield some, [self._some(rows[i], some) if i in rows else t for i, t in enumerate(given)]

    def _rows(self, tensor: Tensor) -> Tensor:
        """The tensor with its rows along one dimension, the first where there is no other."""
        return tensor.flatten(0, -2) if self.dim is None else tensor

    def _some(self, rows: Tensor, some: slice) -> Tensor:
        return rows.narrow(self.dim or 0, some.start, some.stop - some.start)

    def _sizes(self, piece: Tensor, given: Tensor) -> list[int]:
        """Those of all of a result, of which this is a piece."""
        if self.dim is None:
            return [*given.shape[:-1], piece.shape[-1]]
        sizes = [*piece.shape]
        sizes[self.dim] = given.shape[self.dim]
        return sizes


class _Held(torch.autograd.Function):
    """Keeps what a part is given; gives an empty tensor, whose gradient comes once those of the results are there."""

    @staticmethod
    def forward(ctx: Any, tiles: _Tiles, *given: Tensor) -> Tensor:
        ctx.save_for_backward(*given)
        ctx.tiles = tiles
        return given[tiles.in_rows[0]].new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        tiles, given, wanted = ctx.tiles, ctx.saved_tensors, list(ctx.needs_input_grad[1:])
        gradients, tiles.gradients = tiles.gradients, ()
        if all(gradient is None for gradient in gradients):
            return None, *[None] * len(given)
        with in_autocast(given[tiles.in_rows[0]], tiles.autocast):
            if torch.is_grad_enabled():  # to be differentiated again
                return None, *_whole_slopes(tiles.part, given, gradients, wanted)
            return None, *tiles.slopes(given, gradients, wanted)


class _Run(torch.autograd.Function):
    """The results; hands their gradients on."""

    @staticmethod
    def forward(ctx: Any, tiles: _Tiles, held: Tensor, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        ctx.tiles = tiles
        ctx.set_materialize_grads(False)
        return tiles.run(given)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        there = [gradient for gradient in gradients if gradient is not None]
        ctx.tiles.gradients = gradients
        return None, there[0].new_empty(0) if there else None, None


def _whole_slopes(
    part: Callable[..., Any], given: tuple[Tensor, ...], gradients: tuple[Tensor | None, ...], wanted: list[bool]
) -> Gradients:
    results = zip(listed(part(*given)), gradients, strict=True)
    reached, coming = _unzipped([(r, g) for r, g in results if g is not None and r.requires_grad])
    of = [t for t, need in zip(given, wanted, strict=True) if need]
    found = iter(torch.autograd.grad(reached, of, coming, create_graph=True, allow_unused=True))
    return [next(found) if need else None for need in wanted]


def _unzipped(pairs: list[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    return [first for first, _ in pairs], [second for _, second in pairs]
