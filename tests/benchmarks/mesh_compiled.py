"""Models under FSDP2, compiled by PyTorch and by ours, block by block and as a whole: peak and step time of each GPU.

    python -m tests.benchmarks.mesh_compiled FILE.jsonl [--only llama_670m-fsdp ...] [--who eager stock ours]
        [--processes 2] [--deadline-s 500] [--tiny]

One process for each GPU (nccl; gloo on the CPU, with ``--tiny``). Every unit and then the model are sharded by
``fully_shard`` with ``MixedPrecisionPolicy(bf16, fp32)``, tiny ones in float32; ``blocks`` are units compiled one by
one (``unit.compile``), ``whole`` is the model in one ``torch.compile``. ``stock 0.0`` is PyTorch's
``activation_memory_budget``; ours have as their budget a share of the peak that ``torch.compile`` took of the same
workload and way, or reach the lowest there is. ``first`` is the peak of the first step, in which all is compiled,
``peak`` that of steady ones, both by ``torch.cuda.max_memory_allocated``, the highest of all GPUs; ``told`` is
``report_of(model).peak`` and ``measured`` what that has by the first steps; ``losses`` are those of the first steps, of
the first process. Where the deadline is passed, no further contender begins.
"""

import argparse
import json
import os
import sys
import tempfile
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import memrewrite
from memrewrite.backends import entry
from memrewrite.records.mesh import Fsdp
from memrewrite.torch_internals.fsdp import units
from tests.benchmarks.mesh import gathered, together
from tests.benchmarks.mesh_plans import Case
from tests.benchmarks.rows import machine
from tests.benchmarks.trial import Trial, clear

_POLICY = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
_CONTENDERS = (
    ("eager", "", None),
    ("stock", "blocks", 1.0),
    ("stock", "blocks", 0.0),
    ("ours", "blocks", 1.0),
    ("ours", "blocks", 0.75),
    ("ours", "blocks", "min"),
    ("stock", "whole", 1.0),
    ("ours", "whole", 1.0),
    ("ours", "whole", 0.75),
    ("ours", "whole", "min"),
)
_WHO = ["eager", "stock", "ours"]
_USUAL = ["llama_670m-fsdp", "llama_1b-fsdp"]
_SHARDED = [*_USUAL, "unet-fsdp"]  # which needs no library, and float32
_FIRST, _STEPS = 8, 8  # steps in which plans are settled, and corrected, and those that are measured after them
Row = dict[str, Any]


def compiled(model: nn.Module, who: str, way: str, budget: int | str | None, case: Case, device: torch.device) -> Any:
    """The model as a contender trains it, sharded; what is to be called."""
    options = {"budget": budget, "optimizer": case.workload.optimizer}
    by: Any = {"backend": entry.memrewrite, "options": options} if who == "ours" else {}
    mesh = case.mesh
    assert isinstance(mesh, Fsdp)
    devices = init_device_mesh(device.type, (mesh.size,))
    for unit in [*units(model, mesh), model]:
        if way == "blocks" and unit is not model:
            unit.compile(**by)
        fully_shard(unit, mesh=devices, mp_policy=MixedPrecisionPolicy() if case.tiny else _POLICY)
    return torch.compile(model, **by) if way == "whole" else model


def trained(case: Case, who: str, way: str, budget: int | str | None, share: float, device: torch.device) -> Row:
    """What one process sees of a contender in training, in bytes and ms."""
    others = clear(device)
    torch._dynamo.reset()
    model, inputs = case.made(device, who, dist.get_rank())
    begun = time.perf_counter()
    with functorch.patch(activation_memory_budget=share):
        module = compiled(model, who, way, budget, case, device)
        trial = Trial(module, inputs, replace(case.step, amp=None, mesh=None), others)
        _reset(device)
        losses = [_loss(trial)]
        row: Row = {"first": _peak(device, others), "first_s": time.perf_counter() - begun}
        losses += [_loss(trial) for _ in range(_FIRST - 1)]
    clear(device)
    dist.barrier()
    figures = trial.figures(_STEPS) if device.type == "cuda" else {"step_ms": sorted(trial._on_cpu(3))[1]}
    report = memrewrite.report_of(module) if who == "ours" else None
    told = {} if report is None else {"told": report.peak, "measured": report.measured}
    return {**row, **told, "losses": losses, "peak": figures.get("peak"), "step_ms": figures["step_ms"]}


