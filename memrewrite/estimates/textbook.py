"""The rule of thumb for a training step, and what lies between it and the exact figure.

    (parameters x 3 + activations x 2 x batch + inputs x batch) x 4 bytes

It comes from the notes of CS231n ("Computational considerations") and is worked out at length for a net of 532,752
activations and 19,072,984 parameters: weights, gradients and momentum of each parameter; the output of each convolution
and each fully connected layer, and the error of it; the inputs. For predictions there are no gradients, momentum and
errors. Outputs are counted while forward runs on fake tensors: those of whatever PyTorch's own flop counter takes for a
convolution, a matrix product or attention.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from memrewrite.measurement.measuring import preserved_state
from memrewrite.records.estimate import Difference, Textbook
from memrewrite.records.mesh import Fsdp, Tp
from memrewrite.records.options import format_bytes
from memrewrite.simulate import (
    ACTIVATIONS,
    AVERAGE,
    BUFFERS,
    GRADIENTS,
    INPUTS,
    PARAMETERS,
    RESTS,
    STATE,
    TEMPORARIES,
    WORKSPACES,
    Life,
    Timeline,
)
from memrewrite.simulate.fake.copier import tensors_of
from memrewrite.simulate.fake.fakes import on_fakes
from memrewrite.simulate.memory.tracker import COMMUNICATION, GATHERED, OPERATOR_WORKSPACE
from memrewrite.state.random_state import preserved_rng
from memrewrite.targets.allocator import rounded
from memrewrite.torch_internals.fake_tensors import FAKE_TENSOR_ERRORS, TorchDispatchMode
from memrewrite.torch_internals.operators import is_mutable
from memrewrite.workload.step import Inputs, Step, autocast, device_type

_PRODUCTS = {str(packet) for packet in flop_registry}  # aten.mm, aten.convolution, ...
_NAMED = 3  # operators that get a line of their own


class Counted(TorchDispatchMode):
    """While it is active, counts what forward puts out: numbers from products, and bytes written in place."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products = 0
        self.in_place = 0
        self.in_place_bytes = 0
        self._given = {id(tensor.untyped_storage()) for tensor in given}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        first = result[0] if isinstance(result, tuple | list) and result else result
        if isinstance(first, Tensor):
            if str(func.overloadpacket) in _PRODUCTS:
                self.products += first.numel()
            elif is_mutable(func) and id(first.untyped_storage()) not in self._given:
                self.in_place += 1
                self.in_place_bytes += rounded(first.numel() * first.element_size())
        return result


def count(module: nn.Module, inputs: Inputs, step: Step) -> Counted:
    """Run forward once, on fake tensors or where values decide its course on real ones, and count."""
    try:
        with (
            preserved_rng([*tensors_of(module), *inputs.tensors()]),
            on_fakes(module, inputs, step.target, these=True) as (twin, fakes),
        ):
            return _forward(twin, fakes, step)
    except FAKE_TENSOR_ERRORS:
        with preserved_state(module, inputs):
            return _forward(module, inputs, step)


def _forward(module: nn.Module, inputs: Inputs, step: Step) -> Counted:
    with (
        autocast(step.amp, device_type(module, inputs)),
        torch.set_grad_enabled(step.mode == "train"),
        Counted([*tensors_of(module), *inputs.tensors()]) as counted,
    ):
        given = inputs.of_a_run()
        module(*given.args, **given.kwargs)
    return counted


def rule(module: nn.Module, inputs: Inputs, step: Step, batch: int | None, counted: Counted) -> Textbook:
    """What the rule of thumb says of a step of ``batch`` samples (one where there is no batch)."""
    size = batch or 1
    train = step.mode == "train"
    return Textbook(
        parameters=sum(parameter.numel() for parameter in module.parameters()),
        activations=counted.products / size,
        inputs=sum(tensor.numel() for tensor in inputs.tensors()) / size,
        batch_size=size,
        copies=3 if train else 1,
        errors=2 if train else 1,
    )


