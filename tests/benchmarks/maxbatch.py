"""The largest batch that trains within 8, 16, 24 and 80 GB: eager, its peers in ``pareto``, rewritten by memrewrite.

    python -m tests.benchmarks.maxbatch FOLDER [--only resnet50 gpt2_medium] [--budgets 8 16] [--deadline-s 540]
    python -m tests.benchmarks.maxbatch FOLDER --only llama_1b-2048 --without-cuda      # batches for ours, by plans
    python -m tests.benchmarks.maxbatch FOLDER --only llama_1b-2048 --untimed --jobs 12

Every (workload, contender, budget) becomes a row of ``FOLDER/maxbatch.jsonl``; a stopped run resumes where it was. What
a contender does to a workload has a process of its own, as Liger changes classes for good. A
batch fits when the measured peak is within the budget. The search goes where the peak would be if it grew with the
batch as between batches seen before, those of other rows among them, and ends when a batch less than an eighth larger
than one that fits does not fit.

What takes minutes to plan is not searched for on a GPU: ``FOLDER/planned.jsonl`` says which batches should have plans
that fit. Ours is then planned for those, or for a sixteenth less at a time until one fits, without steps or times of
the device, which others use meanwhile. When it is its turn, what its operators take is looked at, and it is trained.
``--untimed`` leaves times out: the peak is that of the second step, and a batch that is too large by far going by other
peaks is not tried. ``--jobs`` are planned side by side; ``--turns`` of them share the device, which must have room for
that many budgets and 15 % more, and for all models.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
from torch import nn

from memrewrite.optimizing import run as optimizing
from memrewrite.records.errors import BudgetInfeasibleError, MeasurementError
from memrewrite.search.bench import Bench
from memrewrite.targets.transients import Transients
from tests.benchmarks.contenders import (
    BLOCK,
    CHUNKED,
    COMPILED_BLOCK,
    EAGER,
    LIGER,
    OURS,
    is_compiled,
    prepare,
    rewritten,
)
from tests.benchmarks.models import WORKLOADS
from tests.benchmarks.rows import MAXBATCH, BatchRow, append, attempt, machine, read, reason
from tests.benchmarks.trial import Trial, clear
from tests.zoo.models import declare_operators

CONTENDERS = [EAGER, BLOCK, COMPILED_BLOCK, *LIGER, *CHUNKED, OURS]
BUDGETS_GB = [8.0, 16.0, 24.0, 80.0]
PLANNED = "planned.jsonl"
_DEFAULT = ["resnet50", "efficientnet_b4", "vit_base", "gpt2_medium"]
_GRANULE = 8  # the batch found is within 1/8 of the largest
_STEPS = 5
_PROBE = 8  # the first batch tried, which says how the peak grows
_PLANS = (4, 16)  # times the workload's batch: what is planned to see how the lowest peaks grow
_SPARE = 0.005  # of a budget, for what a plan that is made without the device does not see
_FAR = 0.05  # above what a budget leaves beside parameters and the like: too large by far
_CAP = 1.15  # times the budget: what untimed contenders may reserve, of a device that they share

Figures = dict[str, Any]


@dataclass
class Search:
    """The batches of one contender at one workload. ``known`` are the bytes that a batch needs at least.

    ``planned`` are batches to train at, by budget. Ours waits for its ``turn`` to train. Untimed, a ``peer`` that is
    not compiled is made once. ``others`` are the bytes that the device had allocated before. ``why`` says what became
    of the last batch.
    """

    name: str
    contender: str
    device: torch.device
    tiny: bool = False
    known: dict[int, int] = field(default_factory=dict)
    timed: bool = True
    planned: dict[int, int] = field(default_factory=dict)
    turn: AbstractContextManager[Any] = field(default_factory=nullcontext)
    peer: nn.Module | None = None
    others: int = 0
    why: str = ""

    def largest(self, budget: int) -> BatchRow:
        """The row of the largest batch within ``budget`` bytes."""
        tried: dict[int, Figures | None] = {}

        def fits(batch: int) -> bool:
            tried[batch] = self._trained(batch, budget)
            words = f"{self.name}, {self.contender}, {batch} in {budget / 1e9:g} GB: {self.why or 'fits'}"
            print(f"{time.strftime('%H:%M:%S')} {words}", flush=True)
            return tried[batch] is not None

        if (known := self.planned.get(budget)) is not None:
            batch = next(filter(fits, range(known, 0, -max(1, known // (2 * _GRANULE)))), 0)
        else:
            batch = largest(fits, lambda: self._guess(budget))
        figures = tried.get(batch) or {"note": f"no batch fits: {self.why}"}
        return self.row(budget, batch, ok=batch > 0, trials=len(tried), **figures)

    def plan(self, budget: int) -> BatchRow:
        """The row of the largest batch that should have a plan for ``budget`` bytes, as two lowest peaks say."""
        few, many = (times * WORKLOADS[self.name].batch for times in _PLANS)
        self._lowest(few)
        self._lowest(many)
        batch = max(0, self._along(few, many, int(budget * (1 - _SPARE))))
        return self.row(budget, batch, ok=batch > 0, trials=len(self.known), note="planned")

    def row(self, budget: int, batch: int = 0, **figures: Any) -> BatchRow:
        """A row of this contender."""
        workload = WORKLOADS[self.name]
        about: dict[str, Any] = {"amp": workload.amp, "optimizer": workload.optimizer, "contender": self.contender}
        return BatchRow(workload=self.name, batch=batch, budget=budget, **about, **machine(self.device), **figures)

    def _guess(self, budget: int) -> int:
        """The batch that would just fit if the peak grew evenly, at the pace from the smallest batch that is known to
        the one whose need is nearest to the budget."""
        if len(self.known) < 2:
            probe = min(_PROBE, max(1, WORKLOADS[self.name].batch // 2))
            probed = self._train(probe, None)
            self.known |= {0: probed["fixed"], probe: probed["peak"]}
        small = min(self.known)
        near = min(self.known.keys() - {small}, key=lambda batch: abs(self.known[batch] - budget))
        return self._along(small, near, budget)

    def _along(self, other: int, near: int, budget: int) -> int:
        """The batch that would just fit if the peak grew from ``near`` at the pace between the two."""
        pace = max((self.known[near] - self.known[other]) / (near - other), 1)
        return int(near + (budget - self.known[near]) / pace)

    def _trained(self, batch: int, budget: int) -> Figures | None:
        """The figures of a row, None where that batch does not fit, for a reason that ``why`` says."""
        self.why = "too large by far"
        if not self.timed and self._too_large(batch, budget):
            return None
        try:
            trained = self._train(batch, budget)
        except (BudgetInfeasibleError, MeasurementError, torch.OutOfMemoryError) as error:
            self.why = reason(error)
            if isinstance(error, BudgetInfeasibleError):
                self.known[batch] = error.lowest
            return None
        if self.contender != OURS:  # which fills the budget
            self.known[batch] = trained["peak"]
        self.why = "" if trained["peak"] <= budget else f"takes {trained['peak']} bytes"
        if self.why:
            return None
        if not self.timed:
            return {"peak": trained["peak"], "reserved": trained["reserved"]}
        samples = batch * WORKLOADS[self.name].samples
        return {
            "peak": trained["peak"],
            "step_ms": trained["step_ms"],
            "per_second": samples / trained["step_ms"] * 1e3,
        }

    def _too_large(self, batch: int, budget: int) -> bool:
        """Whether it is by far, going by one of at least half its size."""
        small, most = min(self.known, default=0), max(self.known, default=0)
        if self.contender == OURS or 2 * most < batch or most == small:
            return False
        return batch > self._along(small, most, int(budget + _FAR * (budget - self.known[small])))

    def _train(self, batch: int, budget: int | None) -> Figures:
        """Steady steps at a batch; ``budget`` None leaves ours at its lowest peak."""
        occupied = clear(self.device)
        if self.peer is None:
            self.others = occupied
        torch.manual_seed(0)
        if not self.timed:
            self._share(budget)
        module = self.peer or self._made(batch, budget)
        clear(self.device)  # others wait with us
        with self.turn:
            figures = self._measured(module, batch)
            clear(self.device)  # who is next has the room
            return figures

    def _measured(self, module: nn.Module, batch: int) -> Figures:
        workload = WORKLOADS[self.name]
        with self.device:
            inputs = workload.inputs(batch, self.tiny)
        trial = Trial(module, inputs, workload.step(), self.others)
        if not self.timed:
            peak = trial.peak()
            reserved = torch.cuda.max_memory_reserved(self.device) if self.device.type == "cuda" else None
            return {"peak": peak, "reserved": reserved, "fixed": trial.fixed()}
        trial.warm_up()
        return trial.figures(_STEPS)

    def _made(self, batch: int, budget: int | None) -> nn.Module:
        """The contender; of a peer, untimed, the one for all batches."""
        workload = WORKLOADS[self.name]
        with self.device:
            model, inputs = workload.build(self.tiny), workload.inputs(batch, self.tiny)
        if self.contender == OURS:
            clear(self.device)  # of what was made before it was cast
            with _leaving_the_device(self.turn) if self.planned else nullcontext():
                return rewritten(budget, workload.step(), model, inputs, returns=workload.returns).module
        torch.compiler.reset()  # of the batch before, after which the next one's code would be for any
        module = prepare(self.contender, workload, model, inputs, {}).module
        if not self.timed and not is_compiled(self.contender):
            self.peer = module
        return module

    def _share(self, budget: int | None) -> None:
        """Leave others of the device what is well above the budget, unless they wait while we train."""
        if self.device.type == "cuda":
            total = torch.cuda.get_device_properties(self.device).total_memory
            share = 1.0 if budget is None or self.planned else min(1.0, _CAP * budget / total)
            torch.cuda.set_per_process_memory_fraction(share, torch.cuda.current_device())

    def _lowest(self, batch: int) -> None:
        """Learn the lowest peak of plans for CUDA, which need none."""
        if batch not in self.known:
            workload = WORKLOADS[self.name]
            torch.manual_seed(0)
            model, inputs = workload.build(self.tiny), workload.inputs(batch, self.tiny)
            ready = rewritten(None, workload.step(), model, inputs, returns=workload.returns, device="cuda")
            self.known[batch] = cast(int, ready.predicted)


@contextmanager
def _leaving_the_device(turn: AbstractContextManager[Any]) -> Iterator[None]:
    """Plan as without CUDA for what lies there: no step is measured, and others train meanwhile.

    Operators are, when it is our ``turn``: compiled chains and kernels take what only the device tells, more with each
    text, and each operator is run at its full size, beside which others may have no room.
    """

    def in_turn(transients: Transients) -> bool:
        with turn:
            return probe(transients)

    probe = Transients.probe
    with (
        mock.patch.object(Bench, "on_cuda", False),
        mock.patch.object(optimizing, "profile_on", return_value=None),
        mock.patch.object(Transients, "probe", in_turn),
    ):
        yield


def largest(fits: Callable[[int], bool], guess: Callable[[], int]) -> int:
    """A batch that fits while one about an eighth larger does not; 0 where 1 does not fit.

    ``guess`` is asked before each try. What it says is kept away from batches that were tried, in doubling strides: an
    eighth from the largest that fits, a sixteenth from the smallest that does not; between two, it is halfway.
    """
    low, high, up, down = 0, None, 1, 1
    while high is None or high - low > max(1, low // _GRANULE):
        batch = max(guess(), low + up * max(1, low // _GRANULE))
        if high is not None and (most := high - down * max(1, high // (2 * _GRANULE))) < batch:
            batch = (low + high) // 2 if low else max(most, 1)
        if fits(batch):
            low, up, down = batch, 2 * up, 1
        else:
            high, up, down = batch, 1, 2 * down
    return low


def main() -> int:
    """Run what the file lacks; see the module docstring."""
    options = _parse()
    end = time.monotonic() + options.deadline_s
    context = get_context("spawn")
    turn = context.BoundedSemaphore(options.turns)
    budgets = [int(gigabytes * 1e9) for gigabytes in options.budgets]
    contenders = [OURS] if options.without_cuda else options.contenders
    with ProcessPoolExecutor(options.jobs, context, _take_turns, (turn,), max_tasks_per_child=1) as pool:
        jobs = []
        for contender, name in itertools.product(contenders, options.only):
            alone = contender == OURS and options.jobs > 1 and not options.without_cuda  # planned side by side
            for some in [[budget] for budget in budgets] if alone else [budgets]:
                jobs.append(pool.submit(_run, name, contender, some, options, end))
        for job in jobs:
            job.result()
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The largest batches that fit a budget.")
    parser.add_argument("folder", type=Path, help="where maxbatch.jsonl is kept and resumed from")
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, default=_DEFAULT, help="run these workloads only")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=[EAGER, BLOCK, OURS])
    parser.add_argument("--budgets", type=float, nargs="+", default=BUDGETS_GB, help="in GB, 10^9 bytes")
    parser.add_argument(
        "--deadline-s", type=float, default=float("inf"), help="start no search after that many seconds"
    )
    parser.add_argument("--without-cuda", action="store_true", help="plan for CUDA on the CPU: which batches ours has")
    parser.add_argument("--untimed", action="store_true", help="peaks only")
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side")
    parser.add_argument("--turns", type=int, default=1, help="how many of them train side by side")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny models of the same families")
    return parser.parse_args()


_turn: Any = None


def _take_turns(turn: Any) -> None:
    global _turn
    _turn = turn


def _run(name: str, contender: str, budgets: list[int], options: argparse.Namespace, end: float) -> None:
    """Add the rows of a contender that the file lacks."""
    path = options.folder / (PLANNED if options.without_cuda else MAXBATCH)
    device = torch.device("cpu" if options.without_cuda else options.device)
    planned = {row.budget: row.batch for row in read(options.folder / PLANNED, BatchRow) if row.workload == name}
    ours = contender == OURS
    declare_operators()  # for a torchvision that was installed beside a PyTorch without CUDA
    with suppress(ImportError):  # which a row tells
        WORKLOADS[name].build(True)  # whose modules are imported before it is anyone's turn
    known = {} if options.without_cuda else _known(path, name, contender)
    search = Search(name, contender, device, options.tiny, known, not options.untimed)
    search.planned, search.turn = (planned, _turn) if ours else ({}, nullcontext())
    with nullcontext() if ours else _turn:
        for budget in budgets:
            if time.monotonic() < end and (name, contender, budget) not in _done(path):
                append(path, _row(search, budget, search.plan if options.without_cuda else search.largest))


def _row(search: Search, budget: int, find: Callable[[int], BatchRow]) -> BatchRow:
    return attempt(lambda: find(budget), lambda why: search.row(budget, ok=False, note=why))


def _known(path: Path, name: str, contender: str) -> dict[int, int]:
    """What a batch of a row needs is about the row's budget."""
    rows = [row for row in read(path, BatchRow) if (row.workload, row.contender) == (name, contender)]
    return {row.batch: row.budget for row in rows if row.ok}


def _done(path: Path) -> set[tuple[str, str, int]]:
    return {(row.workload, row.contender, row.budget) for row in read(path, BatchRow)}


if __name__ == "__main__":
    sys.exit(main())
