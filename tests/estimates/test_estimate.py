"""An estimate is what is simulated, its parts sum up, and the batches it names fit."""

import importlib
import io
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import memrewrite
from memrewrite import cli
from memrewrite.estimates.batches import MOST, largest
from memrewrite.records.errors import CaptureError, DataDependentError, UsageError
from memrewrite.records.estimate import Estimate, Textbook
from memrewrite.report import estimate_table
from memrewrite.simulate import run_tracked, simulate
from memrewrite.simulate.fake.batch import at_batch
from memrewrite.simulate.fake.copier import tensors_of
from memrewrite.targets.allocator import rounded
from memrewrite.targets.cuda_from_cpu import CUDA_FROM_CPU, STATED_ERROR
from memrewrite.targets.workspaces import library_bytes
from memrewrite.workload.step import Inputs, Step
from tests.support.models import MODELS, ResidualNet, SwishNet, images, make

ADAMW = Step(optimizer=torch.optim.AdamW)
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def estimated(name: str, **options: Any) -> Estimate:
    module, inputs = make(name)
    return memrewrite.estimate(module, inputs.args, example_kwargs=inputs.kwargs, **options)


# The seed: 532,752 activations, 19,072,984 parameters, 180 x 50 x 1, batch 128.


@pytest.fixture
def seed(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("seed_batch_memory")


def test_the_seed_is_computed_as_it_was_by_hand_and_exactly(seed: Any) -> None:
    with torch.device("meta"):
        model = seed.get_model()
    inputs = seed.get_inputs(128)
    found = memrewrite.estimate(model, inputs)
    rule = found.textbook
    assert (rule.parameters, rule.activations, rule.inputs, rule.batch_size) == (19_072_984, 532_752, 9_000, 128)
    assert rule.as_written == 742.34
    assert rule.bytes == 4 * (3 * 19_072_984 + 128 * (2 * 532_752 + 9_000))
    assert found.peak.bytes == simulate(model, Inputs(inputs, {}), ADAMW).peak
    assert rule.bytes + sum(difference.bytes for difference in found.differences) == found.peak.bytes
    # What is known of the net: two moments of each parameter, and no weight of the optimizer besides.
    moments = found.peak.categories["optimizer state"]
    assert 0 <= moments - 2 * 4 * 19_072_984 <= 512 * 3 * 14
    # The widest error twice, 40 channels of 180 x 50 before and after ReLU's backward, and that of the loss.
    assert found.peak.categories["temporaries"] == 2 * 128 * 40 * 180 * 50 * 4 + 512
    assert (found.peak.module, found.peak.operator) == ("1", "aten.threshold_backward.default")


def test_the_rule_for_a_prediction() -> None:
    rule = Textbook(parameters=100, activations=10, inputs=5, batch_size=4, copies=1, errors=1)
    assert rule.bytes == 4 * (100 + 4 * 15)


# What sums up.


@pytest.mark.parametrize("mode", ["train", "inference"])
@pytest.mark.parametrize("model", MODELS)
def test_the_parts_make_the_whole(model: str, mode: Any) -> None:
    module, inputs = make(model)
    module.train(mode == "train")
    found = memrewrite.estimate(module, inputs.args, optimizer="sgd-momentum")
    plain = simulate(module, inputs, Step(mode, torch.optim.SGD))
    assert sum(found.peak.categories.values()) == found.peak.bytes
    assert found.textbook.bytes + sum(each.bytes for each in found.differences) == found.peak.bytes
    state = found.peak.categories.get("optimizer state", 0)
    assert found.peak.bytes - plain.peak in (0, state)  # plain SGD has none
    assert [share.path for share in found.modules] == [path for path, _ in module.named_modules()]
    assert found.modules[0].kept == sum(share.kept_alone for share in found.modules)
    assert found.inference_peak == simulate(module.eval(), inputs, Step("inference")).peak


def test_what_was_exported_cannot_be_told_to_evaluate() -> None:
    module, inputs = make("swish")
    plain = memrewrite.estimate(module.eval(), inputs.args)
    exported = torch.export.export(module, inputs.args).module()
    assert memrewrite.estimate(exported, inputs.args).inference_peak == plain.peak.bytes
    with pytest.raises(UsageError, match=r"call torch\.nn\.Module\.train\(model, False\) first"):
        memrewrite.estimate(exported, inputs.args, mode="inference")
    torch.nn.Module.train(exported, False)
    assert memrewrite.estimate(exported, inputs.args, mode="inference").peak.bytes == plain.peak.bytes


@pytest.mark.parametrize("mesh", ["ddp=4", "fsdp=4", "fsdp=4,param-dtype=bf16", "tp=2"])
def test_the_parts_make_the_whole_in_a_mesh(mesh: str) -> None:
    """Also where a process has a part of the parameters, and of their gradients and moments."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    model.tp_plan = {"0": "colwise", "2": "rowwise"}  # type: ignore[assignment]
    found = memrewrite.estimate(model, torch.ones(8, 64), mesh=mesh)
    assert found.textbook.bytes + sum(each.bytes for each in found.differences) == found.peak.bytes
    of_parts = [each.why for each in found.differences if ": each process has a part; " in each.why]
    assert len(of_parts) == (0 if mesh == "ddp=4" else 3)
    (moments,) = (each.why for each in found.differences if each.why.startswith("optimizer: "))
    assert " 2." in moments


def test_a_peak_in_the_optimizer_has_no_errors() -> None:
    found = memrewrite.estimate(nn.Linear(512, 512), torch.ones(2, 512))
    whys = [difference.why for difference in found.differences]
    assert found.peak.phase == "step"
    assert any("none is left when the optimizer works" in why for why in whys)
    assert found.textbook.bytes + sum(difference.bytes for difference in found.differences) == found.peak.bytes


def saved_bytes(module: nn.Module, inputs: Inputs) -> int:
    """What autograd really keeps of a forward, parameters, buffers and inputs left out."""
    given = {t.untyped_storage().data_ptr() for t in [*tensors_of(module), *inputs.tensors()]}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in given:
            saved[storage.data_ptr()] = rounded(storage.nbytes())
        return tensor.detach()

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = module(*inputs.args)
    del kept
    return sum(saved.values())


@pytest.mark.parametrize("model", ["residual", "swish", "transformer"])
def test_what_is_kept_for_backward_is_what_autograd_saves(model: str) -> None:
    module, inputs = make(model)
    assert estimated(model).modules[0].kept == saved_bytes(module, inputs)


def test_each_module_has_its_own_share() -> None:
    module = nn.Sequential(nn.Linear(256, 512), nn.Sigmoid(), nn.Linear(512, 128, bias=False))
    found = memrewrite.estimate(module, torch.ones(64, 256), loss_fn=lambda output: output.sum())
    shares = {share.path: share for share in found.modules}
    assert (shares["1"].kept, shares["1"].kept_per_sample, shares["1"].kind) == (64 * 512 * 4, 512 * 4, "Sigmoid")
    assert (shares["0"].kept, shares["2"].kept) == (0, 0)  # sigmoid keeps its output, which is the second one's input
    assert (shares["0"].parameters, shares["2"].parameters) == (4 * 512 * 257, 4 * 512 * 128)
    assert (shares[""].kept, shares[""].parameters) == (64 * 512 * 4, 4 * 512 * (257 + 128))


# What does not change.


def test_nothing_changes() -> None:
    module, inputs = make("residual")
    module.blocks[1].eval()  # type: ignore[index, union-attr]
    flags = [part.training for part in module.modules()]
    before = {name: value.clone() for name, value in module.state_dict().items()}
    state = torch.get_rng_state()
    memrewrite.estimate(module, inputs.args, device_memory=90_000)
    assert [part.training for part in module.modules()] == flags
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_model_without_memory() -> None:
    with torch.device("meta"):
        module = SwishNet(width=2**20, depth=2)  # 8.8 TB
    found = memrewrite.estimate(module, torch.empty(8, 2**20, device="meta"), optimizer="sgd", device_memory="20TB")
    assert found.modules[0].parameters == 2 * 4 * 2**20 * (2**20 + 1)
    assert found.fits
    assert found.device == "cpu"


def test_a_step_for_cuda_is_planned_on_the_cpu() -> None:
    module, inputs = make("transformer")
    found = memrewrite.estimate(module, inputs.args, device="cuda")
    there = simulate(module, inputs, replace(ADAMW, target=CUDA_FROM_CPU))
    assert found.peak.bytes == there.peak + library_bytes("train")
    assert f"without using it; {STATED_ERROR}" in found.notes[0]
    assert any("libraries" in difference.why for difference in found.differences)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"device_memory": "50%"},
            r"^Device memory '50%' is no number of bytes, or more than any device has; write e\.g\. 8GB or 7\.5GiB\.$",
        ),
        ({"device_memory": "8"}, "no number of bytes"),
        ({"device": "tpu9"}, "unknown"),
        ({"device": "mps"}, "not supported"),
        ({"mode": "inference"}, r"call model.eval\(\) first"),
    ],
    ids=str,
)
def test_wrong_use(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        estimated("residual", **options)


def test_a_model_that_fails_on_its_inputs() -> None:
    with pytest.raises(CaptureError, match="fails on the example inputs"):
        memrewrite.estimate(ResidualNet(), torch.ones(2, 5, 12, 12))


def test_a_step_whose_course_depends_on_values_is_taken_for_real() -> None:
    class Branch(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.sum() > 0 else x

    module = Branch(16, 16)
    found = memrewrite.estimate(module, torch.ones(8, 16), device_memory="1MB")
    assert found.peak.bytes == run_tracked(module, Inputs((torch.ones(8, 16),), {}), ADAMW).peak
    assert found.textbook.activations == 16
    assert {size.batch_size for size in found.largest} == {None}
    with pytest.raises(DataDependentError, match="cannot be simulated"):
        memrewrite.estimate(module, torch.ones(8, 16), device="cuda")


# Batches.


@pytest.mark.parametrize("memory", [200_000, 1_500_000, 40_000])
def test_the_largest_batches_fit_and_the_next_ones_do_not(memory: int) -> None:
    found = estimated("residual", device_memory=memory)
    assert found.fits == (found.peak.bytes <= memory)
    assert [size.mode for size in found.largest] == ["train", "inference"]
    for size in found.largest:
        module = ResidualNet().train(size.mode == "train")
        step = Step(size.mode, torch.optim.AdamW)  # type: ignore[arg-type]
        assert size.batch_size is not None
        assert simulate(module, images(size.batch_size + 1), step).peak > memory
        if size.batch_size:
            assert simulate(module, images(size.batch_size), step).peak == size.peak
            assert size.peak is not None
            assert size.peak <= memory
        else:
            assert "not even one" in size.why


class FixedBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).view(8, 16)


def test_a_model_that_takes_no_other_batch() -> None:
    found = memrewrite.estimate(FixedBatch(), torch.ones(8, 16), device_memory="1GB")
    assert found.modules[0].kept_per_sample is None
    assert {(size.batch_size, size.why) for size in found.largest} == {(None, "no other batch size could be simulated")}


# Peaks by batch size, and how many are looked at: few where they are lines, as a real step's are.
CURVES: dict[str, tuple[Callable[[int], int], int]] = {
    "linear": (lambda batch: 1000 + 7 * batch, 4),
    "two lines": (lambda batch: max(5000 + 2 * batch, 100 + 9 * batch), 7),
    "optimizer first": (lambda batch: max(9000, 30 * batch), 13),
    "granules": (lambda batch: 512 * -(-(1000 + 7 * batch) // 512), 30),
    "convex": (lambda batch: 100 + batch * batch // 50, 30),
    "concave": (lambda batch: 1000 + 40 * math.isqrt(batch), 35),
}


@pytest.mark.parametrize("known", [(1, 2), (64, 128), (5000, 10000)], ids=str)
@pytest.mark.parametrize("curve", CURVES)
def test_the_search(curve: str, known: tuple[int, int]) -> None:
    peak, most = CURVES[curve]
    for memory in (10, 4000, 9999, 10_000):
        found = largest("train", memory, {size: peak(size) for size in known}, peak)
        expected = next(batch for batch in range(100_000) if peak(batch + 1) > memory)
        assert found.batch_size == expected
        assert {expected + 1, expected} - {0} <= {size for size, _ in found.simulated}
        assert len(found.simulated) <= most


def test_the_search_where_nothing_bounds_it_and_where_steps_fail() -> None:
    found = largest("train", 1000, {8: 500, 16: 500}, lambda batch: 500)
    assert (found.batch_size, found.why) == (None, f"more than {MOST} samples fit")
    found = largest("train", 1000, {8: 80, 16: 160}, lambda batch: 10 * batch if batch < 40 else None)
    assert found.batch_size == 39
    assert (40, None) in found.simulated


def test_inputs_of_another_batch_need_no_memory() -> None:
    x = torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last).requires_grad_()
    ids, flag = torch.arange(4)[:, None].expand(4, 5), torch.ones(2)
    larger = at_batch(Inputs((x, {"ids": ids}), {"flag": flag, "n": 3}), 10**6)
    assert larger.args[0].is_meta
    assert larger.args[0].shape == (10**6, 3, 8, 8)
    assert larger.args[0].is_contiguous(memory_format=torch.channels_last)
    assert larger.args[0].requires_grad
    assert larger.args[1]["ids"].is_meta
    assert larger.kwargs == {"flag": flag, "n": 3}
    assert at_batch(Inputs((x, ids), {}), 6).args[1].tolist() == [[i] * 5 for i in (0, 1, 2, 3, 0, 1)]


# The command.

NET = """
import torch
from torch import nn

class SmallNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 64)
        self.second = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))

