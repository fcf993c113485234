"""What a capture would silently lose, found before it: each is refused by name, none is guessed around.

Forward is rehearsed on a fake twin of the model. The functions it calls, the twin's attributes and the random state
afterwards say what happened that no graph of tensor operators can hold; a second run has to do the same as the first.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from memrewrite.capture.at_sight import refuse_hooks, refuse_names, refuse_unnamed
from memrewrite.capture.autocasts import autocast_asked, autocast_regions
from memrewrite.capture.changes import COUNTED, always_matters, refuse_changes, refuse_left
from memrewrite.capture.finite import Finite
from memrewrite.capture.gradients import all_or_none, gradients_asked, with_or_without
from memrewrite.capture.held import Held, held
from memrewrite.capture.identity import OperatorsSeen, together
from memrewrite.capture.reads import ReadsOfForward
from memrewrite.capture.seen import Watch
from memrewrite.records.errors import CaptureError
from memrewrite.runtime.differences import joined
from memrewrite.runtime.guards import Reads
from memrewrite.runtime.segment import autocast_dtype
from memrewrite.simulate.fake.constant_values import known_values
from memrewrite.simulate.fake.fakes import fake_inputs, fake_twin
from memrewrite.simulate.fake.refusals import decides, failed
from memrewrite.simulate.fake.stand_ins import functions_on_fakes
from memrewrite.state.attributes import Attributes
from memrewrite.state.random_state import draws, seed_all
from memrewrite.torch_internals.custom_functions import forwards_replaced, function_calls, functions_behind
from memrewrite.torch_internals.dispatch_modes import Recall
from memrewrite.torch_internals.fake_tensors import FakeTensorMode
from memrewrite.torch_internals.logs import quiet
from memrewrite.torch_internals.pytrees import tensors_in, tree_flatten
from memrewrite.torch_internals.tracing import checkpoint_calls, tracing_untold
from memrewrite.workload.step import Inputs, device_type
from memrewrite.workload.surroundings import Surroundings

_NOBODYS_SEED = 7_046_029_254_386_353_131


@dataclass(frozen=True)
class Findings:
    """What is worth knowing about a model that is safe to capture.

    ``notes`` are sentences for the user; ``export_loses`` is what ``torch.export``'s graph would lack, ``asks`` the
    Python module that asks whether it is being traced, "" if there is none. ``exact`` is False where the model asks
    for values of its inputs, as it may go another way by those it sees; ``checkpoints`` says that it checkpoints,
    ``functions`` are the custom ``autograd.Function`` classes that it applies, ``autocast``, ``reads`` and ``looks``
    are those of ``Captured``; ``gradients`` says whether forward does something else where other tensors need them,
    ``layouts`` whether it asks how tensors lie in memory, ``identity`` whether it asks if inputs are one tensor,
    ``types`` whether it asks for types of what is no parameter.
    ``operators`` are the names of those that forward runs on these inputs, ``derives`` is where it differentiates;
    ``held`` are the attributes that it leaves tensors in.
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
    layouts: bool = False
    identity: bool = False
    types: bool = False
    operators: Sequence[str] = ()
    derives: str = ""
    held: tuple[Held, ...] = ()


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
        rehearsal.refuse_other_branch()
        rehearsal.settle_held(first)
        rehearsal.refuse_changes(rehearsal.before, always_matters)
        for what, places in first.places.items():
            raise CaptureError(f"{name} {_REFUSED[what].format(place=places[0])}")
        switched = rehearsal.differs_where_autocast_is_switched(first, device)
        if switched:
            _refuse_difference(name, rehearsal, first)
        else:  # which was the second run, then
            rehearsal.refuse_changes(rehearsal.between)
            refuse_left(name, rehearsal.around)
        counted = next(rehearsal.around.counted(), None)
        identity = rehearsal.differs_where_inputs_are_one(first)
        asks = bool(about_gradients) or first.asks_of_gradients
        gradients = asks and rehearsal.differs_where_gradients_are_switched(first)
    return Findings(
        notes=tuple(_notes(name, rehearsal, first, checkpoints, counted)),
        export_loses=_lost(rehearsal, first, checkpoints),
        asks=asked[0] if asked else "",
        exact=not rehearsal.asked,
        checkpoints=bool(checkpoints),
        functions=rehearsal.functions,
        autocast=autocast_dtype(device) if about or switched else "any",
        reads=first.reads.found,
        looks=first.reads.looks,
        gradients=gradients,
        layouts=first.asks_of_layouts,
        identity=identity,
        types=first.asks_of_types,
        operators=first.operators,
        derives=first.derives,
        held=rehearsal.held,
    )


