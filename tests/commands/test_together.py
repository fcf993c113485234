"""``memrewrite optimize --mesh`` in several processes, as torchrun starts them: one answer, and one end."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from memrewrite import cli

DEADLINE_S = 300  # seconds, where other work runs beside
NET = """
import os
import torch
from torch import nn

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        y = self.up(x)
        return self.down(y * torch.sigmoid(y))

class Net(nn.Module):
    tp_plan = {"layers.*.up": "colwise_gather_output"}

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

def get_model():
    if os.environ["RANK"] == os.environ.get("BROKEN"):
        raise ValueError("no weights here")
    return Net()

def get_inputs(batch_size=256):
    return torch.randn(batch_size, 16)

def loss(output):
    if os.environ["RANK"] == "1":
        if os.environ["BROKEN"] == "killed":
            os._exit(9)
        raise ValueError("no loss here")
    return output.square().mean()
"""
QUICK = ["--budget", "min", "--passes", "swish", "--no-verify", "--no-measure", "--device", "cpu"]
SEGMENTS = ["--passes", "checkpoint_segments", "--json", "-", "--verify", "--measure"]


def launched(folder: Path, *options: str, broken: str = "", count: int = 2) -> tuple[list[int], list[str], list[str]]:
    """The exit codes of the processes that run the command together, what each printed, and what each told."""
    (folder / "net.py").write_text(NET)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    together = {"WORLD_SIZE": str(count), **address}
    command = [sys.executable, "-m", "memrewrite", "optimize", "net.py", *QUICK, *options]
    processes = [
        subprocess.Popen(
            command,
            env={**os.environ, **together, "RANK": str(rank), "LOCAL_RANK": str(rank), "BROKEN": broken},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        said = [process.communicate(timeout=DEADLINE_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()  # or warnings of open pipes reach another test
    return [process.returncode for process in processes], *map(list, zip(*said, strict=True))  # type: ignore[return-value]


def test_the_first_process_answers_for_both(tmp_path: Path) -> None:
    codes, out, told = launched(tmp_path, "--mesh", "ddp=2", "-o", "out", "--json", "-", "--verbose")
    assert codes == [0, 0], told
    assert out[1] == told[1] == ""
    assert json.loads(out[0])["written"] == "out"
    assert (tmp_path / "out" / "memrewrite_model.py").is_file()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    assert "plan" in told[0]


@pytest.mark.parametrize(("mesh", "count"), [("tp=2", 2), ("fsdp=2", 2), ("fsdp=2,tp=2", 4)])
def test_a_plan_is_the_same_with_and_without_the_other_processes(
    mesh: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--mesh", mesh, *SEGMENTS]
    codes, out, told = launched(tmp_path, *options, "-o", "out", count=count)
    assert codes == [0] * count, told
    assert {*out[1:], *told[1:]} == {""}
    found = json.loads(out[0])
    assert found["config"]["mesh"] == mesh
    proved, measured = found["notes"][-2:]
    assert proved.startswith(f"Verified in each process of the mesh {mesh}; this one: bit-equal")
    assert measured == f"Not measured: one process cannot take its part of a step in {mesh}, which is predicted."
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "0")
    assert cli.run(["optimize", "net.py", *QUICK, *options, "-o", "alone"]) == 0
    capsys.readouterr()
    together, alone = (Path(folder, "memrewrite_model.py").read_text() for folder in ("out", "alone"))
    assert together == alone
    assert ("divided='layers.0.up.weight'" in alone) == ("tp" in mesh)


@pytest.mark.parametrize(
    ("options", "broken", "code", "sentence"),
    [
        (["--mesh", "fsdp=1,tp=2"], "1", 2, "no weights here"),
        (["--mesh", "fsdp=2", "--budget", "1KB"], "", 6, "No plan fits 1000 B"),
        (["--mesh", "ddp=2", "--png", "out.png", "-o", "."], "", 2, "exists"),
        (
            ["--mesh", "ddp=2", "--verify", "--loss", "net:loss", "-o", "out"],
            "",
            5,
            "Process 1 failed while the rewritten model was verified in the mesh ddp=2: ValueError: no loss here.",
        ),
        (
            ["--mesh", "fsdp=2", "--passes", "checkpoint_segments", "--verify", "--loss", "net:loss"],
            "",
            5,
            "Process 1 failed while the rewritten model was verified in the mesh fsdp=2: ValueError: no loss here.",
        ),
    ],
    ids=["one process alone", "budget", "place", "proof", "proof of shards"],
)
def test_an_error_ends_both_and_is_told_once(
    options: list[str], broken: str, code: int, sentence: str, tmp_path: Path
) -> None:
    codes, out, told = launched(tmp_path, *options, broken=broken)
    assert codes == [code, code], told
    assert out == ["", ""]
    assert told[1] == ""
    assert told[0].startswith("memrewrite: ")
    assert sentence in told[0]


def test_a_process_that_is_killed_ends_the_other(tmp_path: Path) -> None:
    options = ["--mesh", "ddp=2", "--verify", "--loss", "net:loss", "-o", "out"]
    codes, out, told = launched(tmp_path, *options, broken="killed")
    assert codes == [5, 9]
    assert out == ["", ""]
    assert told[0] == "memrewrite: A process ended while the rewritten model was verified in the mesh.\n"


ALONE = """
import os
from memrewrite.commands import together

def work(ready):
    import torch.distributed.nn.functional
    ready()
    return 0

assert together.run("ddp=1", work) == 0
print(*(open(f"/proc/self/task/{thread}/comm").read().strip() for thread in os.listdir("/proc/self/task")))
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are not listed here")
def test_no_thread_of_the_group_is_left(tmp_path: Path) -> None:
    alone = {"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run([sys.executable, "-c", ALONE], env={**os.environ, **alone}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not [name for name in done.stdout.split() if "gloo" in name or "store" in name]


@pytest.mark.parametrize(("mesh", "size"), [("ddp=8", 8), ("fsdp=4", 4), ("fsdp=2,tp=2", 4), ("fsdp=2,replicas=2", 4)])
def test_a_mesh_of_other_processes(
    mesh: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NET)
    for name, value in {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert cli.run(["optimize", "net.py", *QUICK, "--mesh", mesh]) == 2
    assert f"A launcher started 2 processes, and the mesh {mesh} has {size}; give" in capsys.readouterr().err
