"""What a capture would silently lose, found before it: each is refused by name, none is guessed around.

Forward is rehearsed on a fake twin of the model. The functions it calls, the twin's attributes and the random state
afterwards say what happened that no graph of tensor operators can hold; a second run has to do the same as the first.
"""

import itertools
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from memrewrite.capture.at_sight import refuse_hooks, refuse_names, refuse_unnamed
from memrewrite.capture.autocasts import autocast_asked, autocast_now, autocast_regions
from memrewrite.capture.changes import COUNTED, always_matters, refuse_changes, refuse_left
from memrewrite.capture.gradients import QUESTIONS, all_or_none, gradients_asked, with_or_without
from memrewrite.capture.identity import OperatorsSeen
from memrewrite.capture.reads import ReadsOfForward
from memrewrite.records.errors import CaptureError
from memrewrite.records.lines import in_checkpoint, is_users, line_now
from memrewrite.runtime.guards import Reads
from memrewrite.runtime.segment import autocast_dtype
from memrewrite.simulate.fake.constant_values import known_values
from memrewrite.simulate.fake.fakes import fake_inputs, fake_twin
from memrewrite.simulate.fake.refusals import failed
from memrewrite.simulate.fake.stand_ins import functions_on_fakes
from memrewrite.state.attributes import Attributes
from memrewrite.state.random_state import RandomState, draws, seed_all
from memrewrite.torch_internals.custom_functions import Forward, forwards_replaced, function_calls, functions_behind
from memrewrite.torch_internals.dispatch_modes import Recall
from memrewrite.torch_internals.fake_tensors import FakeTensorMode
from memrewrite.torch_internals.logs import quiet
from memrewrite.torch_internals.pytrees import tensors_in, tree_flatten, tree_leaves
from memrewrite.torch_internals.tracing import checkpoint_calls, tracing_untold
from memrewrite.workload.step import Inputs, device_type
from memrewrite.workload.surroundings import Surroundings

