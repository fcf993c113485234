"""The caching allocator in numbers: its rules one by one, and on CUDA PyTorch's own figures."""

import itertools
import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from memrewrite.simulate import RESTS, simulate
from memrewrite.simulate.memory.tracker import Tracker
from memrewrite.targets.allocator import GRANULE, Allocator, Block, allocator_on
from memrewrite.targets.cuda_from_cpu import CUDA_FROM_CPU
from memrewrite.targets.transients import Taken, Transients, transients_on
from memrewrite.torch_internals.gradient_sums import SUM
from memrewrite.workload.step import Inputs, Step
from tests.support.models import make

MIB = 2**20
_MM = torch.ops.aten.mm.default


def figures(allocator: Allocator) -> tuple[int, int]:
    return allocator.allocated, allocator.reserved


@pytest.mark.parametrize(
    ("asked", "allocated", "reserved"),
    [
        (1, GRANULE, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + GRANULE, 20 * MIB),
        (10 * MIB - GRANULE, 10 * MIB - GRANULE, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),  # a rest of 1 MiB is not split off
        (11 * MIB - GRANULE, 11 * MIB - GRANULE, 12 * MIB),
    ],
)
def test_a_request_gets_a_segment_by_its_size(asked: int, allocated: int, reserved: int) -> None:
    allocator = Allocator()
    allocator.allocate(asked)
    assert figures(allocator) == (allocated, reserved)


def test_the_best_fitting_block_is_used_again_and_small_rests_go_with_it() -> None:
    allocator = Allocator()
    wide, close = allocator.allocate(40 * MIB), allocator.allocate(32 * MIB)
    allocator.release(wide)
    allocator.release(close)
    assert allocator.allocate(31 * MIB) is close
    assert figures(allocator) == (32 * MIB, 72 * MIB)
    assert allocator.allocate(30 * MIB) is wide
    assert figures(allocator) == (62 * MIB, 72 * MIB)  # of this block a rest of 10 MiB was split off
    assert allocator.allocate(10 * MIB).before is wide
    assert allocator.reserved == 72 * MIB


def test_small_and_large_requests_do_not_share() -> None:
    allocator = Allocator()
    allocator.release(allocator.allocate(20 * MIB))
    allocator.allocate(MIB)
    assert allocator.reserved == 22 * MIB


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (0, 2, 1)])
def test_free_neighbours_become_one(order: tuple[int, ...]) -> None:
    allocator = Allocator()
    blocks = [allocator.allocate(6 * MIB) for _ in range(3)]
    for index in order:
        allocator.release(blocks[index])
    allocator.allocate(9 * MIB)
    allocator.allocate(9 * MIB)
    assert figures(allocator) == (18 * MIB, 20 * MIB)


def test_segments_that_grow_split_off_every_rest() -> None:
    allocator = Allocator(expandable=True)
    first = allocator.allocate(11 * MIB)
    assert figures(allocator) == (11 * MIB, 20 * MIB)
    second = allocator.allocate(11 * MIB)
    assert figures(allocator) == (22 * MIB, 40 * MIB)
    assert second.address == first.address + 11 * MIB
    allocator.release(first)
    allocator.release(second)
    allocator.allocate(60 * MIB)
    assert figures(allocator) == (60 * MIB, 60 * MIB)


def test_the_environment_says_whether_segments_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "")
    assert allocator_on("cpu") is None
    assert allocator_on("cuda") == Allocator()
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128, expandable_segments:True")
    assert allocator_on("cuda") == Allocator(expandable=True)


@pytest.mark.parametrize("expandable", [False, True])
def test_no_bytes_are_lost(expandable: bool) -> None:
    allocator, draws = Allocator(expandable), random.Random(0)  # noqa: S311
    held: list[Block] = []
    for _ in range(3000):
        if held and draws.random() < 0.5:
            allocator.release(held.pop(draws.randrange(len(held))))
        else:
            held.append(allocator.allocate(int(2 ** draws.uniform(3, 26))))
        assert allocator.allocated == sum(block.size for block in held) <= allocator.reserved
    spans = sorted((block.small, block.address, block.size) for block in held)
    for (pool, start, size), (other, following, _) in itertools.pairwise(spans):
        assert pool != other or start + size <= following
    for block in held:
        allocator.release(block)
    segments = [size for pool in allocator._free.values() for size, _, _ in pool]
    assert allocator.allocated == 0
    assert sum(segments) == allocator.reserved
    assert len(segments) == 2 or not expandable