def _notes(
    name: str, rehearsal: "_Rehearsal", first: Watch, checkpoints: Collection[str], counted: str | None
) -> Iterator[str]:
    if checkpoints:
        yield "The model's own torch.utils.checkpoint calls are replaced by the plan."
    if rehearsal.functions:
        names = ", ".join(sorted({kind.__name__ for kind in rehearsal.functions}))
        yield f"What stays a call as the model makes it, with its own backward: {names}."
    if place := rehearsal.decided_by_values(first):
        yield _DECIDED.format(name=name, place=place)
    if counted is not None:
        yield COUNTED.format(name=name, place=counted)


def refuse_kept(model: nn.Module, inputs: Inputs, functions: Sequence[type], other: Callable[[Inputs], Inputs]) -> None:
    """Raise ``CaptureError`` where forward keeps something of what it is given, which is ``other`` in the next call."""
    rehearsal = _Rehearsal(model, inputs, [])
    rehearsal.functions = tuple(functions)
    with quiet(), tracing_untold(), functions_on_fakes():
        rehearsal.settle_held(rehearsal.run())
        rehearsal.run(inputs=other(rehearsal.given))
    rehearsal.refuse_changes(rehearsal.between)
    refuse_left(type(model).__name__, rehearsal.around)


def _first(name: str, rehearsal: "_Rehearsal", functions: list[type]) -> Watch:
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


def _lost(rehearsal: "_Rehearsal", first: Watch, checkpoints: Collection[str]) -> str:
    """What the graph of ``torch.export`` would lack, "" if nothing."""
    if "apply" in checkpoints:
        return "the gradients of checkpoint(use_reentrant=True)"
    written = next(rehearsal.before.written(), None)
    return f"writes to self.{written}, which is no buffer" if written else first.nested


