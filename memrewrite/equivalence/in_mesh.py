"""Do the processes of a mesh train a rewritten model as they train the original?

Each compares what it has: its losses, its outputs, its part of every gradient and, after each step, of every parameter,
on its own inputs. Models run freely from the same seed, and must have the same bits, or be no further off than the
original is from itself, as in ``memrewrite.equivalence.verifying``.
"""

from collections.abc import Callable, Iterator

import torch
from torch import nn

from memrewrite.equivalence.compare import HALF, NOISE_RUNS, Comparison
from memrewrite.equivalence.sizes import batch_of
from memrewrite.equivalence.trial import Record, deterministic, take_step, without_outputs
from memrewrite.equivalence.verifying import Verdict, concluded
from memrewrite.measurement.snapshot import cuda_devices
from memrewrite.runtime.dropin import programs
from memrewrite.state.random_state import preserved_rng, seed_all
from memrewrite.workload.step import Inputs, Step, device_of

STEPS = 3


def verify_in_mesh(
    make: Callable[[bool], nn.Module], inputs: Inputs, step: Step, any_of: Callable[[bool], bool], *, seed: int
) -> Verdict:
    """The verdict of this process, while all others come to theirs.

    ``make`` gives a model of its own, wrapped for the mesh: the rewritten one or, by False, the original, always with
    the same numbers. ``any_of`` says whether any process says yes. Raises what either model raises.
    """
    step = step.shortest()
    alone = any(program.returns == "loss" for program in programs(make(True)).values())
    kept: Callable[[Record], Record] = without_outputs if alone else lambda record: record

    def run(rewritten: bool) -> Iterator[Record]:
        module = make(rewritten)
        devices = cuda_devices((module,), inputs)
        seed_all(seed, devices)
        optimizer = step.make_optimizer(module)
        for _ in range(STEPS):
            yield kept(take_step(module, inputs, step, optimizer, devices, False))

    place = device_of(make(False), inputs)
    comparison = Comparison(step.amp in HALF, place)
    with preserved_rng([torch.empty(0, device=place)]), deterministic():
        originals = [*run(False)]
        equal = [comparison.add_step(*pair) for pair in zip(originals, run(True), strict=True)]
        if any_of(not all(equal)):
            for _ in range(NOISE_RUNS):
                for index, again in enumerate(run(False)):
                    comparison.add_noise(index, originals[index], again)
    return concluded(comparison, STEPS, batch_of(inputs))
