"""What is made of rows of logits: each row of the result of the same row of these, and of tensors beside them.

Probabilities, entropies, divergences from a teacher and the like have as many numbers as logits. They are written down
instead, and what comes to a number a row of them makes some rows at a time, of all that leads to it.

This file needs torch only, because its text is also pasted into generated models.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map

from memrewrite.runtime.cross_entropy import REDUCTIONS, reduced, rows_of
from memrewrite.runtime.linear_cross_entropy import widened
from memrewrite.runtime.tiles import in_tiles

Changing = Callable[[Tensor], Tensor]
Replacing = Callable[[Tensor, str], Any]
Leaves = dict[int, tuple[Tensor, str]]


class Rows(ABC):
    """What an output is made of, row by row. ``layout`` has its sizes, type and strides, on the meta device.

    Its ``leaves`` are tensors by their ids: ``hidden`` ones, of rows that are multiplied with a ``weight``, others of
    ``rows``, and what is read ``whole``. Where it is ``moved``, the classes are not in the last dimension.
    """

    layout: Tensor
    moved: bool
    leaves: Leaves

    @abstractmethod
    def value(self, at: dict[int, Tensor], known: dict[Any, Tensor]) -> Tensor:
        """It, of what is ``at`` the places of its leaves. ``known`` is what was made meanwhile."""

    @abstractmethod
    def replaced(self, replacing: Replacing, known: dict[int, Any]) -> "Rows":
        """The same with something else in the place of its leaves, of each kind. ``known`` is what was replaced."""

    @property
    def tensors(self) -> list[Tensor]:
        """Its leaves."""
        return [leaf for leaf, _ in self.leaves.values()]

    def made(self, *of: Tensor) -> Tensor:
        """The output of these rows, where tensors are given of those in the place of its own."""
        return self.value(dict(zip(self.leaves, of, strict=True)) if of else {}, {})

    def detached(self) -> "Rows":
        """The same without a gradient."""
        return Expression(Tensor.detach, ((self,), {}), self.layout)

    def before_logarithms(self) -> "Rows | None":
        """Those that logarithms were taken of; None where none were taken last."""
        return None

    def chosen(self, change: Changing, layout: Tensor) -> Any:
        """Those of a change that has taken some rows, to this layout; None where it has not."""
        result = self._changed(change)
        leaves = zip(self.leaves.values(), result.tensors, strict=True)
        fit = (new.shape == (*layout.shape[:-1], old.shape[-1]) for (old, kind), new in leaves if kind in _IN_ROWS)
        return replace(result, layout=layout) if all(fit) else None

    def _changed(self, change: Changing) -> Any:
        return self.replaced(lambda leaf, kind: change(leaf) if kind in _IN_ROWS else leaf, {})

    def picked(self, index: tuple[Tensor, ...]) -> Any:
        """Those rows that a mask or places choose; None of anything else."""
        mask = index[0].dtype == torch.bool
        count = index[0].dim() if mask else len(index)
        if mask:
            fits = len(index) == 1 and self.layout.shape[:count] == index[0].shape
        else:
            fits = all(places.dtype == torch.int64 for places in index)
        if self.moved or not fits or not 0 < count < self.layout.dim():
            return None
        result = self._changed(lambda leaf: leaf[index])
        sizes = *result.tensors[0].shape[:-1], self.layout.shape[-1]
        if len(sizes) < 2:
            return None
        return replace(result, layout=torch.empty(sizes, dtype=self.layout.dtype, device="meta"))

    def _is_along_rows(self, dim: Any) -> bool:
        (dim,) = dim if isinstance(dim, tuple | list) and len(dim) == 1 else (dim,)
        return not self.moved and type(dim) is int and dim in (-1, self.layout.dim() - 1)

    def in_tiles(self, of: Callable[..., Any], *beside: Tensor) -> Any:
        """What is made of some rows of the output at a time, and those of the tensors beside it."""

        places = [object() for _ in self.leaves]  # graphs that were used keep no tensors by this
        empty = self.replaced(lambda leaf, _: places[[*self.leaves].index(id(leaf))], {})

        def part(*pieces: Tensor) -> Any:
            at = dict(zip(map(id, places), pieces, strict=False))
            return of(empty.value(at, {}), *pieces[len(at) :])

        kinds = [*(kind for _, kind in self.leaves.values()), *["rows"] * len(beside)]
        in_rows = tuple(i for i, kind in enumerate(kinds) if kind in _IN_ROWS)
        weights = tuple(i for i, kind in enumerate(kinds) if kind == "weight")
        rows = rows_of(self.layout.numel(), self.layout.shape[-1])
        return in_tiles(part, in_rows, weights, rows, *self.tensors, *beside)

    def each(self, func: Any, dim: Any = None, keepdim: bool = False, **more: Any) -> Any:
        """``func`` of each row, such as its sum, or of all where it names no dimension; None of anything else."""
        dim = more.pop("axis", dim)
        if dim is None and func in _OF_ALL and not self.moved and not keepdim and [*more] in ([], ["dtype"]):
            return self._of_all(func.__name__, func(self.layout, **more).dtype)
        if not self._is_along_rows(dim) or [*more] not in ([], ["dtype"]):
            return None
        found = self.in_tiles(lambda some: _plainly(func(some, -1, True, **more)))
        return _as_from(func, found if keepdim else tree_map(lambda made: made.squeeze(-1), found))

    def _of_all(self, name: str, dtype: torch.dtype) -> Tensor:
        """The sum, the mean and the like of all numbers."""
        if name in ("any", "all"):
            found: Tensor = getattr(self.in_tiles(lambda some: getattr(some, name)(-1, True)), name)()
            return found
        total: Tensor = self.in_tiles(lambda some: some.sum(-1, True, dtype=widened(dtype))).sum()
        return (total / self.layout.numel() if name == "mean" else total).to(dtype)

    def best(self, func: Any, k: int, dim: Any = -1, *how: bool, **more: bool) -> Any:
        """The largest or smallest numbers of each row, and their places; None of anything but rows."""
        if not self._is_along_rows(dim) or "out" in more:
            return None
        return _as_from(func, self.in_tiles(lambda some: _plainly(func(some, k, -1, *how, **more))))

    def gather(self, _: Any, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Tensor | None:
        """Those of the numbers of each row that ``index`` counts; None of anything but rows."""
        if sparse_grad or index.shape[:-1] != self.layout.shape[:-1] or not self._is_along_rows(dim):
            return None
        found: Tensor = self.in_tiles(lambda some, places: some.gather(-1, places), index)
        return found

    def loss_of_each(
        self, func: Any, target: Any, weight: Any, ignore_index: int, reduction: str, label_smoothing: float = 0.0
    ) -> Tensor | None:
        """``F.cross_entropy`` or ``F.nll_loss``, by the loss of each row; None where these do not tell it."""
        if not isinstance(target, Tensor) or self.layout.dim() != 2 or self.moved or reduction not in REDUCTIONS:
            return None
        by_classes = target.is_floating_point() and target.shape == self.layout.shape
        by_place = target.dtype == torch.int64 and target.shape == self.layout.shape[:-1]
        if not by_classes and (not by_place or (weight is not None and reduction == "mean")):
            return None
        smooth = {"label_smoothing": label_smoothing} if func is functional.cross_entropy else {}

        def part(some: Tensor, of: Tensor) -> Tensor:
            of = of if by_classes else of.squeeze(-1)
            loss: Tensor = func(some, of, weight, ignore_index=ignore_index, reduction="none", **smooth)
            return loss.unsqueeze(-1)

        losses: Tensor = self.in_tiles(part, target if by_classes else target.unsqueeze(-1)).squeeze(-1)
        if by_place:
            return reduced(losses, target, REDUCTIONS[reduction], ignore_index)
        return losses if reduction == "none" else losses.mean() if reduction == "mean" else losses.sum()


@dataclass(frozen=True, eq=False)
class Expression(Rows):
    """What ``func`` makes of what is ``given``, arguments and options, in which there are other rows and tensors."""

    func: Any
    given: tuple[tuple[Any, ...], dict[str, Any]]
    layout: Tensor

    @property
    def stacked(self) -> bool:
        """Whether it is several others, in a dimension of their own before all that they have."""
        return self.func is _stacked

    @property
    def moved(self) -> bool:  # type: ignore[override]
        """The rows of several are in other dimensions."""
        return self.stacked

    @functools.cached_property
    def leaves(self) -> Leaves:  # type: ignore[override]
        """Those of all that is given, and the tensors beside these."""
        given = tree_leaves(self.given)
        found = {id(each): (each, _place_of(each)) for each in given if isinstance(each, Tensor)}
        for each in given:
            found |= each.leaves if isinstance(each, Rows) else {}
        return dict(sorted(found.items(), key=lambda each: _KINDS.index(each[1][1])))

    def value(self, at: dict[int, Tensor], known: dict[Any, Tensor]) -> Tensor:
        """It, once."""

        def of(each: Any) -> Any:
            return each.value(at, known) if isinstance(each, Rows) else at.get(id(each), each)

        if id(self) not in known:
            args, kwargs = tree_map(of, self.given)
            known[id(self)] = self.func(*args, **kwargs)
        return known[id(self)]

    def replaced(self, replacing: Replacing, known: dict[int, Any]) -> "Rows":
        """The same of other leaves, once."""

        def of(each: Any) -> Any:
            if isinstance(each, Tensor) and id(each) not in known:
                known[id(each)] = replacing(each, _place_of(each))
            return each.replaced(replacing, known) if isinstance(each, Rows) else known.get(id(each), each)

        if id(self) not in known:
            known[id(self)] = replace(self, given=tree_map(of, self.given))
        result: Rows = known[id(self)]
        return result

    def after(self, func: Any, change: Changing, layout: Tensor, _: Any) -> "Rows | None":
        """Those of a view of it; None of anything that takes no whole rows."""
        if self.moved or func not in VIEWS or layout.dim() < 2 or layout.shape[-1] != self.layout.shape[-1]:
            return None
        found: Rows | None = self.chosen(change if func in TAKES else reshaped(layout), layout)
        return found


def reshaped(layout: Tensor) -> Changing:
    """To such sizes, but for the last."""
    return lambda leaf: leaf.reshape(*layout.shape[:-1], leaf.shape[-1])


def expressed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Expression | Tensor | None:
    """What ``func`` makes of rows and what is beside them, written down; None where it is not made row by row.

    A loss of all of them, which is one number, is made at once.
    """
    rows = next(each for each in tree_leaves((args, kwargs)) if isinstance(each, Rows))
    sizes, others = tuple(rows.layout.shape), [*args[1:], *kwargs.values()]
    if func is torch.stack:
        alike = args and others in ([], [0]) and all(_sizes(one) == sizes for one in args[0])
        return _written_down(rows, _stacked, (args[:1], {}), (len(args[0]), *sizes)) if alike else None
    if func in LOSSES and (reduction := kwargs.get("reduction", "mean")) != "none":
        return _loss_of_all(rows, func, args, kwargs, reduction)
    if func in ALONG:
        dim, *rest = *args[1:], *([kwargs["dim"]] if "dim" in kwargs else [])
        if args[0] is not rows or not rows._is_along_rows(dim):
            return None
        args, kwargs = (rows, -1, *rest), {name: value for name, value in kwargs.items() if name != "dim"}
    elif func in ACROSS:
        if not isinstance(rows, Expression) or not rows.stacked or others != [0]:
            return None
        sizes = sizes[1:]
    elif func in _CASTS and [*map(type, others)] != [torch.dtype] * _CASTS[func]:
        return None
    return _written_down(rows, func, (args, kwargs), sizes)


def _written_down(rows: Rows, func: Any, given: Any, sizes: tuple[int, ...]) -> Expression | None:
    """An expression, if what is given fits these rows and as many numbers of such ``sizes`` come of it."""
    try:
        given = tree_map(lambda each: _fitted(each, rows, func in ACROSS), given)
    except _UnfitError:
        return None
    with torch.no_grad():
        args, kwargs = tree_map(lambda each: _none_of(each, rows.tensors[0]), given)
        none = func(*args, **kwargs)
    expected = *(sizes[:1] if func is _stacked else ()), 0, sizes[-1]
    if not isinstance(none, Tensor) or none.shape != expected:
        return None
    return Expression(func, given, torch.empty(sizes, dtype=none.dtype, device="meta"))


def _loss_of_all(rows: Rows, func: Any, args: Any, kwargs: Any, reduction: str) -> Tensor | None:
    """The sum or a mean of all numbers of a loss."""
    sizes = tuple(rows.layout.shape)
    plain = all(kwargs.get(name) is None for name in ("size_average", "reduce", "weight"))
    if not plain or any(_sizes(each) != sizes for each in args) or reduction not in ("sum", "mean", "batchmean"):
        return None
    losses = _written_down(rows, func, (args, {**kwargs, "reduction": "none"}), sizes)
    if losses is None:
        return None
    found: Tensor = losses.each(torch.mean if reduction == "mean" else torch.sum)
    return found / sizes[0] if reduction == "batchmean" else found


def _sizes(given: Any) -> tuple[int, ...]:
    return tuple((given.layout if isinstance(given, Rows) else given).shape)


class _UnfitError(Exception):
    """Raised by ``_fitted``."""


def _fitted(each: Any, rows: Rows, moved: bool) -> Any:
    """What is given beside rows: a tensor has as many of them, or is one that is beside each."""
    sizes = rows.layout.shape
    if isinstance(each, Rows) and each.layout.shape == sizes and each.moved == moved:
        return each
    if not isinstance(each, Tensor):
        if each is None or isinstance(each, _PLAIN_BESIDE):
            return each
        raise _UnfitError
    if each.is_inference():  # no version tells whether it was written
        raise _UnfitError
    if each.dim() < 2 or each.shape[:-1] == sizes[:-1]:
        return each
    if each.shape[:-1].numel() == 1:
        return each.reshape(each.shape[-1])
    ahead = zip(each.shape[-2::-1], sizes[-2::-1], strict=False)
    fits = each.dim() <= len(sizes) and all(size in (1, most) for size, most in ahead)
    if each.shape[-1] != 1 or not fits:
        raise _UnfitError
    return each.expand(*sizes[:-1], 1)


def _none_of(each: Any, like: Tensor) -> Any:
    """The same of no rows."""
    if isinstance(each, Rows):
        sizes = each.layout.shape
        ahead = sizes[:1] if isinstance(each, Expression) and each.stacked else ()
        return like.new_empty((*ahead, 0, sizes[-1]), dtype=each.layout.dtype)
    return each.flatten(0, -2)[:0] if isinstance(each, Tensor) and _place_of(each) == "rows" else each


def _place_of(beside: Tensor) -> str:
    return "rows" if beside.dim() > 1 else "whole"


def _stacked(each: Any) -> Tensor:
    return torch.stack([*each])


def _plainly(made: Any) -> Any:
    return (*made,) if isinstance(made, tuple) else made


def _as_from(func: Any, made: Any) -> Any:
    """With names, as PyTorch gives several results."""
    return getattr(torch.return_types, func.__name__)(made) if isinstance(made, tuple) else made


def named(names: str, *owners: Any) -> list[Any]:
    """The functions of these names, of tensors or of their own."""
    found = (getattr(owner, name, None) for name in names.split() for owner in owners)
    return [func for func in found if func is not None]


_KINDS = ("hidden", "rows", "weight", "whole")
_IN_ROWS = ("hidden", "rows")
_PLAIN_BESIDE = (int, float, bool, str, torch.dtype)
LOGARITHMS = {*named("log_softmax", Tensor, torch, functional)}
ALONG = {*named("softmax log_softmax", Tensor, torch, functional)}
ACROSS = {*named("logsumexp", Tensor, torch)}
MOVES = {*named("transpose permute swapaxes swapdims", Tensor, torch), getattr(Tensor.mT, "__get__")}  # noqa: B009
TAKES = {*named("narrow", Tensor, torch), Tensor.__getitem__}
VIEWS = TAKES | {*named("reshape flatten squeeze unsqueeze", Tensor, torch), Tensor.view, Tensor.contiguous}
_OF_ALL = {*named("sum mean any all", Tensor, torch)}
EACH = {*named("sum mean any all argmax argmin amax amin max min logsumexp", Tensor, torch)}
BEST = {*named("topk", Tensor, torch)}
_CASTS = {Tensor.to: 1, Tensor.type: 1, Tensor.float: 0, Tensor.double: 0, Tensor.half: 0, Tensor.bfloat16: 0}
LOSSES = {functional.kl_div, functional.mse_loss}
_NUMBERS = """add sub subtract rsub mul multiply div divide true_divide neg negative exp expm1 log log1p log2 sqrt
square pow abs clamp clamp_min clamp_max clip sigmoid tanh relu masked_fill where xlogy logaddexp maximum minimum
nan_to_num isnan isinf isfinite eq ne lt le gt ge logical_and logical_or logical_not bitwise_not"""
_WRITTEN = "add sub mul truediv pow radd rsub rmul rtruediv rdiv div rpow neg abs eq ne lt le gt ge and or invert"
OF_NUMBERS = {
    *named(_NUMBERS, Tensor, torch),
    *named(" ".join(f"__{name}__" for name in _WRITTEN.split()), Tensor),
    *named("softplus logsigmoid relu sigmoid", functional),
    *(ALONG | ACROSS | LOSSES | _CASTS.keys()),
    torch.stack,
}
