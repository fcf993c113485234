"""What operators take on the device while they run, beyond their results: convolution workspaces, buffers of split
reductions, accumulators of attention backward.

Fake tensors do not show it and it depends on the device and on library versions, so each operator but views is run per
signature on the device, on tensors of ones and zeros, and the allocator's peak is read, and in which order it was asked
for what: which segments the allocator reserves depends on that. Libraries set themselves up in the first run of an
operator, and some in the first of each signature: that is not what it takes. cuDNN plans a convolution in each thread
anew, which may take a second: operators of backward run where autograd runs them, so that a step need not plan them
again. They run at their full size; what PyTorch reserved for that is given back. What sets libraries up may run once
before, beside what else planning does (``setting_up``).
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from memrewrite.records.tensor_like import TensorLike
from memrewrite.targets.kernels_ahead import CHAINED, Ahead
from memrewrite.targets.normalizing import compiling
from memrewrite.targets.set_up import SettingUp
from memrewrite.torch_internals.allocations import Course, History, recorded_allocations
from memrewrite.torch_internals.fake_tensors import FakeTensor
from memrewrite.torch_internals.operators import OpOverload, argument_names, returns_view

T = TypeVar("T")
Call = tuple[OpOverload, tuple[Any, ...], dict[str, Any]]


@dataclass
class Taken:
    """What a call takes while it runs: at most ``bytes`` beyond its results, by the requests in ``course``.

    Those that it does not give back are its results. An empty course says that it is not known. ``spare`` says that the
    call goes without the others where there is no room for them. As long as nothing is measured, it is ``Unmeasured``.
    """

    bytes: int = 0
    course: Course = ()
    spare: bool = False


class Unmeasured(Taken):
    """Nothing, until it is measured: then what whoever holds this has to count is in it."""

    def fill(self, found: Taken) -> None:
        """It is this."""
        self.bytes, self.course, self.spare = found.bytes, found.course, found.spare


# In the names of operators for which cuDNN tries one algorithm after another, until it gets the workspace that one asks
# for (``try_plans`` in ``aten/src/ATen/native/cudnn/Conv_v8.cpp``).
_CHOOSES = "convolution"
_WITHOUT_BATCH = {"convolution": 1, "convolution_backward": 2}  # by operator, which argument begins with no batch
_IN_BACKWARD = "backward"  # in the names of operators of which autograd's backward consists
_BY_BATCH = (_CHOOSES, "attention")
_SETS_UP = (*_BY_BATCH, "rnn", "lstm", "gru")  # libraries that make a plan for each signature
Measure = Callable[[Sequence[Call]], Sequence[Taken]]
SetUp = Callable[[Sequence[Call]], SettingUp]
NOTHING = Taken()


class Transients:
    """What calls take, by operator and signature. What ``lookup`` does not know it remembers for ``probe``."""

    def __init__(self, measure: Measure, set_up: SetUp | None = None) -> None:
        self._measure, self._set_up = measure, set_up
        self._known: dict[Any, Taken] = {}
        self._unknown: dict[Any, Unmeasured] = {}
        self._in_words: dict[Any, Taken] = {}  # of what is known, by what takes less time to make and to compare
        self._by_batch: dict[Any, dict[int, Taken]] | None = None  # of dear calls, while larger ones stand for smaller
        self._own = object()  # which no later one is taken for, as by its ``id``

    @property
    def table(self) -> object:
        """What is the same for all that say of calls that they take the same."""
        return self._own

    @property
    def empty(self) -> bool:
        """Whether nothing was measured yet."""
        return not self._known

    def lookup(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Taken:
        """What this call takes, which is ``Unmeasured`` as long as that is not known."""
        if not isinstance(func, OpOverload) or not _may_take(func):
            return NOTHING
        words: list[Any] = [func]
        _say(args, words)
        _say(kwargs.items(), words)
        asked = tuple(words)
        try:
            if (found := self._in_words.get(asked)) is not None:
                return found
            call = (func, like(args), like(tuple(kwargs.items())))
            known = self._known.get(call)
        except TypeError:  # an argument that cannot be part of a signature
            return NOTHING
        if known is None:
            return self._of_larger(call) or self._unknown.setdefault(call, Unmeasured())
        self._in_words[asked] = known
        return known

    @property
    def _asked(self) -> list[Call]:
        return [(func, args, dict(kwargs)) for func, args, kwargs in self._unknown]

    @property
    def sets_up(self) -> bool:
        """Whether libraries may have to set themselves up for what is measured first."""
        return self._set_up is not None and self.empty

    def setting_up(self) -> SettingUp:
        """Begin to set libraries up for what ``lookup`` did not know; to be waited for before ``probe``."""
        return SettingUp() if self._set_up is None else self._set_up(self._asked)

    def probe(self) -> bool:
        """Measure what ``lookup`` was asked and did not know; returns whether any of it makes a difference."""
        calls = self._asked
        measured = self._measure(calls) if calls else []
        for held, found in zip(self._unknown.values(), measured, strict=True):
            held.fill(found)
        self._known.update(self._unknown)
        self._unknown.clear()
        return any(taken.bytes or len(taken.course) > 1 for taken in measured)

    @contextmanager
    def smaller_batches(self) -> Iterator[None]:
        """Within, what is planned or compiled for each batch takes what it does of the next larger one that is known.

        That is convolutions and attention, by cuDNN, and chains: to see what they really take may take a second each.
        In which order they ask for it is left out, as they ask for results, too, which are smaller.
        """
        self._by_batch = defaultdict(dict)
        for call, taken in self._known.items():
            key, batch = _and_batch(call)
            self._by_batch[key][batch] = Taken(taken.bytes)
        try:
            yield
        finally:
            self._by_batch = None

    def _of_larger(self, call: Any) -> Taken | None:
        if self._by_batch is None:
            return None
        key, batch = _and_batch(call)
        known = self._by_batch.get(key, {})
        return known.get(min((size for size in known if size > batch), default=-1))


@functools.cache
def transients_on(device: torch.device) -> Transients | None:
    """The table of ``device``, filled as simulations ask; None on devices other than CUDA."""
    if device.type != "cuda":
        return None
    return Transients(functools.partial(_measured, device), functools.partial(_setting_up, device))


@functools.cache
def _may_take(func: OpOverload) -> bool:
    """Whether calls are measured.

    Views take nothing; foreach operators work tensor by tensor and would each be a signature of its own.
    """
    by_tensor = func.__name__.startswith("_foreach")
    return func.namespace in ("aten", "memrewrite") and not by_tensor and not returns_view(func)


def _say(values: Iterable[Any], words: list[Any]) -> None:
    """Add what ``like`` tells of arguments, as plain values one after the other."""
    for value in values:
        if isinstance(value, Tensor):
            device = value.fake_device if isinstance(value, FakeTensor) else value.device
            words += (Tensor, value.shape, value.stride(), value.dtype, device)
        elif isinstance(value, list | tuple):
            words += (tuple, len(value))
            _say(value, words)
        else:
            words.append(value)


def like(value: Any) -> Any:
    """An argument with every tensor in it as a signature, lists as tuples."""
    if isinstance(value, Tensor):
        return TensorLike.of(value, value.fake_device if isinstance(value, FakeTensor) else None)
    return tuple(like(item) for item in value) if isinstance(value, list | tuple) else value


def _and_batch(call: Any) -> tuple[Any, int]:
    """What is planned or compiled for each batch is besides the size of that, and this; other calls have none."""
    func, args, kwargs = call
    name = func.overloadpacket.__name__
    if func not in CHAINED and not any(each in name for each in _BY_BATCH):
        return call, 0
    batches = []

    def rest(value: Any) -> Any:
        if isinstance(value, TensorLike) and len(value.shape) > 1:
            batches.append(value.shape[0])
            return value.shape[1:], value.stride, value.dtype
        return tuple(map(rest, value)) if isinstance(value, tuple) else value

    of_any = tuple(value if place == _WITHOUT_BATCH.get(name) else rest(value) for place, value in enumerate(args))
    return (func, of_any, kwargs), max(batches, default=0)


def made(value: Any) -> Any:
    """An argument again, of what ``like`` made of it; tuples come as lists.

    Of tensors all is one, and of integers zero, which is in range wherever they index something.
    """
    if isinstance(value, TensorLike):
        return value.filled(1 if value.dtype.is_floating_point else 0)
    return [made(item) for item in value] if isinstance(value, tuple) else value


def _measured(device: torch.device, calls: Sequence[Call]) -> list[Taken]:
    """Run each operator twice, where libraries may set themselves up in the first run, and look at the last."""
    ahead = Ahead([(args[0], args[1:]) if func in CHAINED else None for func, args, _ in calls])
    with recorded_allocations(device) as history:
        found, met = [], set()
        for place, (func, args, kwargs) in enumerate(calls):
            ahead.settle(place)
            ready = func in met and func.namespace == "aten" and not _sets_up(func)
            met.add(func)
            run = functools.partial(_run, device, history, func, args, kwargs, 1 if ready else 2)
            found.append(_in_backward(device, run) if _IN_BACKWARD in func.__name__ else run())
    torch.cuda.empty_cache()
    return [
        Taken(extra, history.course(first, last), _CHOOSES in func.__name__)
        for (extra, first, last), (func, _, _) in zip(found, calls, strict=True)
    ]


def _setting_up(device: torch.device, calls: Sequence[Call]) -> SettingUp:
    """Run once what sets libraries up, forward and backward side by side; beside them, a kernel of ours is compiled."""
    forward, backward = list[Callable[[], object]](), list[Callable[[], object]]()
    for call in calls:
        if _sets_up(call[0]):
            once = functools.partial(_once, *call)
            if _IN_BACKWARD in call[0].__name__:
                backward.append(functools.partial(_in_backward, device, once))
            else:
                forward.append(once)
    return SettingUp(forward, backward, compiling(calls))


def _sets_up(func: OpOverload) -> bool:
    return func.namespace == "aten" and any(each in func.__name__ for each in _SETS_UP)


def _once(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    args = random_state_on_host(func, args)
    with torch.no_grad():
        func(*[made(arg) for arg in args], **{name: made(value) for name, value in kwargs.items()})


def _run(
    device: torch.device, history: History, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], times: int
) -> tuple[int, int, int]:
    """The bytes that the last of so many calls takes beyond its results, and the moments between which it ran."""
    if not any(isinstance(arg, TensorLike) and arg.device.type == "cuda" for arg in _leaves(args)):
        return 0, 0, 0
    args = random_state_on_host(func, args)
    try:
        with torch.no_grad():
            for _ in range(times):
                given, named = [made(arg) for arg in args], {name: made(value) for name, value in kwargs.items()}
                torch.cuda.reset_peak_memory_stats(device)
                (before, _), first = allocated(device), history.moment()
                result = func(*given, **named)
                (after, highest), last = allocated(device), history.moment()
                extra = highest - max(before, after)
                del given, named, result
    except RuntimeError:
        return 0, 0, 0  # it does not run on such values, or there is no room for it alone: nothing is known
    return extra, first, last


def allocated(device: torch.device) -> tuple[int, int]:
    """The bytes that tensors have now, and had at most.

    What ``torch.cuda.memory_allocated`` and ``max_memory_allocated`` give, which make a table of all that is counted.
    """
    counted = torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]
    return counted["current"], counted["peak"]


def _in_backward(device: torch.device, run: Callable[[], T]) -> T:
    """What ``run`` gives in the thread in which autograd runs backward on the device."""
    found: list[T] = []
    with torch.inference_mode(False), torch.enable_grad():
        start = torch.zeros((), device=device, requires_grad=True)
        _Backward.apply(start, lambda: found.append(run())).backward()  # type: ignore[no-untyped-call]
    return found[0]


class _Backward(torch.autograd.Function):
    """Its backward runs something."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, run: Callable[[], None]) -> Tensor:
        ctx.run = run
        return start.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        ctx.run()
        return None, None


def random_state_on_host(func: OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments as the kernel reads them: fake tensors have the seed and offset of dropout on the device.

    Backward of memory-efficient attention takes them by a host pointer, so that the process would die of others
    (PyTorch, ``attention_backward.cu``, Note [Seed and Offset Device]). Flash attention has its own on the device.
    """
    if "efficient_attention" not in func.__name__:
        return args
    names = argument_names(func)
    return tuple(
        replace(arg, device=torch.device("cpu")) if name.startswith("philox") and isinstance(arg, TensorLike) else arg
        for name, arg in zip(names, args, strict=False)
    )


def _leaves(value: Any) -> list[Any]:
    return [leaf for item in value for leaf in _leaves(item)] if isinstance(value, tuple) else [value]
