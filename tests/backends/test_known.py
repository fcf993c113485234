"""Steps of several graphs that a process settled: the next one asks for the same at once."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memrewrite.backends.partition import Partition
from tests.backends.test_later_graphs import Late, Stack, Three, X, called, of_logits, trained

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo's own, where it resumes


class Some(Stack):
    """Of its blocks some run."""

    used = 2

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[: self.used]:
            x = block(x)
            torch._dynamo.graph_break()
        return of_logits(self.head(x))


def figures(report: Any) -> list[tuple[int, int]]:
    return sorted((graph.peak, graph.peak_before) for graph in report.graphs)


@pytest.mark.parametrize("budget", ["80%", "min"])
@pytest.mark.parametrize("kind", [Three, Stack, Late])
def test_what_was_settled_is_asked_for_at_once(kind: type[nn.Module], budget: str, partitions: list[Partition]) -> None:
    torch.manual_seed(0)
    model = kind()
    expected, report = trained(model, X, budget)
    partitions.clear()
    losses, again = trained(model, X, budget)
    assert len(partitions) == len(again.graphs) == len(report.graphs) > 1
    assert all(partition.known for partition in partitions)
    assert figures(again) == figures(report)
    assert all(map(torch.equal, losses, expected))


def test_a_step_that_begins_alike_and_goes_on_otherwise_is_settled_anew(
    partitions: list[Partition], notes: Path
) -> None:
    torch.manual_seed(0)
    model = Some()
    before = trained(model, X, "70%")[1]
    model.used = 3
    (name,) = notes.iterdir()
    there = name.read_text()
    name.unlink()
    expected, report = trained(model, X, "70%")
    name.write_text(there)
    partitions.clear()
    losses, again = trained(model, X, "70%")
    assert partitions[0].known
    assert figures(again) == figures(report) != figures(before)
    assert all(map(torch.equal, losses, expected))


@pytest.mark.usefixtures("partitions")
def test_a_step_of_one_call_that_had_several_is_settled_as_if_nothing_were_known() -> None:
    expected = called("60%", 1, 1, 1)
    called("60%", 3, 3, 3)
    (graph,) = called("60%", 1, 1, 1).graphs
    assert (graph.peak, graph.peak_before) == (expected.peak, expected.graphs[0].peak_before)
    assert called("60%", 1, 1, 1) == expected  # the note was wrong and is gone


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"told": {}, "calls": [], "parts": {"a": {}}}', "\udcff"])
def test_what_is_damaged_is_found_anew(damage: str, partitions: list[Partition], notes: Path) -> None:
    torch.manual_seed(0)
    model = Three()
    report = trained(model, X, "70%")[1]
    (name,) = notes.iterdir()
    there = name.read_text()
    name.write_bytes(damage.encode(errors="surrogateescape"))
    partitions.clear()
    assert figures(trained(model, X, "70%")[1]) == figures(report)
    assert not partitions[0].known
    assert name.read_text() == there


PROGRAM = """
import memrewrite, torch
from memrewrite.backends import entry
class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = (torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3))) for _ in range(2))
        self.register_buffer("mix", torch.eye(8))
    def forward(self, x):
        x = x @ self.mix  # has no backward
        torch._dynamo.graph_break()
        x = self.one(x)
        torch._dynamo.graph_break()
        return self.other(x)
compiled = torch.compile(Two(), backend=entry.memrewrite, options={"budget": "90%", "optimizer": "sgd"})
for _ in range(2):
    compiled(torch.ones(64, 8)).backward(torch.ones(64, 8))
report = memrewrite.report_of(compiled)
print(*(graph.choice for graph in report.graphs), report.peak is not None)
"""


def test_another_process_finds_all_graphs(tmp_path: Path) -> None:
    """What stayed as it was first compiled, with its plans, gets into the cache in the second."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    for _ in range(3):
        command = [sys.executable, "-c", PROGRAM]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "no backward from cache from cache True"
