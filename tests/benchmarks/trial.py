"""Steady training steps of a module: peak bytes, and step time as median and quartiles."""

import gc
import itertools
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memrewrite.measurement.measuring import measure
from memrewrite.records.mesh import Fsdp, Tp
from memrewrite.simulate import run_tracked
from memrewrite.simulate.fake.copier import tensors_of
from memrewrite.targets.allocator import rounded
from memrewrite.torch_internals.cuda import clear_cublas_workspaces
from memrewrite.torch_internals.spread import local_part
from memrewrite.workload.step import Inputs, Step, device_of

WARM_UP = 3


@dataclass
class Trial:
    """A module in training. ``warm_up`` first (it compiles what is to be compiled), then ``figures``.

    ``others`` are the bytes that were allocated on the device before the module and its inputs.
    """

    module: nn.Module
    inputs: Inputs
    step: Step
    others: int = 0

    def __post_init__(self) -> None:
        self.optimizer = self.step.make_optimizer(self.module)
        self.loop = self.step.begin(self.module, self.inputs, self.optimizer)
        self.device = device_of(self.module, self.inputs)  # not the host, where parameters may wait

    def warm_up(self) -> None:
        """Take the first steps and free what only they needed."""
        clear(self.device)
        for _ in range(WARM_UP):
            self.loop.take()
        clear(self.device)

    def figures(self, steps: int) -> dict[str, Any]:
        """The fields of a row that were measured over ``steps`` steps."""
        if self.device.type == "cuda":
            times = self._on_cuda(steps)
            peak = torch.cuda.max_memory_allocated(self.device) - self.others
            reserved = torch.cuda.max_memory_reserved(self.device)
        else:
            times = self._on_cpu(steps)
            peak = reserved = self._peak_on_cpu()
        quarters = statistics.quantiles(times, n=4, method="inclusive")
        return {
            "peak": peak,
            "reserved": reserved,
            "fixed": self.fixed(),
            "step_ms": quarters[1],
            "quartiles_ms": (quarters[0], quarters[2]),
            "steps": steps,
        }

    def peak(self) -> int:
        """The peak of the second step, the first of which nothing is measured."""
        if self.device.type != "cuda":
            return self._peak_on_cpu()
        self.loop.take()
        torch.cuda.reset_peak_memory_stats(self.device)
        self.loop.take()
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - self.others

    def _peak_on_cpu(self) -> int:
        if isinstance(self.step.mesh, Fsdp | Tp):  # whose state is not put back
            return run_tracked(self.module, self.inputs, self.step).peak
        return measure(self.module, self.inputs, self.step, steps=1).peak

    def fixed(self) -> int:
        """Bytes of parameters, buffers, gradients, optimizer state, inputs and what is beside, in granules.

        No gradients stay where the optimizer steps while backward runs.
        """
        state = [] if self.optimizer is None else list(self.optimizer.state.values())
        kept = [value for values in state for value in values.values() if isinstance(value, Tensor)]
        gradients = [p for p in self.module.parameters() if p.requires_grad and not self.step.in_backward]
        kept += [*self.loop.targets.all, *self.loop.batches]
        kept += [] if self.loop.average is None else self.loop.average.tensors
        here = [local_part(t) for t in [*tensors_of(self.module), *self.inputs.tensors(), *kept]]
        owned = {id(t.untyped_storage()): t for t in here}
        counted = [t for t in [*owned.values(), *map(local_part, gradients)] if t.device == self.device]
        return sum(rounded(t.untyped_storage().nbytes()) for t in counted)

    def _on_cuda(self, steps: int) -> list[float]:
        self.loop.take()  # allocates again what was freed after the warm-up
        torch.cuda.reset_peak_memory_stats(self.device)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        marks[0].record()
        for mark in marks[1:]:
            self.loop.take()
            mark.record()
        torch.cuda.synchronize(self.device)
        return [start.elapsed_time(end) for start, end in itertools.pairwise(marks)]

    def _on_cpu(self, steps: int) -> list[float]:
        marks = [time.perf_counter()]
        for _ in range(steps):
            self.loop.take()
            marks.append(time.perf_counter())
        return [(end - start) * 1e3 for start, end in itertools.pairwise(marks)]


def clear(device: torch.device) -> int:
    """Free what nothing refers to, caches and workspaces of libraries too; returns the bytes that stay allocated."""
    gc.collect()
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    clear_cublas_workspaces()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(device)
