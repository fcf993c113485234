"""Processes that train together plan once: the first one does, and the others run the programs that it sends.

Each would measure other times on its own device and make another plan of them, and all at once would share the
processors of their host meanwhile. All of them verify what they run then. Where one of them fails, all raise.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from memrewrite.cache.store import Store
from memrewrite.optimizing.alone import alone, is_to_be_parallelized
from memrewrite.optimizing.by_size import noted, when_written
from memrewrite.optimizing.foresight import Foresight, foresee_in
from memrewrite.optimizing.in_mesh import Pair, Written, prove_in_mesh, written_in
from memrewrite.optimizing.remembered import run_remembering
from memrewrite.optimizing.request import Request
from memrewrite.optimizing.run import Outcome, Progress, declined, run
from memrewrite.records.errors import MeasurementError, MemrewriteError, first_line
from memrewrite.records.mesh import Ddp, Fsdp, Tp
from memrewrite.records.options import Budget
from memrewrite.records.report import Report
from memrewrite.report.later import complete_by
from memrewrite.runtime.assembled import assembled
from memrewrite.runtime.dropin import own, program_from, programs
from memrewrite.runtime.promise import reads_planned
from memrewrite.search.so_far import Offer
from memrewrite.simulate.fake.fakes import put_back
from memrewrite.workload.hooks import recorders_off, with_hooks_of, without_hooks
from memrewrite.workload.sharding import refuse_tensor_parallel
from memrewrite.workload.step import device_of
from memrewrite.workload.workload import Workload

PATIENCE = timedelta(hours=6)  # with a process that plans, or measures and saves what it planned


@dataclass(frozen=True)
class _Program:
    """The program of a part, and its constants: each on the CPU, and whether it belongs where the parameters are."""

    source: str
    constants: dict[str, tuple[Tensor, bool]]


@dataclass(frozen=True)
class _Plan:
    """What the first process sends: ``programs`` by the path of their part, none for the model itself; or an error.

    ``plain`` are those that the result is compared with in the mesh, none for the model itself.
    """

    report: Report | None = None
    programs: dict[str, _Program] = field(default_factory=dict)
    plain: dict[str, _Program] = field(default_factory=dict)
    workspace: int = 0
    limit: Budget | None = None
    error: MemrewriteError | None = None


@dataclass(frozen=True)
class Planned:
    """A model and the report on it; ``outcome`` has all that led there, None where another process planned."""

    module: nn.Module
    report: Report
    outcome: Outcome | None = None

    def noted(self, note: str) -> "Planned":
        """The same of a rewritten model, with one more note in the report."""
        report = noted(self.report, note, self.module)
        return replace(self, report=report, outcome=self.outcome and replace(self.outcome, report=report))


def planned(
    work: Workload,
    asked: Request,
    store: Store | None,
    progress: Progress,
    offer: Offer = declined,
    given: nn.Module | None = None,
) -> Planned:
    """What ``run_remembering`` gives; where the processes of a mesh call this together, what it gives the first one.

    ``given`` is the model before it was unwrapped, where it was. Raises what ``run_remembering`` raises, in all of
    them, and what ``prove_in_mesh`` does.
    """
    refuse_tensor_parallel(work.model, work.step.mesh)
    buffers = work.step.targets(work.model, work.inputs).buffers
    with work.context, recorders_off(work.model), put_back(buffers), reads_planned() as read:
        found = _planned(work, asked, store, progress, offer, given)
    for path in programs(found.module) if read else ():
        if (kept := own(found.module.get_submodule(path))) is not None:
            kept.promise.told = True
    return found


def _planned(
    work: Workload, asked: Request, store: Store | None, progress: Progress, offer: Offer, given: nn.Module | None
) -> Planned:
    if not _are_here(work):
        outcome = _alone(work, asked, lambda here: run_remembering(here, asked, store, progress, offer))
        return Planned(outcome.module, outcome.report, outcome)
    group = dist.new_group(backend="gloo", timeout=PATIENCE)
    try:
        way = _first if dist.get_rank() == 0 else _other
        found, plain = way(work, asked, progress, group)
        mesh, trained = work.step.mesh, work.step.mode == "train"
        if found.module is work.model or not (asked.verify and trained and isinstance(mesh, Ddp | Fsdp | Tp)):
            return found
        progress("verify in the mesh")
        placed, _ = asked.placed(work)
        pair = Pair(placed, mesh, work.model if given is None else given, found.module, plain)
        return found.noted(prove_in_mesh(pair, asked.seed, group))
    finally:
        dist.destroy_process_group(group)


def _are_here(work: Workload) -> bool:
    """Whether the processes of the mesh are those of this run, which call this together."""
    if work.step.mesh is None or not (dist.is_available() and dist.is_initialized()):
        return False
    size = dist.get_world_size()
    return 1 < size == work.step.mesh.processes and dist.get_backend() != "fake"  # where the others are not there


def _alone(work: Workload, asked: Request, plan: Callable[[Workload], Outcome]) -> Outcome:
    """What ``plan`` gives in this process alone, of the model itself."""
    with alone(work) as here:
        outcome = plan(here)
    if not is_to_be_parallelized(work):
        return outcome
    sent = _sent(outcome)
    module = _applied(sent, outcome.report, work, asked) if sent.programs else work.model
    bench = outcome.bench
    placed = replace(bench, model=without_hooks(work.model), step=replace(bench.step, mesh=work.step.mesh))
    return replace(outcome, module=module, bench=placed)


def _first(work: Workload, asked: Request, progress: Progress, group: Any) -> tuple[Planned, Written]:
    try:
        outcome = _alone(work, asked, lambda here: run(here, asked, progress))
        plan = _sent(outcome)
        plain = _written(plan.plain, device_of(outcome.module, work.inputs))
    except Exception as error:
        reason = first_line(error)
        told = MeasurementError(f"The first process failed while it planned for all: {type(error).__name__}: {reason}")
        dist.broadcast_object_list([_Plan(error=error if isinstance(error, MemrewriteError) else told)], 0, group)
        raise
    dist.broadcast_object_list([plan], 0, group)
    _all_went_well("", group)
    return Planned(outcome.module, outcome.report, outcome), plain


def _plain(outcome: Outcome) -> nn.Module:
    """What a result is compared with bit for bit."""
    plain = None if outcome.proof is None else outcome.proof.plain
    return outcome.bench.model if plain is None else plain()


def _sent(outcome: Outcome) -> _Plan:
    kept, workspace = own(outcome.module), outcome.bench.workspace
    foresee = None if kept is None else kept.promise.foresee
    limit = foresee.limit if isinstance(foresee, Foresight) else None
    sent = _programs_of(outcome.module) if outcome.rewritten else {}
    return _Plan(outcome.report, sent, _programs_of(_plain(outcome)), workspace, limit)


def _other(work: Workload, asked: Request, progress: Progress, group: Any) -> tuple[Planned, Written]:
    progress("wait for the first process")
    received: list[Any] = [None]
    dist.broadcast_object_list(received, 0, group)
    plan: _Plan = received[0]
    if plan.error is not None or plan.report is None:
        raise plan.error or MeasurementError("The first process sent no plan.")
    try:
        result = _applied(plan, plan.report, work, asked) if plan.programs else work.model
        plain = _written(plan.plain, device_of(result, work.inputs))
    except Exception as error:
        _all_went_well(f"{type(error).__name__}: {error}", group)
        raise
    _all_went_well("", group)
    return Planned(result, plan.report), plain


def _programs_of(result: nn.Module) -> dict[str, _Program]:
    place = next((parameter.device for parameter in result.parameters()), None)

    def sent(constants: dict[str, Tensor]) -> dict[str, tuple[Tensor, bool]]:
        return {name: (tensor.detach().cpu(), tensor.device == place) for name, tensor in constants.items()}

    return {path: _Program(program.source, sent(held)) for path, (program, held) in written_in(result).items()}


def _written(received: dict[str, _Program], place: torch.device) -> Written:
    """Programs that the first process sent, with constants that lie where this one's model does."""
    return {
        path: (program_from(sent.source), {n: t.to(place) if moves else t for n, (t, moves) in sent.constants.items()})
        for path, sent in received.items()
    }


def _applied(plan: _Plan, report: Report, work: Workload, asked: Request) -> nn.Module:
    """The drop-in that the first process has, for the model of this one."""
    bare, (placed, _) = without_hooks(work.model), asked.placed(work)
    result = assembled(bare, _written(plan.programs, device_of(bare, placed.inputs)))
    foresee_in(result, asked.rewritten(placed.step), plan.workspace, plan.limit, placed.inputs)
    with_hooks_of(work.model, result)
    complete_by(report, when_written(result))
    return result


def _all_went_well(reason: str, group: Any) -> None:
    """Raise ``MeasurementError`` in every process where one says what went wrong."""
    reasons: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, reason, group)
    for rank, each in enumerate(reasons):
        if each and not reason:
            raise MeasurementError(f"Process {rank} cannot run the plan that all were to run: {each}")
