"""The times of one call, taken on its device.

A call is made several times in a row between two CUDA events, behind work that keeps the device busy until all of it
is queued: so the events tell what the device takes, however slowly the CPU starts it. Every repetition enters autocast
anew, because autocast remembers the casts of parameters: in a step each is cast once, in a recomputation again.
"""

import functools
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from memrewrite.costs import Times
from memrewrite.costs.calls import Call
from memrewrite.state.random_state import preserved_rng
from memrewrite.torch_internals.cuda import clear_cublas_workspaces, keep_device_busy
from memrewrite.torch_internals.pytrees import tree_leaves
from memrewrite.workload.step import autocast

Measure = Callable[[Call], Times | None]
_REPEATS = 20  # at most, in a row
_ROUNDS = 3
_ROUND_MS = 1.0  # about the length of a round
_LONG_MS = 5.0  # a call this long is timed once


@contextmanager
def timing_on(device: torch.device) -> Iterator[Measure]:
    """What measures calls on ``device``; random state and memory are then as they were, cuBLAS's workspaces freed."""
    with preserved_rng([torch.empty(0, device=device)]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the numbers, which are not the model's
        try:
            yield functools.partial(_times, device)
        finally:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
                clear_cublas_workspaces()
                torch.cuda.empty_cache()


def _times(device: torch.device, call: Call) -> Times | None:
    """The call's times; None where it cannot be timed."""
    try:
        with torch.enable_grad():
            forward, forward_cpu = _forward(device, call)
            backward, backward_cpu = _backward(device, call) if call.grad else (0.0, 0.0)
    except Exception:
        return None  # any operator may refuse numbers that are not the model's, and there may be no room for it
    return Times(forward, backward, forward_cpu, backward_cpu)


def _forward(device: torch.device, call: Call) -> tuple[float, float]:
    run, _ = call.prepared()

    def once() -> None:
        with torch.set_grad_enabled(call.grad), autocast(call.amp, device.type):
            run()

    return _timed(device, once)


def _backward(device: torch.device, call: Call) -> tuple[float, float]:
    run, given = call.prepared()
    # The places in autograd's graph rather than the tensors: one that the call writes has another place after it.
    sources = [get_gradient_edge(tensor) for tensor in given if tensor.requires_grad]
    with autocast(call.amp, device.type):
        results = tree_leaves(run())
    ms, cpu = _timed(device, _gradients(results, sources))
    return ms, max(cpu - _engine_ms(device), 0.0)


def _gradients(results: Iterable[Any], sources: list[Any]) -> Callable[[], object]:
    ends = [result for result in results if isinstance(result, Tensor) and result.requires_grad]
    ones = [torch.ones_like(end) for end in ends]
    return lambda: torch.autograd.grad(ends, sources, ones, retain_graph=True, allow_unused=True)


@functools.cache
def _engine_ms(device: torch.device) -> float:
    """What it takes the CPU to call autograd at all, which a step does once and not for every node."""
    tensor = torch.ones(1, device=device, requires_grad=True)
    return _timed(device, _gradients([tensor.view_as(tensor)], [get_gradient_edge(tensor)]))[1]


def _timed(device: torch.device, run: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds of the device and of the CPU for one run."""
    run()  # libraries load and choose kernels
    single, cpu = _round(device, run, 1, 0.0)
    if single > _LONG_MS:
        return single, cpu
    repeats = min(max(int(_ROUND_MS / max(single, cpu)), 1), _REPEATS)
    rounds = [_round(device, run, repeats, 2 * cpu * repeats) for _ in range(_ROUNDS)]
    return statistics.median(ms for ms, _ in rounds), statistics.median(cpu for _, cpu in rounds)


def _round(device: torch.device, run: Callable[[], object], repeats: int, lead_ms: float) -> tuple[float, float]:
    """The same for each of ``repeats`` runs that start when the device has been busy for ``lead_ms``."""
    if device.type != "cuda":
        cpu = _started(run, repeats)
        return cpu, cpu
    with torch.cuda.device(device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        keep_device_busy(lead_ms)
        start.record()
        cpu = _started(run, repeats)
        end.record()
        end.synchronize()
    return start.elapsed_time(end) / repeats, cpu


def _started(run: Callable[[], object], repeats: int) -> float:
    began = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - began) * 1e3 / repeats
