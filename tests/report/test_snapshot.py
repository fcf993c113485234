"""The snapshot is what PyTorch's own tools for memory snapshots read, and its figures are those predicted."""

import json
import pickle
import pickletools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.cuda import _memory_viz

from memrewrite import cli
from memrewrite.report.snapshot import _Arena, snapshot, to_pickle
from memrewrite.simulate import Timeline, simulate
from memrewrite.workload.step import Inputs, Step
from tests.commands.test_cli import NET

# What the viewer on pytorch.org can read of pickles; it stops at anything else.
READABLE = {
    *("APPEND", "APPENDS", "BINFLOAT", "BINGET", "BININT", "BININT1", "BININT2", "BINPUT", "BINUNICODE", "DICT"),
    *("EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "FRAME", "LIST", "LONG1", "LONG_BINGET", "LONG_BINPUT", "MARK"),
    *("MEMOIZE", "NEWFALSE", "NEWTRUE", "NONE", "PROTO", "SETITEM", "SETITEMS", "SHORT_BINUNICODE", "STOP"),
    *("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
}


@pytest.fixture(scope="module")
def timelines() -> list[Timeline]:
    """A small net's, without and with library workspaces."""
    net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Sequential(nn.Linear(64, 4), nn.Dropout(0.5)))
    step = Step(optimizer=torch.optim.AdamW)
    inputs = Inputs((torch.randn(256, 8),), {})
    return [simulate(net, inputs, step, workspace_bytes=size, attribute=True) for size in (0, 1_000_000)]


@pytest.fixture
def data(timelines: list[Timeline]) -> Any:
    return pickle.loads(to_pickle(timelines))


def walk(trace: list[dict[str, Any]]) -> tuple[int, dict[int, int]]:
    """The highest sum of what is allocated, and what is left at the end; no two storages may share a byte."""
    live: dict[int, int] = {}
    peak = 0
    for entry in trace:
        if entry["action"] == "alloc":
            start, end = entry["addr"], entry["addr"] + entry["size"]
            assert all(end <= other or other + size <= start for other, size in live.items())
            live[start] = entry["size"]
        elif entry["action"] == "free_completed":
            assert live.pop(entry["addr"]) == entry["size"]
        peak = max(peak, sum(live.values()))
    return peak, live


def test_the_peak_is_the_predicted_one(timelines: list[Timeline], data: Any) -> None:
    for timeline, trace, segment in zip(timelines, data["device_traces"], data["segments"], strict=True):
        peak, live = walk(trace)
        assert peak == max(timeline.peak, timeline.peak_step1)
        blocks = [block for block in segment["blocks"] if block["state"] == "active_allocated"]
        assert {block["address"]: block["size"] for block in blocks} == live
        assert sum(live.values()) == segment["active_size"] == timeline.events[-1][0]


def test_segments_are_whole(data: Any) -> None:
    ends = []
    for number, segment in enumerate(data["segments"]):
        assert segment["device"] == number
        assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]
        address = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == address
            address += block["size"]
        ends.append((segment["address"], address))
    assert ends[0][1] <= ends[1][0], "devices have addresses of their own"


def test_torch_reads_it(data: Any) -> None:
    summary = _memory_viz.segsum(data)
    assert "segments: 2" in summary
    text = _memory_viz.trace(data)
    assert f"{len(data['device_traces'][0])} entries" in text
    flames: list[str] = []
    _memory_viz.memory(data, lambda lines: flames.append(lines))
    assert "stream_0;active_allocated" in flames[0]
    for plot in (_memory_viz.trace_plot, _memory_viz.segment_plot):
        assert "snapshot.pickle" in plot(data)


def test_the_viewer_can_unpickle_it(timelines: list[Timeline]) -> None:
    content = to_pickle(timelines)
    assert {operation.name for operation, _, _ in pickletools.genops(content)} <= READABLE
    assert content[:2] == b"\x80\x04"


def test_entries_say_what_the_viewer_asks_for(data: Any) -> None:
    for trace in data["device_traces"]:
        for entry in trace:
            assert {"action", "addr", "size", "stream", "frames", "category", "time_us"} == set(entry)
            assert all({"filename", "line", "name"} == set(frame) for frame in entry["frames"])
        assert "unknown" in {entry["category"] for entry in trace}
    stacks = [[frame["name"] for frame in entry["frames"]] for entry in data["device_traces"][0]]
    assert ["step 2 forward: aten.addmm.default", "2.0", "2", "the model itself"] in stacks


def test_what_dies_as_it_is_made_is_allocated_and_freed(timelines: list[Timeline]) -> None:
    timeline = timelines[0]
    early = replace(timeline.lives[-1], born=3, died=3, bytes=512)
    data = snapshot([replace(timeline, lives=(*timeline.lives, early))])
    walk(data["device_traces"][0])
    assert len(data["device_traces"][0]) == len(snapshot([timeline])["device_traces"][0]) + 3


def test_the_arena_uses_holes_again() -> None:
    arena = _Arena(1000)
    first, second, third = arena.take(10), arena.take(20), arena.take(30)
    assert (first, second, third, arena.top) == (1000, 1010, 1030, 1060)
    arena.give_back(second, 20)
    assert arena.take(5) == 1010
    assert arena.take(16) == 1060
    arena.give_back(1060, 16)
    arena.give_back(third, 30)
    assert arena.take(90) == 1015, "holes that touch are one, and the last one grows"
    assert arena.top == 1105


def test_the_command_line_writes_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("snapshot_net.py").write_text(NET)
    arguments = ["snapshot_net.py", "--no-measure", "--no-verify", "-q", "--snapshot", "memory.pickle"]
    assert cli.run(["optimize", *arguments]) == 0
    data = pickle.loads(Path("memory.pickle").read_bytes())
    rewritten, original = (walk(trace)[0] for trace in data["device_traces"])
    assert rewritten < original
    assert cli.run(["optimize", *arguments, "--passes", "inplace_activation"]) == 0
    assert len(pickle.loads(Path("memory.pickle").read_bytes())["segments"]) == 1, "nothing was rewritten"


CAST = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(6))

    def forward(self, x):
        for layer, norm in zip(self.layers, self.norms):
            x = x + layer(norm(x))
        return x.float().log_softmax(-1)


get_model = Net
example_inputs = torch.ones(256, 64)
"""


@pytest.mark.parametrize("compiled", [[], ["--compiled"]], ids=["eager", "compiled"])
def test_the_peaks_are_those_of_the_report(
    compiled: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("cast_net.py").write_text(CAST)
    arguments = [
        "--no-measure",
        "--no-verify",
        "-q",
        "--amp",
        "bf16",
        "--budget",
        "min",
        "--optimizer",
        "sgd",
        *compiled,
    ]
    assert cli.run(["optimize", "cast_net.py", *arguments, "--snapshot", "memory.pickle", "--json", "-"]) == 0
    said = json.loads(capsys.readouterr().out)
    traces = pickle.loads(Path("memory.pickle").read_bytes())["device_traces"]
    assert [walk(trace)[0] for trace in traces] == [said["predicted_after"]["peak"], said["predicted_before"]["peak"]]
