"""What a call of a drop-in costs before its program runs: is everything that forward read as it was at capture?

    python -m tests.benchmarks.guards [--blocks 33]

A residual network of about 300 modules, as many as ResNet-101 has; printed are the quartiles in microseconds of CPU
time, of the comparison alone and of all that is looked at in a call, inputs included.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from memrewrite.capture import capture
from memrewrite.codegen.writer import generate
from memrewrite.runtime.dropin import accept, build, own, program_from, programs
from memrewrite.workload.step import Inputs

_CALLS, _ROUNDS = 100, 21


class Bottleneck(nn.Module):
    """Three convolutions with batch normalization and a residual, as ResNet has them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, width, 1, bias=False), nn.BatchNorm2d(width)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        return self.relu(self.bn3(self.conv3(y)) + x)


def drop_in(blocks: int) -> tuple[nn.Module, Tensor]:
    """A drop-in for a residual network, and an input for it."""
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.Sequential(*(Bottleneck(4) for _ in range(blocks))), nn.Conv2d(4, 1, 1)
    )
    image = torch.randn(2, 3, 6, 6)
    source, constants = generate(capture(model, Inputs((image,), {})))
    return build(model, program_from(source), constants), image


def microseconds(call: Callable[[], object]) -> list[float]:
    """The quartiles of what a call takes."""
    times = []
    for _ in range(_ROUNDS):
        started = time.process_time()
        for _ in range(_CALLS):
            call()
        times.append((time.process_time() - started) / _CALLS * 1e6)
    return statistics.quantiles(times, n=4)


def main() -> int:
    """Print a line for each."""
    parser = argparse.ArgumentParser(description="What the guards of a drop-in cost a call.")
    parser.add_argument("--blocks", type=int, default=33)
    result, image = drop_in(parser.parse_args().blocks)
    kept, (program,) = own(result), programs(result).values()
    if kept is None or kept.guards is None:
        raise RuntimeError("This is no drop-in.")
    print(
        f"{len(list(result.modules()))} modules, {len(list(result.parameters()))} parameters, torch {torch.__version__}"
    )
    for name, call in {"guards": kept.guards.hold, "call": lambda: accept(program, result, (image,), {})}.items():
        low, middle, high = microseconds(call)
        print(f"{name}: {middle:.1f} us ({low:.1f} - {high:.1f})", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
