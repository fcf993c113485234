"""What else would fit when a step does not: each option simulated, none guessed."""

import itertools
import warnings
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from memrewrite.advice.known import Known
from memrewrite.advice.optimizers import frugal
from memrewrite.capture.autocasts import told_of_regions
from memrewrite.measurement.measuring import predict
from memrewrite.records.errors import BudgetInfeasibleError
from memrewrite.records.options import Budget, format_bytes
from memrewrite.records.outcomes import Option
from memrewrite.runtime.cross_entropy import too_few
from memrewrite.runtime.promise import FallbackWarning
from memrewrite.search.candidate import Candidate
from memrewrite.search.registry import in_rows
from memrewrite.simulate.fake.batch import at_batch
from memrewrite.simulate.timeline import Timeline
from memrewrite.targets.eager import EAGER
from memrewrite.torch_internals.logs import quiet
from memrewrite.workload.in_groups import making_groups
from memrewrite.workload.optimizers import Optimizers
from memrewrite.workload.parts import told_of_parts
from memrewrite.workload.step import Inputs, Step, evaluating
from memrewrite.workload.stepping import refused_in_backward
from memrewrite.workload.stepspec import optimizer_factory

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_OTHER_OPTIMIZER = "another optimizer: it wants another learning rate"
# What may take the place of a richer optimizer, by name.
_LEANER = {
    "SGD with momentum (--optimizer sgd-momentum)": "sgd-momentum",
    "SGD without momentum (--optimizer sgd)": "sgd",
}
_IN_GROUPS = 'optimizer_step="grouped"', "the same update, some parameters at a time"
_IN_BACKWARD = (
    'optimizer_step="in_backward" (--optimizer ...-in-backward)',
    "the same update, and the peak may be lower if it is planned for; no clipping of gradients",
)
_NOTICED = 0.01  # of the peak; a loop that spares less is told of only where it fits by that
_ANY = Budget(minimum=True)
_AMP = "bfloat16 autocast (--amp bf16)"
_OTHER_BITS = "products and convolutions in bfloat16: other bits, as fast or faster on a GPU"


def infeasible(candidate: Candidate, limit: Budget, budget: int, lowest: int, original: int) -> BudgetInfeasibleError:
    """The error for a limit of ``budget`` bytes that no plan meets; what else would is simulated with this candidate.

    ``lowest`` are the lowest bytes reached of what is limited, ``original`` those of the model as it is: where all that
    was rewritten takes more, that is told of, and simulated.
    """
    bench = candidate.bench
    target = bench.target if bench.step.mode == "train" else EAGER
    lower = not target.exact and candidate.simulate().peak_of_optimizer < lowest
    elsewhere = '; uncompiled, or by torch.compile(..., backend="memrewrite"), it may be lower' * lower
    regions = (region.region for region in candidate.regions)
    told = (told_of_regions(region.module, region.captured.graph_module.graph) for region in regions)
    parts = told_of_parts(bench.step, bench.model, bench.inputs)
    said = itertools.chain(parts, _told_of_rest(candidate), *told, _told_of_logits(candidate))
    hints = "".join(f"{hint} " for hint in said)
    as_it_is = ""
    if original < lowest:
        candidate, lowest, as_it_is = replace(candidate, regions=()), original, " of the model as it is"
    message = (
        f"No {target.plan} fits {format_bytes(budget)}{' reserved' * limit.reserved}: the lowest "
        f"{'reserved' if limit.reserved else 'reachable'} peak is {format_bytes(lowest, up=True)}{as_it_is} "
        f"({_floor(candidate)}){elsewhere}. {hints}What else would fit:"
    )
    workspaces = {"train": bench.workspace, "inference": bench.workspace}
    variants = Variants(candidate.build(), bench.inputs, bench.step, workspaces, bounded=limit, original=bench.model)
    found = options(variants, budget, lowest)
    lines = tuple(
        f"  - {option.name}: {format_bytes(option.peak_bytes)} ({option.cost})" for option in found if option.fits
    )
    return BudgetInfeasibleError(message, lowest, lines or ("  - nothing that was tried; a smaller model.",), found)


def _told_of_rest(candidate: Candidate) -> Iterator[str]:
    """Why the model could not be rewritten as a whole, where only parts of it are."""
    if reason := candidate.left.get(""):
        yield f"Only regions are rewritten, because: {reason}"


def _told_of_logits(candidate: Candidate) -> Iterator[str]:
    """What to say where the model returns logits, which might be made of some rows at a time or not at all."""
    steps_to = in_rows(None, False)
    for region in (each.region for each in candidate.regions):
        if region.path or region.captured.returns != "all" or candidate.bench.step.mode != "train":
            continue
        leaves: Any = region.captured.graph_module.graph.output_node().args[0]
        for logits in (leaf for leaf in leaves if isinstance(leaf, fx.Node) and steps_to(leaf) is not None):
            value = logits.meta["val"]
            if not too_few(value.numel()):
                yield (
                    f"{type(region.module).__name__} returns logits of {format_bytes(value.nbytes)}; with "
                    "returns='lazy' (--returns lazy) their cross-entropy makes some rows of them at a time."
                )


