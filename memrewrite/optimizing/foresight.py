"""What a step will take on inputs that a result meets while it trains, and that it was not planned on."""

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from memrewrite.capture.autocasts import autocasts_put_back
from memrewrite.equivalence.sizes import sizes_of, smaller_inputs
from memrewrite.process.thread import apart
from memrewrite.records.options import Budget, short_bytes
from memrewrite.runtime.dropin import own
from memrewrite.runtime.plain_values import is_plain
from memrewrite.runtime.promise import Call, FallbackWarning
from memrewrite.search.candidate import Candidate
from memrewrite.simulate import simulate
from memrewrite.simulate.fake.batch import Form, form_of
from memrewrite.torch_internals.logs import untold_failures
from memrewrite.torch_internals.pytrees import tree_leaves
from memrewrite.workload.step import Inputs, Step

_FORMS = (Tensor, torch.dtype, torch.device)  # of which a step writes the first alone, and not the caller's


@dataclass(frozen=True)
class Foresight:
    """Tells, in bytes of the kind that ``limit`` bounds, what ``step`` takes of a result on other inputs.

    By simulation, which leaves the device alone: what operators take there while they run counts only where it is
    known by their arguments. ``workspace`` are the bytes that libraries hold, ``planned`` are the inputs planned for,
    without memory on a device.
    """

    step: Step
    workspace: int
    limit: Budget
    planned: Form

    def __call__(self, call: Call, original: bool = False) -> int | None:
        """The peak of a step on the inputs of ``call``, where that runs the original forward or, by default, does not.

        None where the step's course depends on values, where its loss does not take the model's output, and where an
        object is given that a step may write, as a cache of keys and values: the caller goes on with it.
        """
        module, args, kwargs = call
        if not all(isinstance(leaf, _FORMS) or is_plain(leaf) for leaf in tree_leaves((args, kwargs))):
            return None
        inputs = Inputs(args, kwargs)
        with autocasts_put_back(), untold_failures(), warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", FallbackWarning)
            try:
                found = apart(lambda: simulate(module, inputs, self.step, workspace_bytes=self.workspace, probe=False))
            except Exception:  # whatever the user's loss says of an output of another size
                return None
        fell_back = any(issubclass(each.category, FallbackWarning) for each in told)
        return self.limit.of(found) if fell_back == original else None


def foresee_in(result: nn.Module, step: Step, workspace: int, limit: Budget | None, inputs: Inputs) -> None:
    """Let a drop-in tell what a call beyond its plan, made for ``inputs``, will take; any other module has no plan."""
    if (kept := own(result)) is not None:
        kept.promise.foresee = Foresight(step, workspace, limit or Budget(), form_of(inputs))


def held(candidate: Candidate, limit: Budget) -> Candidate:
    """The candidate as it is, where its budget holds at smaller sizes of the ranges that the user named, too.

    Peaks need not fall with sizes. Where one does not, a note tells, and the promise is for what is smaller than that:
    calls that are not are told of, or refused, like those beyond the plan.
    """
    if not any(region.region.captured.inputs.ranges for region in candidate.regions):
        return candidate
    bench, result, budget = candidate.bench, candidate.build(), candidate.regions[0].marks.budget
    foresee = Foresight(bench.step, bench.workspace, limit, form_of(bench.inputs))
    known = dict.fromkeys(sizes_of(result, bench.inputs), 1)
    for kind in smaller_inputs(result, bench.inputs, named=True):
        peaks = ((inputs, foresee((result, inputs.args, inputs.kwargs))) for inputs in kind)
        inputs, peak = next(((inputs, peak) for inputs, peak in peaks if peak is not None), (None, 0))
        if inputs is None or peak is None:
            continue
        if peak > budget:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in inputs.tensors())
            told = f"Inputs of {shapes}, smaller than what was planned for, take {short_bytes(peak)}, above the budget."
            return candidate.noted(told).holding_for(known)
        known = sizes_of(result, inputs)
    return candidate
