"""``optimize`` with a memory: what was planned for the same before is built again, and one step of it is verified.

    first start     capture ... plan ... verify        -> an entry: programs, constants, report, how it was proved
    second start    look up, build, verify one step    -> the same drop-in and report, with a note that says so

An entry is taken for granted as little as a fresh plan: what forward read at capture is compared by the guards of the
drop-in, and a step of it with one of the original, by the rule it was proved by. Of what that has left to each value,
where it was float64, another reference is made only if the two are further apart. What does not hold is removed and
planned anew.
"""

import functools
import io
import marshal
from collections.abc import Mapping
from dataclasses import replace
from datetime import date
from typing import Any

import torch
from torch import nn

from memrewrite.cache.description import Description, IndescribableError, replaced_in_torch
from memrewrite.cache.environment import environment
from memrewrite.cache.store import Entry, Store
from memrewrite.equivalence import verifying
from memrewrite.equivalence.verdict import Verdict
from memrewrite.optimizing.by_size import noted
from memrewrite.optimizing.foresight import foresee_in
from memrewrite.optimizing.request import Request
from memrewrite.optimizing.run import INTERRUPTED, Outcome, Progress, run
from memrewrite.records.options import Budget
from memrewrite.records.report import Report
from memrewrite.report.read import report_from
from memrewrite.runtime.assembled import assembled
from memrewrite.runtime.dropin import own, program_from, programs
from memrewrite.search.bench import Bench
from memrewrite.search.fit_to_budget import limit_for
from memrewrite.search.so_far import Offer
from memrewrite.simulate.fake.copier import tensors_of
from memrewrite.targets.layout import bytes_of_blocks
from memrewrite.workload.hooks import with_hooks_of, without_hooks
from memrewrite.workload.in_groups import made_whole
from memrewrite.workload.optimizers import AsOne, Groups, LikeGroups, OptimizerFactory
from memrewrite.workload.step import device_of
from memrewrite.workload.workload import Workload


def run_remembering(work: Workload, asked: Request, store: Store | None, progress: Progress, offer: Offer) -> Outcome:
    """Carry out a request as ``run`` does, or give what is known to have come of it; raises what ``optimize`` says."""
    if store is None or work.step.mesh is not None:  # whose hooks and groups have no description
        return run(work, asked, progress, offer)
    if not asked.verify:
        return _not_kept(run(work, asked, progress, offer), "without a proof nothing tells then whether it still holds")
    progress("look up")
    placed, _ = asked.placed(work)
    try:
        described = _described(placed, asked)
    except IndescribableError as error:
        return _not_kept(run(work, asked, progress, offer), str(error))
    key = described.digest()
    entry = store.get(key)
    if entry is not None:
        outcome = _recalled(entry, placed, asked, progress)
        if outcome is not None:
            return outcome
        store.drop(key)
    outcome = run(work, asked, progress, offer)
    if INTERRUPTED in outcome.report.notes:
        return outcome
    try:
        store.put(key, _packed(outcome, described))
    except IndescribableError as error:
        return _not_kept(outcome, str(error))
    return outcome


def _not_kept(outcome: Outcome, why: str) -> Outcome:
    """The outcome, whose report says that the next start plans again."""
    return replace(outcome, report=_noted(outcome, f"The plan is not kept for the next start: {why}."))


def _noted(outcome: Outcome, note: str) -> Report:
    """The report with one more note."""
    if outcome.rewritten:
        return noted(outcome.report, note, outcome.module)
    return replace(outcome.report, notes=(*outcome.report.notes, note))


def _described(work: Workload, asked: Request) -> Description:
    """All that a plan depends on; raises ``IndescribableError`` where not all of it can be told."""
    if programs(work.model):
        raise IndescribableError("a part of the model was optimized before")
    found, step = Description(), work.step
    budget = None if asked.budget is None else Budget.parse(asked.budget)
    device = None if asked.device is None else str(asked.device)
    regions = None if asked.regions is None else tuple(asked.regions)
    options = replace(asked, budget=budget, device=device, regions=regions, dynamic=None)
    loop = step.micro_batches, str(step.loop), step.in_backward, _forms(step.groups)
    settings = step.mode, str(step.amp), type(step.target).__name__, *loop
    found.add("environment", environment(device_of(work.model, work.inputs)))
    found.add("replaced", replaced_in_torch())
    found.add("request", f"{options} {asked.ranges} {settings}")
    found.add("optimizer", _optimizer(step.optimizer))
    found.add("model", without_hooks(work.model))
    found.add("inputs", (work.inputs.args, work.inputs.kwargs), values=False)
    found.add("loss", step.loss_fn, values=False)
    found.add("blocks", bytes_of_blocks([*tensors_of(work.model), *work.inputs.tensors()]))
    return found


def _optimizer(factory: OptimizerFactory | None) -> Any:
    """The factory, without the learning rate where that is a number to one of PyTorch's optimizers."""
    if isinstance(factory, AsOne):
        return "several", [(_optimizer(each), count) for each, count in factory.factories]
    if isinstance(factory, LikeGroups):
        return "like groups", _optimizer(factory.make), [_without_rate(each) for each in factory.settings]
    whole, most = made_whole(factory)
    if most is not None:
        return "in groups", most, _optimizer(whole)
    if not isinstance(factory, functools.partial) or not str(factory.func.__module__).startswith("torch.optim"):
        return factory
    return factory.func, _without_rate(factory.keywords)


