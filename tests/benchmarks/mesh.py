"""Peak and step time of each GPU under DDP and FSDP2: eager, block checkpointing, and ours at the budgets of a GPU.

    python -m tests.benchmarks.mesh FILE.json [--only resnet50 vit_large] [--processes 2] [--deadline-s 280] [--tiny]

Starts its own processes, one for each GPU (nccl), or two on the CPU with ``--tiny`` (gloo). ``ours block`` has as its
budget the peak that block checkpointing takes and 0.5 % more, ``ours 50%`` half of what eager training takes beyond its
floor, ``ours min`` the lowest peak there is. Bytes are predicted before anything runs, and measured by
``torch.cuda.max_memory_allocated`` over steady steps, the highest of all GPUs; ms are a median, of the slowest GPU.
``same`` says that all made the same plan. Names with ``-fsdp`` are sharded by ``fully_shard``, block by block, with no
mixed precision but autocast's; with ``-offload`` after that, parameters lie on the host. The file is written after
every row; where the deadline is passed no further one is begun.
"""

import argparse
import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from memrewrite.measurement.measuring import predict
from memrewrite.records.errors import BudgetInfeasibleError
from memrewrite.records.mesh import Ddp, Fsdp
from memrewrite.runtime.dropin import programs
from memrewrite.simulate import Timeline
from memrewrite.targets.workspaces import measured as workspace_bytes
from memrewrite.torch_internals.fsdp import units
from memrewrite.workload.step import Inputs, Step
from tests.benchmarks.language import decoder, llama, tokens
from tests.benchmarks.models import WORKLOADS
from tests.benchmarks.rows import machine
from tests.benchmarks.trial import Trial, clear
from tests.benchmarks.workload import Workload

CONTENDERS = ("eager", "block", "ours block", "ours 50%", "ours min")
_STEPS = 8
_BLOCK = 1.005  # of its peak: lowest peaks are found to half a percent


@dataclass(frozen=True)
class Row:
    """One contender at one workload, ``batch`` on each of ``processes`` GPUs. Bytes and ms; None where it failed."""

    workload: str
    contender: str
    batch: int
    processes: int
    mesh: str
    budget: int | None = None
    predicted: int | None = None
    measured: int | None = None
    step_ms: float | None = None
    setup_s: float | None = None
    same: bool = True
    note: str = ""


def _vit_large(tiny: bool) -> nn.Module:
    import timm

    small: dict[str, Any] = {"img_size": 64, "embed_dim": 32, "depth": 4, "num_heads": 2} if tiny else {}
    return cast(nn.Module, timm.create_model("vit_large_patch16_224", pretrained=False, **small))


def _llama_670m(tiny: bool) -> nn.Module:
    return llama(decoder(tiny, 2048, 10, 32, 32000))


CASES: dict[str, Workload] = {
    "resnet50": replace(WORKLOADS["resnet50"], batch=96),
    "vit_large": replace(WORKLOADS["vit_base"], build=_vit_large, batch=64),
    "llama_1b": replace(WORKLOADS["llama_1b"], batch=2),
    "llama_670m-fsdp": replace(WORKLOADS["llama_1b"], build=_llama_670m, inputs=tokens(2048, 32000), batch=4),
    "unet": replace(WORKLOADS["unet"], batch=4),  # on request: it needs no library
    "unet-fsdp": replace(WORKLOADS["unet"], batch=4),
}
CASES |= {f"{name}-offload": CASES[name] for name in ("llama_670m-fsdp", "unet-fsdp")}


