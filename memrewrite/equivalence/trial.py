"""One training step run from a known state, with copies of everything it computed kept for comparison."""

import contextlib
import functools
import warnings
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from memrewrite.equivalence.attention import summing_in_order
from memrewrite.records.tensor_like import strides_between
from memrewrite.runtime.differences import joined
from memrewrite.runtime.lazy_output import made_when_used
from memrewrite.runtime.promise import FallbackWarning
from memrewrite.state.random_state import RandomState
from memrewrite.torch_internals.pytrees import tree_flatten, tree_leaves, tree_map
from memrewrite.torch_internals.spread import local_part
from memrewrite.workload.held import Targets
from memrewrite.workload.optimizers import own_name
from memrewrite.workload.step import Inputs, Phase, Step, autocast, default_loss, device_type

Key = tuple[str, str]
"""Kind and name of one compared value, e.g. ``("gradient", "blocks.0.conv.weight")``."""
Record = dict[Key, Any]
"""What one step computed."""
_DEEPEST_OUTPUT = 8  # levels of attributes followed into an output of unknown class; it may refer to itself


@dataclass(frozen=True)
class Kept:
    """What of a step is kept, as copies on the CPU or, ``near``, where each tensor lies.

    ``outputs`` are left out where a model may return its loss alone: logits are most of what it computes. ``gradients``
    are no copies, wherever they lie, of a module that nobody has afterwards, and "spent" where an optimizer has used
    them in one of the models. No gradients are asked for of the inputs numbered in ``idle``, unless they require one.
    What forward leaves in the attributes ``held``, each the path of a module and a name, counts as output.
    """

    outputs: bool = True
    parameters: bool = True
    near: bool = False
    gradients: Literal["copied", "taken", "spent"] = "copied"
    idle: frozenset[int] = frozenset()
    held: tuple[tuple[str, str], ...] = ()

    def copy(self, value: Any) -> Any:
        """A copy of a tensor, dense; of one that is spread, its part here; anything else as it is."""
        found = _dense(value)
        return found.to(found.device if self.near else "cpu", copy=True) if isinstance(found, Tensor) else found

    def gradient(self, of: Tensor) -> Any:
        """That of a tensor, if it has one."""
        return _dense(of.grad) if self.gradients == "taken" else self.copy(of.grad)