def _loss(trial: Trial) -> float:
    loss = trial.loop.take()
    return float("nan") if loss is None else float(loss)


def _reset(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _peak(device: torch.device, others: int) -> int | None:
    return torch.cuda.max_memory_allocated(device) - others if device.type == "cuda" else None


def attempted(case: Case, contender: tuple[str, str, Any], stock: dict[str, int], device: torch.device) -> Row:
    """A contender's row, of what all processes saw."""
    who, way, setting = contender
    row: Row = {"workload": case.name, "who": who, "way": way, "setting": setting, "processes": case.mesh.size}
    budget: int | str | None = None
    if who == "ours":
        budget = setting if isinstance(setting, str) or device.type != "cuda" else int(setting * stock[way])
        budget = budget if isinstance(budget, int | str) else f"{100 * setting:.0f}%"
    share = setting if who == "stock" else 1.0
    found = together(lambda: trained(case, who, way, budget, share, device))
    if isinstance(found, str):
        return {**row, "budget": budget, "note": found}
    every = gathered(found)
    most = {key: max(each[key] for each in every) for key in found if key != "losses" and None not in _all(every, key)}
    if who == "stock" and setting == 1.0 and "peak" in most:
        stock[way] = most["peak"]
    return {**row, "budget": budget, **most, "losses": found["losses"]}


def _all(every: list[Row], key: str) -> list[Any]:
    return [each[key] for each in every]


def line(row: Row) -> str:
    """One line of the table."""
    gb = " ".join(f"{row[k] / 1e9:8.3f}" if row.get(k) else "       -" for k in ("first", "peak", "told", "measured"))
    budget = row.get("budget")
    asked = f"{budget / 1e9:.3f}" if isinstance(budget, int) else str(budget or "")
    over = " OVER" if isinstance(budget, int) and row.get("peak", 0) > budget else ""
    losses = " ".join(f"{loss:.5f}" for loss in row.get("losses", ())[:4])
    name = f"{row['workload']:16s} {row['who']:6s} {row['way']:6s} {row['setting'] or '':4}"
    figures = f"{asked:>7s} {gb} {row.get('step_ms') or 0:8.1f} ms {row.get('first_s') or 0:4.0f} s{over}"
    return f"{name} {figures} {losses} {row.get('note', '')}"


def rank_main(rank: int, store: str, case: Case, asked: argparse.Namespace, end: float) -> None:
    """What one process does of one workload."""
    warnings.simplefilter("default" if rank == 0 else "ignore", memrewrite.BeyondPlanWarning)
    on_cuda = torch.cuda.is_available() and not asked.tiny
    device = torch.device("cuda", rank) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
    way, place = "nccl" if on_cuda else "gloo", f"file://{store}"
    dist.init_process_group(way, init_method=place, rank=rank, world_size=asked.processes)
    stock: dict[str, int] = {}
    for contender in _CONTENDERS:
        if contender[0] not in asked.who or max(gathered(time.time())) > end:
            continue
        row = attempted(case, contender, stock, device)
        if rank == 0:
            print(line(row), flush=True)
            with asked.file.open("a") as file:
                file.write(json.dumps({**row, **machine(device)}) + "\n")
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # as in mesh


def main() -> int:
    """Run the processes of one workload after another, and wait for them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="JSON lines, added to")
    parser.add_argument("--only", nargs="+", choices=_SHARDED, default=_USUAL)
    parser.add_argument("--who", nargs="+", choices=_WHO, default=_WHO)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--deadline-s", type=float, default=500)
    parser.add_argument("--tiny", action="store_true", help="small models on the CPU")
    asked = parser.parse_args()
    if "ours" in asked.who and "stock" not in asked.who:
        parser.error("ours have their budgets by what stock takes; name both with --who")
    end = time.time() + asked.deadline_s
    print("GB (10^9) of each GPU: budget, first step, steady, told, measured by ours; step; losses", flush=True)
    spawn: Any = torch.multiprocessing.spawn  # type: ignore[attr-defined]
    for name in asked.only:
        case = Case(name, asked.processes, asked.tiny)
        with tempfile.TemporaryDirectory() as folder:
            spawn(rank_main, (str(Path(folder) / "store"), case, asked, end), nprocs=asked.processes)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
