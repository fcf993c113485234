"""Budgets in the loops people write: each model at a 50 % plan, its peak in a loop written by hand against the budget.

    python -m tests.benchmarks.loops rows               # on CUDA, within four minutes; rows/loops.jsonl
    python -m tests.benchmarks.loops rows --tiny --device cpu

The loops are those of ``tests/loops.py``, which know nothing of memrewrite. A budget is half of what the model takes in
that loop above what no plan lowers (parameters, gradients, optimizer state, batches). Prints budget, predicted and
measured peak, and what no case had time for.
"""

import argparse
import copy
import gc
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import memrewrite
from memrewrite.records.errors import BudgetInfeasibleError
from memrewrite.records.options import short_bytes
from memrewrite.records.report import Report
from memrewrite.simulate.fake.copier import tensors_of
from memrewrite.targets.allocator import rounded
from memrewrite.torch_internals.cuda import clear_cublas_workspaces
from tests.benchmarks import rows
from tests.benchmarks.models import WORKLOADS, example
from tests.support import loops

LOOPS = "loops.jsonl"
_SECONDS = 230.0
_STEPS = 6
_FIXED = ("parameters", "buffers", "inputs", "gradients", "optimizer state", "average of the weights")


@dataclass(frozen=True, kw_only=True)
class LoopRow(rows.Row):
    """One model in one loop: bytes of the original's predicted peak, the budget, the plan's peak and the real one."""

    loop: str
    original: int | None = None
    budget: int | None = None
    predicted: int | None = None
    measured: int | None = None
    habits: dict[str, int] | None = None
    seconds: float | None = None


class Block(nn.Module):
    """GPT-2's, with causal attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(width // 64, 1)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class LanguageModel(nn.Module):
    """Like GPT-2, whose logits are the largest tensor."""

    def __init__(self, words: int, width: int, depth: int, length: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        return self.head(self.norm(self.blocks(self.words(ids) + self.places(places))))


def of_tokens(output: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy over all tokens."""
    return F.cross_entropy(output.flatten(0, 1), y.flatten())


@dataclass(frozen=True)
class Case:
    """A model in training, of its true size or tiny: the module, a batch, and the criterion of (output, target)."""

    module: nn.Module
    x: Tensor
    y: Tensor
    criterion: loops.Criterion


def _unet(tiny: bool) -> Case:
    size, batch = (32, 2) if tiny else (256, 16)
    module = example("unet").UNet(base=4 if tiny else 64, levels=2 if tiny else 4, classes=4)
    return Case(module, torch.randn(batch, 3, size, size), torch.randint(4, (batch, size, size)), F.cross_entropy)


def _language_model(tiny: bool) -> Case:
    words, length, batch = (160, 32, 8) if tiny else (50257, 1024, 8)
    module = LanguageModel(words, 32, 4, length) if tiny else LanguageModel(words, 768, 12, length)
    return Case(module, torch.randint(words, (batch, length)), torch.randint(words, (batch, length)), of_tokens)


def _resnet(tiny: bool) -> Case:
    batch = 4 if tiny else 128
    workload = WORKLOADS["resnet50"]
    (x,) = workload.inputs(batch, tiny).args
    module = workload.build(tiny)
    with torch.no_grad():
        classes = copy.deepcopy(module).eval()(x[:1]).shape[1]
    return Case(module, x, torch.randint(classes, (batch,)), F.cross_entropy)


CASES: dict[str, Callable[[bool], Case]] = {"unet": _unet, "language model": _language_model, "resnet50": _resnet}


