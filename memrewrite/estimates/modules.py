"""Which module takes what, from the lives of the storages of a simulated step."""

from collections import Counter
from collections.abc import Iterator

from torch import nn

from memrewrite.records.estimate import ModuleShare
from memrewrite.simulate import ACTIVATIONS, PARAMETERS, TEMPORARIES, Life, Timeline


def shares(
    module: nn.Module, timeline: Timeline, dropping: Timeline, other: tuple[int, Timeline] | None
) -> tuple[ModuleShare, ...]:
    """The share of every submodule, in the order of ``named_modules``.

    ``dropping`` is the timeline in a loop that lets go of the output before backward. ``other`` is one more of such a
    loop with so many samples more (or fewer, negative), from which follows what one takes.
    """
    alone = _kept(dropping)
    kept, parameters = _with_submodules(alone), _with_submodules(_parameters(timeline))
    made = _with_submodules(_made(timeline.living(timeline.peak_event)))
    elsewhere = _with_submodules(_kept(other[1])) if other else None
    return tuple(
        ModuleShare(
            path,
            type(part).__name__,
            parameters[path],
            kept[path],
            alone[path],
            None if other is None or elsewhere is None else round((elsewhere[path] - kept[path]) / other[0]),
            made[path],
        )
        for path, part in module.named_modules()
    )


def _kept(timeline: Timeline) -> Counter[str]:
    """Bytes by module that the last forward made and that are there when backward has begun; none in inference."""
    labels = [label for _, label in timeline.events]
    begins = next((i for i, label in enumerate(labels) if label.startswith("step 2 backward:")), None)
    if begins is None:
        return Counter()
    return _by_module(life for life in timeline.living(begins) if life.operator.startswith("step 2 forward:"))


def _parameters(timeline: Timeline) -> Counter[str]:
    return _by_module(life for life in timeline.lives if life.category == PARAMETERS)


def _made(lives: list[Life]) -> Counter[str]:
    return _by_module(life for life in lives if life.category in (ACTIVATIONS, TEMPORARIES))


def _by_module(lives: Iterator[Life]) -> Counter[str]:
    found: Counter[str] = Counter()
    for life in lives:
        if life.module is not None:
            found[life.module] += life.bytes
    return found


def _with_submodules(alone: Counter[str]) -> Counter[str]:
    """Each module with all that is inside it; "" is the whole."""
    found: Counter[str] = Counter()
    for path, size in alone.items():
        found[""] += size
        parts = path.split(".") if path else []
        for end in range(1, len(parts) + 1):
            found[".".join(parts[:end])] += size
    return found
