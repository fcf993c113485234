"""Where candidates for one step of one model are costed, simulated and measured, each program once."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from torch import fx, nn

from memrewrite.costs import Costs, normalizations, roofline_costs
from memrewrite.costs.fused import when_fused
from memrewrite.costs.profile import Profile
from memrewrite.costs.steptime import step_times
from memrewrite.costs.work import of_loss, of_optimizer
from memrewrite.measurement import measuring
from memrewrite.observe.effects import Effects
from memrewrite.plan.marks import Marks
from memrewrite.plan.segments import Plan
from memrewrite.records.errors import DataDependentError
from memrewrite.records.mesh import Fsdp, Tp
from memrewrite.records.outcomes import Measured
from memrewrite.runtime.assembled import Written
from memrewrite.simulate import Noted, Timeline, Twins, requests
from memrewrite.state.random_state import preserved_rng
from memrewrite.targets.allocator import Requests
from memrewrite.targets.eager import Target
from memrewrite.targets.kernels_ahead import stop_ahead
from memrewrite.workload.step import Inputs, Step, device_of, device_type

T = TypeVar("T")
_Simulated = dict[tuple[bool, tuple[str, ...]], Timeline]  # by what was simulated


@dataclass(frozen=True)
class Tried:
    """A plan that was simulated, what makes the candidate that has it, and its peak in bytes."""

    plan: Plan
    make: Callable[[], Any]
    peak: int


@dataclass(frozen=True)
class Bench:
    """A model, its inputs and the step that it is to take within a budget.

    ``workspace`` are the bytes that libraries hold throughout; ``profile`` times nodes on their device, ``original``
    are the predicted ``times`` of a step of the model as it is; ``tried`` are the plans that were looked at.
    """

    model: nn.Module
    inputs: Inputs
    step: Step
    workspace: int
    profile: Profile | None = None
    original: tuple[float, float] | None = None
    tried: list[Tried] = field(default_factory=list, compare=False)
    _simulated: _Simulated = field(default_factory=dict, compare=False)
    _courses: dict[tuple[str, ...], Noted] = field(default_factory=dict, compare=False)
    _passes: dict[tuple[str, ...], tuple[Timeline, int]] = field(default_factory=dict, compare=False)
    _twins: Twins = field(default_factory=Twins, compare=False)
    _requests: dict[tuple[str, ...], Requests | None] = field(default_factory=dict, compare=False)  # None: unknown
    _remembered: dict[object, tuple[object, Any]] = field(default_factory=dict, compare=False)

    @property
    def target(self) -> Target:
        """Where the step runs."""
        return self.step.target

    @property
    def device(self) -> str:
        """The type of the device that the step is planned for."""
        return self.step.device_type(self.model, self.inputs)

    @property
    def on_cuda(self) -> bool:
        """Whether there is a device to measure on."""
        here = device_type(self.model, self.inputs) == "cuda"
        return here and not isinstance(self.step.mesh, Fsdp | Tp)  # which take all of their devices

    @property
    def statistics(self) -> bool:
        """Whether batch normalizations in segments keep their statistics and apply them again, by a kernel for CUDA.

        That saves the device time and costs the CPU some: where a step takes the CPU longer, they run again as a whole.
        """
        if self.original is not None and self.original[0] < self.original[1]:
            return False
        return self.target.normalizes_by_kernel(device_of(self.model, self.inputs))

    def normalizations(self, effects: Effects) -> dict[fx.Node, fx.Node | None]:
        """Those of a graph that keep their ``statistics``, with their rectifiers."""
        found = normalizations.found(effects)
        return found if found and self.statistics else {}  # asked last, as the kernel is tried then

    def costs(self, effects: Effects) -> Costs:
        """What the nodes of a graph take: measured where there is a profile."""
        if self.profile is None:
            costs = roofline_costs(self.device, self.step.amp)
        else:
            costs = self.profile.costs(effects, self.step.amp)
        if self.target.fuses:
            return when_fused(costs, effects)
        if not (found := self.normalizations(effects)):
            return costs
        again = self.profile.again(found) if self.profile else normalizations.again_ms(found, costs.roofline)
        return replace(costs, again=again)

    def times(self, effects: Effects, restored: Callable[[Any], Any], marks: Marks) -> tuple[float, float] | None:
        """The predicted times in ms, of the device and of the CPU, of a step whose forward is one graph.

        ``restored`` makes what the model returns of what that graph does. None without a profile, and where nodes are
        fused.
        """
        if self.profile is None or self.target.fuses:
            return None
        with preserved_rng(self.inputs.tensors()):  # a loss of the user's may draw
            loss = of_loss(effects, restored, self.step, self.device)
            optimizer = self.remembered("optimizer", None, lambda: of_optimizer(self.model, self.inputs, self.step))
        passes = self.step.micro_batches
        return step_times(effects, self.costs(effects), [*[loss] * passes, optimizer], passes, marks)

    def simulate(
        self, programs: tuple[str, ...], written: Callable[[], Written], blocks: bool, noted: Noted | None = None
    ) -> Timeline:
        """The exact timeline of two steps of ``programs``, as they are ``written``; ``blocks`` counts on CUDA alone."""
        blocks = blocks and self.device == "cuda"
        if (blocks, programs) not in self._simulated:
            self._look(programs, written(), blocks, noted)
        return self._simulated[blocks, programs]

    def _look(self, programs: tuple[str, ...], written: Written, blocks: bool, noted: Noted | None) -> None:
        """Simulate, on CUDA with and without blocks at once: who asks for one asks for the other sooner or later."""
        both = self.device == "cuda" and self.step.mesh is None
        found = self.predict(self.model, written=written, blocks=blocks, both=both, noted=noted)
        if found.asked_for is None:
            self._simulated[blocks, programs] = found
        else:
            self._simulated[True, programs] = replace(found, asked_for=None)
            self._simulated[False, programs] = found.asked_for

    def has_simulated(self, programs: tuple[str, ...]) -> bool:
        """Whether their timeline is known, blocks aside."""
        return (False, programs) in self._simulated

    @property
    def usual(self) -> Timeline | None:
        """The first timeline that was simulated, blocks aside."""
        return next((timeline for (blocks, _), timeline in self._simulated.items() if not blocks), None)

    def predict(self, module: nn.Module, step: Step | None = None, **how: Any) -> Timeline:
        """``measuring.predict`` of a module in the step, or in another one on the same inputs."""
        return measuring.predict(module, self.inputs, step or self.step, workspace_bytes=self.workspace, **how)

    @property
    def one_pass_tells_nothing(self) -> bool:
        """Whether the second step differs from the first, or is none without its optimizer."""
        return self.step.loop.zero_grad == "in place" or self.step.in_backward or bool(self.step.left)

    def noted(self, whole: tuple[str, ...], room: int) -> Noted:
        """What is known of the passes of a whole model's program, which makes room for so many bytes before all else.

        They are alike where those of the usual timeline are.
        """
        usual = self.usual
        alike = usual is not None and self.remembered("alike", id(usual), lambda: usual.passes_alike)
        return replace(self._courses.setdefault(whole, Noted()), alike=alike, room=room)

    def one_pass(
        self, programs: tuple[str, ...], written: Callable[[], Written], usual: Timeline, noted: Noted | None
    ) -> int:
        """The peak in bytes of forward and backward in a later step, by one pass; ``usual`` is another's timeline."""
        if programs not in self._passes or self._passes[programs][0] is not usual:
            step = replace(self.step, optimizer=None)
            # Where the whole model is one program, nothing of the user's but the loss sees the twin.
            twins = None if noted is None or self.step.mesh is not None else self._twins
            how: dict[str, Any] = {"steps": 1, "blocks": False, "noted": noted, "twins": twins}
            once = self.predict(self.model, step, written=written(), **how)
            self._passes[programs] = usual, once.repeated(usual, self.step.mode)
        return self._passes[programs][1]

    def reserved_under(
        self,
        programs: tuple[str, ...],
        written: Callable[[], Written],
        cap: int,
        room: int,
        noted: Noted | None,
    ) -> int:
        """What CUDA's allocator reserves in bytes for ``programs``, as ``Candidate.reserved_under`` says.

        ``room`` is for how many bytes they make room, which they do for any number of them.
        """
        if programs not in self._requests:
            self._requests[programs] = self._requests_of(written(), noted)
        asked = self._requests[programs]
        return cap if asked is None else asked.reserved_under(cap, room)

    def _requests_of(self, written: Written, noted: Noted | None) -> Requests | None:
        how: dict[str, Any] = {"workspace_bytes": self.workspace, "written": written, "noted": noted}
        with suppress(DataDependentError):
            return requests(self.model, self.inputs, self.step, **how)
        return None

    def remembered(self, slot: object, asked: object, make: Callable[[], T]) -> T:
        """What ``make`` gave when the same was asked last for this slot, else what it gives now."""
        if slot not in self._remembered or self._remembered[slot][0] != asked:
            self._remembered[slot] = asked, make()
        found: T = self._remembered[slot][1]
        return found

    def measure(self, module: nn.Module) -> Measured:
        """What a step really takes where the model lies."""
        stop_ahead()  # whose processes would count among what the device has in use
        return measuring.measure(module, self.inputs, self.step.shortest(), steps=3)
