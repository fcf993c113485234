"""Counts the bytes of tensor storages from birth to death, on real tensors and on fake ones alike."""

import contextlib
import itertools
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
import torch.distributed
from torch import Tensor

from memrewrite.runtime.lazy_output import made_when_used
from memrewrite.simulate.memory.counted import INNER, Birth, Counted, Life, Log, Ran, Stand, by_cublas
from memrewrite.simulate.memory.places import Places
from memrewrite.targets.allocator import Allocator, Block, rounded
from memrewrite.targets.eager import EAGER, Target
from memrewrite.targets.transients import NOTHING, Taken, Transients
from memrewrite.torch_internals.autograd_nodes import backward_number
from memrewrite.torch_internals.dispatch_modes import Layer
from memrewrite.torch_internals.fake_tensors import FakeTensor, NoDataError
from memrewrite.torch_internals.gradient_sums import SUM, in_place, of_one_alone
from memrewrite.torch_internals.pytrees import tree_iter
from memrewrite.torch_internals.spread import parts_of, wraps_local

OPERATOR_WORKSPACE = "operator workspace"
COMMUNICATION, GATHERED = "communication buffers", "gathered parameters"
_DEVICE = torch.ops.prim.device.default  # what half of all calls are: optimizers ask each tensor for its device
_COLLECTIVES = {"c10d", "fsdp", "_c10d_functional"}  # the libraries of operators that communicate


