"""The training step a budget speaks of; simulation, measuring and verification all run this one.

Inputs on the device, forward under ``amp``, loss, backward, optimizer step, ``zero_grad``. Where gradients are
accumulated, forward, loss and backward are taken several times before the optimizer's step. In inference mode the step
is one forward under ``torch.no_grad``. What stays alive between steps is the loop's: ``Running`` is one under way.
"""

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn

from memrewrite.records.errors import UsageError
from memrewrite.records.loop import TUTORIAL_LOOP, Loop
from memrewrite.records.mesh import Ddp, Fsdp, Mesh
from memrewrite.state.objects import Copies, alone
from memrewrite.targets.eager import EAGER, Target
from memrewrite.targets.layout import Layout
from memrewrite.torch_internals.pytrees import tensors_in, tree_map
from memrewrite.torch_internals.scaler import Scaler
from memrewrite.torch_internals.spread import computed_on, parts_of
from memrewrite.workload.average import Average
from memrewrite.workload.held import Targets, held_beside, held_by
from memrewrite.workload.in_backward import stepping_in_backward, while_backward
from memrewrite.workload.optimizers import Groups, OptimizerFactory, one_of, own_name, param_groups

if TYPE_CHECKING:
    from memrewrite.torch_internals.ddp import Replica

Listener = Callable[[list[Tensor]], None]
Phase = Literal["data", "forward", "loss", "backward", "step"]
PHASES: tuple[Phase, ...] = ("data", "forward", "loss", "backward", "step")