def _dense(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    value = local_part(value.detach())  # which is all that one process has to compare
    return value if value.layout == torch.strided else value.to_dense()


EVERYTHING = Kept()
"""All that a step computes, on the CPU."""


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Deterministic algorithms where there are any; a fallback of the drop-in is an error; all settings come back.

    cuDNN's attention, whose backward adds up in any order, leaves its work to kernels that do not, where there are any:
    see ``memrewrite.equivalence.attention``.
    """
    cudnn, attention = torch.backends.cudnn, torch.backends.cuda
    before = cudnn.deterministic, cudnn.benchmark
    attends = attention.cudnn_sdp_enabled()
    others = attention.flash_sdp_enabled() or attention.mem_efficient_sdp_enabled()
    algorithms = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        cudnn.deterministic, cudnn.benchmark = True, False
        torch.use_deterministic_algorithms(True, warn_only=True)
        attention.enable_cudnn_sdp(attends and not others)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"(?s).*deterministic", category=UserWarning)
            warnings.simplefilter("error", FallbackWarning)
            yield
    finally:
        cudnn.deterministic, cudnn.benchmark = before
        torch.use_deterministic_algorithms(algorithms[0], warn_only=algorithms[1])
        attention.enable_cudnn_sdp(attends)


def take_step(
    module: nn.Module,
    inputs: Inputs,
    step: Step,
    optimizer: torch.optim.Optimizer | None,
    devices: tuple[torch.device, ...],
    input_gradients: bool,
    kept: Kept = EVERYTHING,
) -> Record:
    """Take one step on private copies of the inputs and return copies of what it computed, as ``kept`` says.

    Kinds: output, layout (of outputs: shape, stride, requires_grad), loss, gradient, input gradient, buffer, parameter
    (after the step), random state, training flag. ``input_gradients`` asks for those of every floating-point input.
    """
    record: Record = {}
    leaves, private = private_inputs(inputs, input_gradients and step.mode == "train", kept.idle)
    if step.mode == "inference":
        with torch.no_grad(), autocast(step.amp, device_type(module, private)):
            _keep_output(record, module, private.run(module), kept)
    else:
        loss_fn = step.loss_fn or default_loss

        def observed_loss(output: Any) -> Tensor:
            _keep_output(record, module, output, kept)  # before the loss or a later operator can write it in place
            loss = loss_fn(output)
            sum_in_order(loss)
            return loss

        def on_phase(phase: Phase) -> None:
            if phase == "backward":
                _keep_gradients(record, module, leaves, kept)

        alone = replace(step.loop, ahead=0, average=False)  # what lies beside the step computes nothing
        observed = replace(step, loss_fn=observed_loss, loop=alone, mesh=None)
        loop = observed.begin(module, private, optimizer, Targets())
        with summing_in_order() as sum_in_order:
            record["loss", "loss"] = kept.copy(loop.take(on_phase))
        for parameter in step.left_in(module):  # to whose gradient a later step would add, in place
            parameter.grad = None
    _keep_state(record, module, devices, kept if optimizer is not None else replace(kept, parameters=False))
    return record


def bring_to_cpu(record: Record) -> None:
    """Have its tensors lie on the CPU."""
    for key, value in record.items():
        record[key] = value.cpu() if isinstance(value, Tensor) else value


def on_device(record: Record) -> bool:
    """Whether its tensors lie on a device other than the CPU."""
    return any(isinstance(value, Tensor) and value.is_cuda for value in record.values())


def private_inputs(inputs: Inputs, gradients: bool, idle: Collection[int]) -> tuple[list[Tensor], Inputs]:
    """Leaf copies of the tensor inputs, and the inputs made of them; an input passed twice stays one tensor.

    A leaf that requires gradients enters the model through a clone, so that the model may write it in place.
    """
    leaves: list[Tensor] = []

    def copy(value: Tensor) -> Tensor:
        leaf = value.detach().clone()
        asked = gradients and len(leaves) not in idle and (leaf.is_floating_point() or leaf.is_complex())
        leaves.append(leaf.requires_grad_(value.requires_grad or asked))
        return leaf.clone() if leaf.requires_grad else leaf

    given = inputs.changed(copy)
    return leaves, given


def _keep_output(record: Record, module: nn.Module, output: Any, kept: Kept) -> None:
    if kept.outputs:
        leaves, record["output", "structure"] = tree_flatten(_expanded(output))
        _keep_leaves(record, "output", leaves, kept)
    for path, name in kept.held:
        _keep_leaves(record, joined(path, name), tree_leaves(getattr(module.get_submodule(path), name)), kept)


def _keep_leaves(record: Record, of: str, leaves: list[Any], kept: Kept) -> None:
    for index, leaf in enumerate(leaves):
        name = of if len(leaves) == 1 else f"{of}[{index}]"
        made = leaf.apart() if made_when_used(type(leaf)) else leaf  # its loss may make some rows at a time
        record["output", name] = kept.copy(made)
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
            record["layout", name] = tuple(leaf.shape), strides_between(made), leaf.requires_grad


def _expanded(value: Any, depth: int = 0) -> Any:
    """Outputs of unknown classes (dataclasses, caches, distributions) as their class and attributes."""
    leaves, _ = tree_flatten(value)
    if len(leaves) != 1 or leaves[0] is not value:
        return tree_map(functools.partial(_expanded, depth=depth), value)
    opaque = isinstance(value, Tensor | nn.Module | type) or callable(value) or not hasattr(value, "__dict__")
    if opaque or depth == _DEEPEST_OUTPUT:
        return value
    return type(value).__qualname__, {name: _expanded(field, depth + 1) for name, field in vars(value).items()}


def _keep_gradients(record: Record, module: nn.Module, leaves: list[Tensor], kept: Kept) -> None:
    for name, parameter in module.named_parameters() if kept.gradients != "spent" else ():
        record["gradient", own_name(name)] = kept.gradient(parameter)
    for index, leaf in enumerate(leaves):
        record["input gradient", input_name(index)] = kept.gradient(leaf)


def input_name(number: int) -> str:
    """By which the gradient of an input is kept."""
    return f"input {number}"


def _keep_state(record: Record, module: nn.Module, devices: tuple[torch.device, ...], kept: Kept) -> None:
    for name, buffer in module.named_buffers():
        record["buffer", own_name(name)] = kept.copy(buffer)
    for name, parameter in module.named_parameters() if kept.parameters else ():
        record["parameter", own_name(name)] = kept.copy(parameter)
    state = RandomState(devices)
    for device, generator in state.torch.items():
        record["random state", device] = generator
    record["random state", "python"] = state.python
    for name, child in module.named_modules():
        record["training flag", own_name(name)] = child.training


def to_cpu(value: Any) -> Any:
    """A copy of a tensor on the CPU, as ``Kept`` makes it; anything else as it is."""
    return EVERYTHING.copy(value)