class Tracker(Layer):
    """While it is active, every storage an operator makes on ``device_type`` is counted until it is freed.

    ``current`` and ``peak`` are bytes; ``events`` lists (bytes in use, label) after each operator that made a storage,
    ``modules`` the submodule of each. No tensor is kept alive. Storages from before count once they are given to
    ``register``. What an operator takes while it runs counts towards the peak as far as ``transients`` knows it. With
    ``places``, storages know the submodule that made them. What a tensor counts as is up to the ``target``. With
    ``blocks`` a storage counts as the block that this allocator would hand out for it.
    """

    promises = True  # whether what cannot be counted on fake tensors, as sparse gradients, is an error

    def __init__(
        self,
        device_type: str,
        transients: Transients | None = None,
        places: Places | None = None,
        target: Target = EAGER,
        blocks: Allocator | None = None,
    ) -> None:
        super().__init__()
        self.target = target
        self._together = True  # whether operators may communicate, and tensors be spread over a mesh
        self.blocks = blocks
        self.device_type = device_type
        self.current = 0
        self.peak = 0
        self.events: list[tuple[int, str]] = []
        self.modules: list[str | None] = []
        self.peak_event = 0  # the number of the event at which the peak was reached
        self.multiplied = False  # whether cuBLAS has had anything to do
        self.places = places
        self._place: str | None = None
        self._func: Any = None
        self._label = ""
        self._labels: dict[Any, str] = {}
        self._category = ""
        self._clock = 0
        self._away = False
        self.on_host = False  # whether what is made now lies where the step does not run, and takes nothing
        self._transients = transients
        self._peak_clock = 0
        self._peak_extra = 0
        self._live: dict[int, Counted] = {}
        self._blocks: list[Counted] = []
        self.libraries: list[int] = []  # bytes that cuBLAS asks for, for good, at its next product
        self._alone = of_one_alone(device_type)
        self._device: Any = torch.cuda if device_type == "cuda" else torch.cpu
        self._streams: dict[Any, int] = {}
        self.log: Log | None = None  # of what happens, while it is kept
        self.course: list[Any] | None = None  # the same of a pass; None in it stands for what is more than that
        self._ready: dict[int, deque[Block]] = {}  # what the allocator handed out for the operator that runs, by bytes

    def __enter__(self) -> Self:
        self._together = torch.distributed.is_available() and torch.distributed.is_initialized()
        self._look_at_stream()
        return super().__enter__()

    def register(self, tensors: Iterable[Tensor], category: str, module: str | None = None) -> None:
        """Count the storages of ``tensors`` as ``category``, also those that were counted as something else.

        ``module`` is the path of the submodule they belong to, None where that is not known better than before.
        """
        for part in (part for tensor in tensors for part in parts_of(tensor)):
            block = self._see(part)
            if block is not None:
                block.category = category
                block.module = block.module if module is None else module

    def moved_out(self, tensors: Iterable[Tensor]) -> None:
        """Count the storages of ``tensors``, whatever they were counted as, as nothing from here on."""
        for part in (part for tensor in tensors for part in parts_of(tensor)):
            block = self._see(part)
            if block is not None and block.size:
                self._died(block)
                self._born(part.untyped_storage(), block.nbytes, block.category, 0)

    def exchange(self, tensors: Iterable[Tensor], sizes: Iterable[int]) -> None:
        """Give back the blocks of ``tensors``, then ask for others, of ``sizes`` bytes, as the next batch does."""
        sized = {id(tensor.untyped_storage()): size for tensor, size in zip(tensors, sizes, strict=True)}
        moved = [(self._live[key], size) for key, size in sized.items() if key in self._live]
        if self.blocks is None:
            return
        for block, _ in moved:
            if block.given is not None:
                self.blocks.release(block.given)
        for block, size in moved:
            block.given = self.blocks.allocate(size) if size else None

    def counts(self, tensor: Tensor) -> bool:
        """Whether the storage of ``tensor`` is counted now."""
        return self.counted(tensor) is not None

    def counted(self, tensor: Tensor | Stand) -> Counted | None:
        """The storage of ``tensor``, or what stands for it, where it is counted now."""
        return self._live.get(id(tensor if isinstance(tensor, Stand) else tensor.untyped_storage()))

    @property
    def table(self) -> object:
        """By what it is known what operators take."""
        return None if self._transients is None else self._transients.table

    def begin(self, label: str, category: str) -> None:
        """From here on, storages are born as ``category`` and events are labelled ``label: operator``."""
        self._label, self._category, self._labels = label, category, {}

    def mark(self, label: str) -> None:
        """Add an event between operators."""
        self.events.append((self.current, label))
        self.modules.append(None)

    def reset_peak(self) -> None:
        """Forget the peak so far: ``peak`` and ``categories`` speak of what follows."""
        self._clock += 1  # what died until now is in use at no moment that follows
        self._set_peak(0)

    def categories(self) -> dict[str, int]:
        """Bytes in use at the peak by category; they sum to ``peak``."""
        totals = {OPERATOR_WORKSPACE: self._peak_extra} if self._peak_extra else {}
        for block in self._blocks:
            if block.size and block.born <= self._peak_clock <= block.died:
                totals[block.category] = totals.get(block.category, 0) + block.size
        return totals

    def lives(self) -> tuple[Life, ...]:
        """Every storage that was counted, in the order of their births."""
        return tuple(
            Life(
                block.events[0],
                len(self.events) if block.events[1] is None else block.events[1],
                block.size,
                block.category,
                block.module,
                block.label if block.func is None else f"{block.label}: {block.func}",
            )
            for block in self._blocks
        )

    def living(self) -> dict[str, int]:
        """Bytes in use now by category."""
        totals: dict[str, int] = {}
        for block in list(self._live.values()):
            totals[block.category] = totals.get(block.category, 0) + block.size
        return totals

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE and type(args[0]) is FakeTensor:
            return args[0].device
        if any(map(made_when_used, types)) or (self._together and any(map(wraps_local, types))):
            return NotImplemented  # its own rules come first, and lead here again with local parts
        if self._away:
            return self.below(func, types, args, kwargs or {})
        clock = self._clock
        if self.places is not None:
            self._place = self.places.now()
        result = self.below(func, types, args, kwargs or {})
        self._runs(func)
        made = len(self._blocks)
        first = self._added_to(args) if func is SUM else None
        if first is not None:
            self._hand_on(first)
        if self._together and getattr(func, "namespace", "") in _COLLECTIVES:
            self._communicated(func, args, kwargs or {}, result)
        if size := self.target.read_as(func, args, result):
            self._see(result, size)
        known = None if first is not None or self.on_host else self._transients  # in place, a sum asks for nothing
        taken = NOTHING if known is None else known.lookup(func, args, dict(kwargs or {}))
        place = self._place
        self._ran(clock, func, self._made(result, taken))
        self._note(func, made, taken, first, place)
        return result

    def repeat(self, func: Any, made: list[Birth], taken: Taken, added: Any, place: str | None = None) -> None:
        """Count what an operator did once more: the storages that it ``made``, where ``added`` is one's or None."""
        self._place = place
        clock = self._clock
        self._runs(func)
        first, count = None if added is None else self._live[id(added)], len(self._blocks)
        if first is not None:
            self._hand_on(first)
        self._ran(clock, func, self._made(made, taken))
        self._note(func, count, taken, first, place)

    def _note(self, func: Any, count: int, taken: Taken, first: Counted | None, place: str | None) -> None:
        """Where a log is kept, an operator that ran since there were ``count`` storages."""
        if self.log is not None or self.course is not None:
            ran = Ran(func, tuple(self._blocks[count:]), taken, first, place)
            for log in (self.log, self.course):
                if log is not None:
                    log.append(ran)

    def _runs(self, func: Any) -> None:
        """An operator runs, and may be the one for which cuBLAS asks for memory."""
        self._look_at_stream()
        self._func = func
        if (self.libraries or not self.multiplied) and by_cublas(func):
            self.multiplied = True
            if self.blocks is not None:
                self.blocks.follow(self.libraries)
            self.libraries = []

    def _ran(self, clock: int, func: Any, extra: int) -> None:
        """It took ``extra`` bytes beside what it made, since what was then the ``clock``."""
        if self.current + extra > self.peak:
            self._clock += 1  # a moment of its own: storages may have died since the last birth
            self._set_peak(extra)
        if self._clock != clock:
            label = self._labels.get(func)
            if label is None:
                label = self._labels[func] = f"{self._label}: {func}"
            self.events.append((self.current + extra, label))
            self.modules.append(self._place)
        self._place = self._func = None

    def _added_to(self, args: tuple[Any, ...]) -> Counted | None:
        """The storage to which autograd adds a gradient in place when no mode looks at it, None if it does not."""
        now = backward_number()
        if now is None or not isinstance(args[0], Tensor):  # a segment may add to a number, as torch.add does
            return None
        first = self.counted(args[0])
        from_before = first is not None and first.node != now
        return first if from_before and in_place(args, self._alone) else None

    def _hand_on(self, block: Counted) -> None:
        """A storage ends, and what is made next gets its place."""
        given, block.given = block.given, None
        self._died(block)
        if self.log is not None:
            self.log.pop()  # the sum is noted with it
        if self.course is not None:
            self.course.pop()
        if given is not None:
            self._ready.setdefault(rounded(block.nbytes), deque()).append(given)

    @contextlib.contextmanager
    def looking_away(self) -> Iterator[None]:
        """Count nothing of what operators make meanwhile."""
        self._away = True
        try:
            yield
        finally:
            self._away = False

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count a storage anew that was resized past the dispatcher."""
        known = self._live.get(id(storage))
        if known is not None and known.nbytes != storage.nbytes():
            self._look_at_stream()
            self._died(known)
            self._born(storage, storage.nbytes(), known.category)

    def _look_at_stream(self) -> None:
        """Let the allocator be asked by the stream that work is given to now; units of FSDP2 have several."""
        if self._together and self.blocks is not None:
            here = self._device.current_stream()
            self.blocks.stream = self._streams.setdefault(here, len(self._streams))

    def _communicated(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Name what a collective, or an operator of FSDP's beside one, is given and was born in this phase.

        What it gives is named where the parts of all processes lie in it one after another, to be put together.
        """
        name = func.__name__.partition(".")[0]
        if name == "wait_tensor":  # which is given what a collective gave
            return
        whole = "out" in kwargs and name.startswith("split_with_sizes_copy")  # what was gathered, by parameter
        for tensor in tree_iter((args, kwargs)):
            block = self.counted(tensor) if isinstance(tensor, Tensor) else None
            if block is not None and block.category == self._category:
                block.category = COMMUNICATION
        if name == "all_gather_into_tensor" and isinstance(result, Tensor):
            self.register([result], COMMUNICATION)
        for tensor in kwargs["out"] if whole else ():
            self.register([tensor], GATHERED)

    def _set_peak(self, extra: int) -> None:
        self.peak, self._peak_clock, self._peak_extra = self.current + extra, self._clock, extra
        self.peak_event = len(self.events)

    def _made(self, result: Any, taken: Taken) -> int:
        """Count the result of an operator; returns the bytes that it takes besides while it runs.

        Where its requests are known, their blocks are handed out in that order, and the result gets those it keeps.
        """
        if self.blocks is None or self.target.fuses or not taken.course:
            self._see_all(result)
            if self.blocks is None or not taken.bytes:
                return taken.bytes
            block = self.blocks.allocate(taken.bytes)
            size = block.size  # released, it may become one with others
            self.blocks.release(block)
            return size
        kept, highest = self.blocks.follow(taken.course, taken.spare)
        for size, block in kept:
            self._ready.setdefault(rounded(size), deque()).append(block)
        self._see_all(result)
        for block in itertools.chain.from_iterable(self._ready.values()):
            self.blocks.release(block)
        self._ready.clear()
        return max(0, highest - self.blocks.allocated)

    def _see_all(self, result: Any) -> None:
        kind = type(result)
        if kind is FakeTensor and result.layout is torch.strided:  # as most are: it has one storage
            self._see(result)
        elif kind is Birth:
            block = self._born(result.storage, result.nbytes, self._category)
            block.node = INNER if result.inner else block.node
        elif isinstance(result, Tensor):
            if kind is FakeTensor and self.promises:
                raise NoDataError("how much a sparse tensor holds")
            for part in parts_of(result):
                self._see(part)
        elif isinstance(result, list | tuple):
            for item in result:
                self._see_all(item)

    def _see(self, tensor: Tensor, size: int | None = None) -> Counted | None:
        """The block of a tensor's storage, counted now, as ``size`` bytes, if it is new; None on other devices."""
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        known = self._live.get(id(storage))
        if known is not None:
            if known.nbytes == nbytes:
                return known
            self._died(known)  # resized in place: from here on a block of another size
            return self._born(storage, nbytes, known.category)
        device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
        if device.type != self.device_type:
            return None
        return self._born(storage, nbytes, self._category, 0 if self.on_host else size)

    def _born(self, storage: Any, nbytes: int, category: str, size: int | None = None) -> Counted:
        self._clock += 1
        block = Counted(storage, self._died)
        block.key, block.nbytes, block.category = id(storage), nbytes, category
        block.size = rounded(nbytes if size is None else size)
        block.given = None
        if self.blocks is not None and block.size:
            ready = self._ready.get(block.size)
            block.given = ready.popleft() if ready else self.blocks.allocate(block.size)
            block.size = block.given.size
        block.born, block.died = self._clock, math.inf
        block.module, block.label, block.func = self._place, self._label, self._func
        block.node = backward_number()
        block.events = len(self.events), None
        self._live[block.key] = block
        self._blocks.append(block)
        self.current += block.size
        if self.current > self.peak:
            self._set_peak(0)
        return block

    def _died(self, block: Counted) -> None:
        """Called as the storage goes, before its id can be used again; and when a storage changes its size."""
        if self._live.get(block.key) is block:
            if self.log is not None:
                self.log.append(block)
            if self.course is not None:
                self.course.append(block if block() is None else None)  # it has another size
            del self._live[block.key]
            block.died = self._clock
            block.events = block.events[0], len(self.events)
            self.current -= block.size
            if self.blocks is not None and block.given is not None:
                self.blocks.release(block.given)
