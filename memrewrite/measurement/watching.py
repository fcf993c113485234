"""``watch``: whether a running loop keeps the promise of the plan, and if not, what of the loop broke it, by name."""

import contextlib
import gc
import warnings
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from memrewrite.measurement.passes import Waiting
from memrewrite.records.attached import report_of
from memrewrite.records.loop import Loop
from memrewrite.records.options import format_bytes
from memrewrite.records.report import Report
from memrewrite.runtime.dropin import accept, fallen_back, own, programs
from memrewrite.runtime.lazy_output import made_when_used
from memrewrite.simulate import AVERAGE, INPUTS, STATE
from memrewrite.simulate.memory.tracker import Tracker
from memrewrite.targets.allocator import rounded
from memrewrite.torch_internals.fake_tensors import FakeTensor
from memrewrite.torch_internals.pytrees import tensors_in
from memrewrite.torch_internals.spread import parts_of
from memrewrite.workload.in_backward import gradient_of

_TOLD = 0.05  # of what is over the promise: what explains less of it is not named
_UNSEEN = (
    "nothing that can be seen from here explains it, as a loss does that was not given as loss_fn: memrewrite.measure "
    "the model"
)
_NO_CALL = (
    "No call of {} was watched: the loop calls another module, as a copy of it, or its forward itself, "
    "as sentence-transformers does (module.forward(x)), which calls no hooks."
)
_NO_STEP = "Only calls of {} for evaluation were watched, and its plan is for training steps."
_SEEN_ON_CPU = " On the CPU this is known of tensors made while it was watched, of the model, its inputs and optimizer."


class OverBudgetWarning(UserWarning):
    """A step of a watched loop took more memory than was promised."""


@dataclass
class _Facts:
    """What was seen of the last pass: bytes, but for why the original forward ran ("" if it did not).

    ``waiting`` is how many passes before it had no backward yet.
    """

    gradients: int = 0
    inputs: int = 0
    output: int = 0
    fallback: str = ""
    waiting: int = 0
    like_inputs: set[tuple[torch.Size, torch.dtype]] = field(default_factory=set)
    known: set[int] = field(default_factory=set)  # addresses of inputs and outputs


