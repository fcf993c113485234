"""What two processes do under DDP in ``tests/api/test_ddp.py``: the model as it is, and optimized, side by side."""

import itertools
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import memrewrite
from memrewrite.runtime.dropin import programs
from memrewrite.simulate.memory.tracker import Tracker

SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("ddp=2", {}),
    "view": ("ddp=2,gradient-as-bucket-view", {"gradient_as_bucket_view": True}),
    "static": ("ddp=2,static-graph", {"static_graph": True}),
    "unused": ("ddp=2,find-unused-parameters", {"find_unused_parameters": True}),
}
WRAPPED = "wrapped before"
FIRST = ("default", WRAPPED)  # apart from the others, which are slow
SENT: list["weakref.ref[Tensor]"] = []  # by the hook, in backwards that are over
STEPS, BUDGET = 3, "75%"


@dataclass(frozen=True)
class Trained:
    """What came of some steps; ``peak`` in bytes is that of the later ones, ``numbers`` are all there are, by name."""

    wrapped: Any
    numbers: dict[str, Tensor]
    peak: int


@dataclass(frozen=True)
class Outcome:
    """The original beside what was made of it. ``differs`` are the names of numbers that do; bytes of either."""

    differs: list[str]
    budget: int
    predicted_before: int
    peak_before: int
    predicted: int
    peak: int
    programs: list[str]


class Net(nn.Module):
    """Keeps more than its parameters take, has buffers that DDP sends and, if asked for, parameters nobody uses."""

    def __init__(self, unused: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = [3, 16, 16, 16]
        pairs = itertools.pairwise(sizes)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.SiLU()) for i, o in pairs
        )
        self.head = nn.Linear(16 * 16, 400)
        self.spare = nn.Linear(30, 400) if unused else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(nn.functional.adaptive_avg_pool2d(x, 4).flatten(1))
        return logits


def everything(names: Sequence[str]) -> tuple[dict[str, Outcome], list[str]]:
    """Settings of a model that is optimized before DDP wraps it, and one that is optimized after; and errors."""
    outcomes = {name: after_wrapping() if name == WRAPPED else before_wrapping(name) for name in names}
    return outcomes, [failing(budget=1000), failing(loss_fn=broken_in_the_first)] if names == FIRST else []


def failing(**asked: Any) -> str:
    """What a call that cannot succeed raises."""
    try:
        memrewrite.optimize(Net(False), images(), mesh="ddp=2", **asked)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def broken_in_the_first(output: Tensor) -> Tensor:
    """A loss that only one process cannot compute."""
    if dist.get_rank() == 0:
        raise ZeroDivisionError("no loss here")
    return output.mean()


def before_wrapping(name: str) -> Outcome:
    """The budget is that of the mesh that the model is wrapped for afterwards."""
    mesh, arguments = SETTINGS[name]
    unused = name == "unused"

    def wrapped(model: nn.Module) -> DistributedDataParallel:
        return DistributedDataParallel(model, **arguments)

    return beside(train(Net(unused), wrapped), train(optimized(Net(unused), mesh), wrapped))


def half(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    """Sends half the bits, and holds them until backward is over, however soon they are there."""
    buffer = bucket.buffer()
    sent = buffer.half().div_(2)
    dist.all_reduce(sent, group=group)
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(lambda: SENT.append(weakref.ref(sent)))
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(buffer.copy_(sent))
    return future


def let_go() -> None:
    """Wait until gloo's thread, too, has let go of what the hook sent."""
    while any(sent() is not None for sent in SENT):
        time.sleep(0.001)
    SENT.clear()


def after_wrapping() -> Outcome:
    """The mesh is the wrapper's own: small buckets, and a hook that sends half the bits."""

    def wrapped(model: nn.Module) -> DistributedDataParallel:
        found = DistributedDataParallel(model, bucket_cap_mb=0.1)
        found.register_comm_hook(None, half)
        return found

    return beside(train(Net(False), wrapped), train(Net(False), wrapped, optimized))


def optimized(model: nn.Module, mesh: str | None = None) -> Any:
    """By segments alone, and not verified, which takes less time: what is trained is compared."""
    asked: dict[str, Any] = {"passes": ["checkpoint_segments"], "verify": False, "mesh": mesh}
    return memrewrite.optimize(model, images(), budget=BUDGET, optimizer=optimizer, **asked)


def beside(theirs: Trained, ours: Trained) -> Outcome:
    """The outcome of two trainings."""
    same = [name for name, value in theirs.numbers.items() if torch.equal(value, ours.numbers[name])]
    report = memrewrite.report_of(ours.wrapped.module)
    return Outcome(
        sorted({*theirs.numbers, *ours.numbers} - {*same}),
        report.budget or 0,
        report.predicted_before.peak,
        theirs.peak,
        report.predicted_after.peak,
        ours.peak,
        [str(program.source) for program in programs(ours.wrapped.module).values()],
    )


def train(
    model: nn.Module, wrap: Callable[[Any], Any], then: Callable[[Any], Any] = lambda wrapped: wrapped
) -> Trained:
    """Some steps of PyTorch's tutorial loop, whose storages are counted, as are those that wrapping makes."""
    tracker = Tracker("cpu")
    tracker.register([*model.parameters(), *model.buffers()], "model")
    with tracker:
        wrapped = wrap(model)
    wrapped = then(wrapped)
    SENT.clear()  # in simulated steps
    chosen, peak = optimizer(wrapped.parameters()), 0
    numbers: dict[str, Tensor] = {}
    for number in range(STEPS):
        x = images(number)
        tracker.register([x], "inputs")
        tracker.reset_peak()
        with tracker:
            output = wrapped(x)
            loss = output.float().mean()
            loss.backward()
        let_go()
        grads = {name: p.grad for name, p in wrapped.named_parameters() if p.grad is not None}
        numbers |= {f"gradient of {name}": gradient.clone() for name, gradient in grads.items()}
        del grads
        with tracker:
            chosen.step()
            chosen.zero_grad()
        numbers[f"loss {number}"] = loss.detach().clone()
        peak = max(peak, tracker.peak) if number else 0
    numbers |= {name: value.clone() for name, value in wrapped.state_dict().items()}
    return Trained(wrapped, numbers, peak)


def images(seed: int = 0) -> Tensor:
    """A batch, another one on each rank."""
    return torch.randn(8, 3, 24, 24, generator=torch.Generator().manual_seed(seed + 100 * dist.get_rank()))


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    """Keeps one tensor of state for each parameter."""
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)
