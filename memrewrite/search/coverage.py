"""How much of what forward keeps for backward lies in the regions that are rewritten, and how much outside them."""

from collections.abc import Callable, Collection
from contextlib import ExitStack
from typing import Any

from torch import nn

from memrewrite.measurement.measuring import preserved_state
from memrewrite.simulate.fake.copier import tensors_of
from memrewrite.simulate.fake.fakes import on_fakes
from memrewrite.simulate.memory.tracker import Tracker
from memrewrite.state.random_state import preserved_rng
from memrewrite.torch_internals.fake_tensors import FAKE_TENSOR_ERRORS
from memrewrite.workload.step import Inputs, Step, autocast, device_type


def kept(model: nn.Module, inputs: Inputs, step: Step, paths: Collection[str]) -> dict[str, int]:
    """Bytes alive as forward ends, by which of ``paths`` made them (the innermost; "" stands for the rest).

    Parameters, buffers and inputs do not count; storages are rounded up to 512 bytes. Runs forward once on a fake twin
    or, where values decide its course, on the model itself, which is then put back.
    """
    try:
        with (
            preserved_rng([*tensors_of(model), *inputs.tensors()]),
            on_fakes(model, inputs, step.target, these=True) as (twin, fakes),
        ):
            return _forward(twin, fakes, step, paths)
    except FAKE_TENSOR_ERRORS:
        with preserved_state(model, inputs):
            return _forward(model, inputs, step, paths)


def _forward(model: nn.Module, inputs: Inputs, step: Step, paths: Collection[str]) -> dict[str, int]:
    tracker = Tracker(device_type(model, inputs))
    tracker.register([*tensors_of(model), *inputs.tensors()], _GIVEN)
    tracker.begin("forward", "")
    inside = [""]
    with ExitStack() as stack:
        for path in filter(None, paths):
            enter, leave = _switches(tracker, inside, path)
            module = model.get_submodule(path)
            stack.callback(module.register_forward_pre_hook(enter).remove)
            stack.callback(module.register_forward_hook(leave, always_call=True).remove)
        with autocast(step.amp, device_type(model, inputs)), tracker:
            given = inputs.of_a_run()
            output = model(*given.args, **given.kwargs)
    living = tracker.living()
    del output
    return {path: living.get(path, 0) for path in dict.fromkeys(["", *paths])}


_GIVEN = ".given"  # no path begins with a dot


def _switches(tracker: Tracker, inside: list[str], path: str) -> tuple[Callable[..., None], Callable[..., None]]:
    """Hooks between which storages are counted as made at ``path``; ``inside`` holds the paths being run."""

    def enter(*args: Any) -> None:
        inside.append(path)
        tracker.begin("forward", path)

    def leave(*args: Any) -> None:
        inside.pop()
        tracker.begin("forward", inside[-1])

    return enter, leave
