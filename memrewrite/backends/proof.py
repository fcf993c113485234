"""The first call of a compiled graph, compared with the stock partitioner's and with eager.

Four run on copies of the real inputs, from the same random state and with the same random gradients of the outputs: the
compiled graph, what Inductor makes of the same graph with the stock partitioner, the graph as it is, and that in
float64. Compared are outputs, gradients of all inputs, and what was written into others, as elsewhere: bit for bit,
else by the float64 rule (``memrewrite.equivalence.compare``). Each value must pass beside one of the two: where it
fails beside the other, that is told and no error. Then the call itself runs, as if nothing had been before it.

Tensors that the graph holds itself, as that of an optimizer's step does parameters and state, are put back after each.

This takes more memory than the budget, once, and another compilation. So that all draw the same random numbers,
Inductor takes those of eager (``fallback_random``), also in later calls.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn

from memrewrite.backends.partition import Partition
from memrewrite.equivalence.compare import HALF, Comparison, TensorVerdict
from memrewrite.equivalence.reference import (
    WIDE,
    Draw,
    FusedRandomnessError,
    Recorder,
    double_copy,
    double_or_refused,
    in_double,
    leaf_like,
)
from memrewrite.equivalence.trial import Record, to_cpu
from memrewrite.process.turns import one_at_a_time
from memrewrite.records.errors import MeasurementError, NotEquivalentError, first_line
from memrewrite.state.random_state import RandomState
from memrewrite.torch_internals.compiling import copied
from memrewrite.torch_internals.fake_tensors import FakeTensor, higher_order

_SEED = 0  # of the gradients of outputs


class Proof:
    """Compares a graph of Dynamo's once it is compiled; ``stock`` compiles another copy of it, while Dynamo knows what
    its inputs are."""

    def __init__(
        self, graph: fx.GraphModule, partition: Partition, stock: Callable[[fx.GraphModule], Callable[..., Any]]
    ) -> None:
        self._plain, self._stock = copied(graph, plain=True), stock(copied(graph, plain=False))
        own = {str(node.target) for node in graph.graph.find_nodes(op="get_attr")}
        held = {name: attrgetter(name)(graph) for name in sorted(own)}
        self._held = {name: each for name, each in held.items() if isinstance(each, Tensor)}
        self._names = [str(node.target) for node in graph.graph.find_nodes(op="placeholder")]
        self._half = any(_is_half(node.meta.get("example_value")) for node in graph.graph.nodes)
        self._partition = partition

    def first(self, made: Callable[..., Any]) -> Callable[..., Any]:
        """The compiled graph, whose first call is compared; raises ``NotEquivalentError`` where it is another."""
        pending: list[Proof] = [self]

        def run(*args: Any) -> Any:
            if pending:
                prove(args)
            return made(*args)

        @one_at_a_time
        def prove(args: Sequence[Any]) -> None:
            if not pending:  # another thread was here first
                return
            if any(isinstance(each, FakeTensor) for each in args):
                pending[0]._stock(*args)  # DDP asks all that it had compiled once for the strides of what that gives
                return
            pending[0].prove(made, args)
            pending.clear()

        return run

    def prove(self, made: Callable[..., Any], args: Sequence[Any]) -> None:
        """Compare for these inputs, which stay as they are, as does the random state."""
        refuse(self._names, args)
        tensors = [each for each in args if isinstance(each, Tensor)]
        state = RandomState(dict.fromkeys(each.device for each in tensors if each.is_cuda))
        try:
            self._compare(made, Case(self._names, args, state, self._held))
        finally:
            state.restore()

    def _compare(self, made: Callable[..., Any], case: "Case") -> None:
        recorder = Recorder()
        try:
            eager = case.run(self._plain, during=recorder)
        except FusedRandomnessError as error:
            raise MeasurementError(
                f"Option verify=True cannot compare a graph with dropout inside of a fused operator "
                f"({error.family}); compile without it, or with dropout 0."
            ) from error
        except NotImplementedError as error:  # such as for an operator on graphs, which no dispatch mode knows
            reason = f"{name} runs graphs of its own" if (name := higher_order(error)) else first_line(error)
            raise MeasurementError(
                f"Option verify=True cannot run the graph in eager ({reason}); compile without it."
            ) from error
        ours = case.run(made)
        stock = case.run(self._stock)
        near, far = (self._verdicts(case, recorder.draws, other, ours) for other in (stock, eager))
        told = _told("the stock partitioner's graph", near, far), _told("eager", far, near)
        self._partition.verified = ", ".join(told)

    def _verdicts(self, case: "Case", draws: list[Draw], original: Record, ours: Record) -> tuple[TensorVerdict, ...]:
        """The verdicts on what ``ours`` computed."""
        comparison = Comparison(self._half, next(iter(case.devices), torch.device("cpu")))
        if not comparison.add_step(original, ours):
            comparison.add_reference(original, ours, case.double(self._plain, draws))
        return comparison.verdicts()


def _told(name: str, verdicts: Sequence[TensorVerdict], others: Sequence[TensorVerdict]) -> str:
    """In words how what was compiled compares with ``name``; raises ``NotEquivalentError`` where it is another.

    Values may differ that pass by ``others``, beside the other one: which is luckily near to float64 is no matter of
    ours, and neither is what Inductor makes of any graph.
    """
    wrong = [each for each in verdicts if not each.passed]
    if not wrong:
        exact = all(each.bit_equal for each in verdicts)
        return f"as {name} {'bit for bit' if exact else 'by the float64 rule'}"
    count = f"{len(wrong)} of {len(verdicts)} values"
    right = {(each.kind, each.name) for each in others if each.passed}
    first = next((each for each in wrong if (each.kind, each.name) not in right), None)
    if first is None:
        return f"as {name} but for {count}, in which the two differ: {_value(wrong[0])}"
    raise NotEquivalentError(
        f"The compiled graph gives other numbers than {name} ({count}, such as {_value(first)}). "
        "Please report it; without a budget the graph is left to PyTorch."
    )


def _value(verdict: TensorVerdict) -> str:
    name = f"{verdict.kind} {verdict.name}".replace("output output", "output")
    return f"{name} is off by {verdict.error:.3g}, where {verdict.allowed:.3g} is allowed"


@dataclass
class Case:
    """The inputs of a call by name, and the random state before it; what runs on them gets copies of both.

    What the graph has ``held`` itself, by name, is as it was after each run.
    """

    names: Sequence[str]
    args: Sequence[Any]
    state: RandomState
    held: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._before = {name: each.detach().clone() for name, each in self.held.items()}
        self._tangents: dict[int, Tensor] = {}  # of each output, on the CPU
        self._reference: Record | None = None

    @property
    def devices(self) -> set[torch.device]:
        """The devices that inputs lie on, the CPU aside."""
        return {each.device for each in self.args if isinstance(each, Tensor) and each.device.type != "cpu"}

    def copies(self, wide: bool = False) -> tuple[list[Tensor | None], list[Any]]:
        """The leaves that gradients are asked of, and the copies: what was no leaf is none, and may be written."""
        leaves: list[Tensor | None] = []
        given: list[Any] = []
        for each in self.args:
            leaf = _copy(each, wide) if isinstance(each, Tensor) else each
            leaves.append(leaf if isinstance(leaf, Tensor) and leaf.requires_grad else None)
            made = isinstance(each, Tensor) and each.requires_grad and not each.is_leaf
            given.append(leaf.clone() if made else leaf)
        return leaves, given

    def run(
        self, program: Callable[..., Any], wide: bool = False, during: AbstractContextManager[Any] | None = None
    ) -> Record:
        """What a program computes: outputs, gradients of inputs, and what the others are afterwards."""
        self.state.restore()
        leaves, given = self.copies(wide)
        held = {name: attrgetter(name)(program) for name in self.held} if wide else self.held
        with during or nullcontext():
            found = program(*given)
            outputs = list(found) if isinstance(found, tuple | list) else [found]
            record: Record = {("output", f"output {i}"): to_cpu(each) for i, each in enumerate(outputs)}
            record |= self._gradients(outputs, leaves)
        for name, each, leaf in zip(self.names, given, leaves, strict=True):
            if isinstance(each, Tensor) and leaf is None:
                record["buffer", name] = to_cpu(each)
        record |= {("buffer", name): to_cpu(each) for name, each in held.items()}
        self._put_back()
        return record

    @torch.no_grad()
    def _put_back(self) -> None:
        for name, each in self.held.items():
            if not torch.equal(each, self._before[name]):  # else it may be needed in this version for a backward
                each.copy_(self._before[name])

    def _gradients(self, outputs: list[Any], leaves: list[Tensor | None]) -> Record:
        made = {i: each for i, each in enumerate(outputs) if isinstance(each, Tensor) and each.requires_grad}
        asked = {name: leaf for name, leaf in zip(self.names, leaves, strict=True) if leaf is not None}
        if not made or not asked:
            return {}
        with ExitStack() as stack:
            for kind in {each.device.type for each in made.values()}:
                stack.enter_context(torch.autocast(kind, enabled=False))  # as in a training loop
            tangents = [self._tangent(number, each) for number, each in made.items()]
            found = torch.autograd.grad([*made.values()], [*asked.values()], tangents, allow_unused=True)
        # Compiled graphs give zeros where eager gives None.
        return {
            ("gradient", name): to_cpu(torch.zeros_like(leaf) if each is None else each)
            for (name, leaf), each in zip(asked.items(), found, strict=True)
        }

    def _tangent(self, number: int, output: Tensor) -> Tensor:
        """The gradient of an output, drawn in the precision of the first run, which is eager's."""
        if number not in self._tangents:
            generator = torch.Generator().manual_seed(_SEED + number)
            kind = torch.complex64 if output.is_complex() else torch.float32
            self._tangents[number] = torch.randn(output.shape, generator=generator, dtype=kind, device="cpu").to(
                output.dtype
            )
        return self._tangents[number].to(output.device, output.dtype)

    def double(self, graph: nn.Module, draws: list[Draw]) -> Record:
        """What the graph computes in float64, found out once."""
        if self._reference is None:
            with double_or_refused("The graph", "so that verify=True cannot judge it; compile without it."):
                self._reference = self.run(double_copy(graph), wide=True, during=in_double(draws))
        return self._reference


def refuse(names: Sequence[str], args: Sequence[Any]) -> None:
    """Raise ``MeasurementError`` for an input that cannot be copied as it is."""
    for name, each in zip(names, args, strict=True):
        if isinstance(each, Tensor) and (type(each) not in (Tensor, nn.Parameter) or each.layout != torch.strided):
            kind = type(each).__name__ if each.layout == torch.strided else f"tensor of layout {each.layout}"
            raise MeasurementError(
                f"Option verify=True cannot compare a graph that takes {name}, a {kind}; compile without it."
            )


def _copy(tensor: Tensor, wide: bool) -> Tensor:
    """A leaf with the same values, strides and wish for a gradient, which lies in memory of its own."""
    dtype = WIDE.get(tensor.dtype, tensor.dtype) if wide else tensor.dtype
    new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=tensor.device)
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if tensor.numel():  # all that it reaches over, as one place may be several of its values
        with torch.no_grad():
            new.as_strided((reach,), (1,)).copy_(tensor.as_strided((reach,), (1,)))
    return leaf_like(tensor, new)


def _is_half(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype in HALF