def run(name: str, loop: str, device: torch.device, tiny: bool) -> LoopRow:
    """Plan for half of what is above the floor, then run the loop."""
    torch.manual_seed(0)
    with torch.device(device):
        case = CASES[name](tiny)
    case.module.train()
    started = time.perf_counter()
    about: dict[str, Any] = {"workload": name, "batch": len(case.x), "amp": "off", "optimizer": "adamw", "loop": loop}
    about |= rows.machine(device)
    loss_fn = partial(_loss, case.criterion, case.y)
    optimize = partial(memrewrite.optimize, case.module, case.x, loss_fn=loss_fn, loop=loop, verify=False, cache=False)
    before = memrewrite.estimate(case.module, case.x, loss_fn=loss_fn, loop=loop).peak
    fixed = sum(before.categories.get(category, 0) for category in _FIXED)
    budget = fixed + (before.bytes - fixed) // 2
    try:
        optimized = optimize(budget=budget)
    except BudgetInfeasibleError as error:
        budget = int(1.02 * error.lowest)
        optimized = optimize(budget=budget)
    report: Report = optimized.report
    # Batches come from the host, as they do in training, so that none is on the device but those the loop holds.
    x, y, criterion = case.x.cpu(), case.y.cpu(), case.criterion
    del case, loss_fn, optimize
    return LoopRow(
        **about,
        ok=True,
        original=before.bytes,
        budget=budget,
        predicted=report.predicted_after.peak,
        measured=measured(loops.LOOPS[loop], optimized, criterion, x, y, device),
        habits={habit.words: habit.bytes for habit in report.habits},
        seconds=time.perf_counter() - started,
    )


def _loss(criterion: loops.Criterion, y: Tensor, output: Any) -> Tensor:
    return criterion(output, y)


def measured(
    loop: loops.Loop, module: nn.Module, criterion: loops.Criterion, x: Tensor, y: Tensor, device: torch.device
) -> int:
    """The real peak in bytes from the second forward on; on CUDA, without what else was allocated before."""
    if device.type != "cuda":
        return loops.peak_of(loop, module, torch.optim.AdamW, criterion, x, y)
    gc.collect()
    torch.cuda.synchronize(device)
    clear_cublas_workspaces()
    torch.cuda.empty_cache()
    owned = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_of(module)}
    others = torch.cuda.memory_allocated(device) - sum(map(rounded, owned.values()))
    forwards = itertools.count(1)

    def begin(module: nn.Module, args: Any) -> None:
        if next(forwards) == 2:
            torch.cuda.reset_peak_memory_stats(device)

    handle = module.register_forward_pre_hook(begin)
    batches = ((x.to(device), y.to(device)) for _ in range(_STEPS))
    loop(module, torch.optim.AdamW(module.parameters()), criterion, batches)
    handle.remove()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - others


def main() -> None:
    """Each case in turn, the tutorial's loop of all models first, until the time is over."""
    parser = argparse.ArgumentParser(description="Peaks of plans in loops written by hand, against their budgets.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small models")
    parser.add_argument("--only", nargs="+", choices=CASES, default=[*CASES], help="these models only")
    parser.add_argument("--seconds", type=float, default=_SECONDS, help="start no case after so many")
    options = parser.parse_args()
    end = time.perf_counter() + options.seconds
    left = []
    for loop, name in itertools.product(loops.LOOPS, options.only):
        if time.perf_counter() > end:
            left.append(f"{name}, {loop}")
            continue
        row = rows.attempt(
            partial(run, name, loop, torch.device(options.device), options.tiny), partial(_failed, name, loop)
        )
        rows.append(options.folder / LOOPS, row)
        gc.collect()
        print(f"{name}, {loop}: {_words(row)}", flush=True)
    if left:
        print(f"No time was left for: {'; '.join(left)}")


def _failed(name: str, loop: str, why: str) -> LoopRow:
    return LoopRow(workload=name, batch=0, amp="off", optimizer="adamw", loop=loop, ok=False, note=why)


def _words(row: LoopRow) -> str:
    if not row.ok or row.budget is None or row.predicted is None or row.measured is None:
        return row.note
    spare = 100 * (row.measured / row.budget - 1)
    figures = (f"{what} {short_bytes(size)}" for what, size in [("budget", row.budget), ("predicted", row.predicted)])
    return f"{', '.join(figures)}, measured {short_bytes(row.measured)} ({spare:+.2f} %)"


if __name__ == "__main__":
    main()
