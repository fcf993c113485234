"""Triton's kernels stay calls: in a Function, in an operator of ``torch.library``, launched by a model or its part.

Runs on CUDA, or on the CPU under ``TRITON_INTERPRET=1``, which is read as Triton is imported.
"""

import copy
import gc
import os
import pickle
import re
import subprocess
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memrewrite
from memrewrite.artifact.load import load
from memrewrite.artifact.save import save
from memrewrite.cache.description import Description
from memrewrite.records.errors import CaptureError
from memrewrite.runtime.dropin import programs
from memrewrite.runtime.promise import FallbackWarning
from memrewrite.simulate import run_tracked
from memrewrite.torch_internals.fake_tensors import in_place_of_modes
from memrewrite.workload.step import Inputs, Step

triton: Any = pytest.importorskip("triton")
kernels: Any = pytest.importorskip("tests.support.kernels")
INTERPRETED: bool = kernels.INTERPRETED
pytestmark = pytest.mark.skipif(not torch.cuda.is_available() and not INTERPRETED, reason="needs CUDA")
DEVICE = "cpu" if INTERPRETED else "cuda"
WIDTH, ROWS = kernels.WIDTH, 64 if INTERPRETED else 4096


class Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out: Tensor = kernels.launched(x)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return _slope(ctx, *gradients)


def _slope(ctx: Any, gradient: Tensor) -> Tensor:
    (out,) = ctx.saved_tensors
    slope: Tensor = gradient * out * (1 - out)
    return slope


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)


@torch.library.custom_op("memrewrite_tests::gate", mutates_args=())
def gate(x: Tensor) -> Tensor:
    found: Tensor = kernels.launched(x)
    return found


@torch.library.custom_op("memrewrite_tests::launched_gate", mutates_args=())
def launched_gate(x: Tensor) -> Tensor:
    """Launches a kernel on fake tensors, too."""
    found: Tensor = kernels.launched(x)
    return found


@torch.library.triton_op("memrewrite_tests::traced_gate", mutates_args={})
def traced_gate(x: Tensor) -> Tensor:
    found: Tensor = kernels.launched(x, torch.library.wrap_triton(kernels.sigmoid))
    return found


gate.register_fake(torch.empty_like)
launched_gate.register_fake(kernels.launched)
for operator in (gate, launched_gate, traced_gate):
    operator.register_autograd(_slope, setup_context=_keep)


