"""What stands on a CUDA device before the first step: how it is read, and what a step that begins with it takes."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memrewrite.measurement.measuring import measure, predict
from memrewrite.simulate import requests, simulate
from memrewrite.targets import layout
from memrewrite.targets.allocator import GRANULE, Allocator, rounded
from memrewrite.targets.cuda_from_cpu import CUDA_FROM_CPU
from memrewrite.targets.layout import Layout, Segment, Standing, bytes_of_blocks, layout_of
from memrewrite.workload.step import Inputs, Step
from memrewrite.workload.stepspec import optimizer_factory

MIB = 2**20
_HOLES: Layout = (
    Segment(0, False, (Standing(4 * MIB, False, 3 * MIB + 5), Standing(10 * MIB, True), Standing(6 * MIB, False))),
    Segment(100 * MIB, True, (Standing(MIB, False, MIB), Standing(MIB, True))),
)


def test_what_is_given_gets_its_block_and_others_the_holes() -> None:
    allocator = Allocator(layout=_HOLES)
    assert (allocator.reserved, allocator.most, allocator.allocated) == (22 * MIB, 22 * MIB, 0)
    weight = allocator.allocate(3 * MIB + 5)
    assert (weight.size, allocator.allocated) == (4 * MIB, 4 * MIB)
    allocator.record()
    assert allocator.allocate(9 * MIB).size == 10 * MIB  # the hole beside it, of which no rest is split off
    assert allocator.allocate(MIB).size == MIB  # in the other hole: nobody asked for the block that was given
    assert allocator.reserved == 22 * MIB
    allocator.allocate(11 * MIB)
    assert allocator.reserved == 34 * MIB


def test_a_block_that_was_given_is_joined_with_the_hole_beside_it() -> None:
    allocator = Allocator(layout=_HOLES)
    weight = allocator.allocate(3 * MIB + 5)
    allocator.record()
    allocator.release(weight)
    assert allocator.allocate(14 * MIB - GRANULE).size == 14 * MIB
    assert allocator.reserved == 22 * MIB


def test_segments_that_grow_begin_empty() -> None:
    assert Allocator(expandable=True, layout=_HOLES).reserved == 0


def test_any_allocator_begins_with_the_same() -> None:
    def run(allocator: Allocator) -> Allocator:
        weight = allocator.allocate(3 * MIB + 5)
        for _ in range(2):
            allocator.record()
            kept, _ = allocator.follow([9 * MIB, 40 * MIB, -1, 12 * MIB])
            for _, block in kept:
                allocator.release(block)
        assert weight.size == 4 * MIB
        return allocator

    asked = run(Allocator(layout=_HOLES)).asked()
    for limit in (None, 80 * MIB, 62 * MIB):
        assert asked.reserved_under(limit) == run(Allocator(limit=limit, layout=_HOLES)).settle()


def test_the_layout_is_that_of_the_segments_that_something_given_lies_in(monkeypatch: pytest.MonkeyPatch) -> None:
    def block(address: int, size: int, state: str = "active_allocated") -> dict[str, Any]:
        return {"address": address, "size": size, "state": state}

    def segment(*blocks: dict[str, Any], device: int = 0, stream: int = 0, kind: str = "large") -> dict[str, Any]:
        address = blocks[0]["address"]
        return {"device": device, "stream": stream, "segment_type": kind, "address": address, "blocks": list(blocks)}

    found = [
        segment(block(0, 4 * MIB), block(4 * MIB, 16 * MIB, "inactive")),
        segment(block(32 * MIB, 20 * MIB)),  # of others
        segment(block(64 * MIB, 20 * MIB), stream=7),
        segment(block(0, 20 * MIB), device=1),
        segment(block(128 * MIB, MIB), block(129 * MIB, MIB, "active_pending_free"), kind="small"),
    ]
    given = {(0, 0): 3 * MIB, (0, 64 * MIB): 20 * MIB, (0, 128 * MIB): MIB}
    backend = "native"
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: backend)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: found)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(layout, "_addresses", lambda tensors: given.items())
    assert layout_of([]) == (
        Segment(0, False, (Standing(4 * MIB, False, 3 * MIB), Standing(16 * MIB, True))),
        Segment(128 * MIB, True, (Standing(MIB, False, MIB), Standing(MIB, False))),
    )
    assert bytes_of_blocks([]) == 25 * MIB
    backend = "cudaMallocAsync"  # which has no segments
    assert (layout_of([]), bytes_of_blocks([])) == ((), 24 * MIB)


def test_nothing_lies_on_a_device_that_is_not_used() -> None:
    assert layout_of([torch.ones(3), torch.ones(3).to_sparse()]) == ()
    assert bytes_of_blocks([torch.ones(3)]) == 0


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(1100, 1100) for _ in range(4)))


def test_a_step_counts_parameters_as_the_blocks_they_lie_in() -> None:
    net, inputs = _net(), Inputs((torch.randn(700, 1100),), {})
    step = Step("train", optimizer_factory("adamw"), torch.sum, target=CUDA_FROM_CPU)
    packed = simulate(net, inputs, step)
    sizes = [parameter.nbytes for parameter in net.parameters()]
    large = [size for size in sizes if size > MIB]
    roomy = tuple(
        Segment(i * 20 * MIB, False, (Standing(rounded(size) + MIB // 2, False, size), Standing(8 * MIB, True)))
        for i, size in enumerate(large)
    )
    apart = simulate(net, inputs, replace(step, layout=roomy))
    assert apart.categories["parameters"] == sum(map(rounded, sizes)) + len(large) * MIB // 2
    assert apart.floor > packed.floor
    asked = requests(net, inputs, replace(step, layout=roomy))
    assert asked.layout == roomy
    assert asked.reserved_under(None) >= sum(block.size for segment in roomy for block in segment.blocks)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_model_that_was_cast_on_the_device_takes_what_is_told() -> None:
    """What it was before leaves blocks behind that are larger than what lies in them now, and holes between them."""
    with torch.device("cuda"):
        net: nn.Module = nn.Sequential(*(nn.Linear(1000 + 37 * i, 1037 + 37 * i) for i in range(12))).bfloat16()
        inputs = Inputs((torch.randn(512, 1000, dtype=torch.bfloat16),), {})

    def loss(output: Tensor) -> Tensor:
        return output.float().square().mean()

    step = Step("train", optimizer_factory("adamw"), loss)
    workspace = step.target.workspace_bytes(torch.device("cuda"), None, "train")
    told = predict(net, inputs, step, workspace_bytes=workspace)
    asked = sum(rounded(parameter.nbytes) for parameter in net.parameters())
    assert told.categories["parameters"] == bytes_of_blocks(net.parameters()) > asked
    assert told.peak == pytest.approx(measure(net, inputs, step).peak, rel=1e-3)
