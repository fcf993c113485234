"""What is there before the first step, and what it counts as; some of it may lie on the host, and take nothing."""

from collections.abc import Callable, Iterable

from torch import Tensor, nn

from memrewrite.records.mesh import Fsdp, Tp
from memrewrite.simulate.fake.copier import tensors_of
from memrewrite.simulate.memory.recorder import BUFFERS, INPUTS, PARAMETERS, owner
from memrewrite.simulate.memory.tracker import COMMUNICATION, Tracker
from memrewrite.targets.layout import Layout, layout_of
from memrewrite.torch_internals.spread import parts_of
from memrewrite.workload.held import Targets
from memrewrite.workload.step import Inputs, Step


def parameters_apart(step: Step, module: nn.Module, inputs: Inputs) -> bool:
    """Whether parameters lie on the host, and the optimizer works there, while the step runs elsewhere."""
    offload = isinstance(step.mesh, Fsdp) and step.mesh.offload
    return offload and step.device_type(module, inputs) != "cpu"


def layout_for(step: Step, module: nn.Module, inputs: Inputs) -> Layout:
    """How what is given lies on a CUDA device: as the step says, else now; nowhere where it is yet to be divided."""
    if step.layout is not None:
        return step.layout
    if step.device_type(module, inputs) != "cuda" or isinstance(step.mesh, Fsdp | Tp):
        return ()
    return layout_of([*tensors_of(module), *inputs.tensors(), *step.targets(module, inputs).all])


def register_apart(tracker: Tracker, tensors: Iterable[Tensor], category: str, apart: bool) -> None:
    """Count as nothing what lies on the host, if it does."""
    tracker.on_host = apart
    tracker.register(tensors, category)
    tracker.on_host = False


def register_given(tracker: Tracker, module: nn.Module, inputs: Inputs, targets: Targets, apart: bool) -> None:
    """Say of all that is there before the first step what it is; parameters may lie ``apart``, on the host."""
    register_apart(tracker, module.parameters(), PARAMETERS, apart)
    tracker.moved_out(targets.own)
    tracker.register(targets.all, INPUTS)
    tracker.register(targets.beside, BUFFERS)
    tracker.register(tensors_of(module), BUFFERS)
    for name, buffer in module.named_buffers():
        tracker.register([buffer], BUFFERS, owner(name))
    for name, parameter in module.named_parameters():
        tracker.register([parameter], PARAMETERS, owner(name))
    tracker.register(inputs.tensors(), INPUTS)


def communicated(tracker: Tracker, module: nn.Module) -> Callable[[list[Tensor]], None]:
    """Lets what is sent to other processes count as such; a buffer that is sent as it is stays one."""
    own = {id(each.untyped_storage()) for buffer in module.buffers() for each in parts_of(buffer)}

    def sent(tensors: list[Tensor]) -> None:
        tracker.register([each for each in tensors if id(each.untyped_storage()) not in own], COMMUNICATION)

    return sent
