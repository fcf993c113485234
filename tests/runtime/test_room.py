"""What PyTorch does not hold yet of so many bytes of a device comes in one piece, which tensors are then cut out of."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memrewrite.capture import capture
from memrewrite.codegen.writer import generate
from memrewrite.plan.marks import Marks
from memrewrite.runtime.dropin import build, program_from
from memrewrite.runtime.room import make_room, room_simulated
from memrewrite.workload.step import Inputs

ON_CUDA: Any = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0))
MIB = 2**20
ON_CPU: Any = SimpleNamespace(is_cuda=False, device=torch.device("cpu"))


class Device:
    """A device of 1,000 MiB; PyTorch holds 300 of them, of which it has given 100 to tensors."""

    def __init__(self) -> None:
        self.reserved, self.used, self.limit = 300 * MIB, 100 * MIB, 1000 * MIB
        self.calls: list[str] = []

    def empty(self) -> None:
        self.reserved = self.used
        self.calls.append("emptied")

    def take(self, size: int, device: torch.device) -> int:
        assert device == ON_CUDA.device
        if self.reserved + size > self.limit:
            raise torch.OutOfMemoryError
        self.reserved += size
        self.calls.append(f"took {size // MIB}")
        return 4096

    def give(self, pointer: int) -> None:
        self.calls.append(f"gave {pointer} back")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    there = Device()
    stand_ins: dict[str, Callable[..., Any]] = {
        "is_current_stream_capturing": lambda: False,
        "memory_reserved": lambda device: there.reserved,
        "empty_cache": there.empty,
        "caching_allocator_alloc": there.take,
        "caching_allocator_delete": there.give,
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return there


def test_what_pytorch_does_not_hold_yet_comes_in_one_piece_and_only_once(device: Device) -> None:
    for _ in range(2):
        make_room(801 * MIB, ON_CPU, ON_CUDA)
    assert device.calls == ["emptied", "took 700", "gave 4096 back"]  # a multiple of 2 MiB
    assert device.reserved == 800 * MIB


@pytest.mark.parametrize(("total", "times"), [(300, 0), (315, 0), (316, 1)])
def test_where_little_is_missing_nothing_is_done(device: Device, total: int, times: int) -> None:
    make_room(total * MIB, ON_CUDA)
    assert device.calls.count("emptied") == times


def test_where_the_process_may_not_hold_as_much_its_cache_is_returned(device: Device) -> None:
    make_room(1200 * MIB, ON_CUDA)
    assert device.calls == ["emptied"]
    assert device.reserved == device.used


def test_nothing_is_done_on_the_cpu_or_while_a_graph_is_recorded(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_room(800 * MIB, ON_CPU)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    make_room(800 * MIB, ON_CUDA)
    assert device.calls == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_a_device_the_piece_is_there() -> None:
    x = torch.zeros(1, device="cuda")
    torch.cuda.empty_cache()
    total = torch.cuda.memory_reserved() + 100 * MIB
    make_room(total, x)
    assert torch.cuda.memory_reserved() == total
    y = torch.zeros(99 * MIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_reserved() == total
    del y


def test_a_program_makes_room_first_and_runs_compiled_as_one_graph() -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU()), torch.randn(2, 3)
    source, constants = generate(capture(model, Inputs((x,), {})), marks=Marks(room=12345))
    (line,) = (line.strip() for line in source.splitlines() if "make_room" in line)
    assert line == "make_room(12345, input_1)"
    result, asked = build(model, program_from(source), constants), list[int]()
    with room_simulated(asked.append):
        same(model, result, x)
    assert asked == [12345]
    same(model, torch.compile(result, fullgraph=True, backend="eager"), x)


def same(model: nn.Module, result: Callable[[Tensor], Tensor], x: Tensor) -> None:
    assert torch.equal(model(x), result(x))
