"""What a step will take on inputs that a result meets while it trains, and that it was not planned for."""

import warnings

from memrewrite.process.thread import apart
from memrewrite.records.options import Budget
from memrewrite.runtime.promise import Call, FallbackWarning, Foresee
from memrewrite.simulate import simulate
from memrewrite.workload.step import Inputs, Step


def foresight(step: Step, workspace: int, limit: Budget) -> Foresee:
    """What tells, in bytes of the kind that ``limit`` bounds, what ``step`` takes of a result on other inputs.

    By simulation, which leaves the device alone: what operators take there while they run counts only where it is
    known by their arguments. ``workspace`` are the bytes that libraries hold. None is told where the step's course
    depends on values, and where its loss does not take the model's output.
    """

    def foreseen(call: Call, original: bool) -> int | None:
        module, args, kwargs = call
        inputs = Inputs(args, kwargs)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", FallbackWarning)
            try:
                found = apart(lambda: simulate(module, inputs, step, workspace_bytes=workspace, probe=False))
            except Exception:  # whatever the user's loss says of an output of another size
                return None
        fell_back = any(issubclass(each.category, FallbackWarning) for each in told)
        return limit.of(found) if fell_back == original else None

    return foreseen
