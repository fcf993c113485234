"""The predicted peak of a training step against the real one, over models, batch sizes, dtypes and optimizers.

    python -m tests.benchmarks.predict FOLDER [--only resnet50 bert_base] [--deadline-s 540]

Every case becomes a row of ``FOLDER/predict.jsonl``; a stopped run resumes where it was. The prediction is made first,
without running the model; where a step depends on values, real steps are tracked instead, and the row says so. What is
real is measured in a process of its own: what is reserved depends on where segments lie, and so on all that ran before.
Loops
with a ``GradScaler`` are measured with it and predicted without: it has a few tensors of one number.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from memrewrite.api import optimize
from memrewrite.measurement.measuring import measure, predict
from memrewrite.records.errors import DataDependentError
from memrewrite.records.outcomes import Peaks
from memrewrite.simulate import Timeline, simulate
from memrewrite.workload.optimizers import OptimizerFactory
from memrewrite.workload.step import Inputs, Step
from memrewrite.workload.stepspec import amp_dtype, optimizer_factory
from tests.benchmarks.predict_models import MODELS
from tests.benchmarks.rows import PREDICT, PredictRow, append, attempt, machine, read
from tests.benchmarks.trial import clear

_FACTORIES: dict[str, OptimizerFactory] = {
    "adamw-loop": lambda parameters: torch.optim.AdamW(parameters, foreach=False),
    "adafactor": torch.optim.Adafactor,
}
ROOT = Path(__file__).resolve().parents[2]
_STEPS = 3
_TINY_BATCH = 4


@dataclass(frozen=True)
class Case:
    """One step. Parameters whose names match ``frozen`` do not train; ``budget`` is that of the rewritten model.

    ``scaled`` says that the real loop has a ``GradScaler``.
    """

    model: str
    batch: int
    amp: str = "off"
    optimizer: str = "adamw"
    frozen: str = ""
    budget: str = ""
    micro_batches: int = 1
    scaled: bool = False

    @property
    def name(self) -> str:
        """What the rows call it."""
        frozen, ours = (" frozen" if self.frozen else ""), (f" ours {self.budget}" if self.budget else "")
        parts = f" x{self.micro_batches}" if self.micro_batches > 1 else ""
        return f"{self.model} b{self.batch}{parts} {self.amp} {self.optimizer}{' scaled' * self.scaled}{frozen}{ours}"

    def build(self, tiny: bool = False) -> tuple[nn.Module, Inputs]:
        """The model, on the current default device, and its inputs."""
        torch.manual_seed(0)
        model = MODELS[self.model]
        module, inputs = model.build(tiny), model.inputs(_TINY_BATCH if tiny else self.batch, tiny)
        for name, parameter in module.named_parameters():
            if self.frozen and re.match(self.frozen, name):
                parameter.requires_grad_(False)
        return module.train(), inputs

    def step(self) -> Step:
        """The step it takes."""
        factory = _FACTORIES.get(self.optimizer) or optimizer_factory(self.optimizer)
        return Step("train", factory, None, amp_dtype(self.amp), micro_batches=self.micro_batches)


@dataclass(frozen=True)
class Scaled(Step):
    """The step of a loop with a ``GradScaler``."""

    scaler: torch.amp.GradScaler = field(default_factory=lambda: torch.amp.GradScaler(init_scale=256.0))

    def backward(self, loss: Tensor) -> None:
        """That of the scaled loss."""
        self.scaler.scale(loss).backward()

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Nothing where gradients overflow."""
        self.scaler.step(optimizer)
        self.scaler.update()


CASES = [
    Case("resnet50", 64),
    Case("resnet50", 32, optimizer="sgd"),
    Case("resnet50", 128, optimizer="adam"),
    Case("resnet50", 256, "bf16", "sgd-momentum"),
    Case("resnet50", 128, "bf16", "adamw-fused"),
    Case("resnet50", 64, frozen=r"conv1|bn1|layer[123]\."),
    Case("resnet50", 128, budget="60%"),
    Case("resnet50", 64, micro_batches=4),
    Case("efficientnet_b4", 16),
    Case("efficientnet_b4", 32, "bf16", "adam"),
    Case("efficientnet_b4", 16, budget="40%"),
    Case("densenet121", 64, optimizer="sgd-momentum"),
    Case("densenet121", 64, "bf16"),
    Case("convnext_tiny", 128, "bf16"),
    Case("convnext_tiny", 64, optimizer="adafactor"),
    Case("vit_base", 128, "bf16"),
    Case("vit_base", 64, optimizer="sgd"),
    Case("vit_base", 64, optimizer="adamw-fused"),
    Case("vit_base", 128, "bf16", frozen=r"(?!head|blocks\.1[01])"),
    Case("swin_tiny", 128, "bf16"),
    Case("swin_tiny", 64, "fp16", "adam"),
    Case("swin_tiny", 64, "fp16", "adam", scaled=True),
    Case("resnet50", 128, "fp16", "sgd-momentum", scaled=True),
    Case("unet", 4),
    Case("unet", 8, "bf16", "sgd-momentum"),
    Case("unet", 8, budget="60%"),
    Case("mobilenet_v3", 128),
    Case("vgg16", 64, optimizer="sgd-momentum"),
    Case("deeplabv3", 8, optimizer="sgd-momentum"),
    Case("fcn", 8, "bf16"),
    Case("retinanet", 4, optimizer="sgd-momentum"),
    Case("ssdlite", 32),
    Case("bert_base", 16, "bf16"),
    Case("bert_base", 8, optimizer="adamw-loop"),
    Case("bert_base", 16, "bf16", frozen=r"bert\.embeddings|bert\.encoder\.layer\.[0-7]\."),
    Case("t5_base", 8, "bf16"),
    Case("opt_125m", 8, "bf16", "sgd"),
    Case("gpt2_medium", 4, "bf16"),
    Case("gpt2_medium", 2, optimizer="adam"),
    Case("gpt2_medium", 4, "bf16", "adafactor"),
    Case("gpt2_medium", 4, "bf16", budget="60%"),
    Case("gpt2_medium", 4, "bf16", micro_batches=2),
    Case("gpt2_medium", 4, "bf16", micro_batches=2, budget="60%"),
    Case("llama_1b", 1, "bf16"),
    Case("llama_1b", 2, "bf16", "sgd"),
]


