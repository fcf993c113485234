"""Branches that clamp what is not finite, as layers of the DETR family end while they train.

    if not torch.isfinite(x).all():
        x = torch.clamp(x, min=-largest, max=largest)

Where these are the largest numbers of the type, clamping changes no finite number and no gradient of one: a graph that
always clamps does what forward does, whatever the values are.
"""

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from memrewrite.records.lines import line_now
from memrewrite.torch_internals.dispatch_modes import PLAIN
from memrewrite.torch_internals.pytrees import tensors_in, tree_leaves

_CLAMPS = (torch.clamp, Tensor.clamp, torch.clip, Tensor.clip)
_OF_ALL = {  # by what tells of each number, what tells of all, and whether its yes says that all are finite
    (torch.isfinite, torch.all): True,
    (torch.isinf, torch.any): False,
    (torch.isnan, torch.any): False,
}
_SAME = {Tensor.isfinite: torch.isfinite, Tensor.isinf: torch.isinf, Tensor.isnan: torch.isnan}
_SAME |= {Tensor.all: torch.all, Tensor.any: torch.any}
_TELLING = {Tensor.__bool__, *_SAME, *_SAME.values()}
_ASKED_OF_TYPES = Tensor.dtype.__get__  # type: ignore[attr-defined]


class Finite(TorchFunctionMode):
    """Answers whether all numbers of a tensor are finite: no, or yes if ``finite``.

    ``asked`` is where that was asked first, "" if nowhere. If it is ``noting``, ``calls`` has what forward calls, with
    what it gives to each, where what is clamped so counts as what it is made of.
    """

    def __init__(self, finite: bool = False, noting: bool = False) -> None:
        super().__init__()
        self.asked = ""
        self.calls: list[Any] = []
        self._finite, self._noting = finite, noting
        self._each: dict[int, tuple[Any, Tensor]] = {}  # what tells of each number: how, and of which tensor
        self._all: dict[int, tuple[Any, bool, Tensor]] = {}  # what tells of all: also whether its yes is of finite
        self._asked: dict[int, set[Any]] = {}  # how, by what was asked about
        self._numbers: dict[int, int] = {}  # of tensors, by identity
        self._next = itertools.count()
        self._alive: list[Tensor] = []  # so that no other tensor has the identity of one of these
        self._same: list[tuple[Tensor, int]] = []  # with the version that each has to have to the end

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _TELLING and not self._noting:  # as almost all of what a large model calls
            return func(*args, **kwargs)
        if func is Tensor.__bool__ and (told := self._all.get(id(args[0]))) is not None:
            self.asked = self.asked or line_now()
            how, yes, source = told
            if self._noting:
                self._number(source)  # of which a custom Function in the branch makes another
                self._asked.setdefault(id(source), set()).add(how)
                self._same.append((source, source._version))
            return yes is self._finite
        result = func(*args, **kwargs)
        if self._listens(_SAME.get(func, func), args, kwargs, result):
            return result
        if self._noting and func in _CLAMPS and args and self._keeps_finite(args, kwargs, result):
            self._alive.append(result)
            self._same.append((result, result._version))
            self._numbers[id(result)] = self._number(args[0])
        elif self._noting and func != _ASKED_OF_TYPES:
            self.calls.append((func, self._words((args, kwargs)), self._words(tensors_in(result))))
        return result

    def returns(self, output: Any) -> None:
        """Note what forward returned."""
        self.calls.append((None, self._words(output), []))

    def _words(self, tree: Any) -> list[Any]:
        """Each tensor as its number, what is plain as what it is, and other objects as what kind they are of."""
        return [
            self._number(leaf) if isinstance(leaf, Tensor) else repr(leaf if type(leaf) in PLAIN else type(leaf))
            for leaf in tree_leaves(tree)
        ]

    def does_as(self, other: "Finite") -> bool:
        """Whether forward did the same with what is finite, which ``other`` was told all is.

        That has to be asked in full, and nothing written over what was asked about or clamped, which were two tensors
        in one run and one in the other.
        """
        same = (*self._same, *other._same)
        in_full = all(torch.isfinite in how or {torch.isinf, torch.isnan} <= how for how in other._asked.values())
        written = any(tensor._version != version for tensor, version in same)
        return self.calls == other.calls and in_full and not written

    def _listens(self, func: Any, args: Any, kwargs: Any, result: Any) -> bool:
        """Remember what a result tells of all numbers of a tensor; whether it tells anything of that."""
        if len(args) != 1 or kwargs or not isinstance(result, Tensor):
            return False
        how, source = self._each.get(id(args[0]), (None, args[0]))
        if (how, func) in _OF_ALL:
            self._all[id(result)] = (how, _OF_ALL[how, func], source)
        elif any(func is one for one, _ in _OF_ALL):
            self._each[id(result)] = (func, args[0])
        else:
            return False
        self._alive.append(result)
        return True

    def _keeps_finite(self, args: Any, kwargs: Any, result: Tensor) -> bool:
        """Whether what was asked about is clamped to all finite numbers of its type."""
        source = args[0]
        if not any(source is asked for asked, _ in self._same) or not source.is_floating_point():
            return False
        limits = dict(zip(("min", "max"), args[1:], strict=False)) | kwargs
        low, high = limits.get("min"), limits.get("max")
        info = torch.finfo(source.dtype)
        most = info.max * (1 - info.eps / 8)  # which rounds to the largest number
        alike = result.dtype == source.dtype and result.stride() == source.stride()
        return alike and isinstance(low, float | int) and isinstance(high, float | int) and -low >= most <= high

    def _number(self, tensor: Tensor) -> int:
        if id(tensor) not in self._numbers:
            self._alive.append(tensor)
            self._numbers[id(tensor)] = next(self._next)
        return self._numbers[id(tensor)]