def test_a_step_planned_for_cuda_counts_blocks_and_what_is_reserved() -> None:
    module, inputs = make("residual")
    step = Step(optimizer=torch.optim.AdamW, target=CUDA_FROM_CPU)
    blocks, asked = (simulate(module, inputs, step, workspace_bytes=MIB, blocks=b) for b in (True, False))
    assert asked.peak <= blocks.peak <= blocks.reserved
    assert blocks.reserved % MIB == 0
    assert sum(blocks.categories.values()) == blocks.peak
    assert asked.reserved == asked.peak
    assert simulate(module, inputs, step, workspace_bytes=MIB, both=True) == replace(blocks, asked_for=asked)
    here = simulate(module, inputs, Step(optimizer=torch.optim.AdamW))
    assert here == simulate(module, inputs, Step(optimizer=torch.optim.AdamW), blocks=False)


@pytest.mark.parametrize(
    ("widths", "rows", "kind"),
    [
        ((508, 1118, 917, 860, 901), 494, "sgd"),
        ((988, 508, 1085, 359, 1107), 892, "sgd"),
        ((442, 588, 443, 1073, 397), 833, "adamw"),
        ((955, 509, 865, 788, 753), 733, "adamw"),
    ],
)
def test_the_peak_is_that_of_later_steps_where_they_get_larger_blocks(
    widths: tuple[int, ...], rows: int, kind: str
) -> None:
    layers = [(nn.Linear(a, b), nn.ReLU()) for a, b in itertools.pairwise(widths)]
    module, inputs = nn.Sequential(*itertools.chain(*layers)), Inputs((torch.randn(rows, widths[0]),), {})
    make: Any = {"sgd": torch.optim.SGD, "adamw": partial(torch.optim.AdamW, foreach=False)}[kind]
    step = Step(loss_fn=lambda output: output.sum(), optimizer=make, target=CUDA_FROM_CPU)
    told, taken = simulate(module, inputs, step), simulate(module, inputs, step, steps=9)
    peaks = dict.fromkeys(range(1, 10), 0)
    for size, label in taken.events:
        number = int(label.split()[1])
        peaks[number] = max(peaks[number], size)
    second, *later = [peaks[number] for number in range(2, 10)]
    assert told.peak == max(later) > second
    assert told.categories[RESTS] == told.peak - second
    assert sum(told.categories.values()) == told.peak


def test_of_blocks_that_fit_alike_the_last_segment_goes_first() -> None:
    """As measured: segments of one size came at falling addresses, and the lowest address is taken first."""
    allocator = Allocator()
    first, second = allocator.allocate(40 * MIB), allocator.allocate(40 * MIB)
    allocator.release(first)
    allocator.release(second)
    assert allocator.allocate(40 * MIB) is second
    assert first.address == second.address + 40 * MIB


def test_a_course_is_served_in_order_and_leaves_its_results() -> None:
    allocator = Allocator()
    held = allocator.allocate(30 * MIB)
    kept, highest = allocator.follow((20 * MIB, 64 * MIB, -2, 12 * MIB, 40 * MIB, -4))
    assert [size for size, _ in kept] == [20 * MIB, 12 * MIB]
    assert [block.size for _, block in kept] == [20 * MIB, 12 * MIB]
    assert highest == (30 + 20 + 64) * MIB
    assert figures(allocator) == (62 * MIB, (30 + 20 + 64) * MIB)  # the last two were served from the second's
    allocator.release(held)


def test_what_is_reserved_settles_over_further_steps() -> None:
    """A step leaves one block to the next, which lies in the way of what that asks for."""
    allocator = Allocator()
    old = allocator.allocate(20 * MIB)
    allocator.record()
    wide = allocator.allocate(60 * MIB)
    allocator.release(wide)
    left = allocator.allocate(20 * MIB)  # of the 60
    allocator.release(old)
    assert left.size == old.size == 20 * MIB
    assert allocator.most == 80 * MIB
    assert allocator.settle() == 140 * MIB  # 60 beside the 20 that were left; the next step finds it
    assert allocator.allocated == 20 * MIB


def test_under_a_limit_free_segments_go_before_another_comes() -> None:
    allocator = Allocator(limit=100 * MIB)
    whole, split = allocator.allocate(40 * MIB), allocator.allocate(30 * MIB)
    allocator.release(whole)
    allocator.release(split)
    allocator.allocate(12 * MIB)  # of the 30
    allocator.allocate(60 * MIB)
    assert (allocator.reserved, allocator.retries, allocator.most) == (90 * MIB, 1, 90 * MIB)
    allocator.allocate(40 * MIB)
    assert (allocator.reserved, allocator.retries, allocator.most) == (130 * MIB, 2, 130 * MIB)  # it would have failed


