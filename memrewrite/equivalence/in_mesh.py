"""Do the processes of a mesh train a rewritten model as they train the original?

Each compares what it has: its losses, its outputs, its part of every gradient and, after each step, of every parameter,
on its own inputs. Models run freely from the same seed, and must have the same bits, or be no further off than the
original is from itself, as in ``memrewrite.equivalence.verifying``.
"""

import gc
from collections.abc import Callable, Iterator

import torch
from torch import nn

from memrewrite.equivalence.compare import HALF, NOISE_RUNS, Comparison
from memrewrite.equivalence.sizes import batch_of
from memrewrite.equivalence.trial import Kept, Record, deterministic, take_step
from memrewrite.equivalence.verdict import Verdict, concluded
from memrewrite.state.random_state import preserved_rng, seed_all
from memrewrite.workload.step import Inputs, Step

STEPS = 3


def verify_in_mesh(
    make: Callable[[bool], nn.Module],
    inputs: Inputs,
    step: Step,
    any_of: Callable[[bool], bool],
    *,
    place: torch.device,
    seed: int,
    outputs: bool = True,
) -> Verdict:
    """The verdict of this process, while all others come to theirs.

    ``make`` gives a model of its own on ``place``, wrapped for the mesh: the rewritten one or, by False, the original,
    always with the same numbers. ``any_of`` says whether any process says yes. ``outputs`` is False where the rewritten
    model returns its loss alone. Raises what either model raises.
    """
    step = step.shortest()
    devices = (place,) if place.type == "cuda" else ()

    def run(rewritten: bool) -> Iterator[Record]:
        module = make(rewritten)
        seed_all(seed, devices)
        optimizer = step.make_optimizer(module)
        for _ in range(STEPS):
            yield take_step(module, inputs, step, optimizer, devices, False, Kept(outputs))
        del module, optimizer
        gc.collect()  # as they are in cycles, and the next run needs their memory

    comparison = Comparison(step.amp in HALF, place)
    with preserved_rng([torch.empty(0, device=place)]), deterministic():
        originals = [*run(False)]
        equal = [comparison.add_step(*pair) for pair in zip(originals, run(True), strict=True)]
        if any_of(not all(equal)):
            for _ in range(NOISE_RUNS):
                for index, again in enumerate(run(False)):
                    comparison.add_noise(index, originals[index], again)
    return concluded(comparison, STEPS, batch_of(inputs))
