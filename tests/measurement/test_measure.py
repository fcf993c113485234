"""Measuring tells the real peak, puts everything back, and survives whatever happens to its child."""

import contextlib
import copy
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memrewrite.measurement import ahead
from memrewrite.measurement.measuring import Loader, measure, measure_in_child, out_of_memory, preserved_state
from memrewrite.process import child
from memrewrite.records.errors import CaptureError, MeasurementError, TargetError, UsageError
from memrewrite.simulate import simulate
from memrewrite.targets.compiled import CompiledTarget
from memrewrite.workload.step import PHASES, Inputs, Step
from memrewrite.workload.stepspec import StepSpec
from tests.support.models import MODELS, make

TARGET = """
    import os, signal, sys, time
    import torch
    from torch import nn

    class Tiny(nn.Linear):
        def __init__(self):
            super().__init__(8, 8)

        def forward(self, x):
            print("noise from the model")
            return super().forward(x)

    class Killed(Tiny):
        def forward(self, x):
            os.kill(os.getpid(), signal.SIGKILL)

    class Broken(Tiny):
        def forward(self, x):
            raise ValueError("no such thing")

    class Slow(Tiny):
        def forward(self, x):
            if os.fork() == 0:
                time.sleep(600)
            open("pids", "w").write(f"{os.getpid()}")
            time.sleep(600)

    def get_inputs():
        return torch.ones(4, 8)

    def squared(output):
        return output.square().sum()
"""


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("tiny_target.py").write_text(textwrap.dedent(TARGET))
    return "tiny_target.py"


@pytest.mark.parametrize("mode", ["train", "inference"])
@pytest.mark.parametrize("model", MODELS)
def test_measured_peak_is_the_simulated_one(model: str, mode: Any) -> None:
    module, inputs = make(model)
    step = Step(mode, torch.optim.AdamW)
    measured = measure(module, inputs, step, steps=1)
    simulated = simulate(module, inputs, step)
    assert (measured.peak, measured.reserved, measured.phases) == (simulated.peak, simulated.peak, simulated.phases)
    assert measured.step_ms > 0
    assert measured.device == "cpu"


class Stateful(nn.Module):
    steps: Tensor
    expanded: Tensor

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(4)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("expanded", torch.ones(1).expand(4))
        self.calls = 0
        self.seen: list[Tensor] = []
        self.fails = fails

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.steps = self.steps + 1
        self.seen.append(x)
        self.bn.eval()
        self.late = torch.ones(1)
        random.random()  # noqa: S311
        x.add_(1)
        if self.fails and self.calls == 2:
            raise ValueError("on purpose")
        return nn.functional.dropout(self.bn(x)) * self.expanded


@pytest.mark.parametrize("fails", [False, True], ids=["success", "exception"])
def test_everything_is_put_back(fails: bool) -> None:
    module = Stateful(fails)
    x = torch.randn(3, 4)
    gradient = module.bn.weight.grad = torch.full((4,), 7.0)
    before, x_before = copy.deepcopy(module.state_dict()), x.clone()
    names, buffer = list(vars(module)), module.steps
    state, python = torch.get_rng_state(), random.getstate()
    with pytest.raises(ValueError, match="on purpose") if fails else contextlib.nullcontext():
        measure(module, Inputs((x,), {}), Step(optimizer=torch.optim.AdamW), steps=1)
    assert module.bn.weight.grad is gradient
    assert torch.equal(gradient, torch.full((4,), 7.0))
    assert module.bn.bias.grad is None
    assert module.steps is buffer
    assert (module.calls, module.seen, module.bn.training, list(vars(module))) == (0, [], True, names)
    assert torch.equal(x, x_before)
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == python
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


def test_resized_storage_is_put_back() -> None:
    module = nn.Linear(2, 2)
    weight = module.weight.detach().clone()
    with preserved_state(module, Inputs((), {})):
        module.weight.untyped_storage().resize_(0)
    assert torch.equal(module.weight, weight)


def test_what_waits_on_the_cpu_is_put_back_bit_for_bit() -> None:
    storage = torch.randn(1000).untyped_storage()
    saved = ahead.on_cpu(storage)
    assert saved.nbytes() == storage.nbytes()
    assert saved.data_ptr() != storage.data_ptr()
    assert bytes(saved) == bytes(storage)


class Huge(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).expand(2**40, *x.shape).contiguous()


def test_out_of_memory_is_one_sentence() -> None:
    with pytest.raises(
        MeasurementError, match="The training step of Huge ran out of memory on cpu; set a lower budget"
    ):
        measure(Huge(8, 8), Inputs((torch.ones(4, 8),), {}), Step())