class Part(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = kernels.LAUNCHES["under no_grad"](x)
        return found


CALLS = {"a Function": Gate.apply, "custom_op": gate, "launched_op": launched_gate, "triton_op": traced_gate}


class Net(nn.Module):
    """Layers with kernels between them, by ``name``."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.parts = nn.ModuleList(Part() for _ in range(6 if name == "a part" else 0))
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            hidden = torch.tanh(layer(x))
            x = x + (self.parts[i](hidden) if len(self.parts) else self._call(hidden))
        return x

    def _call(self, x: Tensor) -> Tensor:
        found: Tensor = (CALLS | kernels.LAUNCHES | kernels.OTHERS)[self.name](x)
        return found


def given(rows: int = ROWS) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1)).to(DEVICE)


def taken(module: nn.Module, x: Tensor) -> list[Tensor]:
    module.zero_grad(set_to_none=True)
    x = x.clone()
    out = module(x)
    out.square().mean().backward()
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    return [out.detach(), x, *grads, *(buffer.clone() for buffer in module.buffers())]


def same_at_all_sizes(result: nn.Module, model: nn.Module) -> None:
    """Outputs, gradients and what is written, without the original forward."""
    x = given()
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        for rows in (x, x[: ROWS // 4], x[:7]):
            assert all(map(torch.equal, taken(result, rows), taken(model, rows)))


def in_segments(result: Any) -> str:
    functions = programs(result)[""].source.split("\ndef ")
    return "".join(each for each in functions if each.startswith("segment_"))


def _possible(names: Iterable[str]) -> list[Any]:
    """The names, those that PyTorch 2.11 cannot wrap to be skipped."""
    skip = pytest.mark.skipif(not kernels.wraps(), reason="this PyTorch wraps no kernels that are interpreted")
    return [pytest.param(name, marks=[skip] * (name in ("triton_op", "wrapped"))) for name in names]


@pytest.mark.parametrize("name", _possible([*CALLS, "a part"]))
def test_kernels_are_called_in_one_plan(name: str) -> None:
    model = Net(name).to(DEVICE)
    result: Any = memrewrite.optimize(model, (given(),), budget="min")
    assert result.report.verdict.startswith("bit-equal")
    assert result.report.segments
    same_at_all_sizes(result, model)


@pytest.mark.parametrize("name", _possible(kernels.LAUNCHES))
def test_the_model_may_launch_one_itself(name: str) -> None:
    model = Net(name).to(DEVICE)
    result: Any = memrewrite.optimize(model, (given(),), budget="min")
    assert result.report.verdict.startswith("bit-equal")
    assert list(programs(result)) == [""]
    again = in_segments(result)
    assert "launch(" in again or "region_" in again
    assert any(
        note.startswith("What stays a call as the model makes it: the Triton kernel") for note in result.report.notes
    )
    same_at_all_sizes(result, model)


def test_a_grid_is_one_for_each_way_to_tune() -> None:
    source = programs(memrewrite.optimize(Net("tuned").to(DEVICE), (given(),), verify=False))[""].source
    choices = r"launch\(tuned, \[\(\{'BLOCK': 256\}, \(\w+, \), \), \(\{'BLOCK': 512\}, \(\w+, \), \)\], "
    assert len(re.findall(choices, source)) == len(Net("tuned").layers)


def test_backward_computes_with_what_a_kernel_wrote_over_what_was_kept() -> None:
    model = Net("over what is kept").to(DEVICE)
    result: Any = memrewrite.optimize(model, (given(),), budget="min")
    assert result.report.verdict.startswith("bit-equal")
    assert "sigmoid" not in in_segments(result)
    same_at_all_sizes(result, model)


def test_one_that_does_not_repeat_is_launched_once_a_step() -> None:
    result: Any = memrewrite.optimize(Net("unsteady").to(DEVICE), (given(),), budget="min", verify=False)
    assert result.report.segments
    kernels.RUNS.clear()
    taken(result, given())
    assert [True] * len(result.layers) == kernels.RUNS


class Writes(Net):
    """Its input and a buffer are written by kernels, the buffer in each layer."""

    counts: Tensor

    def __init__(self) -> None:
        super().__init__("launched")
        self.register_buffer("counts", torch.zeros(WIDTH, dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        kernels.doubled[kernels.blocks(x)](x, x.numel(), BLOCK=kernels.BLOCK)
        for layer in self.layers:
            hidden = torch.tanh(layer(x))
            kernels.counted[(x.shape[0],)](hidden, self.counts, WIDTH, BLOCK=WIDTH)
            x = x + kernels.LAUNCHES["launched"](hidden)
        return x * self.counts


def test_what_is_not_the_steps_own_is_written_once() -> None:
    model = Writes().to(DEVICE)
    result: Any = memrewrite.optimize(model, (given(),), budget="min")
    assert result.report.verdict.startswith("bit-equal")
    assert "counted" not in in_segments(result)
    twin = copy.deepcopy(model)  # the result shares the buffer
    assert result.counts is model.counts
    same_at_all_sizes(result, twin)


@pytest.mark.skipif(not INTERPRETED, reason="a real peak on CUDA has more in it")
@pytest.mark.parametrize("name", ["launched", "in place", "counts"])
def test_the_promised_peak_is_the_real_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, own = type(kernels.sigmoid), type(kernels.sigmoid).run

    def unseen(*args: Any, **kwargs: Any) -> None:
        with in_place_of_modes():
            own(*args, **kwargs)
        gc.collect()  # what Triton's interpreter leaves behind

    result: Any = memrewrite.optimize(Net(name), (given(),), budget="min", verify=False)
    monkeypatch.setattr(kind, "run", unseen)
    report, inputs, step = result.report, Inputs((given(),), {}), Step("train", torch.optim.AdamW)
    for predicted, module in ((report.predicted_before, Net(name)), (report.predicted_after, result)):
        assert run_tracked(module, inputs, step).peak == predicted.peak


def test_copies_pickles_and_artifacts_launch_it(tmp_path: Path) -> None:
    model = Net("constants").to(DEVICE)
    result = memrewrite.optimize(model, (given(),), budget="min")
    expected = taken(model, given())
    save(result, tmp_path / "saved")
    text = (tmp_path / "saved" / "memrewrite_model.py").read_text()
    assert "scaled = importlib.import_module('tests.support.kernels').scaled\n" in text
    twins = (
        copy.deepcopy(result),
        pickle.loads(pickle.dumps(result)),
        load(tmp_path / "saved", Net("constants").to(DEVICE)),
    )
    for twin in twins:
        assert all(map(torch.equal, taken(twin, given()), expected))


def _local(x: Tensor) -> Tensor:
    kernel = triton.jit(kernels.sigmoid.fn)
    kernel[(1,)](x, x, x.numel(), BLOCK=kernels.BLOCK)
    return x


def _nameless(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    act = triton.jit(kernels.half.fn)
    kernels.scaled[(1,)](x, out, None, 1.0, 1, 16, KIND="abs", TYPE=triton.language.float32, ACT=act)
    return x + out.sum()


REFUSED = {
    "local": (_local, r"Triton kernel sigmoid is launched, which .*kernels has under no name.* at the top of a module"),
    "nameless": (_nameless, r"Triton kernel scaled is given .*, a \w+Function, which no program can spell; give it"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_program_can_spell_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, words = REFUSED[name]
    monkeypatch.setitem(CALLS, name, function)
    with pytest.raises(CaptureError, match=words):
        memrewrite.optimize(Net(name).to(DEVICE), (given(),))


EDITS: dict[str, tuple[Any, str, Any]] = {
    "tuned": (kernels.tuned.configs[0], "kwargs", {"BLOCK": 128}),
    "chosen": (kernels.chosen, "values", {"BLOCK": lambda args: 128, "EVEN": lambda args: True}),
    "constants": (kernels, "half", triton.jit(kernels.doubled.fn)),
    "launched": (kernels.sigmoid, "fn", kernels.doubled.fn),
}


@pytest.mark.parametrize("name", EDITS)
def test_another_kernel_is_another_plan(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def described() -> str:
        found = Description()
        found.add("function", kernels.LAUNCHES[name])
        return found.digest()

    before = described()
    owner, attribute, value = EDITS[name]
    monkeypatch.setattr(owner, attribute, value)
    assert described() != before
    monkeypatch.undo()
    assert described() == before


_WRITTEN = """
import torch, triton
from triton.backends.compiler import GPUTarget
from memrewrite.simulate.fake.launches import parted
from memrewrite.torch_internals.triton_kernels import Launch
from tests.support import kernels

class Driver:
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

def written(kernel, *args, **kwargs):
    found, _ = parted(Launch(kernel, (1,), args, kwargs))
    return [next(i for i, arg in enumerate(args) if arg is each) for each in found]

def all_written():
    x, out, counts = torch.ones(4, 4), torch.ones(4, 4), torch.ones(4, dtype=torch.int32)
    more = {"KIND": "abs", "TYPE": triton.language.float32, "ACT": kernels.half, "num_warps": 4}
    yield written(kernels.sigmoid, x, out, 16, BLOCK=16)
    yield written(kernels.doubled, x, 16, BLOCK=16)
    yield written(kernels.counted, x, counts, 4, BLOCK=4)
    yield written(kernels.scaled, x, out, None, 0.5, 16, 16, **more)
    yield written(kernels.scaled, x, out, counts, 0.5, 16, 16, **more)
    yield written(kernels.tuned, x, out, 16)
    yield written(kernels.chosen, x, out, 16)

"""


@pytest.mark.parametrize(
    ("driver", "expected"),
    [
        ("Driver()", [[1], [0], [1], [1], [1], [1], [1]]),
        ("None", [[0, 1], [0], [0, 1], [0, 1], [0, 1, 2], [0, 1], [0, 1]]),
    ],
    ids=["with a GPU", "without"],
)
def test_what_a_kernel_writes_is_in_its_code(driver: str, expected: list[list[int]]) -> None:
    """Without a GPU Triton makes no code, and whatever a kernel is given may be written."""
    script = f"{_WRITTEN}\ntriton.runtime.driver.set_active({driver})\nassert [*all_written()] == {expected}"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["CUDA_VISIBLE_DEVICES"] = ""  # else the driver of a GPU that is there would be taken for none
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)