def get_inputs(batch_size=256):
    return torch.randn(batch_size, 8)
"""


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "estimated_net.py").write_text(NET)
    return "estimated_net.py"


def squeezed(capsys: pytest.CaptureFixture[str]) -> str:
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    return " ".join(out.split())


def test_the_command(net: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["estimate", net, "-q"]) == 0
    said = squeezed(capsys)
    for part in (
        "estimated_net.py:SmallNet: train step on cpu, batch 256",
        "second.1 (BatchNorm1d)",
        "4,864 parameters x 3 + (128 activations x 2 + 8 inputs) x 256",
        "numbers per parameter, not 1",
        "Inference with the same inputs, under no_grad",
    ):
        assert part in said
    assert "Device memory" not in said


def test_the_command_for_a_model_on_the_meta_device(net: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("meta_net.py").write_text(
        "from estimated_net import *\n\ndef get_model():\n    with torch.device('meta'):\n        return SmallNet()\n"
    )
    assert cli.run(["estimate", net, "-q", "--json", "-"]) == 0
    real = json.loads(capsys.readouterr().out)
    assert cli.run(["estimate", "meta_net.py", "-q", "--json", "-"]) == 0
    meta = json.loads(capsys.readouterr().out)
    assert (meta["peak"], meta["textbook"]) == (real["peak"], real["textbook"])


def test_a_tree_of_modules(net: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["estimate", net, "--depth", "1", "-q"]) == 0
    said = squeezed(capsys)
    assert "(the model itself) (SmallNet)" in said
    assert "second (Sequential)" in said
    assert "BatchNorm1d" not in said


def test_what_does_not_fit(net: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["estimate", net, "--device-memory", "200KB", "--mode", "train", "-q"]) == 1
    said = squeezed(capsys)
    assert "does not fit, over by" in said
    assert "Largest batch, train:" in said
    assert "micro-batches of" in said


def test_inference(net: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["estimate", net, "--device-memory", "1MB", "--mode", "inference", "-q"]) == 0
    said = squeezed(capsys)
    assert "uses at the peak" in said
    assert "Largest batch, inference:" in said
    assert "Largest batch, train:" not in said


def test_json(net: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.run(["estimate", net, "--device-memory", "1GB", "--device", "cuda", "--json", "-", "-q"])
    found = json.loads(capsys.readouterr().out)
    assert (code, found["exit_code"], found["schema_version"], found["fits"]) == (0, 0, 1, True)
    assert found["device"] == "cuda"
    assert found["textbook"]["bytes"] == 4 * (3 * 4864 + 256 * (2 * 128 + 8))
    assert found["command"]["device_memory"] == "1GB"
    assert [size["mode"] for size in found["largest"]] == ["train", "inference"]
    assert code == cli.run(["estimate", net, "--json", "estimate.json", "-q"])
    assert json.loads(Path("estimate.json").read_text())["peak"]["bytes"] < found["peak"]["bytes"]


def test_where_cuda_is_it_is_left_alone(
    net: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: pytest.fail("the device was used"))
    assert cli.run(["estimate", net, "--device-memory", "66MB", "-q"]) == 1
    said = squeezed(capsys)
    assert "train step on cuda" in said
    assert "without using it" in said


def test_foreign_names_steer_nothing() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module("[red]\x1b[31m", nn.Linear(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            for child in self.children():
                x = torch.sigmoid(child(x))
            return x

    found = memrewrite.estimate(Odd(), torch.ones(64, 8), device_memory=1000)
    stream = io.StringIO()
    estimate_table.show(found, Console(width=80, file=stream), depth=3)
    text = stream.getvalue()
    assert "[red]\\x1b[31m" in text
    assert "\x1b[31m" not in text
    assert str(found).startswith("Odd: train step on cpu, batch 64\nPredicted peak: ")


def test_a_model_that_is_already_optimized_is_refused() -> None:
    module, inputs = make("residual")
    optimized = memrewrite.optimize(module, inputs.args, budget="min", verify=False)
    with pytest.raises(UsageError, match="The model is already optimized: its report has the figures"):
        memrewrite.estimate(optimized, inputs.args)
