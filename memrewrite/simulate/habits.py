"""What each habit of a loop costs at the peak: observed, by simulating the same steps in a loop without it."""

from collections.abc import Callable
from dataclasses import replace

from memrewrite.records.outcomes import HabitCost
from memrewrite.simulate import Timeline
from memrewrite.workload.step import Step


def costs(step: Step, timeline: Timeline, peak: Callable[[Step], int]) -> tuple[HabitCost, ...]:
    """By how many bytes each thing that ``step.loop`` keeps raises the peak of ``timeline``; ``peak`` simulates a step.

    One simulation each, none for an output of which nothing is held. The costs need not add up: what is there at
    another moment than the peak costs nothing.
    """
    found = []
    for habit in step.loop.keeps(step.mode):
        without = timeline.peak
        if habit.loop.keeps_output == step.loop.keeps_output or timeline.held:
            without = peak(replace(step, loop=habit.loop))
        found.append(HabitCost(habit.words, timeline.peak - without))
    return tuple(found)
