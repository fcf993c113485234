"""What the training examples share: the memory of a step as it runs, and two runs held against each other."""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from memrewrite import FallbackWarning
from memrewrite.simulate.memory.tracker import Tracker

AMP = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def scale(device: str) -> int:
    """How many times larger batches are on a GPU, where 70 MB of library workspaces would outweigh those for a CPU."""
    return 32 if device.startswith("cuda") else 1


def tolerance(device: str, amp: str) -> float:
    """How far losses may be apart; on a GPU convolutions round to TF32, which makes more of a last bit."""
    return 1e-5 if amp == "off" and device == "cpu" else 1e-2


@dataclass
class Run:
    """The loss of each step, and the peak in bytes of the steps taken under ``watched``."""

    losses: list[float] = field(default_factory=list)
    peak: int = 0

    @contextmanager
    def watched(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Iterable[Tensor]) -> Iterator[None]:
        """Watch a step: CUDA's own counter, or on the CPU every storage from birth to death."""
        warnings.simplefilter("error", FallbackWarning)  # the original's peak is not to pass for the rewritten one's
        on_cuda = next(model.parameters()).is_cuda
        state = [value for values in optimizer.state.values() for value in values.values() if torch.is_tensor(value)]
        tracker = Tracker("cpu")
        tracker.register([*model.parameters(), *model.buffers(), *state, *batch], "there before")
        if on_cuda:
            torch.cuda.reset_peak_memory_stats()
        with nullcontext() if on_cuda else tracker:
            yield
        self.peak = max(self.peak, torch.cuda.max_memory_allocated() if on_cuda else tracker.peak)


def compare(before: Run, after: Run, tolerance: float, what: str = "peak") -> None:
    """Print both runs; ends the program where losses differ by more than ``tolerance`` or the peak did not fall."""
    for number, losses in enumerate(zip(before.losses, after.losses, strict=True), start=1):
        print("step {}: loss {:.6f}, rewritten {:.6f}".format(number, *losses))
    print(f"{what} {before.peak / 1e6:.1f} MB, rewritten {after.peak / 1e6:.1f} MB")
    apart = max(abs(a - b) for a, b in zip(before.losses, after.losses, strict=True))
    if not apart <= tolerance:
        raise SystemExit(f"The losses are {apart} apart, allowed are {tolerance}.")
    if after.peak >= before.peak:
        raise SystemExit("The rewritten model takes no less.")