_TENSOR_HOOKS = ("register_hook", "register_post_accumulate_grad_hook")
_GRADIENTS = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)
_CASTS = (Tensor.to, Tensor.type_as, Tensor.cpu, Tensor.cuda)  # to a type that is told, or that a tensor has
_NOBODYS_SEED = 7_046_029_254_386_353_131
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_LET_TRAIN = (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Findings:
    """What is worth knowing about a model that is safe to capture.

    ``notes`` are sentences for the user; ``export_loses`` is what ``torch.export``'s graph would lack, ``asks`` the
    Python module that asks whether it is being traced, "" if there is none. ``exact`` is False where the model asks
    for values of its inputs, as it may go another way by those it sees; ``checkpoints`` says that it checkpoints,
    ``functions`` are the custom ``autograd.Function`` classes that it applies, ``autocast``, ``reads`` and ``looks``
    are those of ``Captured``; ``gradients`` says whether forward does something else where other tensors need them.
    ``operators`` are the names of those that forward runs on these inputs, ``derives`` is where it differentiates.
    """

    notes: tuple[str, ...] = ()
    export_loses: str = ""
    asks: str = ""
    exact: bool = True
    checkpoints: bool = False
    functions: tuple[type, ...] = ()
    autocast: torch.dtype | Literal["any"] | None = "any"
    reads: Reads = ()
    looks: tuple[str, ...] = ()
    gradients: bool = False
    operators: Sequence[str] = ()
    derives: str = ""


def check(model: nn.Module, inputs: Inputs) -> Findings:
    """Rehearse forward, under autocast as it is. Raises ``CaptureError`` naming the hazard and its place if any."""
    name, device = type(model).__name__, device_type(model, inputs)
    refuse_hooks(model)
    refuse_names(model)
    with (
        quiet(),
        tracing_untold() as asked,
        autocast_asked() as about,
        checkpoint_calls() as checkpoints,
        function_calls() as functions,
        autocast_regions() as regions,
        gradients_asked() as about_gradients,
        functions_on_fakes(),
    ):
        rehearsal = _Rehearsal(model, inputs, regions)
        first = _first(name, rehearsal, functions)
        refuse_changes(name, rehearsal.before, always_matters)
        for what, places in first.places.items():
            raise CaptureError(f"{name} {_REFUSED[what].format(place=places[0])}")
        switched = rehearsal.differs_where_autocast_is_switched(first, device)
        if switched:
            _refuse_difference(name, rehearsal, first)
        else:  # which was the second run, then
            refuse_changes(name, rehearsal.between)
            refuse_left(name, rehearsal.around)
        counted = next(rehearsal.around.counted(), None)
        asks = bool(about_gradients) or first.asks_of_gradients
        gradients = model.training and asks and rehearsal.differs_where_gradients_are_switched(first)
    notes = ["The model's own torch.utils.checkpoint calls are replaced by the plan."] if checkpoints else []
    if rehearsal.functions:
        names = ", ".join(sorted({kind.__name__ for kind in rehearsal.functions}))
        notes.append(f"What stays a call as the model makes it, with its own backward: {names}.")
    notes += [] if counted is None else [COUNTED.format(name=name, place=counted)]
    if place := rehearsal.decided_by_values(first):
        notes.append(_DECIDED.format(name=name, place=place))
    return Findings(
        notes=tuple(notes),
        export_loses=_lost(rehearsal, first, checkpoints),
        asks=asked[0] if asked else "",
        exact=not rehearsal.asked,
        checkpoints=bool(checkpoints),
        functions=rehearsal.functions,
        autocast=autocast_dtype(device) if about or switched else "any",
        reads=first.reads.found,
        looks=first.reads.looks,
        gradients=gradients,
        operators=first.operators,
        derives=first.derives,
    )


def refuse_kept(model: nn.Module, inputs: Inputs, functions: Sequence[type], other: Callable[[Inputs], Inputs]) -> None:
    """Raise ``CaptureError`` where forward keeps something of what it is given, which is ``other`` in the next call."""
    rehearsal = _Rehearsal(model, inputs, [])
    rehearsal.functions = tuple(functions)
    with quiet(), tracing_untold(), functions_on_fakes():
        rehearsal.run()
        rehearsal.run(inputs=other(rehearsal.given))
    refuse_changes(type(model).__name__, rehearsal.between)
    refuse_left(type(model).__name__, rehearsal.around)


def _first(name: str, rehearsal: "_Rehearsal", functions: list[type]) -> "_Watch":
    """The first run, or with custom ``functions`` the first that does not look into them."""
    seed_all(_NOBODYS_SEED, ())  # so that a forward that sets the seed of before is seen to set one
    before = draws()
    first = rehearsal.run()
    functions += functions_behind(first.output)  # applied through a name bound to ``apply`` before
    if functions:
        refuse_unnamed(name, functions)
        rehearsal.functions = tuple(dict.fromkeys(functions))
        seed_all(_NOBODYS_SEED, ())
        first = rehearsal.run()
    if draws() != before:
        raise CaptureError(
            f"{name} draws from Python's or NumPy's random in forward, or seeds a generator there; "
            "one outcome would be baked in. Draw with torch, or outside forward."
        )
    return first


def _lost(rehearsal: "_Rehearsal", first: "_Watch", checkpoints: Collection[str]) -> str:
    """What the graph of ``torch.export`` would lack, "" if nothing."""
    if "apply" in checkpoints:
        return "the gradients of checkpoint(use_reentrant=True)"
    written = next(rehearsal.before.written(), None)
    return f"writes to self.{written}, which is no buffer" if written else first.nested


class _Rehearsal:
    """Runs of forward on one fake twin; ``before`` and ``between`` are its attributes before the first and the last.

    ``around`` is what its code may write to besides, before the last.
    """

    def __init__(self, model: nn.Module, inputs: Inputs, regions: list[bool]) -> None:
        self._regions = regions
        self._name = type(model).__name__
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        with self._explained():
            self._twin, given = fake_twin(model, self._mode), fake_inputs(inputs, self._mode)
            # A leaf that requires a gradient could not be written in place, as an input that was computed can.
            self.given = given.changed(lambda leaf: leaf.clone() if leaf.requires_grad else leaf)
        self._real = inputs.tensors()
        self.asked = False
        self.functions: tuple[type, ...] = ()  # what happens in them is not looked at
        self.before = self.between = Attributes(self._twin)
        self.around = Surroundings((self._twin,))

    def decided_by_values(self, first: "_Watch") -> str:
        """Where forward does something else once it can see the values of its inputs, "" if nowhere."""
        if not self.asked:
            return ""
        try:
            return first.differs(self.run(list(zip(self.given.tensors(), self._real, strict=True))), computing=True)
        except CaptureError:  # no graph can hold what it does then
            return ""

    def differs_where_autocast_is_switched(self, first: "_Watch", device: str) -> bool:
        """Whether forward calls other functions then, or the same for other types; if so, the run leaves no trace."""
        before, enabled = Attributes(self._twin), torch.is_autocast_enabled(device)
        try:
            with torch.autocast(device, torch.bfloat16, enabled=not enabled):
                differs = bool(first.differs(self.run()))
        except CaptureError:  # it does not run then
            differs = True
        if differs:
            before.restore()
        return differs

    def differs_where_gradients_are_switched(self, first: "_Watch") -> bool:
        """Whether forward calls other functions where everything needs a gradient, or nothing."""
        for needed in (True, False):
            try:
                with all_or_none(self._twin, needed):
                    if first.differs(self.run(inputs=with_or_without(self.given, needed))):
                        return True
            except CaptureError:  # it does not run then
                return True
        return False

    def run(self, given: Sequence[tuple[Tensor, Tensor]] = (), inputs: Inputs | None = None) -> "_Watch":
        """Run forward once; ``given`` are fake inputs and the real ones whose values it may see."""
        # Only a training step runs backward, where a checkpoint would write them once more.
        watch = _Watch({id(b) for b in self._twin.buffers()} if self._twin.training else set(), self._regions)
        self.between, self.around = Attributes(self._twin), Surroundings((self._twin,))
        inputs = (inputs or self.given).of_a_run()
        leaves, nesting = tree_flatten((inputs.args, inputs.kwargs))
        reads = ReadsOfForward(self._twin)
        unseen, recall = forwards_replaced(self.functions, watch.unseen), Recall(self._mode)
        with (
            self._explained(),
            self._mode,
            recall,
            known_values(given) as values,
            OperatorsSeen() as operators,
            watch,
            unseen,
            reads.observed(),
        ):
            watch.output = self._twin.forward(*inputs.args, **inputs.kwargs)
        theirs = {id(tensor) for tensor in (*inputs.tensors(), *tensors_in(watch.output))}
        if lines := [line for leaf, line in watch.leaves if id(leaf) in theirs]:  # the caller has it
            watch.places["leaf"] = lines
        watch.reads, watch.operators = reads, operators.names
        self.asked |= values.asked
        now, as_nested = tree_flatten((inputs.args, inputs.kwargs))
        if as_nested != nesting or any(new is not old for new, old in zip(now, leaves, strict=True)):
            raise CaptureError(
                f"{self._name} changes a list or dictionary that it is given, which a captured graph would not; "
                "return what is added to it."
            )
        return watch

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except CaptureError:
            raise
        except Exception as error:
            raise CaptureError(failed(self._name, error)) from error


def _refuse_difference(name: str, rehearsal: _Rehearsal, first: "_Watch") -> None:
    """A second run must do the same as the first and change nothing. What is set up once and then kept is no hazard."""
    try:
        second = rehearsal.run()
    except CaptureError:
        refuse_changes(name, rehearsal.before)  # which is then the reason
        raise
    refuse_changes(name, rehearsal.between)
    refuse_left(name, rehearsal.around)
    if first.differs(second):
        refuse_changes(name, rehearsal.before)
        if place := second.differs(rehearsal.run()):  # what is cached or compiled in the first run is settled by now
            raise CaptureError(
                f"{name} does something else each time forward runs (at {place}); what decides that is "
                "outside its tensors, and one outcome would be baked in."
            )


_DECIDED = (
    "The values of its inputs decide what {name} does (at {place}); the program does what fits any values, which can "
    "take more time and memory. A mask that masks nothing is best left out of the inputs."
)
_REFUSED = {
    "hook": "registers tensor hooks in forward (at {place}); a captured graph loses them.",
    "inference": "enters torch.inference_mode in forward (at {place}), which a graph loses; use torch.no_grad.",
    "seed": "seeds PyTorch's generator in forward (at {place}), which a captured graph loses; seed outside forward.",
    "generator": "draws from a torch.Generator of its own (at {place}), which no graph does; draw from PyTorch's.",
    "data": "assigns to .data in forward (at {place}), which no graph can hold; use copy_ under torch.no_grad.",
    "twice": "updates buffers under its own torch.utils.checkpoint (at {place}), which does so once more in backward; "
    "switch the model's checkpointing off, and the plan says what is recomputed.",
    "gradient": "takes gradients in forward (at {place}), which a graph would differentiate again; "
    "detach what they are taken of, or give create_graph=True.",
    "leaf": "lets an input or output require a gradient in forward (at {place}), which in a graph none would; let "
    "inputs require theirs before the model is called.",
    "frozen": "freezes a parameter or an input in forward (at {place}), which in a graph would be trained; freeze what "
    "is never trained before the model is called, or compute with detached tensors.",
}
_FunctionCall = tuple[Any, list[str], str]  # the function, its plain arguments and how many tensors, the place


class _Watch(TorchFunctionMode):
    """Sees every torch function of a rehearsal, and in which modes it runs.

    ``places`` holds where something on the list of what is refused happened, a write to one of ``buffers`` (by id)
    under a checkpoint among it; ``nested`` says where modes are in force that export loses, "" if nowhere; ``regions``
    is that of ``autocast_regions``. ``output`` is what forward returned, ``reads`` what it read, ``asks_of_gradients``
    whether it asked a tensor whether it needs one, ``derives`` where it took some that can be differentiated again.
    """

    def __init__(self, buffers: set[int], regions: list[bool]) -> None:
        super().__init__()
        self._buffers, self._regions, self._looking = buffers, regions, True
        self.places: dict[str, list[str]] = {}
        self.nested = self.derives = ""
        self.output: Any = None
        self.reads: Any = None
        self.operators: list[str] = []
        self.asks_of_gradients = False
        self._calls: list[_FunctionCall] = []
        self._computing: list[_FunctionCall] = []  # those of them that gave numbers with fractions
        self.leaves: list[tuple[Tensor, str]] = []  # which it let require a gradient
        self._cache = torch.is_autocast_cache_enabled()
        self._outside = (torch.is_inference_mode_enabled(), torch.initial_seed(), autocast_now(), _attention())

    def unseen(self, kind: type, forward: Forward, context: Any, args: tuple[Any, ...]) -> Any:
        """What a custom Function gives, without a look at how; nor does it draw for anybody else."""
        drawn, self._looking = RandomState(), False
        try:
            return forward(context, *args)
        finally:
            self._looking = True
            drawn.restore()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._looking:
            return func(*args, **kwargs)
        theirs = is_users(sys._getframe(1).f_code.co_filename)
        if func in QUESTIONS:
            self.asks_of_gradients |= theirs
            return func(*args, **kwargs)
        inference, seed, autocast, attention = self._outside
        line = line_now()
        happens = {
            "hook": getattr(func, "__name__", "") in _TENSOR_HOOKS,
            "inference": torch.is_inference_mode_enabled() != inference,
            "seed": torch.initial_seed() != seed,
            "generator": kwargs.get("generator") is not None,
            "data": func == _SET_DATA,
            "gradient": func in _GRADIENTS and not kwargs.get("create_graph"),
        }
        for what in (what for what, happened in happens.items() if happened):
            self.places.setdefault(what, []).append(line)
        self.derives = self.derives or line * (func in _GRADIENTS)
        if not torch.is_grad_enabled() and any(self._regions) and autocast_now() != autocast:
            self.nested = self.nested or f"no_grad inside of autocast at {line}"  # it keeps the outer one only
        if torch.is_autocast_cache_enabled() != self._cache:
            self.nested = self.nested or f"autocast without its cache at {line}"
        if _attention() != attention:
            self.nested = self.nested or f"the choice of attention kernels at {line}"
        leaves = tree_leaves((args, kwargs))
        plain = [repr(leaf) for leaf in leaves if isinstance(leaf, int | float | str | torch.dtype)]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        plain.append(f"{len(tensors)} tensors")
        if func in _CASTS and not any(isinstance(leaf, torch.dtype) for leaf in leaves):
            plain.append(repr(tensors[-1].dtype))  # which the graph names
        self._calls.append((func, plain, line))
        versions = [(value, value._version) for value in args if id(value) in self._buffers]
        trained = func in _LET_TRAIN and args[0].requires_grad
        result = func(*args, **kwargs)
        if theirs and not trained and (args[0].requires_grad if func in _LET_TRAIN else kwargs.get("requires_grad")):
            self.leaves.append((args[0] if func in _LET_TRAIN else result, line))
        if trained and not args[0].requires_grad:
            self.places.setdefault("frozen", []).append(line)
        if any(leaf.is_floating_point() for leaf in tensors_in(result)):
            self._computing.append(self._calls[-1])
        if any(buffer._version != version for buffer, version in versions) and in_checkpoint():
            self.places.setdefault("twice", []).append(line_now())
        return result

    def differs(self, other: "_Watch", computing: bool = False) -> str:
        """The place of the first call that the other run made differently, "" if both are the same.

        With ``computing``, calls do not count that give integers or truth values only.
        """
        calls = (self._computing, other._computing) if computing else (self._calls, other._calls)
        for mine, theirs in itertools.zip_longest(*calls):
            if mine is None or theirs is None or mine[:2] != theirs[:2]:
                return (mine or theirs)[2] or "a place unknown"
        return ""


def _attention() -> tuple[bool, ...]:
    """Which kernels scaled_dot_product_attention may use, as ``torch.nn.attention.sdpa_kernel`` sets."""
    kinds = torch.backends.cuda
    return kinds.flash_sdp_enabled(), kinds.mem_efficient_sdp_enabled(), kinds.math_sdp_enabled()
