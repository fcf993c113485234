"""Seconds to plan against the number of nodes, on the CPU: stacked models of growing depth, then the pareto models.

    python -m tests.benchmarks.plantime FOLDER [--nodes 200 500 1000] [--only gpt2 resnet50] [--deadline-s 540]

Every graph becomes a row of ``FOLDER/plantime.jsonl``; a stopped run resumes where it was. The plan is for a peak
halfway between what no plan can lower and the peak without one; its time includes every simulation that it asks for.
"""

import argparse
import functools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from memrewrite.plan_facts.chain import compute_nodes
from memrewrite.search.bench import Bench
from memrewrite.search.candidate import Candidate, CandidateRegion
from memrewrite.search.graphs import ObservedGraph
from memrewrite.search.planning import plan, rewritten
from memrewrite.search.regions import find
from memrewrite.workload.step import Inputs
from memrewrite.workload.stepspec import StepSpec
from tests.benchmarks.models import WORKLOADS, example
from tests.benchmarks.rows import PLANTIME, PlanRow, append, attempt, machine, read

NODES = [200, 500, 1000, 2000, 5000, 10_000]
_CPU = torch.device("cpu")
_BATCH = 2  # of the pareto models, which are built whole


def _gpt2(layers: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    gpt2 = example("gpt2")
    config = gpt2.Config(vocabulary=97, context=16, layers=layers, heads=2, width=16)
    return gpt2.GPT2(config), gpt2.random_tokens(512, config, 16)


def _resnet(layers: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return example("resnet50").ResNet((1, 1, layers, 1), width=4, classes=10), (torch.randn(64, 3, 64, 64),)


@dataclass(frozen=True)
class Stack:
    """A model of any depth; ``fixed`` and ``each`` say how many nodes its graph has beside its layers and per layer."""

    build: Callable[[int], tuple[nn.Module, tuple[Tensor, ...]]]
    fixed: int
    each: int

    def made(self, nodes: int) -> tuple[nn.Module, Inputs]:
        """The model of about ``nodes`` nodes, and its inputs."""
        module, args = self.build(max(1, round((nodes - self.fixed) / self.each)))
        return module, Inputs(args, {})


STACKS = {"gpt2": Stack(_gpt2, 11, 24), "resnet": Stack(_resnet, 59, 13)}


def run(name: str, batch: int, module: nn.Module, inputs: Inputs, spec: StepSpec) -> PlanRow:
    """Capture, then plan; what fails is a row with the reason."""
    about: dict[str, Any] = {"workload": name, "batch": batch, "amp": spec.amp, "optimizer": spec.optimizer}
    about |= machine(_CPU)
    return attempt(
        lambda: PlanRow(ok=True, **about, **_timed(module, inputs, spec)),
        lambda why: PlanRow(ok=False, note=why, **about),
    )


def _timed(module: nn.Module, inputs: Inputs, spec: StepSpec) -> dict[str, Any]:
    step, started = spec.build(), time.perf_counter()
    graphs = (ObservedGraph(each, step, each.captured.graph_module) for each in find(module, inputs, step).found)
    captured = Candidate(Bench(module, inputs, step, 0), tuple(map(CandidateRegion, graphs)))
    candidate = rewritten(captured, None, exact=False)
    nodes = sum(len(compute_nodes(region.effects)) for region in candidate.regions)
    observed = time.perf_counter()
    unplanned = candidate.simulate()
    budget = (unplanned.floor + unplanned.peak) // 2
    begun = time.perf_counter()
    fitted = plan(candidate, budget).fitted
    planned = time.perf_counter()
    seconds = {"capture_s": observed - started, "plan_s": planned - begun}
    return {
        "nodes": nodes,
        "budget": budget,
        "peak": fitted.peak,
        "note": "" if fitted.fits else "not reached",
    } | seconds


def _stacked(stack: str, nodes: int) -> PlanRow:
    module, inputs = STACKS[stack].made(nodes)
    return run(f"{stack} {nodes}", inputs.tensors()[0].shape[0], module, inputs, StepSpec())


def _whole(name: str, tiny: bool) -> PlanRow:
    workload = WORKLOADS[name]
    spec = StepSpec(optimizer=workload.optimizer, amp=workload.amp)
    return run(name, _BATCH, workload.build(tiny), workload.inputs(_BATCH, tiny), spec)


def main() -> int:
    """Run what the file lacks; see the module docstring."""
    whole = [name for name in WORKLOADS if not name.endswith("-small")]
    parser = argparse.ArgumentParser(description="Seconds to plan against the number of nodes.")
    parser.add_argument("folder", type=Path, help="where plantime.jsonl is kept and resumed from")
    parser.add_argument("--nodes", type=int, nargs="+", default=NODES, help="sizes of the stacked models")
    parser.add_argument("--only", nargs="+", choices=[*STACKS, *whole], default=[*STACKS, *whole])
    parser.add_argument("--deadline-s", type=float, default=float("inf"), help="start no graph after that many seconds")
    parser.add_argument("--tiny", action="store_true", help="tiny models of the same families")
    options = parser.parse_args()
    end, path = time.monotonic() + options.deadline_s, options.folder / PLANTIME
    jobs: dict[str, Callable[[], PlanRow]] = {
        f"{stack} {nodes}": functools.partial(_stacked, stack, nodes)
        for nodes in options.nodes
        for stack in STACKS
        if stack in options.only
    }
    jobs |= {name: functools.partial(_whole, name, options.tiny) for name in whole if name in options.only}
    for name, job in jobs.items():
        if time.monotonic() < end and name not in {row.workload for row in read(path, PlanRow)}:
            torch.manual_seed(0)
            append(path, job())
    return 0


if __name__ == "__main__":
    sys.exit(main())