def test_out_of_memory_error_of_the_device_is_named() -> None:
    class Full(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")

    with pytest.raises(MeasurementError, match="The training step of Full ran out of memory"):
        measure(Full(2, 2), Inputs((torch.ones(1, 2),), {}), Step())
    assert out_of_memory("It", "cpu").startswith("It ran out of memory on cpu;")


def test_other_devices_are_refused() -> None:
    with pytest.raises(UsageError, match="cannot be measured on meta"):
        measure(nn.Linear(2, 2, device="meta"), Inputs((), {}), Step())


def test_compiled_steps_are_measured_on_cuda_only() -> None:
    with pytest.raises(UsageError, match="measured on CUDA only"):
        measure(nn.Linear(2, 2), Inputs((torch.ones(1, 2),), {}), Step(target=CompiledTarget()))


def test_child_round_trip(target: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    loader = Loader(f"{target}:Tiny", ("2x8",), batch_size=6, seed=3)
    step = StepSpec("train", "sgd-momentum", "tiny_target:squared", "bf16")
    measured = measure_in_child(loader, step, timeout_s=120, steps=1)
    monkeypatch.syspath_prepend(str(Path.cwd()))
    path = [*sys.path]
    spec = step.build()
    assert sys.path == path
    del sys.modules["tiny_target"]
    here = simulate(nn.Linear(8, 8), Inputs((torch.ones(6, 8),), {}), spec)
    assert (measured.peak, measured.phases) == (here.peak, here.phases)
    assert [name for name, _ in measured.phases] == [*PHASES, *PHASES]
    output, errors = capfd.readouterr()
    assert output == ""
    assert "noise from the model" in errors


@pytest.mark.parametrize(
    ("attribute", "device", "error", "sentence"),
    [
        ("Killed", "cpu", MeasurementError, "killed by SIGKILL, as the system does when the host runs out of memory"),
        ("Broken", "cpu", CaptureError, r"fails on the example inputs with ValueError: no such thing \(at tiny_target"),
        ("Tiny", "gpu", UsageError, "Device 'gpu' is unknown"),
    ],
    ids=["killed", "raised", "device"],
)
def test_failure_of_the_child_is_one_sentence(
    target: str, attribute: str, device: str, error: type, sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        measure_in_child(Loader(f"{target}:{attribute}", device=device), StepSpec(), timeout_s=120)


@pytest.mark.parametrize(
    ("output", "status", "error", "sentence"),
    [
        ("", -signal.SIGABRT, MeasurementError, "killed by SIGABRT"),
        ("", 3, MeasurementError, "ended with status 3 and no answer"),
        ("half an ans", 0, MeasurementError, "ended with status 0 and no answer"),
        ('{"error": ["TargetError", "no model there"]}', 0, TargetError, "no model there"),
        ('{"error": ["SomethingNew", "sentence"]}', 0, MeasurementError, "sentence"),
    ],
)
def test_what_a_child_leaves_behind(output: str, status: int, error: type, sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        child._answer(output, status)


def gone(group: int) -> bool:
    """Whether every process of ``group`` ends within a few seconds; zombies waiting for a parent count as ended."""
    for _ in range(100):
        states = subprocess.run(["ps", "-o", "stat=", "-g", str(group)], capture_output=True, text=True)  # noqa: S607
        if all(line.startswith("Z") for line in states.stdout.split()):
            return True
        time.sleep(0.05)
    return False


def started() -> int:
    """The process that the slow target runs in, once it does."""
    for _ in range(1200):
        with contextlib.suppress(FileNotFoundError, ValueError):
            return int(Path("pids").read_text())
        time.sleep(0.05)
    raise TimeoutError("the slow target never ran")


def test_timeout_ends_the_child(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    children = []

    class Recorded(subprocess.Popen[str]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            children.append(self)

    monkeypatch.setattr(subprocess, "Popen", Recorded)
    with pytest.raises(MeasurementError, match=r"no answer within 0\.2 s and was ended"):
        measure_in_child(Loader(f"{target}:Slow"), StepSpec(), timeout_s=0.2)
    monkeypatch.undo()
    assert children[0].returncode == -signal.SIGKILL
    assert gone(children[0].pid)


def test_interrupt_ends_the_child_with_all_it_started_and_is_raised_again(target: str) -> None:
    def interrupt() -> None:
        started()
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        measure_in_child(Loader(f"{target}:Slow"), StepSpec(), timeout_s=120)
    thread.join()
    assert gone(started())


def test_child_ends_when_its_parent_is_killed(target: str) -> None:
    loader = asdict(Loader(f"{target}:Slow"))
    job = {"kind": "measure", "device": "cpu", "loader": loader, "step": StepSpec().to_json(), "steps": 1}
    code = (
        "import json, sys; from memrewrite.process import child; child.run_job(json.loads(sys.argv[1]), timeout_s=120)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen([sys.executable, "-c", code, json.dumps(job)], env=environment)
    measuring = started()
    parent.kill()
    parent.wait()
    for _ in range(100):
        with contextlib.suppress(ProcessLookupError):
            os.kill(measuring, 0)
            time.sleep(0.05)
            continue
        break
    else:
        pytest.fail("the measuring process outlived its parent")
    with contextlib.suppress(ProcessLookupError):
        os.killpg(measuring, signal.SIGKILL)


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        (
            StepSpec(optimizer="lion"),
            "Optimizer 'lion' is unknown; choose none, sgd, sgd-momentum, adam, adam-fused, adam-grouped, adamw, "
            "adamw-fused or adamw-grouped",
        ),
        (StepSpec(optimizer="torch.optim:Lion"), "The optimizer 'torch.optim:Lion' cannot be found"),
        (StepSpec(optimizer="torch:pi"), "is of type float, which cannot be called"),
        (StepSpec(loss="no_such_module:fn"), "The loss 'no_such_module:fn' cannot be found"),
        (StepSpec(loss="fn"), "The loss 'fn' is not of the form module:function"),
        (StepSpec(amp="int8"), "Precision 'int8' is unknown; choose off, bf16 or fp16"),
        (StepSpec(mode="test"), "Mode 'test' is unknown; choose train or inference"),  # type: ignore[arg-type]
    ],
)
def test_step_names_that_mean_nothing(spec: StepSpec, sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        spec.build()
    assert sentence in str(caught.value)


def test_step_spec_round_trip_and_factories() -> None:
    spec = StepSpec("train", "torch.optim:RMSprop", "torch:sum", "fp16")
    assert StepSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    step = spec.build()
    assert (step.optimizer, step.loss_fn, step.amp) == (torch.optim.RMSprop, torch.sum, torch.float16)
    momentum = StepSpec(optimizer="sgd-momentum").build().make_optimizer(nn.Linear(2, 2))
    assert momentum is not None
    assert momentum.defaults["momentum"] == 0.9
    assert StepSpec(optimizer="none").build().optimizer is None
