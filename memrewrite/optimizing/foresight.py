"""What a step will take on inputs that a result meets while it trains, and that it was not planned for."""

import warnings
from dataclasses import dataclass

from memrewrite.process.thread import apart
from memrewrite.records.options import Budget
from memrewrite.runtime.promise import Call, FallbackWarning
from memrewrite.simulate import simulate
from memrewrite.simulate.fake.batch import Form
from memrewrite.workload.step import Inputs, Step


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

        None where the step's course depends on values, and where its loss does not take the model's output.
        """
        module, args, kwargs = call
        inputs = Inputs(args, kwargs)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", FallbackWarning)
            try:
                found = apart(lambda: simulate(module, inputs, self.step, workspace_bytes=self.workspace, probe=False))
            except Exception:  # whatever the user's loss says of an output of another size
                return None
        fell_back = any(issubclass(each.category, FallbackWarning) for each in told)
        return self.limit.of(found) if fell_back == original else None