def test_what_is_cut_out_of_one_piece_becomes_one_again() -> None:
    """Tensors of 40 MiB that stay, and between them one of 60 that goes: then another of 110 comes."""
    course = [40 * MIB, 60 * MIB, -2, 40 * MIB, -1, -3, 110 * MIB, -4]

    def reserved(total: int, limit: int | None = None) -> tuple[int, int]:
        allocator = Allocator(limit=limit)
        allocator.follow([10 * MIB])  # a weight
        allocator.record()
        allocator.make_room(total)
        allocator.follow(course)
        return allocator.settle(), allocator.retries

    assert reserved(0) == (220 * MIB, 0)
    assert reserved(130 * MIB) == reserved(130 * MIB, 130 * MIB) == (130 * MIB, 0)
    assert reserved(220 * MIB, 130 * MIB)[0] <= 130 * MIB  # it may not have as much, but starts with nothing cached


def test_room_that_is_nearly_there_is_not_made() -> None:
    allocator = Allocator()
    allocator.follow([96 * MIB, -1])
    allocator.make_room(100 * MIB)
    assert allocator.most == 96 * MIB
    allocator.make_room(120 * MIB)
    assert (allocator.most, allocator.reserved) == (120 * MIB, 120 * MIB)


@pytest.mark.parametrize(("limit", "most"), [(None, 120), (119, 80), (100, 80), (70, 80)])
def test_a_workspace_is_left_out_where_there_is_no_room(limit: int | None, most: int) -> None:
    """A tensor of 40 MiB, and a convolution whose result has as many, with a workspace of them if it gets it."""
    allocator = Allocator(limit=limit and limit * MIB)
    allocator.follow([40 * MIB])
    allocator.record()
    kept, highest = allocator.follow([40 * MIB, 40 * MIB, -2], spare=True)
    assert [size for size, _ in kept] == [40 * MIB]
    allocator.release(kept[0][1])
    assert allocator.settle() == highest == most * MIB


@pytest.mark.parametrize(("limit", "most"), [(None, 120), (110, 110)])
def test_a_workspace_that_had_room_once_is_left_out_later(limit: int | None, most: int) -> None:
    """Each step leaves 30 MiB to the next, the first in what the workspace had."""
    allocator = Allocator(limit=limit and limit * MIB)
    left: Block | None = None
    for _ in range(2):
        allocator.record()
        (result, again), _highest = allocator.follow([40 * MIB, 40 * MIB, -2, 30 * MIB], spare=True)
        allocator.release(result[1])
        if left is not None:
            allocator.release(left)
        left = again[1]
    assert (allocator.settle(), allocator.allocated) == (most * MIB, 30 * MIB)


@pytest.mark.parametrize("limit", [None, 200 * MIB, 150 * MIB, 110 * MIB, 70 * MIB])
@pytest.mark.parametrize("total", [0, 120 * MIB, 180 * MIB])
def test_requests_tell_what_any_allocator_would_reserve_for_them(limit: int | None, total: int) -> None:
    def run(allocator: Allocator, room: int) -> Allocator:
        left: Block | None = None
        (weight,), _ = allocator.follow([10 * MIB])
        for _ in range(3):
            allocator.record()
            allocator.make_room(room)
            kept, _ = allocator.follow([40 * MIB, 60 * MIB, -2, 30 * MIB, 50 * MIB, -4], spare=True)
            allocator.release(kept[0][1])
            if left is not None:
                allocator.release(left)
            left = kept[1][1]
        allocator.release(weight[1])
        return allocator

    asked = run(Allocator(), 1).asked(2)
    assert asked.reserved_under(limit, total) == run(Allocator(limit=limit), total).settle(2)
    assert asked.reserved_under(limit) == asked.reserved_under(limit, 1)