class Watch:
    """Watches the loop that runs while it is entered; ``told`` is what it had to say, "" as long as nothing.

    The promise is the budget, or without one the peak that the report has. The first step is left out: in it the
    optimizer makes its state. On CUDA the counter of the caching allocator's peak is reset as the second one begins.
    """

    def __init__(self, optimized: nn.Module) -> None:
        report = report_of(optimized)
        self.told = ""
        self._module = optimized
        self._report: Report = report
        self._loop = Loop.parse(report.config["loop"])
        self._limit = report.budget or (report.measured_after or report.predicted_after).peak
        place = next(optimized.parameters(), torch.empty(0, device="cpu")).device
        self._device = place
        self._tracker = None if place.type == "cuda" else Tracker(place.type)
        self._passes = 0
        self._evaluates = False  # since the last pass
        self._facts = _Facts()
        self._outputs: list[weakref.ref[torch.UntypedStorage]] = []
        self._handles: list[Any] = []
        self._waiting: Waiting | None = None
        self._fallen = fallen_back(optimized)  # already before

    def __enter__(self) -> Self:
        # Functions, not methods: a copy of the model that somebody makes copies its hooks, but not what functions hold.
        def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not _foreseen(args, kwargs):
                self._begin(args, kwargs)

        def end(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if _foreseen(args, kwargs) or self._evaluates:
                return
            known = self._facts.known | {_address(t) for t in (*module.parameters(), *module.buffers())}
            held = (part for tensor in tensors_in(output) for part in parts_of(tensor))
            made = (t for t in held if self._here(t) and _address(t) not in known)
            self._outputs = [weakref.ref(t.untyped_storage()) for t in made]

        waiting = self._waiting = Waiting(self._module)

        def accumulated(parameter: Tensor) -> None:
            self._facts.output = self._bytes_of_outputs()
            waiting.begin()

        self._handles = [
            waiting,
            self._module.register_forward_pre_hook(begin, prepend=True, with_kwargs=True),
            self._module.register_forward_hook(end, with_kwargs=True),
            *(p.register_post_accumulate_grad_hook(accumulated) for p in self._module.parameters() if p.requires_grad),
        ]
        if self._tracker is not None:
            state = _states(self._module)
            gradients = _gradients(self._module)
            self._tracker.register([*self._module.parameters(), *self._module.buffers(), *gradients, *state], "model")
            self._tracker.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._tracker is not None:
            self._tracker.__exit__(kind, error, trace)
        for handle in self._handles:
            handle.remove()
        if error is None and not self._passes:
            self.told = (_NO_STEP if self._evaluates else _NO_CALL).format(type(self._module).__name__)
            warnings.warn(self.told, UserWarning, stacklevel=2)
        elif error is None:
            self._look(self._passes)

    def _begin(self, args: Any, kwargs: Any) -> None:
        """A forward pass begins: judge what was before it, then see what is there."""
        self._look(self._passes)
        evaluated, trains = self._evaluates, self._module.training and torch.is_grad_enabled()
        self._evaluates = self._report.mode == "train" and not trains
        if self._evaluates:
            return
        self._passes += 1
        inputs = [t for t in tensors_in((args, kwargs)) if self._here(t)]
        if self._tracker is not None:
            self._tracker.register(inputs, INPUTS)
            self._tracker.reset_peak()
        elif evaluated or self._passes == self._report.config["micro_batches"] + 1:
            torch.cuda.reset_peak_memory_stats(self._device)
        gradients = _gradients(self._module)
        self._facts = _Facts(
            gradients=_bytes(gradients),
            inputs=_bytes(inputs),
            output=self._bytes_of_outputs(),
            fallback=self._fallback(args, kwargs),
            waiting=len(self._waiting or ()),
            like_inputs={(t.shape, t.dtype) for t in inputs},
            known={_address(t) for t in inputs},
        )

    def _look(self, passes: int) -> None:
        """Tell, once, if the passes since the first step took more than was promised."""
        if self.told or self._evaluates or passes <= self._report.config["micro_batches"]:
            return
        peak = torch.cuda.max_memory_allocated(self._device) if self._tracker is None else self._tracker.peak
        if peak <= self._limit:
            return
        over = peak - self._limit
        causes = [words for size, words in sorted(self._causes(), reverse=True) if size > _TOLD * over]
        found = "; ".join(causes) or _UNSEEN
        self.told = (
            f"A step took {format_bytes(peak)}, {format_bytes(over)} more than the {format_bytes(self._limit)} that "
            f"were promised: {found}.{'' if self._tracker is None else _SEEN_ON_CPU}"
        )
        warnings.warn(self.told, OverBudgetWarning, stacklevel=4)

    def _causes(self) -> Iterator[tuple[int, str]]:
        """What the loop does otherwise than was promised, with its bytes."""
        facts, config = self._facts, self._report.config
        if facts.fallback:
            yield self._limit, f"the original forward ran, because {facts.fallback}"
        if facts.waiting:
            times = f"forward ran {facts.waiting + 1} times before backward, and what each time keeps adds up"
            yield self._limit, f"{times}: optimize a model that has all of them in its forward"
        for path in fallen_back(self._module):
            if path and path not in self._fallen:
                yield self._limit, f"the original forward of {path} ran, of which a warning has said why"
        if any(kept is not None and kept.promise.retrained for kept in map(own, self._module.modules())):
            yield self._limit, "parameters were trained, or frozen, after the plan was made: optimize again for a plan"
        if not self._loop.keeps_output and facts.output:
            size = format_bytes(facts.output)
            yield (
                facts.output,
                f"the output is alive in backward or the next forward ({size}) though it was to be dropped",
            )
        if self._loop.zero_grad == "after step" and config["micro_batches"] == 1 and facts.gradients:
            size, how = format_bytes(facts.gradients), "free them after the step, or say zero-before-backward"
            yield facts.gradients, f"gradients are alive while forward runs ({size}): {how}"
        if (more := facts.inputs - config["input_bytes"]) > 0:
            yield self._limit, f"the batch is larger: its inputs take {format_bytes(more)} more"
        yield from self._beside()

    def _beside(self) -> Iterator[tuple[int, str]]:
        """Other tensors on the device than were promised, as far as Python holds them."""
        categories = self._report.predicted_after.categories
        state = _states(self._module)
        if (more := _bytes(state) - categories.get(STATE, 0)) > 0:
            yield more, f"the optimizer holds {format_bytes(more)} more state than the one that was named"
        model = [*self._module.parameters(), *self._module.buffers()]
        model += _gradients(self._module)
        known = {_address(t) for t in (*model, *state)} | self._facts.known
        known |= {storage.data_ptr() for ref in self._outputs if (storage := ref()) is not None}
        found = {_address(t): t for t in _all_tensors() if self._counts(t) and _address(t) not in known}
        batches = [t for t in found.values() if (t.shape, t.dtype) in self._facts.like_inputs]
        others = [t for t in found.values() if (t.shape, t.dtype) not in self._facts.like_inputs]
        allowed = categories.get(INPUTS, 0) - self._facts.inputs + categories.get(AVERAGE, 0)
        if batches and not self._loop.ahead and not self._facts.waiting:  # whose batches are there
            yield _bytes(batches), f"another batch is on the device ({format_bytes(_bytes(batches))}): say prefetch"
        if others and (more := _bytes(others) - max(allowed, 0)) > 0:
            largest = max(others, key=lambda t: t.nbytes)
            yield (
                more,
                (
                    f"other tensors are beside the model ({format_bytes(more)}), the largest of them {largest.dtype} "
                    f"{tuple(largest.shape)}"
                ),
            )

    def _fallback(self, args: Any, kwargs: Any) -> str:
        """Why the rewritten forward does not run for this call; "" if it does, or only parts are rewritten."""
        program = programs(self._module).get("")
        if program is None:
            return ""
        wrapped = "forward" in vars(self._module)  # by accelerate, which enters autocast there
        kind = program.autocast if wrapped and isinstance(program.autocast, torch.dtype) else None
        with torch.autocast(self._device.type, kind) if kind else contextlib.nullcontext():
            return accept(program, self._module, args, kwargs)[1]

    def _bytes_of_outputs(self) -> int:
        alive = [storage for ref in self._outputs if (storage := ref()) is not None]
        return sum(rounded(storage.nbytes()) for storage in alive)

    def _here(self, tensor: Tensor) -> bool:
        return tensor.device == self._device and tensor.layout is torch.strided

    def _counts(self, tensor: Tensor) -> bool:
        """Whether the tensor is among those that the peak is of."""
        return self._here(tensor) and (self._tracker is None or self._tracker.counts(tensor))


def watch(optimized: nn.Module) -> Watch:
    """A context in which a training loop of what ``memrewrite.optimize`` returned is watched.

        with memrewrite.watch(optimized):
            for x, y in batches: ...

    Where a step takes more than the budget (or, without one, than the report's peak) it warns once, by an
    ``OverBudgetWarning`` that names what the loop does otherwise than was promised: the output alive in backward,
    gradients alive while forward runs, another batch on the device, other tensors beside the model, a larger batch, an
    optimizer with more state, or that the original forward ran. A loop in which no call was seen is warned of, too.
    From a call for evaluation (in eval mode, or without gradients) to the next one that trains nothing is judged.
    On CUDA the allocator's own counters are read. On the CPU each operator is followed, which takes time, and tensors
    that were made before the context and are none of the model's, its optimizer's or its inputs are not seen. Hooks on
    ``optimized`` are removed as the context ends.
    Raises ``UsageError`` for any other module.
    """
    return Watch(optimized)


def _foreseen(args: Any, kwargs: Any) -> bool:
    """Whether a pass is none of the loop's: the drop-in foresees by it what a larger batch takes."""
    return any(isinstance(tensor, FakeTensor) for tensor in tensors_in((args, kwargs)))


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _gradients(module: nn.Module) -> list[Tensor]:
    """Those that are there."""
    return [gradient for p in module.parameters() if (gradient := gradient_of(p)) is not None]


def _states(module: nn.Module) -> list[Tensor]:
    """What optimizers hold for its parameters."""
    return [t for optimizer in _optimizers(module) for t in tensors_in(list(optimizer.state.values()))]


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages of ``tensors``, each once, in granules."""
    storages = {_address(t): t.untyped_storage().nbytes() for t in tensors if t.layout is torch.strided}
    return sum(map(rounded, storages.values()))


def _all_tensors() -> list[Tensor]:
    """Every tensor that Python holds; asked by type, because some objects answer isinstance by importing things."""
    found = [each for each in gc.get_objects() if issubclass(type(each), Tensor) and not made_when_used(type(each))]
    return [t for t in found if not isinstance(t, FakeTensor) and t.layout is torch.strided and _has_storage(t)]


def _has_storage(tensor: Tensor) -> bool:
    """Whether it has bytes somewhere; what ``torch.func`` hands to a function, say, has none and may live on."""
    try:
        return not tensor.is_meta and tensor.untyped_storage().device == tensor.device
    except (NotImplementedError, RuntimeError):  # of a subclass or a wrapper without any
        return False


def _optimizers(module: nn.Module) -> list[torch.optim.Optimizer]:
    """The optimizers, wherever they are, that step a parameter of ``module``."""
    ours = {id(parameter) for parameter in module.parameters()}
    found = [each for each in gc.get_objects() if issubclass(type(each), torch.optim.Optimizer)]
    groups = [(each, getattr(each, "param_groups", ())) for each in found]  # none where its own constructor refused
    return [each for each, given in groups if any(id(p) in ours for group in given for p in group["params"])]
