"""The supported versions of PyTorch: one range, held to what is tested; what is missing or untested is a sentence."""

import json
import re
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import pytest
import torch

from memrewrite.artifact.manifest import TORCH_MINIMUM
from memrewrite.records.errors import TorchVersionError
from memrewrite.torch_internals.versions import (
    NEWEST,
    OLDEST,
    private_imports,
    require,
    require_module,
    warn_if_untested,
)
from tests.conftest import CORE

ROOT = Path(__file__).resolve().parents[2]
TESTED = "2.11 to 2.15"
# One process imports PyTorch; a fork of it for each spoiled seam says how the command ends there, and on which words.
BROKEN = """
import json, os, sys
import torch
spoils, target = json.loads(sys.argv[1]), sys.argv[2]
for spoil in spoils:
    sys.stdout.flush()
    child = os.fork()
    if not child:
        os.dup2(1, 2)
        exec(spoil)
        from memrewrite.cli import run
        code = run(["estimate", target, "--device", "cpu", "-q"])
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)
    print("ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
MODEL = "import torch\nmodel = torch.nn.Linear(2, 2)\nexample_inputs = torch.ones(1, 2)\n"
SPOILS: dict[str, tuple[str, str]] = {
    "import of fake tensors": (
        "import torch._subclasses.fake_impls as room; del room.op_implementations_dict",
        "torch._subclasses.fake_impls.op_implementations_dict",
    ),
    "import of dispatch modes": (
        "import torch._subclasses._fake_tensor_utils as room; del room._CacheKeyState",
        "torch._subclasses._fake_tensor_utils._CacheKeyState",
    ),
    "module": ("sys.modules['torch.utils._sympy.printers'] = None", "torch.utils._sympy.printers"),
    "used by autograd nodes": ("del torch._C._current_autograd_node", "torch._C._current_autograd_node"),
    "used by dispatch modes": (
        "from torch._subclasses.fake_tensor import FakeTensorMode; del FakeTensorMode._cache_key",
        "torch._subclasses.fake_tensor.FakeTensorMode._cache_key",
    ),
}


def test_a_seam_that_is_gone_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(MODEL)
    spoils = json.dumps([spoil for spoil, _ in SPOILS.values()])
    command = [sys.executable, "-c", BROKEN, spoils, str(tmp_path / "net.py")]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ran.stdout == "".join(
        f"memrewrite: PyTorch {torch.__version__} has no {seam}, which memrewrite cannot do without; "
        f"install PyTorch {TESTED}, or a newer memrewrite.\nended with {TorchVersionError.exit_code}\n"
        for _, seam in SPOILS.values()
    )
    assert ran.stderr == ""


def test_other_errors_of_imports_keep_their_words() -> None:
    with pytest.raises(TorchVersionError, match="has no module 'torch' has no attribute 'gone'"), private_imports():
        raise AttributeError("module 'torch' has no attribute 'gone'")
    require("nn.Module", "ops.aten.add.Tensor._schema")


@pytest.mark.parametrize("name", ["torch.gone", "torch.gone.further"])
def test_a_module_that_is_imported_later_is_missed_at_once(name: str) -> None:
    with pytest.raises(TorchVersionError, match=f"has no {name},"):
        require_module(name)
    require_module("torch.utils._sympy.printers")


@pytest.mark.parametrize("version", ["2.16.0", "3.0.1+cu140", "2.100.0a0"])
def test_a_newer_version_is_told_once(version: str) -> None:
    with pytest.warns(
        UserWarning, match=rf"memrewrite is tested with PyTorch {TESTED}, and this is {re.escape(version)};"
    ):
        warn_if_untested(version)


@pytest.mark.parametrize("version", [torch.__version__, "2.11.0", "2.15.3+cu132", "unknown"])
def test_a_tested_version_is_not_worth_a_word(version: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_untested(version)


def test_the_range_is_what_is_tested_and_what_is_asked_for() -> None:
    listed = re.search(r"^versions=\((.*)\)$", (ROOT / ".ci/versions").read_text(), re.MULTILINE)
    assert listed is not None
    between = [f"{OLDEST[0]}.{minor}" for minor in range(OLDEST[1], NEWEST[1])]
    assert listed[1].split() == [*between, "newest"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = ".".join(map(str, OLDEST))
    assert f"torch>={oldest}" in project["dependencies"]
    assert oldest == TORCH_MINIMUM
    pinned = re.search(r"^torch==(\d+)\.(\d+)", (ROOT / ".ci/constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert OLDEST <= (int(pinned[1]), int(pinned[2])) <= NEWEST


def test_the_core_is_there() -> None:
    assert [name for name in CORE if not (ROOT / "tests" / name).exists()] == []