@pytest.mark.parametrize("early", [False, True], ids=["the result first", "its scratch first"])
def test_what_is_reserved_depends_on_the_order_of_requests(early: bool) -> None:
    """The result of a product, made before or after its scratch memory is there."""
    course = (32 * MIB, 16 * MIB, -1) if early else (16 * MIB, 32 * MIB, -2)
    products = Transients(lambda calls: [Taken(32 * MIB, course) if f is _MM else Taken() for f, _, _ in calls])

    def run() -> tuple[int, int, int]:
        tracker = Tracker("cpu", products, blocks=(blocks := Allocator()))
        with tracker:
            results = [left @ left for _ in range(2)]
        assert tracker.current == blocks.allocated == 32 * MIB
        del results
        return tracker.peak, blocks.reserved, blocks.allocated

    left = torch.empty(2048, 2048)
    assert run()[:2] == (32 * MIB, 32 * MIB)
    assert products.probe()
    assert run() == (64 * MIB, (64 if early else 80) * MIB, 0)


def test_scratch_memory_beside_a_large_free_block_counts_as_what_it_is() -> None:
    products = Transients(lambda calls: [Taken(16 * MIB) if f is _MM else Taken() for f, _, _ in calls])
    left = torch.empty(2048, 2048)
    products.lookup(_MM, (left, left), {})
    assert products.probe()
    allocator = Allocator()
    allocator.make_room(200 * MIB)
    tracker = Tracker("cpu", products, blocks=allocator)
    with tracker:
        result = left @ left
    assert (tracker.peak, tracker.current, result.nbytes) == (32 * MIB, 16 * MIB, 16 * MIB)


def test_gradients_that_are_added_up_in_place_ask_for_nothing() -> None:
    """Once it is measured, too, what the same operator asks for where it makes its result."""
    sums = Transients(lambda calls: [Taken(0, (16 * MIB,)) if f is SUM else Taken() for f, _, _ in calls])

    def events() -> list[tuple[int, str]]:
        tracker = Tracker("cpu", sums, blocks=Allocator())
        with tracker:
            doubled = torch.ones(2048, 2048, requires_grad=True) * 2.0
            (doubled.exp() * doubled.cos()).sum().backward()
        return tracker.events

    before = events()
    assert any(label.endswith(str(SUM)) for _, label in before)
    gradient = torch.empty(2048, 2048)
    sums.lookup(SUM, (gradient, gradient), {})
    sums.probe()
    assert sums.lookup(SUM, (gradient, gradient), {}).course
    assert events() == before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_the_requests_of_an_operator_are_seen_in_order() -> None:
    device = torch.device("cuda")
    x, w = torch.randn(8, 64, 56, 56, device=device), torch.randn(64, 64, 3, 3, device=device)
    backward = torch.ops.aten.convolution_backward.default
    given = (x, x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False])
    transients = transients_on(device)
    assert transients is not None
    transients.lookup(backward, given, {})
    transients.probe()
    taken = transients.lookup(backward, given, {})
    course = taken.course
    assert taken.spare
    kept = {place + 1 for place in range(sum(step > 0 for step in course))} - {-step for step in course if step < 0}
    asked = [step for step in course if step > 0]
    assert [asked[place - 1] for place in sorted(kept)] == [x.nbytes, w.nbytes]


@pytest.mark.parametrize("expandable", [False, True])
def test_a_stream_is_given_no_block_of_another(expandable: bool) -> None:
    allocator = Allocator(expandable)
    first = allocator.allocate(20 * MIB)
    allocator.release(first)
    allocator.stream = 1
    other = allocator.allocate(20 * MIB)
    assert (other is first, allocator.reserved) == (False, 40 * MIB)
    allocator.release(other)
    allocator.stream = 0
    assert allocator.allocate(20 * MIB) is first
    allocator.stream = 1
    assert allocator.allocate(20 * MIB) is other
    allocator.release(first)
    allocator.release(other)
    assert allocator.reserved == allocator.asked().reserved_under(None) == 40 * MIB


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("seed", range(4))
def test_pytorch_hands_out_the_same(seed: int) -> None:
    """No two sizes are the same: between blocks that fit alike PyTorch goes by addresses, which the driver makes."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    allocator, draws = Allocator(), random.Random(seed)  # noqa: S311
    held: list[tuple[Any, Block]] = []
    for number in range(400):
        if held and draws.random() < 0.45:
            tensor, block = held.pop(draws.randrange(len(held)))
            del tensor
            allocator.release(block)
        else:
            size = (4000 * draws.randrange(1, 40) + number) * GRANULE
            held.append((torch.empty(size, dtype=torch.uint8, device="cuda"), allocator.allocate(size)))
        now = torch.cuda.memory_allocated() - before[0], torch.cuda.memory_reserved() - before[1]
        assert now == figures(allocator), number
