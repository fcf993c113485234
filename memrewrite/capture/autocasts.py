"""What a forward does about autocast: the questions that it asks, the regions that it opens."""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import fx, nn

from memrewrite.capture.normal import attribute
from memrewrite.torch_internals.patches import process_wide

_OURS = ("torch", "memrewrite")
_QUESTIONS = ("is_autocast_enabled", "is_autocast_cpu_enabled", "get_autocast_dtype", "get_autocast_gpu_dtype")


@contextmanager
def autocast_asked() -> Iterator[list[str]]:
    """The names of the modules, but PyTorch's own, that ask meanwhile, unless they imported a question by its name."""
    importlib.import_module("torch._dynamo")  # as it is imported it notes these functions, to know them again
    asked: list[str] = []
    with ExitStack() as stack:
        for name in _QUESTIONS:
            stack.enter_context(mock.patch.object(torch, name, noting(getattr(torch, name), asked)))
        yield asked


def noting(question: Callable[..., Any], asked: list[str]) -> Callable[..., Any]:
    """The same question, which notes the modules, but PyTorch's own, that ask it."""

    def answer(*args: Any) -> Any:
        asking = str(sys._getframe(1).f_globals.get("__name__"))
        if asking.partition(".")[0] not in _OURS:
            asked.append(asking)
        return question(*args)

    return answer


@contextmanager
def autocast_regions() -> Iterator[list[bool]]:
    """For each autocast region that is open meanwhile, outermost first, whether it was entered with gradients on."""
    regions: list[bool] = []
    enter, leave = torch.autocast.__enter__, torch.autocast.__exit__

    def entered(self: torch.autocast) -> Any:
        regions.append(torch.is_grad_enabled())
        return enter(self)  # type: ignore[no-untyped-call]

    def left(self: torch.autocast, *error: Any) -> Any:
        regions.pop()
        return leave(self, *error)

    with mock.patch.multiple(torch.autocast, __enter__=entered, __exit__=left):
        yield regions


@process_wide
@contextmanager
def autocasts_put_back() -> Iterator[None]:
    """What is entered meanwhile knows afterwards what it knew: whoever waits for this may be inside of the same one.

    An autocast object holds what was on before it, and one that decorates a forward, as accelerate's does, is entered
    by each call of that.
    """
    then: dict[int, tuple[torch.autocast, dict[str, Any]]] = {}
    enter = torch.autocast.__enter__

    def entered(self: torch.autocast) -> Any:
        then.setdefault(id(self), (self, {**vars(self)}))
        return enter(self)  # type: ignore[no-untyped-call]

    try:
        with mock.patch.object(torch.autocast, "__enter__", entered):
            yield
    finally:
        for region, known in then.values():
            vars(region).clear()
            vars(region).update(known)


def autocast_now() -> tuple[Any, ...]:
    """Whether autocast is on, and what it casts to, on each type of device."""
    return tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda"))


def told_of_regions(model: nn.Module, graph: fx.Graph) -> tuple[str, ...]:
    """What to say where most of the weights that a graph reads are read in autocast regions: a plan divides none."""
    read = {node: attribute(model, str(node.target)) for node in graph.find_nodes(op="get_attr")}
    weights = {node: value.numel() for node, value in read.items() if isinstance(value, nn.Parameter)}
    regions = graph.find_nodes(op="call_function", target=torch.ops.higher_order.wrap_with_autocast)
    inside = {node for region in regions for node in region.all_input_nodes if node in weights}
    if 2 * sum(map(weights.__getitem__, inside)) <= sum(weights.values()):
        return ()
    name = type(model).__name__
    return (
        f"{name} enters autocast in its own forward, and a plan frees nothing of what it runs in there. Enter autocast "
        'around the call instead (amp="bf16"), or plan the layers inside by themselves, regions=["layers.*"] say.',
    )
