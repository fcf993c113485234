"""What the storages of training steps count as, and where memory stands as each phase of them ends."""

from collections.abc import Sequence
from contextlib import ExitStack

from memrewrite.simulate.memory.tracker import COMMUNICATION, Tracker
from memrewrite.torch_internals.pytrees import tensors_in
from memrewrite.workload.in_backward import gradient_of
from memrewrite.workload.step import PHASES, Phase, Running

PARAMETERS, BUFFERS, INPUTS = "parameters", "buffers", "inputs"
GRADIENTS, STATE = "gradients", "optimizer state"
AVERAGE = "average of the weights"
ACTIVATIONS, TEMPORARIES = "activations", "temporaries"
WORKSPACES = "library workspaces"
RESTS = "rests of blocks"
_PERSISTENT = (PARAMETERS, BUFFERS, INPUTS, GRADIENTS, STATE, AVERAGE, COMMUNICATION)
_BORN_AS: dict[Phase, str] = {
    "data": ACTIVATIONS,
    "forward": ACTIVATIONS,
    "loss": ACTIVATIONS,
    "backward": TEMPORARIES,
    "step": TEMPORARIES,
}


def owner(name: str) -> str:
    """The path of the submodule that has the parameter or buffer of that full name."""
    return name.rpartition(".")[0]


class Recorder:
    """Follows the phases of a step: what is born in each, and what turned out to be a gradient or optimizer state."""

    def __init__(
        self, tracker: Tracker, loop: Running, libraries: tuple[list[int], list[int]], on_host: bool = False
    ) -> None:
        self.tracker = tracker
        self._on_host = on_host  # whether the optimizer works there
        tracker.libraries, self._of_backward = libraries  # the autograd engine's thread has a handle of its own
        self.phases: list[tuple[str, int]] = []
        self.floor = 0
        self._loop = loop
        self._owners = {id(parameter): owner(name) for name, parameter in loop.module.named_parameters()}
        self._leaves = [*loop.module.parameters(), *loop.inputs.tensors()]
        self._number = 0
        self.peaks: list[int] = []  # in bytes, by step
        tracker.register([] if loop.scaler is None else loop.scaler.tensors, STATE)
        tracker.on_host = on_host
        self._register_state()  # some optimizers make theirs as they are made

    def begin_step(self, number: int) -> None:
        """Step ``number`` begins."""
        self.tracker.reset_peak()
        self.tracker.on_host = False
        self._number = number
        self._begin("data")
        if self.tracker.blocks is not None:
            self.tracker.blocks.record()

    def on_phase(self, phase: Phase) -> None:
        """Record the end of ``phase`` and begin the next one."""
        if phase == "backward":
            for leaf in self._leaves:
                if leaf.is_leaf and (gradient := gradient_of(leaf)) is not None:
                    self.tracker.register([gradient], GRADIENTS, self._owners.get(id(leaf)))
            self.tracker.on_host = self._on_host
        if phase == "step":
            self._register_state()
        living = self.tracker.living()
        self.floor = max(self.floor, sum(living.get(category, 0) for category in _PERSISTENT))
        self.phases.append((phase, self.tracker.current))
        self.tracker.mark(f"step {self._number} {phase} ends")
        self._begin(PHASES[min(PHASES.index(phase) + 1, len(PHASES) - 1)])

    def _register_state(self) -> None:
        self.tracker.register([] if self._loop.scaler is None else self._loop.scaler.tensors, STATE)
        for parameter, state in self._loop.optimizer.state.items() if self._loop.optimizer is not None else ():
            self.tracker.register(tensors_in(state), STATE, self._owners.get(id(parameter)))

    def _begin(self, phase: Phase) -> None:
        if phase == "backward":
            self.tracker.libraries, self._of_backward = [*self.tracker.libraries, *self._of_backward], []
        self.tracker.begin(f"step {self._number} {phase}", _BORN_AS[phase])


def take_step(loop: Running, recorders: Sequence[Recorder], number: int) -> None:
    """Take step ``number`` under the trackers of all ``recorders``, which note its peak."""

    def on_phase(phase: Phase) -> None:
        for recorder in recorders:
            recorder.on_phase(phase)

    with ExitStack() as stack:
        for recorder in recorders:
            recorder.begin_step(number)
            stack.enter_context(recorder.tracker)
        loop.take(on_phase)
    for recorder in recorders:
        recorder.peaks.append(recorder.tracker.peak)
