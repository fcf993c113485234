"""Peak and step time of each GPU under DDP, FSDP2 and tensor parallelism: eager, block checkpointing, and ours.

    python -m tests.benchmarks.mesh FILE.json [--only resnet50-ddp ...] [--contenders eager block "ours min" ...]
        [--plans FOLDER] [--lock FILE] [--processes 2] [--jobs 20] [--plan-s 240] [--deadline-s 440] [--tiny]

All is predicted and planned at first, side by side, each in a process that speaks to no other. Then one process for
each GPU (nccl; gloo on the CPU, with ``--tiny``) trains what was planned, one contender after another. ``ours block``
has as its budget the peak that is predicted of block checkpointing and 0.5 % more, ``ours 50%`` half of what eager
training takes beyond its floor, ``ours min`` is the lowest peak there is. ``compile 0.4`` are units compiled one by one
with PyTorch's ``activation_memory_budget``, of which nothing is predicted. Bytes are measured by
``torch.cuda.max_memory_allocated`` and ``max_memory_reserved`` over steady steps, the highest of all GPUs; ms are a
median, of the slowest GPU. ``tracked`` is what PyTorch's ``FSDPMemTracker`` predicts. Names with ``-fsdp`` are sharded
by ``fully_shard``, block by block, with no mixed precision but autocast's; with ``-offload`` after that, parameters lie
on the host. Each row is added to the file; where the deadline is passed no further one is begun.
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from memrewrite.records.mesh import Ddp, Fsdp
from memrewrite.torch_internals.fsdp import units
from memrewrite.torch_internals.tensor_parallel import parallelize
from memrewrite.workload.step import Inputs
from tests.benchmarks.backend import alone
from tests.benchmarks.contenders import BLOCK, COMPILE, EAGER, OURS
from tests.benchmarks.mesh_plans import CASES, OWN, TRACKED, USUAL, Case, Prepared, prepared_in_child
from tests.benchmarks.rows import machine, reason
from tests.benchmarks.trial import Trial, clear

CONTENDERS = (EAGER, BLOCK, "ours block", "ours 50%", "ours min")
_SHARDED = (f"{COMPILE} 0.4", f"{COMPILE} 0.0")  # what runs besides where units are compiled one by one
_STEPS = 8
_PATIENCE_S, _NOTHING = 5.0, 2**20
_Plans = dict[tuple[str, str], Prepared]


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
    tracked: int | None = None
    measured: int | None = None
    predicted_reserved: int | None = None
    reserved: int | None = None
    step_ms: float | None = None
    setup_s: float | None = None
    note: str = ""


class Bench:
    """One workload, of which this process trains a part."""

    def __init__(self, case: Case, device: torch.device, plans: _Plans) -> None:
        self.case, self.device, self.plans = case, device, plans

    def run(self, contender: str) -> Row:
        """The row of a contender; what one process raises is every process's note."""
        case, plan = self.case, self.plans[self.case.name, contender]
        tracked = self.plans.get((case.name, f"{TRACKED} {contender}"), Prepared())
        row = Row(case.name, contender, case.batch, case.mesh.size, str(case.mesh), plan.budget, plan.predicted)
        row = replace(row, tracked=tracked.predicted, predicted_reserved=plan.reserved, setup_s=plan.setup_s)
        row = replace(row, note=plan.note or tracked.note)
        if plan.note:
            return row
        others = self._left()
        figures = together(lambda: self._trained(contender, plan, others))
        if isinstance(figures, str):
            return replace(row, note=figures)
        peak, reserved, ms = (max(each) for each in zip(*gathered(figures), strict=True))
        return replace(row, measured=peak, reserved=reserved, step_ms=ms)

    def _left(self) -> int:
        """The bytes that stay of what trained before, some of which a thread of NCCL's gives back a second later."""
        end = time.monotonic() + _PATIENCE_S
        while (left := clear(self.device)) > _NOTHING and time.monotonic() < end:
            time.sleep(0.1)
        return left

    def _trained(self, contender: str, plan: Prepared, others: int) -> tuple[int, int, float]:
        """What is allocated and reserved at most, in bytes, and the ms of a step, under the real thing."""
        case = self.case
        model, inputs = case.made(self.device, contender, dist.get_rank())
        module = self._wrapped(plan.applied(model, self.device), contender.startswith(COMPILE))
        del model
        torch._dynamo.reset()
        share = float(contender.split()[1]) if contender.startswith(COMPILE) else None
        with nullcontext() if share is None else functorch.patch(activation_memory_budget=share):
            return self._figures(module, inputs, others)

    def _figures(self, module: nn.Module, inputs: Inputs, others: int) -> tuple[int, int, float]:
        step = replace(self.case.step, mesh=None) if isinstance(self.case.mesh, Ddp) else self.case.step
        trial = Trial(module, inputs, step, others)
        trial.warm_up()
        dist.barrier()
        figures = trial.figures(_STEPS)
        return figures["peak"], figures["reserved"], figures["step_ms"]

    def _wrapped(self, module: nn.Module, by_unit: bool) -> nn.Module:
        mesh = self.case.mesh
        if isinstance(mesh, Ddp):
            return DistributedDataParallel(module)
        devices = init_device_mesh(self.device.type, (mesh.size,))
        if not isinstance(mesh, Fsdp):
            return parallelize(module, devices, [module])
        policy = CPUOffloadPolicy(pin_memory=self.device.type == "cuda") if mesh.offload else OffloadPolicy()
        for unit in [*units(module, mesh), module]:
            if by_unit and unit is not module:
                unit.compile()
            fully_shard(unit, mesh=devices, offload_policy=policy)
        return module


