"""What a rewritten model without segments costs beside the original where starting operators is all the work.

    python -m tests.benchmarks.overhead [--device cuda] [--rounds 40]

Inputs are so small that the time of a step is that of Python and the dispatcher. Steps of both alternate; printed are
the median ratio over the pairs and its quartiles.
"""

import argparse
import statistics
import sys
import time

import torch
from torch import nn

from memrewrite.api import optimize
from memrewrite.workload.step import Inputs, Step
from memrewrite.workload.stepspec import StepSpec
from tests.benchmarks.models import example

_STEPS = 3  # in a row, for one figure


def models(device: torch.device) -> dict[str, tuple[nn.Module, Inputs]]:
    """Models of the examples with tiny inputs, the same each time.

    Where batch normalization sees two values only, some random ones amplify rounding beyond what verification allows.
    """
    torch.manual_seed(0)
    gpt2 = example("gpt2")
    config = gpt2.Config(vocabulary=97, context=16, layers=12, heads=2, width=32)
    found = {
        "resnet50": (example("resnet50").ResNet((3, 4, 6, 3), width=8, classes=10), (torch.randn(2, 3, 32, 32),)),
        "efficientnet": (example("efficientnet").get_model(), (torch.randn(2, 3, 32, 32),)),
        "gpt2": (gpt2.GPT2(config), gpt2.random_tokens(2, config, 16)),
    }
    return {name: (m.to(device), Inputs(tuple(x.to(device) for x in args), {})) for name, (m, args) in found.items()}


def ratios(original: nn.Module, rewritten: nn.Module, inputs: Inputs, step: Step, rounds: int) -> list[float]:
    """Time of the rewritten model over that of the original, for every pair; which goes first alternates."""
    optimizers = {id(m): step.make_optimizer(m) for m in (original, rewritten)}

    def seconds(module: nn.Module) -> float:
        started = time.perf_counter()
        for _ in range(_STEPS):
            step.run(module, inputs, optimizers[id(module)])
        if inputs.tensors()[0].is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - started

    found = []
    for number in range(rounds + 2):
        pair = (original, rewritten) if number % 2 else (rewritten, original)
        took = {id(module): seconds(module) for module in pair}
        found.append(took[id(rewritten)] / took[id(original)])
    return found[2:]  # the first two warm up


def main() -> int:
    """Print a line per model."""
    parser = argparse.ArgumentParser(description="Time of rewritten models without segments over the originals'.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    step = StepSpec(optimizer="sgd").build()
    for name, (model, inputs) in models(torch.device(options.device)).items():
        passes = ("swish", "composites", "inplace_activation")
        # BatchNorm over so few values makes much of a last bit, so that nothing could be proved here.
        rewritten = optimize(model, inputs.args, optimizer="sgd", passes=passes, verify=False, cache=False)
        low, middle, high = statistics.quantiles(ratios(model, rewritten, inputs, step, options.rounds), n=4)
        print(f"{name}: x{middle:.3f} ({low:.3f} - {high:.3f}), {len(rewritten.report.rewrites)} rewrites", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