class _Rehearsal:
    """Runs of forward on one fake twin; ``before`` and ``between`` are its attributes before the first and the last.

    ``around`` is what its code may write to besides, before the last, ``held`` the attributes it leaves tensors in.
    """

    def __init__(self, model: nn.Module, inputs: Inputs, regions: list[bool]) -> None:
        self._regions = regions
        self._name = type(model).__name__
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.finite = Finite()
        with self._explained():
            self._twin, given = fake_twin(model, self._mode), fake_inputs(inputs, self._mode)
            # A leaf that requires a gradient could not be written in place, as an input that was computed can.
            self.given = given.changed(lambda leaf: leaf.clone() if leaf.requires_grad else leaf)
        self._real = inputs.tensors()
        self.asked = False
        self.functions: tuple[type, ...] = ()  # what happens in them is not looked at
        self.held: tuple[Held, ...] = ()
        self.before = self.between = Attributes(self._twin)
        self.around = Surroundings((self._twin,))

    def settle_held(self, first: Watch) -> None:
        """Find the attributes that the ``first`` run left tensors in: later ones may put others there."""
        self.held = held(self._twin, self.before, first.reads.found)

    def refuse_changes(
        self, attributes: Attributes, matters: Callable[[str, Any], bool] = lambda path, value: True
    ) -> None:
        """Raise ``CaptureError`` where others than those are not what they were, and that ``matters``."""
        paths = {joined(*each) for each in self.held}
        refuse_changes(self._name, attributes, lambda path, value: path not in paths and matters(path, value))

    def decided_by_values(self, first: Watch) -> str:
        """Where forward does something else once it can see the values of its inputs, "" if nowhere."""
        if not self.asked:
            return ""
        try:
            return first.differs(self.run(list(zip(self.given.tensors(), self._real, strict=True))), computing=True)
        except CaptureError:  # no graph can hold what it does then
            return ""

    def differs_where_autocast_is_switched(self, first: Watch, device: str) -> bool:
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

    def differs_where_inputs_are_one(self, first: Watch) -> bool:
        """Whether forward runs other operators where all inputs that can be one tensor are."""
        given = together(self.given)
        try:
            found = first.operators if given is None else self.run(inputs=given).operators
            return found != first.operators and found != self.run().operators  # without what the first sets up
        except CaptureError:  # it does not run then
            return True

    def differs_where_gradients_are_switched(self, first: Watch) -> bool:
        """Whether forward calls other functions where everything needs a gradient, or nothing."""
        for needed in (True, False):
            try:
                with all_or_none(self._twin, needed):
                    if first.differs(self.run(inputs=with_or_without(self.given, needed))):
                        return True
            except CaptureError:  # it does not run then
                return True
        return False

    def refuse_other_branch(self) -> None:
        """Raise ``CaptureError`` where a branch for what is not finite does more than to clamp that."""
        if self.finite.asked:
            clamping, other = Finite(noting=True), Finite(finite=True, noting=True)
            self.run(finite=clamping)
            self.run(finite=other)
            if self.functions or not clamping.does_as(other):  # what custom Functions give is not followed
                raise CaptureError(self._branches_on_finite())

    def _branches_on_finite(self) -> str:
        return decides(self._name, f" at {self.finite.asked}", "whether all are finite")

    def run(
        self,
        given: Sequence[tuple[Tensor, Tensor]] = (),
        inputs: Inputs | None = None,
        finite: Finite | None = None,
    ) -> Watch:
        """Run forward once; ``given`` are fake inputs and the real ones whose values it may see."""
        self.finite = finite or Finite()
        # Only a training step runs backward, where a checkpoint would write them once more.
        watch = Watch({id(b) for b in self._twin.buffers()} if self._twin.training else set(), self._regions)
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
            nullcontext() if finite else self.finite,  # below the watch, which looks at who calls it
            watch,
            finite or nullcontext(),  # above, so that it sees what forward calls, and not what the watch asks
            unseen,
            reads.observed(),
        ):
            watch.output = self._twin.forward(*inputs.args, **inputs.kwargs)
        if finite:
            finite.returns(watch.output)
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
            if self.finite.asked:  # forward may raise what it does for what is not finite
                raise CaptureError(self._branches_on_finite()) from error
            raise CaptureError(failed(self._name, error)) from error


def _refuse_difference(name: str, rehearsal: _Rehearsal, first: Watch) -> None:
    """A second run must do the same as the first and change nothing. What is set up once and then kept is no hazard."""
    try:
        second = rehearsal.run()
    except CaptureError:
        rehearsal.refuse_changes(rehearsal.before)  # which is then the reason
        raise
    rehearsal.refuse_changes(rehearsal.between)
    refuse_left(name, rehearsal.around)
    if first.differs(second):
        rehearsal.refuse_changes(rehearsal.before)
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
    "offset": "asks where in its memory a tensor begins (at {place}), and a graph would keep the answer; as_strided "
    "and the like begin there by themselves.",
    "twice": "updates buffers under its own torch.utils.checkpoint (at {place}), which does so once more in backward; "
    "switch the model's checkpointing off, and the plan says what is recomputed.",
    "gradient": "takes gradients in forward (at {place}), which a graph would differentiate again; "
    "detach what they are taken of, or give create_graph=True.",
    "leaf": "lets an input or output require a gradient in forward (at {place}), which in a graph none would; let "
    "inputs require theirs before the model is called.",
    "frozen": "freezes a parameter or an input in forward (at {place}), which in a graph would be trained; freeze what "
    "is never trained before the model is called, or compute with detached tensors.",
}