def gathered(value: Any) -> list[Any]:
    """What each process has."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def together(work: Callable[[], Any]) -> Any:
    """What ``work`` gives here, or, where it failed in any process, the first reason in all of them."""
    why, result = "", None
    try:
        result = work()
    except RuntimeError as error:  # out of memory among them
        why = reason(error)
    failed = [each for each in gathered(why) if each]
    return failed[0] if failed else result


def line(row: Row) -> str:
    """One line of the table."""
    budget, predicted, tracked, measured = (
        f"{b / 1e9:8.3f}" if b else "       -" for b in (row.budget, row.predicted, row.tracked, row.measured)
    )
    reserved = " ".join(f"{b / 1e9:.3f}" if b else "-" for b in (row.predicted_reserved, row.reserved))
    error = f"{100 * (row.predicted / row.measured - 1):+6.2f} %" if row.predicted and row.measured else "       -"
    ms = f"{row.step_ms:8.1f}" if row.step_ms else "       -"
    over = " OVER" if row.budget and row.measured and row.measured > row.budget else ""
    figures = f"{budget} {predicted} {tracked} {measured} {error} {ms}{over} {row.setup_s or 0:4.0f} s"
    return f"{row.workload:23s} {row.contender:11s} {figures}  {reserved}  {row.note}"


def contenders(case: Case, asked: list[str] | None) -> list[str]:
    """Those of a workload, in the order in which they train."""
    by_unit = isinstance(case.mesh, Fsdp) and not case.offloads and case.workload.blocks
    known = [*CONTENDERS, *(_SHARDED if by_unit else ())]
    return [each for each in known if asked is None or each in asked]


def all_prepared(cases: list[Case], asked: argparse.Namespace) -> _Plans:
    """What is predicted and planned of each, by as many processes as there are to be side by side."""
    every = [(case, each) for case in cases for each in contenders(case, asked.contenders)]
    found: _Plans = {(case.name, each): Prepared() for case, each in every}
    wanted = [(case, each, OWN) for case, each in every if not each.startswith(COMPILE)]
    wanted.sort(key=lambda each: not each[1].startswith(OURS))  # which take longest
    # Gradients that units leave on the host are none of the device's for it, as it counts parameters where they are.
    sharded = [(case, each) for case, each in every if isinstance(case.mesh, Fsdp) and not case.offloads]
    wanted += [(case, each, TRACKED) for case, each in sharded if each in (EAGER, BLOCK)]
    end = time.monotonic() + asked.plan_s
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(asked.jobs) as pool:
        folder = asked.plans or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        files = [folder / f"{case.name} {each} by {way}.pt" for case, each, way in wanted]
        tasks = [(*each, number, file) for number, (each, file) in enumerate(zip(wanted, files, strict=True))]
        codes = [*pool.map(lambda task: _in_child(task, end), tasks)]
        for (case, contender, way), code, file in zip(wanted, codes, files, strict=True):
            key = case.name, contender if way == OWN else f"{way} {contender}"
            failed = Prepared(note=f"{way}: its process ended with code {code}")
            found[key] = torch.load(file, weights_only=False) if code == 0 else failed
    return found


def _in_child(task: tuple[Any, ...], end: float) -> int | None:
    """The exit code of a process that carries out one task, killed when time is up; 0 for one that is done already."""
    if task[-1].exists():
        return 0
    process = multiprocessing.get_context("spawn").Process(target=prepared_in_child, args=task)
    process.start()
    process.join(max(0, end - time.monotonic()))
    if process.is_alive():
        process.kill()
        process.join()
    return process.exitcode


def add(file: Path, row: Row, about: dict[str, Any]) -> None:
    """Add a row to a file, with what every row says about its machine."""
    data = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"rows": []}
    data["rows"].append({**asdict(row), "code": about["code"], "device": about["device"]})
    file.write_text(json.dumps({**data, **about}, indent=1) + "\n", encoding="utf-8")


def rank_main(rank: int, store: str, case: Case, plans: _Plans, asked: argparse.Namespace, end: float) -> None:
    """What one process does of one workload."""
    warnings.simplefilter("ignore")
    on_cuda = torch.cuda.is_available() and not asked.tiny
    device = torch.device("cuda", rank) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // asked.processes))  # for an optimizer on the host
    dist.init_process_group(
        "nccl" if on_cuda else "gloo", init_method=f"file://{store}", rank=rank, world_size=asked.processes
    )
    bench = Bench(case, device, plans)
    for contender in contenders(case, asked.contenders):
        if max(gathered(time.time())) > end:
            continue
        row = bench.run(contender)
        if rank == 0:
            print(line(row), flush=True)
            add(Path(asked.file), row, machine(device))
    dist.barrier()
    dist.destroy_process_group()
    # DTensor's caches keep the group: a thread of it that returns to an interpreter which is ending aborts the process.
    sys.stdout.flush()
    os._exit(0)


def main() -> int:
    """Run the processes and wait for them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(os.environ.get("OUT", ".")) / "mesh.json"
    parser.add_argument(
        "file", nargs="?", type=Path, default=default, help="where the rows go, by default $OUT/mesh.json"
    )
    parser.add_argument("--only", nargs="+", choices=CASES, default=USUAL)
    parser.add_argument("--contenders", nargs="+", choices=(*CONTENDERS, *_SHARDED), help="by default all")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=4, help="how many may plan side by side")
    parser.add_argument("--plans", type=Path, help="a folder where plans are kept, and taken from")
    parser.add_argument("--lock", type=Path, help="a file that tells runs side by side when to train")
    parser.add_argument("--plan-s", type=float, default=240, help="how long planning may take")
    parser.add_argument("--deadline-s", type=float, default=440)
    parser.add_argument("--tiny", action="store_true", help="small models on the CPU")
    asked = parser.parse_args()
    begin, end = time.monotonic(), time.time() + asked.deadline_s
    cases = [Case(name, asked.processes, asked.tiny) for name in asked.only]
    plans = all_prepared(cases, asked)
    print(f"all is planned after {time.monotonic() - begin:.0f} s; GB (10^9) of each GPU:")
    print(
        f"{'workload':23s} contender     budget  predict  tracked measured    error       ms  setup  reserved",
        flush=True,
    )
    spawn: Any = torch.multiprocessing.spawn  # type: ignore[attr-defined]
    for case in cases:  # none finds what another one left
        with alone(asked.lock), tempfile.TemporaryDirectory() as folder:
            spawn(rank_main, (str(Path(folder) / "store"), case, plans, asked, end), nprocs=asked.processes)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