class Bench:
    """One workload, of which this process has a part."""

    def __init__(self, name: str, device: torch.device, tiny: bool) -> None:
        self.name, self.workload, self.device, self.tiny = name, CASES[name], device, tiny
        self.batch = 2 if tiny else self.workload.batch
        size = dist.get_world_size()
        self.mesh: Ddp | Fsdp = Fsdp(size, offload=name.endswith("-offload")) if "-fsdp" in name else Ddp(size)
        self.step: Step = replace(self.workload.step(), mesh=self.mesh)
        self.peaks: dict[str, int] = {}
        self.floor = 0

    def run(self, contender: str) -> Row:
        """The row of a contender; what one process raises is every process's note."""
        row = Row(self.name, contender, self.batch, self.mesh.size, str(self.mesh))
        clear(self.device)
        others = torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0
        start = time.perf_counter()
        torch.manual_seed(0)
        with torch.device(self.device):
            model = self.workload.build(self.tiny).train()
            torch.manual_seed(1 + dist.get_rank())
            inputs = self.workload.inputs(self.batch, self.tiny)
        budget = self._budget(contender)
        ready = together(lambda: self._ready(contender, model, inputs, budget))
        row = replace(row, budget=budget if isinstance(budget, int) else None)
        if isinstance(ready, str):
            return replace(row, note=ready)
        module, predicted = ready
        programs_here = [str(program.source) for program in programs(module).values()]
        same = all(each == programs_here for each in gathered(programs_here))
        row = replace(row, predicted=max(gathered(predicted)), same=same, setup_s=time.perf_counter() - start)
        figures = together(lambda: self._trained(module, inputs, others))
        if isinstance(figures, str):
            return replace(row, note=figures)
        peak, ms = figures
        self.peaks[contender] = max(gathered(peak))
        return replace(row, measured=self.peaks[contender], step_ms=max(gathered(ms)))

    def _budget(self, contender: str) -> int | str | None:
        if contender == "ours min":
            return "min"
        if contender == "ours block":
            return int(_BLOCK * self.peaks["block"]) if "block" in self.peaks else None
        if contender == "ours 50%" and "eager" in self.peaks:
            return (max(gathered(self.floor)) + self.peaks["eager"]) // 2
        return None

    def _ready(
        self, contender: str, model: nn.Module, inputs: Inputs, budget: int | str | None
    ) -> tuple[nn.Module, int]:
        """The module to wrap, and the peak that is predicted of a process."""
        if contender.startswith("ours"):
            if budget is None:
                raise RuntimeError("the peak that the budget refers to is not known")
            return self._optimized(model, inputs, budget)
        if contender == "block":
            self.workload.checkpoint_blocks(model)
        timeline = self._predicted(model, inputs)
        self.floor = timeline.floor if contender == "eager" else self.floor
        return model, timeline.peak

    def _predicted(self, model: nn.Module, inputs: Inputs) -> Timeline:
        workspace = workspace_bytes(self.device, self.step.amp, self.step.mode)
        return predict(model, inputs, self.step, workspace_bytes=workspace)

    def _optimized(self, model: nn.Module, inputs: Inputs, budget: int | str) -> tuple[nn.Module, int]:
        import memrewrite

        step = self.step
        asked: dict[str, Any] = {"optimizer": step.optimizer, "amp": step.amp, "mesh": self.mesh, "verify": False}
        found = memrewrite.optimize(model, inputs.args, example_kwargs=inputs.kwargs, budget=budget, **asked)
        return found, memrewrite.report_of(found).predicted_after.peak

    def _trained(self, module: nn.Module, inputs: Inputs, others: int) -> tuple[int, float]:
        """The measured peak in bytes and the ms of a step, under the real thing."""
        step = replace(self.step, mesh=None) if isinstance(self.mesh, Ddp) else self.step
        trial = Trial(self._wrapped(module), inputs, step, others)
        trial.warm_up()
        dist.barrier()
        figures = trial.figures(_STEPS)
        return figures["peak"], figures["step_ms"]

    def _wrapped(self, module: nn.Module) -> nn.Module:
        if isinstance(self.mesh, Ddp):
            return DistributedDataParallel(module)
        on_host = CPUOffloadPolicy(pin_memory=self.device.type == "cuda")
        policy = on_host if self.mesh.offload else OffloadPolicy()
        for unit in [*units(module, self.mesh), module]:
            fully_shard(unit, offload_policy=policy)
        return module


def gathered(value: Any) -> list[Any]:
    """What each process has."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def together(work: Callable[[], Any]) -> Any:
    """What ``work`` gives here, or, where it failed in any process, the first reason in all of them."""
    reason, result = "", None
    try:
        result = work()
    except (RuntimeError, BudgetInfeasibleError) as error:  # out of memory among them
        reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:200]}"
    failed = [each for each in gathered(reason) if each]
    return failed[0] if failed else result


def line(row: Row) -> str:
    """One line of the table."""
    budget, predicted, measured = (
        f"{b / 1e9:8.2f}" if b else "       -" for b in (row.budget, row.predicted, row.measured)
    )
    error = f"{100 * (row.predicted / row.measured - 1):+6.2f} %" if row.predicted and row.measured else "       -"
    ms = f"{row.step_ms:8.1f}" if row.step_ms else "       -"
    over = " OVER" if row.budget and row.measured and row.measured > row.budget else ""
    note = f"  {row.note}" if row.note else ("" if row.same else "  plans differ")
    return f"{row.workload:10s} {row.contender:11s} {budget} {predicted} {measured} {error} {ms}{over}{note}"


def rank_main(rank: int, processes: int, store: str, asked: argparse.Namespace) -> None:
    """What one process does."""
    warnings.simplefilter("ignore")
    begin = time.monotonic()
    on_cuda = torch.cuda.is_available() and not asked.tiny
    device = torch.device("cuda", rank) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if on_cuda else "gloo", init_method=f"file://{store}", rank=rank, world_size=processes
    )
    rows: list[Row] = []
    if rank == 0:
        print("workload   contender     budget  predict measured    error       ms (GB = 10^9, each GPU)", flush=True)
    for name in asked.only:
        bench = Bench(name, device, asked.tiny)
        for contender in CONTENDERS:
            if max(gathered(time.monotonic() - begin)) > asked.deadline_s:
                continue
            rows.append(bench.run(contender))
            if rank == 0:
                print(line(rows[-1]), flush=True)
                data = {"rows": [asdict(row) for row in rows], **machine(device)}
                Path(asked.file).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    """Run the processes and wait for them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(os.environ.get("OUT", ".")) / "mesh.json"
    parser.add_argument(
        "file", nargs="?", type=Path, default=default, help="where the rows go, by default $OUT/mesh.json"
    )
    parser.add_argument("--only", nargs="+", choices=CASES, default=["resnet50", "vit_large", "llama_1b"])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--deadline-s", type=float, default=280)
    parser.add_argument("--tiny", action="store_true", help="small models on the CPU")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (asked.processes, str(Path(folder) / "store"), asked)
        torch.multiprocessing.spawn(rank_main, arguments, nprocs=asked.processes)  # type: ignore[attr-defined,no-untyped-call]
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
