"""One training step run from a known state, with everything it computed kept on the CPU for comparison."""

import contextlib
import dataclasses
import functools
import itertools
import random
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from memrewrite.attributes import Attributes
from memrewrite.private import is_view, tree_flatten, tree_map
from memrewrite.runtime.dropin import FallbackWarning
from memrewrite.simulate.fake import tensors_of
from memrewrite.step import Inputs, Phase, Step, Targets, autocast, default_loss, device_type

Key = tuple[str, str]
"""Kind and name of one compared value, e.g. ``("gradient", "blocks.0.conv.weight")``."""
Record = dict[Key, Any]
"""What one step computed; tensors lie on the CPU."""
_DEEPEST_OUTPUT = 8  # levels of attributes followed into an output of unknown class; it may refer to itself


class State:
    """Parameters, buffers, other attributes, gradients, flags and random state of some modules, bit for bit.

    ``inputs`` are tensors that count as well. Bytes are kept on the CPU, one copy per storage; ``.grad`` tensors are
    kept by reference.
    """

    def __init__(
        self, modules: tuple[nn.Module, ...], devices: tuple[torch.device, ...], inputs: Iterable[Tensor] = ()
    ) -> None:
        self._attributes = [Attributes(module) for module in modules]
        self._tensors: dict[int, tuple[Tensor, Tensor, bool, Tensor | None]] = {}  # itself, alias, requires_grad, grad
        self._bytes: dict[int, tuple[Any, Any]] = {}  # a storage and its copy on the CPU
        for tensor in itertools.chain(*map(tensors_of, modules), inputs):
            if id(tensor) not in self._tensors:
                self._keep(tensor)
        self._generators = RandomState(devices)

    def _keep(self, tensor: Tensor) -> None:
        grad = tensor.grad if tensor.is_leaf else None
        self._tensors[id(tensor)] = (tensor, tensor.detach(), tensor.requires_grad, grad)
        if tensor.layout != torch.strided or tensor.device.type == "meta":
            return  # a sparse buffer is kept by reference: no module writes one in place
        storage: Any = tensor.untyped_storage()
        if id(storage) not in self._bytes:
            saved = storage.clone() if storage.device.type == "cpu" else storage.cpu()
            self._bytes[id(storage)] = (storage, saved)

    def restore(self) -> None:
        """Put everything back, in place, into the same objects."""
        for attributes in self._attributes:
            attributes.restore()
        for storage, saved in self._bytes.values():
            if storage.nbytes() != saved.nbytes():
                storage.resize_(saved.nbytes())
            storage.copy_(saved)
        for tensor, alias, requires_grad, grad in self._tensors.values():
            if tensor.grad_fn is not None and requires_grad is False and not is_view(tensor):
                tensor.detach_()  # a buffer updated in place from activations carries their graph
            if tensor.layout == torch.strided and tensor.data_ptr() != alias.data_ptr():
                tensor.data = alias
            if tensor.is_leaf:
                tensor.requires_grad_(requires_grad)
                tensor.grad = grad
        self._generators.restore()

    def clear_gradients(self) -> None:
        """Set every kept ``.grad`` to None; ``restore`` brings them back."""
        for tensor, *_ in self._tensors.values():
            if tensor.is_leaf:
                tensor.grad = None


class RandomState:
    """The random state of the CPU, of the CUDA ``devices`` and of Python's ``random``."""

    def __init__(self, devices: tuple[torch.device, ...]) -> None:
        self.torch = {"cpu": torch.get_rng_state()}
        self.torch |= {str(device): torch.cuda.get_rng_state(device) for device in devices}
        self.python = random.getstate()

    def restore(self) -> None:
        """Make this the random state again."""
        for device, state in self.torch.items():
            if device == "cpu":
                torch.set_rng_state(state)
            else:
                torch.cuda.set_rng_state(state, device)
        random.setstate(self.python)


def seed_all(seed: int, devices: tuple[torch.device, ...]) -> None:
    """Seed exactly the generators that ``RandomState`` keeps; ``torch.manual_seed`` would touch every device."""
    torch.default_generator.manual_seed(seed)
    for device in devices:
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
    random.seed(seed)