def _floor(candidate: Candidate) -> str:
    """What the peak is made of, largest first."""
    categories = candidate.simulate().categories
    largest = sorted(categories.items(), key=lambda item: -item[1])[:4]
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in largest)


@dataclass(frozen=True)
class Variants:
    """A model whose step is simulated in other ways.

    ``workspaces`` are the bytes that libraries hold in each mode; with ``probe`` False no device is used. Peaks are
    those of what ``bounded`` bounds, ``known`` those that need not be simulated, ``passes`` that of forward and
    backward where it is known: what other kernels for the optimizer do not lower. ``original`` runs where the program
    of ``module`` is not for the inputs, such as for a batch of one.
    """

    module: nn.Module
    inputs: Inputs
    step: Step
    workspaces: Mapping[str, int]
    probe: bool = True
    bounded: Budget = _ANY
    known: Known = field(default_factory=Known)
    passes: int = 0
    original: nn.Module | None = None

    def peak(self, step: Step, inputs: Inputs | None = None) -> int | None:
        """The peak in bytes; None where neither the rewritten forward nor the model itself takes the inputs."""
        given = self.inputs if inputs is None else inputs
        known = self.known.of(step, given)
        if known is not None:
            return known
        found = self._predicted(self.module, step, given)
        if found is None and self.original is not None:
            found = self._predicted(self.original, step, given)
        if found is None:
            return None
        peak = self.bounded.of(found)
        self.known.add(step, given, peak)
        return peak

    def _predicted(self, module: nn.Module, step: Step, inputs: Inputs) -> Timeline | None:
        with quiet(), evaluating(module) if step.mode == "inference" else nullcontext():
            warnings.simplefilter("error", FallbackWarning)
            try:
                return predict(module, inputs, step, workspace_bytes=self.workspaces[step.mode], probe=self.probe)
            except Exception:  # whatever the user's code says of a batch of another size
                return None


def options(variants: Variants, limit: int, now: int) -> tuple[Option, ...]:
    """Other ways to take the step, whose peak is ``now`` bytes: those within ``limit`` bytes first, then the cheapest.

    Cheapest is what changes the training least: a loop that keeps less, other kernels for the optimizer, where its step
    takes most, micro-batches (unless batch normalization sees them), the optimizer's step in groups of parameters or
    while backward runs, autocast, another optimizer, both, and all of it where nothing else fits. Of what does not fit,
    the lowest peaks come first. Last stand evaluation, and what a loop would take that does not free gradients.
    """
    if variants.step.mode == "inference":
        return (*_leaner_loops(variants, limit, now), *_batches(variants, limit, now))
    found = [*_leaner_loops(variants, limit, now), *_same_optimizer(variants, limit, now)]
    found += [*_same_update(variants, limit, now), *_leaner_steps(variants, limit, now)]
    if _normalized(variants.module):
        found.sort(key=lambda option: "micro-batches" in option.name)
    if not any(option.fits for option in found):
        leanest, words = _leanest(variants.step)
        if words and variants.inputs.batch_size > 1:
            found += _batches(replace(variants, step=leanest), limit, variants.peak(leanest) or now, f", with {words}")
    fitting = [option for option in found if option.fits]
    others = sorted((option for option in found if not option.fits), key=lambda option: option.peak_bytes)
    return (*fitting, *others, *_as_it_is(variants, limit, now))


def _same_update(variants: Variants, limit: int, now: int) -> Iterator[Option]:
    """The step of the same optimizer with the same bits, some parameters at a time, as far as that lowers the peak."""
    step = variants.step
    one = not isinstance(step.make_optimizer(variants.module), Optimizers)
    if step.optimizer is None or step.in_backward or not one:
        return
    ways = {}
    if variants.passes < now and frugal(variants.module, step) is not None:
        ways[_IN_GROUPS] = replace(step, optimizer=making_groups(step.optimizer))
    if not refused_in_backward(step):
        ways[_IN_BACKWARD] = replace(step, in_backward=True)
    for (name, cost), other in ways.items():
        yield from _lowered(variants, limit, now, name, other, cost)


def _lowered(variants: Variants, limit: int, now: int, name: str, other: Step, cost: str) -> Iterator[Option]:
    """The option of another step, if that lowers the peak."""
    peak = variants.peak(other)
    if peak is not None and peak < now:
        yield Option(name, peak, peak <= limit, cost)


def _same_optimizer(variants: Variants, limit: int, now: int) -> list[Option]:
    """Other kernels for the optimizer if its step takes most, smaller batches, and both where neither is enough."""
    kernels = frugal(variants.module, variants.step)
    if variants.inputs.batch_size <= 1 and variants.passes >= now:
        return []
    if kernels is None:
        return [*_batches(variants, limit, now)]
    step = replace(variants.step, optimizer=kernels)
    peak = variants.peak(step) or now
    if peak < now:  # then the optimizer's step is above the limit
        found = [Option(kernels.advice, peak, peak <= limit, kernels.cost)]
    else:
        found = [*_batches(variants, limit, now)]
    if any(option.fits for option in found):
        return found
    reached = min((option.peak_bytes for option in found), default=now)
    both = _batches(replace(variants, step=step), limit, peak, f", with {kernels.setting}")
    return [*found, *(option for option in both if option.peak_bytes < reached)]