def differences(text: Textbook, timeline: Timeline, counted: Counted, step: Step) -> tuple[Difference, ...]:
    """What leads from the rule's figure to the peak, term by term."""
    size = timeline.categories.get
    weights, outputs = 4 * text.parameters, round(4 * text.activations * text.batch_size)
    divided = isinstance(step.mesh, Fsdp | Tp)
    own, has = (size(PARAMETERS, 0), "each process has a part; ") if divided else (weights, "")
    found = [
        Difference(size(PARAMETERS, 0) - weights, f"parameters: {has}their types, and granules of 512 bytes"),
        Difference(size(GATHERED, 0), "parameters that are gathered from all processes"),
        Difference(size(BUFFERS, 0), "buffers, such as the running statistics of BatchNorm"),
        Difference(
            size(INPUTS, 0) - round(4 * text.inputs * text.batch_size),
            "inputs: their types and granules, targets, batches ahead",
        ),
        *_activations(timeline, outputs, counted),
    ]
    if step.mode == "train":
        held, state = size(GRADIENTS, 0), size(STATE, 0)
        per_parameter = state / own if own else 0.0
        found += [
            Difference(held - weights, f"gradients: {has}{_gradients(held, own)}"),
            Difference(state - weights, f"optimizer: {has}{per_parameter:.2f} numbers per parameter, not 1"),
            *_errors(timeline, outputs),
        ]
    else:
        found.append(Difference(size(TEMPORARIES, 0), "temporaries"))
    found.append(Difference(size(AVERAGE, 0), "the average of the weights"))
    found.append(Difference(size(COMMUNICATION, 0), "buffers through which processes send"))
    found.append(Difference(size(WORKSPACES, 0), "workspaces of libraries"))
    found.append(Difference(size(OPERATOR_WORKSPACE, 0), "workspace of the operator that runs at the peak"))
    found.append(Difference(size(RESTS, 0), "rests of the allocator's blocks, as steps after the second get them"))
    return tuple(difference for difference in found if difference.bytes)


def _errors(timeline: Timeline, outputs: int) -> Iterator[Difference]:
    temporaries = timeline.categories.get(TEMPORARIES, 0)
    if timeline.events[timeline.peak_event][1].startswith("step 2 step"):
        yield Difference(-outputs, "errors: none is left when the optimizer works, which is where the peak is")
        yield Difference(temporaries, "temporaries of the optimizer")
    else:
        why = f"errors: temporaries, {format_bytes(temporaries)} at once, not one error for each activation"
        yield Difference(temporaries - outputs, why)


def _gradients(held: int, weights: int) -> str:
    if not held:
        return "none exists at the peak; zero_grad frees those of the step before"
    if held < weights:
        return f"{100 * held / weights:.0f} % of them exist at the peak; zero_grad freed those of the step before"
    return "their types, and granules of 512 bytes"


def _activations(timeline: Timeline, outputs: int, counted: Counted) -> Iterator[Difference]:
    """What is in use of the outputs the rule counts, and of what it does not."""
    living = [life for life in timeline.living(timeline.peak_event) if life.category == ACTIVATIONS]
    by_operator: Counter[str] = Counter()
    for life in living:
        by_operator[_operator(life)] += life.bytes
    products = sum(size for name, size in by_operator.items() if name in _PRODUCTS)
    why = f"activations: of the outputs of products {format_bytes(products)} are in use at the peak"
    if counted.in_place:
        shared = format_bytes(counted.in_place_bytes)
        why += f"; {counted.in_place} operators after them write in place, which makes {shared} less"
    yield Difference(products - outputs, why)
    others = [(name, size) for name, size in by_operator.most_common() if name not in _PRODUCTS]
    for name, size in others[:_NAMED]:
        yield Difference(size, f"activations: what {name.removeprefix('aten.') or 'no operator'} made")
    yield Difference(sum(size for _, size in others[_NAMED:]), "activations: what other operators made")


def _operator(life: Life) -> str:
    """``aten.relu`` for a storage born in ``step 2 forward: aten.relu.default``."""
    return life.operator.partition(": ")[2].rpartition(".")[0]