def run(case: Case, device: torch.device, tiny: bool = False) -> PredictRow:
    """Predict, measure; a case that fails is a row with the reason."""
    clear(device)
    about: dict[str, Any] = {
        "workload": case.name,
        "batch": case.batch,
        "amp": case.amp,
        "optimizer": case.optimizer,
        **machine(device),
    }
    return attempt(
        lambda: PredictRow(ok=True, **about, **_figures(case, device, tiny)),
        lambda why: PredictRow(ok=False, note=why, **about),
    )


def _figures(case: Case, device: torch.device, tiny: bool) -> dict[str, Any]:
    with device:
        module, inputs = case.build(tiny)
    step, started = case.step(), time.perf_counter()
    predicted: Peaks | Timeline
    if case.budget:
        module, predicted, note = _optimized(case, module, inputs, step)
    else:
        predicted, note = _predicted(module, inputs, step, device)
    seconds = time.perf_counter() - started
    with tempfile.TemporaryDirectory(prefix="memrewrite-") as scratch:
        file = Path(scratch) / "module.pt"
        if case.budget:
            torch.save(module, file)
        del module, inputs
        clear(device)
        command = [sys.executable, "-m", "tests.benchmarks.predict", scratch, "--device", device.type]
        command += ["--measure", json.dumps(asdict(case)), *["--tiny"] * tiny]
        answer = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    peak, held = json.loads(answer.splitlines()[-1])
    reserved = {"predicted_reserved": predicted.reserved, "reserved": held}
    return {"predicted": predicted.peak, "measured": peak, **reserved, "seconds": seconds, "note": note}


def _measure(case: Case, file: Path, device: torch.device, tiny: bool) -> tuple[int, int]:
    """The peak of the bytes allocated and of those reserved by the case's step, or by what ``file`` has."""
    with device:
        module, inputs = case.build(tiny)
    if file.exists():
        del module
        clear(device)
        module = torch.load(file, map_location=device, weights_only=False)
    step = case.step()
    measured = measure(module, inputs, Scaled(**vars(step)) if case.scaled else step, steps=_STEPS)
    return measured.peak, measured.reserved


def _optimized(case: Case, module: nn.Module, inputs: Inputs, step: Step) -> tuple[nn.Module, Peaks, str]:
    optimized = optimize(
        module,
        inputs.args,
        example_kwargs=inputs.kwargs,
        budget=case.budget,
        optimizer=step.optimizer,
        amp=step.amp,
        micro_batches=step.micro_batches,
        verify=False,
        cache=False,
    )
    return optimized, optimized.report.predicted_after, f"{len(optimized.report.segments)} segments"


def _predicted(module: nn.Module, inputs: Inputs, step: Step, device: torch.device) -> tuple[Timeline, str]:
    workspace = step.target.workspace_bytes(device, step.amp, step.mode)
    try:
        return simulate(module, inputs, step, workspace_bytes=workspace), ""
    except DataDependentError:
        return predict(module, inputs, step, workspace_bytes=workspace), "depends on values: real steps tracked"


def main() -> int:
    """Run the cases that the file lacks; see the module docstring."""
    parser = argparse.ArgumentParser(description="Predicted against measured peaks.")
    parser.add_argument("folder", type=Path, help="where predict.jsonl is kept and resumed from")
    parser.add_argument("--only", nargs="+", choices=MODELS, help="run these models only")
    parser.add_argument("--deadline-s", type=float, default=float("inf"), help="start no case after that many seconds")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny models of the same families")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        case = Case(**json.loads(options.measure))
        print(json.dumps(_measure(case, options.folder / "module.pt", torch.device(options.device), options.tiny)))
        return 0
    end, path = time.monotonic() + options.deadline_s, options.folder / PREDICT
    for case in CASES:
        wanted = options.only is None or case.model in options.only
        if wanted and time.monotonic() < end and case.name not in {row.workload for row in read(path, PredictRow)}:
            append(path, run(case, torch.device(options.device), options.tiny))
    return 0


if __name__ == "__main__":
    sys.exit(main())