def _batches(variants: Variants, limit: int, now: int, also: str = "") -> Iterator[Option]:
    """The largest halved batch that fits, else the leanest, in micro-batches; and a smaller batch, if that is larger.

    A batch that by a straight line through the known peaks is far from fitting is not tried.
    """
    whole = variants.inputs.batch_size
    train = variants.step.mode == "train"
    loop = replace(variants.step, micro_batches=2) if train else variants.step
    known = [(whole, now)]
    for size in (whole >> power for power in range(1, whole.bit_length())):
        if _line(known, size) > 1.1 * limit and size > 1:
            continue
        peak = variants.peak(loop, at_batch(variants.inputs, size))
        if peak is None:  # the smallest batches are special: BatchNorm, for one, needs two samples
            break
        known.append((size, peak))
        if peak <= limit:
            break
    if len(known) == 1:
        return
    size, peak = min(known[1:], key=lambda pair: pair[1])
    parts = -(-whole // size) * variants.step.micro_batches
    if not train:
        yield Option(f"{parts} batches of {size}", peak, peak <= limit, f"{parts} forward passes")
        return
    cost = f"{parts} forward and backward passes for each optimizer step"
    if _normalized(variants.module):
        cost += f"; batch normalization then sees {size} samples at a time"
    yield Option(f"{parts} micro-batches of {size} with gradient accumulation{also}", peak, peak <= limit, cost)
    if peak <= limit and parts > 2 and not also:
        lower = variants.peak(variants.step, at_batch(variants.inputs, 2 * size))
        if lower is not None and lower <= limit:
            cost = f"another training: {2 * size} samples for each optimizer step"
            yield Option(f"batch {2 * size} (--batch-size {2 * size})", lower, True, cost)


def _line(known: list[tuple[int, int]], size: int) -> float:
    """What a straight line through the last two known peaks says; nothing with one of them."""
    if len(known) < 2:
        return 0.0
    (more, high), (less, low) = known[-2:]
    return low + (size - less) * (high - low) / (more - less)


def _normalized(module: nn.Module) -> bool:
    """Whether batch normalization takes its statistics from the batch."""
    return any(isinstance(part, _BATCH_NORMS) and part.training for part in module.modules())


def _leanest(step: Step) -> tuple[Step, str]:
    """The step under autocast, with an optimizer without state, and what of that is new in it."""
    words = ["bfloat16 autocast"] * (step.amp is None) + ["SGD"] * (step.optimizer is not None)
    optimizer = None if step.optimizer is None else torch.optim.SGD
    return replace(step, amp=step.amp or torch.bfloat16, optimizer=optimizer), " and ".join(words)


def _leaner_steps(variants: Variants, limit: int, now: int) -> Iterator[Option]:
    """Autocast and leaner optimizers, as far as they lower the peak, and both where each does."""
    step, lowered = variants.step, partial(_lowered, variants, limit, now)
    narrow: list[Option] = []
    lean: list[Option] = []
    if step.amp is None:
        narrow = [*lowered(_AMP, replace(step, amp=torch.bfloat16), _OTHER_BITS)]
    if step.optimizer is not None:
        for name, short in _LEANER.items():
            lean += lowered(name, replace(step, optimizer=optimizer_factory(short)), _OTHER_OPTIMIZER)
    yield from (*narrow, *lean)
    if narrow and lean:
        both, words = _leanest(step)
        yield from lowered(f"both {words}", both, f"{_OTHER_BITS}; {_OTHER_OPTIMIZER}")


def _as_it_is(variants: Variants, limit: int, now: int) -> Iterator[Option]:
    """What holds without a change: evaluation, and what another way to write the loop would take."""
    evaluation = variants.peak(replace(variants.step, mode="inference"))
    if evaluation is not None:
        yield Option(
            "evaluation under torch.no_grad()", evaluation, evaluation <= limit, "no gradients, so no training"
        )
    if variants.step.loop.zero_grad == "after step":
        filled = replace(variants.step, loop=replace(variants.step.loop, zero_grad="in place"))
        more = variants.peak(filled)
        if more is not None and more > now:
            cost = f"{format_bytes(more - now)} more than this step, which frees gradients"
            yield Option("zero_grad(set_to_none=False)", more, more <= limit, cost)


def _leaner_loops(variants: Variants, limit: int, now: int) -> Iterator[Option]:
    """The loop without what it need not keep, one thing after another, as far as that lowers the peak."""
    for habit in variants.step.loop.keeps(variants.step.mode):
        if habit.trains:
            continue
        peak = variants.peak(replace(variants.step, loop=habit.loop))
        if peak is not None and (peak <= limit or now - peak > _NOTICED * now):
            cost = "nothing but a change of the loop"
            yield Option(f"not {habit.words} (--loop {habit.loop})", peak, peak <= limit, cost)
