"""What a drop-in says of calls that its budget was not promised for. Torch only; part of every artifact."""

import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

Call = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
"""A module and the inputs that it is called with."""
Foresee = Callable[[Call, bool], int | None]
"""The peak in bytes of a step on such inputs, with the original forward or not; None where that is not known."""


class FallbackWarning(UserWarning):
    """An optimized module met inputs it was not captured for and ran the original forward."""


class BeyondPlanWarning(UserWarning):
    """An optimized module met inputs that are larger than those its budget was promised for."""


class LazyOutputWarning(UserWarning):
    """An output of an optimized module that is made when it is read was read, which takes memory not told of.

    ``DistributedDataParallel`` reads all of them itself where it looks for unused parameters or has a static graph.
    """


class BeyondPlanError(RuntimeError):
    """A module optimized with ``strict=True`` met a call that its budget was not promised for, and did not run it."""


class Promise:
    """The budget of one drop-in, in bytes (None: none was given), and the sizes of inputs that it is known to hold for.

    Where it is ``strict``, calls that may take more are refused. ``foresee`` tells the peaks of other sizes, where that
    can be done: in the process that planned. Each warning comes once. Nothing more is said of outputs that are read
    where that was ``told``, or is what the step that was planned does.
    """

    def __init__(self, name: str, budget: int | None, strict: bool, planned: Mapping[str, int]) -> None:
        self.name = name
        self.budget = budget
        self.strict = strict
        self.foresee: Foresee | None = None
        self.fallen_back = False
        self.retrained = False  # whether parameters were, or frozen, after it was planned
        self._frozen: dict[str, Callable[[], Tensor | None]] = {}
        self._exceeded = False
        self.told = False
        self._within = [dict(planned)]
        self._peaks: dict[tuple[Any, ...], int | None] = {}

    def fall_back(self, text: str, stacklevel: int, call: Call | None = None) -> None:
        """Warn that what follows does not run as planned; ``call`` is the module and its inputs, if it is for them.

        Raises ``BeyondPlanError`` instead where the promise is strict.
        """
        if self.fallen_back and not self.strict:
            return
        peak = None if call is None else self._peak(call, True)
        text = text if peak is None else f"{text} {self._figures(peak)}"
        if self.strict and (peak is None or peak > (self.budget or 0)):
            raise BeyondPlanError(f"Optimized {self.name} is strict, and would have done this: it {text}")
        if not self.fallen_back:
            self.fallen_back = True
            _warn(f"Optimized {self.name} {text}", stacklevel + 1)

    def tell_of_gradients(self, name: str, stacklevel: int) -> None:
        """Warn that a parameter needs a gradient, or none, unlike when it was planned."""
        self.retrained = True
        changed = f"{name} was trained, or frozen, after it was planned; optimize again for a plan"
        self.fall_back(f"keeps what the original does in a part of its forward: {changed}.", stacklevel)

    def note_frozen(self, module: nn.Module) -> None:
        """Know the parameters that need no gradient."""
        named = module.named_parameters() if self.budget is not None else ()
        self._frozen = {name: weakref.ref(parameter) for name, parameter in named if not parameter.requires_grad}

    def check_frozen(self, stacklevel: int, call: Call) -> None:
        """Warn where parameters are trained that were frozen when it was planned, unless the budget holds with them.

        Raises ``BeyondPlanError`` instead where the promise is strict.
        """
        thawed = [name for name, ref in self._frozen.items() if (now := ref()) is not None and now.requires_grad]
        if not thawed:
            return
        self._peaks.clear()
        peak = self._peak(call, False) or self._peak(call, True)  # as segments of what was frozen run as they do there
        if peak is None or self.budget is None or peak > self.budget:
            self.retrained = True
            text = f"trains {thawed[0]}, which was frozen when it was planned; optimize again for a plan."
            self.fall_back(text if peak is None else f"{text} {self._figures(peak, '')}", stacklevel)
        self._frozen = {name: ref for name, ref in self._frozen.items() if name not in thawed}

    def check(self, sizes: Mapping[str, int], stacklevel: int, call: Call) -> None:
        """Warn where inputs are so much larger than was planned for that the budget may not hold.

        Raises ``BeyondPlanError`` instead where the promise is strict.
        """
        if self._exceeded or any(all(size <= known[n] for n, size in sizes.items()) for known in self._within):
            return
        peak = self._peak(call, False)
        if peak is not None and self.budget is not None and peak <= self.budget:
            self._within.append(dict(sizes))
            return
        planned = self._within[0]
        larger = next(f"{size}, planned for {planned[n]}" for n, size in sizes.items() if size > planned[n])
        told = "Its peak may be above the budget." if peak is None else self._figures(peak)
        text = f"Optimized {self.name} takes inputs of size {larger}. {told} Plan for the largest."
        if self.strict:
            raise BeyondPlanError(text)
        self._exceeded = True
        warnings.warn(text, BeyondPlanWarning, stacklevel=stacklevel)

    def tell_of_output(self, shape: tuple[int, ...], size: int, stacklevel: int) -> None:
        """Warn that an output of so many bytes is made, as it is read: peaks are told without it.

        Raises ``BeyondPlanError`` instead where the promise is strict. Where the step that is planned reads outputs,
        peaks are told with them, and nothing is to be said.
        """
        if (read := getattr(_PLANNING, "read", None)) is not None:
            read.append(shape)
            return
        if self.told:
            return
        text = f"an output {shape} as it was read: {_short(size)} that its peak was told without"
        if self.strict:
            raise BeyondPlanError(f"Optimized {self.name} is strict, and would have made {text}.")
        self.told = True
        text = f"Optimized {self.name} made {text}. Where each step reads it, optimize with returns='all'."
        warnings.warn(text, LazyOutputWarning, stacklevel=stacklevel)

    def _peak(self, call: Call, original: bool) -> int | None:
        if self.foresee is None or self.budget is None:
            return None
        key = (original, *(_key(leaf) for leaf in tree_leaves(call[1:])))
        if key not in self._peaks:
            self._peaks[key] = self.foresee(call, original)
        return self._peaks[key]

    def _figures(self, peak: int, inputs: str = " on them") -> str:
        return f"A step{inputs} takes {_short(peak)}, and the budget is {_short(self.budget or 0)}."


def _warn(text: str, stacklevel: int) -> None:
    warnings.warn(text, FallbackWarning, stacklevel=stacklevel)


vars(_warn)["_dynamo_marked_constant"] = True  # runs while Dynamo traces, which cannot trace a warning
_PLANNING = threading.local()


@contextmanager
def reads_planned() -> Iterator[list[tuple[int, ...]]]:
    """Note the shapes of outputs that this thread reads: those that the step which is being planned reads."""
    before, _PLANNING.read = getattr(_PLANNING, "read", None), []
    try:
        yield _PLANNING.read
    finally:
        _PLANNING.read = before


def _key(leaf: Any) -> Any:
    """What peaks depend on of an input."""
    return (leaf.dtype, leaf.shape) if isinstance(leaf, Tensor) else repr(leaf)


def _short(size: int) -> str:
    unit, scale = next(((unit, scale) for unit, scale in _UNITS if size >= scale), ("kB", 1e3))
    return f"{size / scale:.2f} {unit}"


_UNITS = (("GB", 1e9), ("MB", 1e6))