def _forms(groups: Groups | None) -> Any:
    """The groups, with the shapes of what has no name."""
    return groups and [[each if isinstance(each, str) else tuple(each.shape) for each in group] for group in groups]


def _without_rate(settings: dict[str, Any]) -> dict[str, Any]:
    rates = ("lr", "initial_lr")
    return {k: v for k, v in settings.items() if k not in rates or not isinstance(v, float | int)}


def _packed(outcome: Outcome, described: Description) -> Entry:
    """The entry for an outcome; raises ``IndescribableError`` where its programs hold more than can be written."""
    found = programs(outcome.module) if outcome.rewritten else {}
    parts = {path: own(outcome.module.get_submodule(path)) for path in found}
    constants = {path: {} if part is None else part.constants for path, part in parts.items()}
    if any(described.holds(tensor) for tensors in constants.values() for tensor in tensors.values()):
        raise IndescribableError("its program holds a tensor that the model has outside of its buffers")
    plain = {path: part.guards.plain.hex() for path, part in parts.items() if part is not None and part.guards}
    if plain.keys() != parts.keys():
        raise IndescribableError("the model changed while it was planned")
    report = outcome.report
    facts = {
        "about": {"model": report.model, "device": report.device, "budget": report.budget, "made": str(date.today())},
        "programs": {path: program.source for path, program in found.items()},
        "plain": plain,
        "captured": outcome.captured() if found else {},
        "report": report.to_json(),
        "workspace": outcome.bench.workspace,
        "bitwise": None if outcome.proof is None else outcome.proof.bitwise,
        "room": [] if outcome.proof is None else [[*key, room] for key, room in outcome.proof.verdict.room.items()],
    }
    tensors = io.BytesIO()
    torch.save({p: {n: t.detach() for n, t in each.items()} for p, each in constants.items()}, tensors)
    return Entry(facts, tensors.getvalue())


def _recalled(entry: Entry, work: Workload, asked: Request, progress: Progress) -> Outcome | None:
    """The outcome that an entry stands for; None where anything is not as it has to be."""
    try:
        bench, report = _bench(entry, work, asked), report_from(entry.facts["report"])
        bitwise = entry.facts["bitwise"]
        result = _built(entry, work, bench, asked)
        if result is None or (result is not work.model and bitwise is None):
            return None
        again = ""
        if result is not work.model:
            progress("verify")
            verdict = _one_step(result, bench, asked.seed, entry.facts)
            if not verdict.equivalent:
                return None
            again = f"; one step was verified again, {_how(verdict, bitwise)}"
        captured, made = dict(entry.facts["captured"]), str(entry.facts["about"]["made"])
    except Exception:  # whatever is wrong with it: a plan that is made anew is right, or says what is wrong
        return None
    if result is not work.model:
        with_hooks_of(work.model, result)
    outcome = Outcome(result, report, bench, lambda: captured, result is not work.model)
    return replace(outcome, report=_noted(outcome, f"The plan comes from the cache, made on {made}{again}."))


def _bench(entry: Entry, work: Workload, asked: Request) -> Bench:
    """Where results are simulated, without what timed their nodes."""
    step = asked.rewritten(work.step)
    return Bench(without_hooks(work.model), work.inputs, step, int(entry.facts["workspace"]))


def _built(entry: Entry, work: Workload, bench: Bench, asked: Request) -> nn.Module | None:
    """The drop-in, or the model where it was returned as it is; None where that is not as it was at capture."""
    facts, model = entry.facts, bench.model
    if not facts["programs"]:
        return work.model
    constants = torch.load(io.BytesIO(entry.tensors), weights_only=True)
    plain = {path: marshal.loads(bytes.fromhex(text)) for path, text in facts["plain"].items()}  # noqa: S302  (ours)
    written = {path: (program_from(source), constants[path]) for path, source in facts["programs"].items()}
    result = assembled(model, written, plain)
    parts = [own(result.get_submodule(path)) for path in facts["programs"]]
    if not all(part and part.guards and not (part.broken or part.guards.changed()) for part in parts):
        return None
    limit = limit_for(asked.budget, asked.reserved, work.step.device_type(model, work.inputs))
    foresee_in(result, bench.step, bench.workspace, limit, bench.inputs)
    return result


def _one_step(result: nn.Module, bench: Bench, seed: int, facts: Mapping[str, Any]) -> Verdict:
    """Whether a step of it is that of the original, by the rule that the plan was proved by.

    Where that was float64, what it left to each value then says how far from the original one may be now; only where
    that is not enough a reference is made again.
    """
    known = {(kind, name): room for kind, name, room in facts["room"]}
    how: dict[str, Any] = {"exact": facts["bitwise"], "steps": 1, "seed": seed, "smaller": False, "known": known}
    return verifying.verify(bench.model, result, bench.inputs, bench.step, **how)


def _how(verdict: Verdict, bitwise: bool) -> str:
    if verdict.exact:
        return "bit for bit"
    if bitwise:
        return "by the original's own noise"
    return "against float64" if verdict.room else "no farther from the original than float64 allowed at first"