@dataclass(frozen=True)
class Inputs:
    """The example inputs of one step: what ``module(*args, **kwargs)`` is called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def tensors(self) -> list[Tensor]:
        """Every tensor in the inputs, in flattening order."""
        return tensors_in((self.args, self.kwargs))

    def of_a_run(self) -> "Inputs":
        """What one run is given: these tensors, and copies of the objects beside them, which it may write."""
        return Inputs(*tree_map(Copies(alone, self.tensors()).of, (self.args, self.kwargs)))

    def run(self, function: Callable[..., Any]) -> Any:
        """What ``function`` returns for what one run is given."""
        given = self.of_a_run()
        return function(*given.args, **given.kwargs)

    def changed(self, change: Callable[[Tensor], Tensor]) -> "Inputs":
        """The inputs with what ``change`` makes of each tensor; one that is given twice stays one, and is made once."""
        made: dict[int, Tensor] = {}

        def of(leaf: Any) -> Any:
            if isinstance(leaf, Tensor) and id(leaf) not in made:
                made[id(leaf)] = change(leaf)
            return made.get(id(leaf), leaf)

        return Inputs(*tree_map(of, (self.args, self.kwargs)))

    def changed_in_batch(self, change: Callable[[Tensor], Tensor]) -> "Inputs":
        """The inputs with what ``change`` makes of each tensor that has the batch in dimension 0."""
        size = self.batch_size
        return self.changed(lambda leaf: change(leaf) if size and leaf.dim() and leaf.shape[0] == size else leaf)

    @property
    def bytes(self) -> int:
        """What the storages of all of them take, each counted once, in granules of 512 bytes."""
        dense = (t.untyped_storage() for t in self.tensors() if t.layout is torch.strided)
        storages = {id(storage): storage for storage in dense}
        return sum(-(-storage.nbytes() // 512) * 512 for storage in storages.values())

    @property
    def batch_size(self) -> int:
        """The most frequent size of dimension 0, the first of those on a tie; 0 where no tensor has one."""
        sizes = Counter(tensor.shape[0] for tensor in self.tensors() if tensor.dim() and tensor.shape[0])
        return sizes.most_common(1)[0][0] if sizes else 0


@dataclass(frozen=True)
class Step:
    """How one step is taken. ``optimizer`` None counts no optimizer state; ``amp`` None runs without autocast.

    ``target`` is where it runs, and says what that changes. Gradients of ``micro_batches`` forward and backward passes
    add up before the optimizer's step, each pass over the same inputs. ``loop`` says what stays alive from one step to
    the next, ``mesh`` which processes train together, None where this one trains alone. ``in_backward`` says that the
    optimizer updates parameters while backward runs, which ends their gradients. ``layout`` is how what is given lay on
    the device as planning began, None for as it lies now. ``groups`` are the parameters in each of the optimizer's
    groups, None where all that train are in one; ``left`` are the names of those that train and are in none: nobody
    frees their gradients.
    """

    mode: Literal["train", "inference"] = "train"
    optimizer: OptimizerFactory | None = None
    loss_fn: Callable[[Any], Tensor] | None = None
    amp: torch.dtype | None = None
    target: Target = EAGER
    micro_batches: int = 1
    loop: Loop = TUTORIAL_LOOP
    mesh: Mesh | None = None
    in_backward: bool = False
    layout: Layout | None = None
    groups: Groups | None = None
    left: frozenset[str] = frozenset()

    @property
    def divides_layers(self) -> bool:
        """Whether layers are divided among processes, so that a forward pass takes all of them."""
        return self.mesh is not None and self.mesh.divides_layers

    def shortest(self) -> "Step":
        """The shortest step that takes as much memory: third and later micro-batches find what the second found."""
        return replace(self, micro_batches=min(self.micro_batches, 2))

    @property
    def gradients_wait(self) -> bool:
        """Whether, in the pass that takes most, gradients of earlier ones are there all the time, or all elsewhere."""
        in_buckets = isinstance(self.mesh, Ddp) and self.mesh.gradient_as_bucket_view
        on_host = isinstance(self.mesh, Fsdp) and self.mesh.offload
        return self.micro_batches > 1 or self.loop.zero_grad == "in place" or in_buckets or on_host

    @property
    def gradients_come(self) -> bool:
        """Whether gradients come as backward goes, and stay until it ends."""
        return not self.gradients_wait and not self.in_backward

    def device_type(self, module: nn.Module, inputs: Inputs) -> str:
        """``"cuda"`` or ``"cpu"``: what the step is planned for."""
        return self.target.device_type(device_type(module, inputs))

    def make_optimizer(self, module: nn.Module) -> torch.optim.Optimizer | None:
        """The optimizer over the parameters that train and that it steps, or None where there is nothing to train."""
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if self.mode == "inference" or self.optimizer is None or not trained:
            return None
        made = one_of(self.optimizer(trained if self.groups is None else param_groups(self.groups, module)))
        return stepping_in_backward(made) if self.in_backward else made

    def begin(
        self,
        module: nn.Module,
        inputs: Inputs,
        optimizer: torch.optim.Optimizer | None,
        targets: "Targets | None" = None,
        on_collective: Listener = lambda tensors: None,
    ) -> "Running":
        """The step's loop, of which no step has been taken yet; ``targets`` are by default ``self.targets``."""
        targets = self.targets(module, inputs) if targets is None else targets
        return Running(self, module, inputs, optimizer, targets, on_collective)

    def run(
        self,
        module: nn.Module,
        inputs: Inputs,
        optimizer: torch.optim.Optimizer | None,
        on_phase: Callable[[Phase], None] = lambda phase: None,
    ) -> Tensor | None:
        """Take the first step of a loop and end it; otherwise like ``Running.take``."""
        return self.begin(module, inputs, optimizer).take(on_phase)

    def targets(self, module: nn.Module, inputs: Inputs) -> Targets:
        """What the loss function and the code of the module hold that is neither the module's nor an input."""
        loss = ([], []) if self.loss_fn is None or self.mode == "inference" else held_by(self.loss_fn)
        held = *loss, held_beside(module)
        if not any(held):
            return Targets()
        given = [*module.parameters(), *module.buffers(), *inputs.tensors()]
        known = {id(part.untyped_storage()) for tensor in given for part in parts_of(tensor)}

        def new(tensor: Tensor) -> bool:
            return not any(id(part.untyped_storage()) in known for part in parts_of(tensor))

        return Targets(*(tuple(filter(new, found)) for found in held))

    @property
    def stepped_beside(self) -> list[Tensor]:
        """What the optimizer steps that is no parameter of the model."""
        return [each for group in self.groups or () for each in group if isinstance(each, Tensor)]

    def left_in(self, module: nn.Module) -> list[nn.Parameter]:
        """The parameters that train and that the optimizer does not step."""
        return [p for name, p in module.named_parameters() if own_name(name) in self.left]

    def backward(self, loss: Tensor) -> None:
        """Make the gradients of ``loss``; a step that does more than that overrides it."""
        loss.backward()

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the optimizer take its step; likewise."""
        optimizer.step()


class Running:
    """A loop under way: takes one step after another and holds between them what such a loop holds.

    ``batches`` are the tensors of the batches loaded ahead, ``average`` the averaged weights and ``scaler`` the
    gradient scaler, None where the loop has none. In a mesh ``on_collective`` is told the tensors of each collective.
    """

    def __init__(
        self,
        step: Step,
        module: nn.Module,
        inputs: Inputs,
        optimizer: torch.optim.Optimizer | None,
        targets: Targets,
        on_collective: Listener,
    ) -> None:
        self.step, self.module, self.inputs, self.optimizer, self.targets = step, module, inputs, optimizer, targets
        train = step.mode == "train"
        batch = {id(t): t.detach() for t in (*inputs.tensors(), *targets.of_batch)}.values()
        self.batches = [torch.empty_like(t) for _ in range(step.loop.ahead) for t in batch]
        self.average = Average(module) if step.loop.average and train else None
        self.scaler = Scaler(device_type(module, inputs)) if step.loop.scaler and train else None
        self._on_collective, self._replica = on_collective, cast("Replica | None", None)
        self._given: Inputs | None = None  # until the next pass, as the loop has names for what it gives
        self._output: Any = None
        self._loss: Tensor | None = None

    def take(self, on_phase: Callable[[Phase], None] = lambda phase: None) -> Tensor | None:
        """Take one step; ``on_phase`` is called as each phase ends. Returns the detached loss (None in inference).

        Micro-batches before the last one belong to its first phase.
        """
        if self.step.mode == "inference":
            self._load(on_phase)
            with torch.no_grad(), self._autocast():
                self._forward(on_phase)
            return None
        more = self.step.micro_batches - 1
        for number in range(more):
            with self._in_mesh(last=False):
                self._pass(number == 0, lambda phase: None)
        with self._in_mesh(last=True):
            value = self._pass(more == 0, on_phase)
        self._update()
        on_phase("step")
        if self.step.loop.zero_grad != "before backward":
            self._zero_grad()
        if self.average is not None:
            self.average.update()
        if self._replica is not None:
            self._replica.end_step()
        return value

    def release(self) -> None:
        """Let go of what the last step was given and of its output and loss, as the end of the loop's function does."""
        self._output = self._loss = self._given = None

    @property
    def output(self) -> Any:
        """What the loop holds of the last output, None where it holds none."""
        return self._output

    def hold_output(self, output: Any) -> None:
        """Hold it from here on, if the loop does; the last step's is gone."""
        self._output = output if self.step.loop.keeps_output else None

    def hold_loss(self, loss: Any) -> None:
        """The same of the loss."""
        self._loss = loss if self.step.loop.keeps_output else None

    def _pass(self, first: bool, on_phase: Callable[[Phase], None]) -> Tensor:
        """Forward, loss and backward; returns the detached loss."""
        self._load(on_phase)
        with self._autocast():
            output = self._forward(on_phase)
            loss = one_number((self.step.loss_fn or default_loss)(output))
            self.hold_loss(loss)
            on_phase("loss")
        del output  # a loop that keeps it has another name for it
        if first and self.step.loop.zero_grad == "before backward":
            self._zero_grad()
        with while_backward(self.optimizer):
            self.step.backward(loss if self.scaler is None else self.scaler.scale(loss))
        on_phase("backward")
        return loss.detach()

    def _load(self, on_phase: Callable[[Phase], None]) -> None:
        self._given = None
        self._given = self.inputs.of_a_run()
        on_phase("data")

    def _forward(self, on_phase: Callable[[Phase], None]) -> Any:
        given = self._given or self.inputs
        output = (self._replica or self.module)(*given.args, **given.kwargs)
        self.hold_output(output)
        on_phase("forward")
        return output

    def _in_mesh(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """Around a pass; DDP makes its buckets before the first one."""
        if not isinstance(self.step.mesh, Ddp):
            return contextlib.nullcontext()
        if self._replica is None:
            from memrewrite.torch_internals.ddp import Replica  # a second, for those who need it

            self._replica = Replica(self.module, self.step.mesh, self._on_collective)
        return self._replica.around(last)

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        return autocast(self.step.amp, device_type(self.module, self.inputs))

    def _update(self) -> None:
        if self.optimizer is None:
            return
        if self.scaler is None:
            self.step.update(self.optimizer)
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def _zero_grad(self) -> None:
        owner = self.module if self.optimizer is None else self.optimizer
        owner.zero_grad(set_to_none=self.step.loop.zero_grad != "in place")


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Let the module be in eval mode; afterwards every submodule has its own flag again."""
    flags = [(part, part.training) for part in module.modules()]
    with contextlib.suppress(NotImplementedError):  # of what torch.export made, which does the same in either mode
        module.eval()
    try:
        yield
    finally:
        for part, flag in flags:
            part.training = flag


def autocast(amp: torch.dtype | None, device: str, cached: bool = True) -> contextlib.AbstractContextManager[Any]:
    """``torch.autocast`` for ``amp``, or nothing; ``cached`` says whether it keeps its casts of weights."""
    return torch.autocast(device, amp, cache_enabled=cached) if amp is not None else contextlib.nullcontext()


def device_of(module: nn.Module, inputs: Inputs) -> torch.device:
    """Where the first parameter (else the first input) lies, or is when it is computed with."""
    return next(map(computed_on, itertools.chain(module.parameters(), inputs.tensors())), torch.device("cpu"))


def device_type(module: nn.Module, inputs: Inputs) -> str:
    """``"cuda"`` or ``"cpu"``: that of ``device_of``."""
    return device_of(module, inputs).type


def one_number(loss: Any) -> Tensor:
    """The loss, which backward starts from; raises ``UsageError`` where it cannot."""
    if not isinstance(loss, Tensor):
        raise UsageError(f"The loss is {type(loss).__name__}; loss_fn is to return a tensor of one number.")
    if loss.numel() != 1:
        raise UsageError(
            f"The loss has the shape {tuple(loss.shape)}, and backward starts from one number; give that as loss_fn, "
            "lambda output: output.loss.mean() say."
        )
    return loss


def default_loss(output: Any) -> Tensor:
    """``output.loss`` when there is one, else the sum over floating-point outputs of their float32 mean."""
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    means = [t.float().mean() for t in tensors_in(output) if t.is_floating_point()]
    if not means:
        raise UsageError("The model returns no floating-point tensor to take a loss of; pass --loss module:function.")
    return torch.stack(means).sum() if len(means) > 1 else means[0]
