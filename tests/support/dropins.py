"""Drop-in modules with segments where a test wants them, and every number of a training step for comparison."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from memrewrite.capture import Captured, capture
from memrewrite.passes.functionalize import Functionalize
from memrewrite.plan.marks import Marks
from memrewrite.plan.segments import Bytes, Plan
from memrewrite.plan_facts.chain import barrier
from memrewrite.search.bench import Bench
from memrewrite.search.candidate import Candidate, CandidateRegion
from memrewrite.search.graphs import ObservedGraph
from memrewrite.search.inplace import marked_inplace
from memrewrite.search.regions import Region, find
from memrewrite.simulate import run_tracked
from memrewrite.targets.compiled import CompiledTarget
from memrewrite.targets.eager import EAGER
from memrewrite.workload.step import Inputs, Step


class ConvNet(nn.Module):
    """Two convolutions with batch normalization, a residual, dropout when asked for, and a linear head."""

    def __init__(self, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.norm, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, 4)

    def forward(self, image: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(image)))
        x = self.dropout(torch.relu(self.norm2(self.second(x)) + x))
        return self.head(x.mean((2, 3)))


def image(batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def conv_net(dropout: float = 0.0) -> ConvNet:
    torch.manual_seed(0)
    return ConvNet(dropout=dropout)


@dataclass(frozen=True)
class Segmented:
    """A drop-in ``module`` with ``count`` segments, its graph's ``nodes`` and the ``barrier`` for each."""

    module: nn.Module
    nodes: list[fx.Node]
    barrier: list[int]
    count: int
    marks: Marks

    def inside(self) -> list[str]:
        """The names of the nodes in segments."""
        return [node.name for node in self.nodes if self.marks[node.name].segment]


def candidate(model: nn.Module, inputs: Inputs, step: Step, kind: type[Bench] = Bench, workspace: int = 0) -> Candidate:
    """The model as it was captured, whole or by regions."""
    found = find(model, inputs, step)
    graphs = (ObservedGraph(region, step, region.captured.graph_module) for region in found.found)
    bench = kind(model, inputs, step, workspace)
    return Candidate(bench, tuple(map(CandidateRegion, graphs)), found.notes, found.left)


class Keeping(Bench):
    """Keeps the statistics of batch normalizations on the CPU, too."""

    @property
    def statistics(self) -> bool:
        return True


def segmented(
    model: nn.Module,
    *args: Any,
    size: int | tuple[int, ...] = 4,
    amp: torch.dtype | None = None,
    kwargs: dict[str, Any] | None = None,
    keeping: bool = False,
    statistics: bool = False,
    compiled: bool = False,
    captured: Captured | None = None,
) -> Segmented:
    """``model`` with segments of up to ``size`` nodes wherever they may be, of several sizes one inside the other.

    It is captured as a whole here, unless it is ``captured``.

    ``keeping`` keeps in them what can be kept, for ``torch.compile`` where ``compiled``. ``statistics`` keeps those of
    batch normalizations, as on CUDA, and puts activations in place.
    """
    inputs = Inputs(args, kwargs or {})
    step = Step("train", None, None, amp, target=CompiledTarget() if compiled else EAGER)
    region = Region("", model, captured or capture(model, inputs), lambda: inputs)
    first = CandidateRegion(ObservedGraph(region, step, region.captured.graph_module)).after(Functionalize())
    nodes, effects = first.graph.nodes, first.effects
    ends = barrier(effects, nodes)
    intervals = _intervals(ends, 0, len(nodes), size if isinstance(size, tuple) else (size,))
    kept = [pair for path, pair in Plan(tuple(intervals)).numbered() if len(path) == 1] if keeping else []
    bench = (Keeping if statistics else Bench)(model, inputs, step, 0)
    made = Candidate(bench, (first,)).with_segments(Plan(tuple(intervals), keeping=tuple(kept)))
    if statistics:
        made = marked_inplace(made, None)
    return Segmented(made.build(), nodes, ends.tolist(), len(intervals), made.regions[0].marks)


def _intervals(ends: Bytes, start: int, end: int, sizes: tuple[int, ...]) -> list[tuple[int, int]]:
    found = []
    while start < end and sizes:
        stop = min(int(ends[start]), start + sizes[0], end)
        if stop > start:
            found += [(start, stop), *_intervals(ends, start, stop, sizes[1:])]
        start = max(stop, start + 1)
    return list(dict.fromkeys(found))


def loss_of(output: Any) -> Tensor:
    """A loss that weighs every element differently."""
    flat = output.float().flatten()
    return (flat * torch.linspace(0.5, 2, flat.numel())).square().sum()


def step(
    module: nn.Module, x: Tensor, call: Callable[[nn.Module, Tensor], Any] = lambda module, x: module(x)
) -> dict[str, Any]:
    """All that one seeded step computes: output, gradients, buffers and the random state afterwards.

    The module's buffers are put back to what they were.
    """
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    leaf = x.detach().clone().requires_grad_(x.is_floating_point())
    torch.manual_seed(3)
    output = call(module, leaf)
    loss_of(output).backward()
    record: dict[str, Any] = {"output": output.detach(), "random": torch.get_rng_state(), "input": leaf.grad}
    record |= {name: p.grad for name, p in module.named_parameters()}
    record |= {name: buffer.clone() for name, buffer in module.named_buffers()}
    module.zero_grad(set_to_none=True)
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            buffer.copy_(before[name])
    return record


def assert_same_bits(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Every value is the same, bit for bit; nan equals nan, None equals None."""
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        if value is None or theirs[name] is None:
            assert value is theirs[name], name
        else:
            torch.testing.assert_close(value, theirs[name], rtol=0, atol=0, equal_nan=True, msg=f"{name} differs")


def peak(module: nn.Module, x: Tensor) -> int:
    """The real peak of the second step on the CPU, in bytes."""
    return run_tracked(module, Inputs((x,), {}), Step()).peak
