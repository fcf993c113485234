"""Training loops as people write them, each written out, to compare what a step is said to take with what it takes.

The loops are plain PyTorch and know nothing of ``memrewrite``; ``peak_of`` counts every storage they have.
"""

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from examples.unet import UNet
from memrewrite.records import loop as habits
from memrewrite.simulate.memory.tracker import Tracker
from memrewrite.workload.step import Step
from tests.support.models import ResidualNet

STEPS = 3
Batches = Iterator[tuple[Tensor, Tensor]]
Criterion = Callable[[Any, Tensor], Tensor]
Loop = Callable[[nn.Module, torch.optim.Optimizer, Criterion, Batches], None]


class LanguageModel(nn.Module):
    """Token embedding, residual layers that are no wider inside, a head whose logits are the largest tensor of all."""

    def __init__(self, words: int = 160, width: int = 32, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.inner = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(depth))
        self.outer = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(depth))
        self.head = nn.Linear(width, words)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for norm, inner, outer in zip(self.norms, self.inner, self.outer, strict=True):
            x = x + outer(F.gelu(inner(norm(x))))
        return self.head(x)


class Case(NamedTuple):
    model: Callable[[], nn.Module]
    x: Callable[[], Tensor]
    y: Callable[[], Tensor]
    criterion: Criterion
    budget: float


def of_tokens(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), y.flatten())


CASES = {
    "unet": Case(
        lambda: UNet(base=4, levels=2, classes=4),
        lambda: torch.randn(2, 3, 64, 64),
        lambda: torch.randint(4, (2, 64, 64)),
        F.cross_entropy,
        0.62,
    ),
    "language model": Case(
        LanguageModel, lambda: torch.randint(160, (16, 64)), lambda: torch.randint(160, (16, 64)), of_tokens, 0.6
    ),
    "cnn": Case(
        lambda: ResidualNet(8, 4),
        lambda: torch.randn(8, 3, 24, 24),
        lambda: torch.randint(10, (8,)),
        F.cross_entropy,
        0.6,
    ),
}


def made(name: str) -> tuple[nn.Module, Tensor, Tensor, Criterion]:
    torch.manual_seed(0)
    case = CASES[name]
    return case.model(), case.x(), case.y(), case.criterion


def step_of(loop: str, criterion: Criterion, y: Tensor, **more: Any) -> Step:
    loss_fn = lambda output: criterion(output, y)  # noqa: E731  (a closure over the target is what is meant)
    return Step(optimizer=torch.optim.AdamW, loss_fn=loss_fn, loop=habits.Loop.parse(loop), **more)


def tutorial(model: nn.Module, optimizer: torch.optim.Optimizer, criterion: Criterion, batches: Batches) -> None:
    for x, y in batches:
        output = model(x)
        loss = criterion(output, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def drop_output(model: nn.Module, optimizer: torch.optim.Optimizer, criterion: Criterion, batches: Batches) -> None:
    for x, y in batches:
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del loss


def zero_before_backward(
    model: nn.Module, optimizer: torch.optim.Optimizer, criterion: Criterion, batches: Batches
) -> None:
    for x, y in batches:
        output = model(x)
        loss = criterion(output, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def zero_in_place(model: nn.Module, optimizer: torch.optim.Optimizer, criterion: Criterion, batches: Batches) -> None:
    for x, y in batches:
        output = model(x)
        loss = criterion(output, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def prefetch(model: nn.Module, optimizer: torch.optim.Optimizer, criterion: Criterion, batches: Batches) -> None:
    following = next(batches)
    for coming in batches:
        (x, y), following = following, coming
        output = model(x)
        loss = criterion(output, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def scaler(model: nn.Module, optimizer: torch.optim.Optimizer, criterion: Criterion, batches: Batches) -> None:
    scaling = torch.amp.GradScaler(next(model.parameters()).device.type, init_scale=4.0)
    for x, y in batches:
        output = model(x)
        loss = criterion(output, y)
        scaling.scale(loss).backward()
        scaling.step(optimizer)
        scaling.update()
        optimizer.zero_grad()


def ema(model: nn.Module, optimizer: torch.optim.Optimizer, criterion: Criterion, batches: Batches) -> None:
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn())
    for x, y in batches:
        output = model(x)
        loss = criterion(output, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)


def accumulate(model: nn.Module, optimizer: torch.optim.Optimizer, criterion: Criterion, batches: Batches) -> None:
    for number, (x, y) in enumerate(batches, 1):
        output = model(x)
        loss = criterion(output, y)
        loss.backward()
        if number % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()


def evaluate(model: nn.Module, optimizer: torch.optim.Optimizer, criterion: Criterion, batches: Batches) -> None:
    with torch.no_grad():
        for x, _ in batches:
            output = model(x)  # noqa: F841  (as it is in loops: held until the next one is there)


LOOPS: dict[str, Loop] = {
    "tutorial": tutorial,
    "drop-output": drop_output,
    "zero-before-backward": zero_before_backward,
    "zero-in-place": zero_in_place,
    "prefetch": prefetch,
    "scaler": scaler,
    "ema": ema,
}


def peak_of(
    loop: Loop,
    model: nn.Module,
    optimizer: Callable[[Any], torch.optim.Optimizer],
    criterion: Criterion,
    x: Tensor,
    y: Tensor,
    first: int = 2,
) -> int:
    """The most bytes in use from forward number ``first`` on, by the storages of a real run of six batches.

    Each batch is of fresh tensors; how long they live is the loop's affair. ``model`` stays as it is.
    """
    tracker = Tracker("cpu")
    model = copy.deepcopy(model)
    tracker.register([*model.parameters(), *model.buffers()], "model")
    forwards = itertools.count(1)

    def begin(module: nn.Module, args: Any) -> None:
        if next(forwards) == first:
            tracker.reset_peak()

    def batches() -> Batches:
        for _ in range(6):
            yield x.clone(), y.clone()

    model.register_forward_pre_hook(begin)
    with tracker:
        loop(model, optimizer(model.parameters()), criterion, batches())
    return tracker.peak
