"""Training frameworks that train in two processes: the examples under torchrun, and what could go wrong around them.

    pip install -e ".[lightning,transformers]"
    python -m pytest tests/integrations/test_in_processes.py -m "slow or not slow"

Sharding on the CPU takes a word to accelerate, which lets processes there do DDP alone.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations.test_integrations import EXAMPLES, need

LAUNCH = ["-m", "torch.distributed.run", "--standalone", "--local-addr=localhost", "--nproc-per-node=2"]
RUNS = {
    "fsdp": ("", []),
    "accelerate": ("accelerate", []),
    "accelerate, bf16": ("accelerate", ["--amp=bf16"]),
    "accelerate, ddp": ("accelerate", ["--strategy=ddp"]),
    "accelerate, ddp, bf16": ("accelerate", ["--strategy=ddp", "--amp=bf16"]),
    "transformers": ("transformers", []),
    "transformers, bf16": ("transformers", ["--amp=bf16"]),
    "transformers, sharded": ("transformers", ["--fsdp"]),
    "transformers, sharded, bf16": ("transformers", ["--fsdp", "--amp=bf16"]),
    "lightning": ("lightning", []),
    "lightning, sharded": ("lightning", ["--fsdp"]),
    "lightning, sharded, bf16": ("lightning", ["--fsdp", "--amp=bf16"]),
}


def run_in_two(*script: str) -> str:
    """What a script prints under torchrun."""
    path = os.pathsep.join([str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, *LAUNCH, *script]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=EXAMPLES.parent, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", RUNS)
def test_example_trains_alike_in_less(name: str) -> None:
    library, arguments = RUNS[name]
    need(library)
    said = run_in_two(f"examples/train_{name.partition(',')[0]}.py", *arguments)
    figures = re.search(r"peak ([\d.]+) MB, rewritten ([\d.]+) MB", said)
    assert figures, said
    before, after = map(float, figures.groups())
    assert after < 0.75 * before


MESHES = {"ddp": "ddp=2,bucket-cap-mb=25,find-unused-parameters", "fsdp": "fsdp=2"}


@pytest.mark.parametrize("strategy", MESHES)
def test_a_trainer_says_its_mesh_and_saves_what_it_trained(strategy: str, tmp_path: Path) -> None:
    need("transformers")
    said = run_in_two("-m", "tests.support.trainers", strategy, str(tmp_path)).splitlines()[-1]
    mesh = MESHES[strategy]
    assert said.startswith(f"{mesh} rewritten Verified in each process of the mesh {mesh}; ")
    assert said.endswith("Planned for input_ids of (4, 32), the longest texts of the dataset.")