def cuda_devices(modules: tuple[nn.Module, ...], inputs: Inputs) -> tuple[torch.device, ...]:
    """The CUDA devices that hold a parameter, a buffer or an input."""
    tensors = [*inputs.tensors()]
    for module in modules:
        tensors += [*module.parameters(), *module.buffers()]
    return tuple(sorted({t.device for t in tensors if t.device.type == "cuda"}, key=str))


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Deterministic algorithms where there are any; a fallback of the drop-in is an error; all settings come back."""
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark
    algorithms = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        cudnn.deterministic, cudnn.benchmark = True, False
        torch.use_deterministic_algorithms(True, warn_only=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"(?s).*deterministic", category=UserWarning)
            warnings.simplefilter("error", FallbackWarning)
            yield
    finally:
        cudnn.deterministic, cudnn.benchmark = before
        torch.use_deterministic_algorithms(algorithms[0], warn_only=algorithms[1])


def take_step(
    module: nn.Module,
    inputs: Inputs,
    step: Step,
    optimizer: torch.optim.Optimizer | None,
    devices: tuple[torch.device, ...],
    input_gradients: bool,
) -> Record:
    """Take one step on private copies of the inputs and return all it computed.

    Kinds: output, layout (of outputs: shape, stride, requires_grad), loss, gradient, input gradient, buffer, parameter
    (after the step), random state, training flag. ``input_gradients`` asks for those of every floating-point input.
    """
    record: Record = {}
    leaves, private = private_inputs(inputs, input_gradients and step.mode == "train")
    if step.mode == "inference":
        with torch.no_grad(), autocast(step.amp, device_type(module, private)):
            _keep_output(record, module(*private.args, **private.kwargs))
    else:
        loss_fn = step.loss_fn or default_loss

        def observed_loss(output: Any) -> Tensor:
            _keep_output(record, output)  # before the loss or a later operator can write it in place
            return loss_fn(output)

        def on_phase(phase: Phase) -> None:
            if phase == "backward":
                _keep_gradients(record, module, leaves)

        alone = dataclasses.replace(step.loop, ahead=0, average=False)  # what lies beside the step computes nothing
        observed = dataclasses.replace(step, loss_fn=observed_loss, loop=alone)
        loop = observed.begin(module, private, optimizer, Targets())
        record["loss", "loss"] = _to_cpu(loop.take(on_phase))
    _keep_state(record, module, devices, parameters=optimizer is not None)
    return record


def private_inputs(inputs: Inputs, gradients: bool) -> tuple[list[Tensor], Inputs]:
    """Leaf copies of the tensor inputs, and the inputs made of them; an input passed twice stays one tensor.

    A leaf that requires gradients enters the model through a clone, so that the model may write it in place.
    """
    leaves: dict[int, tuple[Tensor, Tensor]] = {}

    def copy(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in leaves:
            leaf = value.detach().clone()
            differentiable = leaf.is_floating_point() or leaf.is_complex()
            leaf.requires_grad_(value.requires_grad or (gradients and differentiable))
            leaves[id(value)] = leaf, leaf.clone() if leaf.requires_grad else leaf
        return leaves[id(value)][1]

    args, kwargs = tree_map(copy, (inputs.args, inputs.kwargs))
    return [leaf for leaf, _ in leaves.values()], Inputs(args, kwargs)


def _keep_output(record: Record, output: Any) -> None:
    leaves, structure = tree_flatten(_expanded(output))
    record["output", "structure"] = structure
    for index, leaf in enumerate(leaves):
        name = "output" if len(leaves) == 1 else f"output[{index}]"
        record["output", name] = _to_cpu(leaf)
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
            stride = tuple(s for s, size in zip(leaf.stride(), leaf.shape, strict=True) if size > 1)
            record["layout", name] = tuple(leaf.shape), stride, leaf.requires_grad


def _expanded(value: Any, depth: int = 0) -> Any:
    """Outputs of unknown classes (dataclasses, caches, distributions) as their class and attributes."""
    leaves, _ = tree_flatten(value)
    if len(leaves) != 1 or leaves[0] is not value:
        return tree_map(functools.partial(_expanded, depth=depth), value)
    opaque = isinstance(value, Tensor | nn.Module | type) or callable(value) or not hasattr(value, "__dict__")
    if opaque or depth == _DEEPEST_OUTPUT:
        return value
    return type(value).__qualname__, {name: _expanded(field, depth + 1) for name, field in vars(value).items()}


def _keep_gradients(record: Record, module: nn.Module, leaves: list[Tensor]) -> None:
    for name, parameter in module.named_parameters():
        record["gradient", name] = _to_cpu(parameter.grad)
    for index, leaf in enumerate(leaves):
        record["input gradient", f"input {index}"] = _to_cpu(leaf.grad)


def _keep_state(record: Record, module: nn.Module, devices: tuple[torch.device, ...], parameters: bool) -> None:
    for name, buffer in module.named_buffers():
        record["buffer", name] = _to_cpu(buffer)
    for name, parameter in module.named_parameters() if parameters else ():
        record["parameter", name] = _to_cpu(parameter)
    state = RandomState(devices)
    for device, generator in state.torch.items():
        record["random state", device] = generator
    record["random state", "python"] = state.python
    for name, child in module.named_modules():
        record["training flag", name] = child.training


def _to_cpu(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    value = value.detach()
    return (value if value.layout == torch.strided else value.to_dense()).to("cpu", copy=True)
