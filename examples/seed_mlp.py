"""The very wide net on which a memory-efficient Swish was first shown, and its table of five phases.

"More Memory-Efficient Swish Activation Function" (2019) read ``torch.cuda.memory_allocated`` after every statement of a
training loop, at batch 128:

    step 1: data 524, forw 1552, loss 1552, back 1044, step 1044 MB
    step 2: data 1044, forw 2072, loss 2072, back 1044, step 1044 MB

The figures give the rest away. "MB" is 2**20 bytes. 524 = 512 (the first weight, 2**19 x 256 floats) + six vectors of
2**19 floats (2 each): its bias, the norm's weight, bias and two running statistics, the last weight. The forward adds
4 x 256 (x, sigmoid(x), their product and the norm's output, all of them kept by autograd) + 2 x 2 (the norm's saved
statistics). 1044 = 524 + 520 of gradients, so the optimizer has no state: plain SGD; and step 2 starts at 1044, so
``zero_grad`` fills the gradients with zeros instead of freeing them.

    python examples/seed_mlp.py    # measured on CUDA; predicted where there is none, in seconds and without the memory
"""

import argparse
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

MIB = 2**20
FEATURES = 256
WIDTH = 2**19


class Swish(nn.Module):
    """Autograd keeps x and sigmoid(x)."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)


class SwishFunction(torch.autograd.Function):
    """The article's remedy: keep x alone. Its backward makes several temporaries as large as x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return grad * (s * (1 + x * (1 - s)))


class FunctionSwish(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return SwishFunction.apply(x)


class KeepingSGD(torch.optim.SGD):
    """Plain SGD whose ``zero_grad`` keeps the gradients' memory, the default of 2019."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        super().zero_grad(set_to_none=False)


def optimizer(parameters: Iterable[nn.Parameter]) -> KeepingSGD:
    return KeepingSGD(parameters, lr=1e-3)


def get_model(width: int = WIDTH, swish: Callable[[], nn.Module] = Swish) -> nn.Module:
    """136,314,881 parameters at the full width, almost all of them in the first layer."""
    return nn.Sequential(nn.Linear(FEATURES, width), swish(), nn.BatchNorm1d(width), nn.Linear(width, 1))


def get_inputs(batch_size: int = 128) -> tuple[Tensor, ...]:
    return (torch.randn(batch_size, FEATURES),)


def get_small_model() -> nn.Module:
    return get_model(width=2**10)


def get_small_inputs(batch_size: int = 512) -> tuple[Tensor, ...]:
    return get_inputs(batch_size)


def variants(width: int, batch_size: int, device: str) -> Iterator[tuple[str, nn.Module]]:
    """The three nets to compare, one at a time."""
    import memrewrite

    yield "x * sigmoid(x)", get_model(width).to(device)
    yield "the article's Function", get_model(width, FunctionSwish).to(device)
    inputs = tuple(x.to(device) for x in get_inputs(batch_size))
    # Here only memory is looked at; the tests verify this rewrite.
    yield "memrewrite", memrewrite.optimize(get_model(width).to(device), inputs, optimizer=optimizer, verify=False)


def main() -> None:
    """Print the phases of both steps at the first batch size, and the peak of step 2 at every batch size."""
    from memrewrite.measurement.measuring import measure
    from memrewrite.simulate import simulate
    from memrewrite.workload.step import Inputs, Step

    parser = argparse.ArgumentParser(description="The table of the Swish article, for three variants of its net.")
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    # In 2019 cuBLAS took its workspaces outside of PyTorch's allocator. Today they count (two of 32 MiB on an H200),
    # unless they are switched off before CUDA starts; so the figures here are those of the tensors alone.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "0")

    look, word = (measure, "measured") if options.device.startswith("cuda") else (simulate, "predicted")
    for batch_size in options.batch_sizes:
        inputs = Inputs(tuple(x.to(options.device) for x in get_inputs(batch_size)), {})
        for name, model in variants(options.width, batch_size, options.device):
            seen = look(model, inputs, Step(optimizer=optimizer))
            print(f"batch {batch_size}, {name}: {word} peak of step 2 {seen.peak / MIB:.0f} MiB")
            if batch_size == options.batch_sizes[0]:
                for number, phases in enumerate((seen.phases[:5], seen.phases[5:]), start=1):
                    print(f"  step {number}:", ", ".join(f"{phase} {used / MIB:.0f}" for phase, used in phases))


if __name__ == "__main__":
    main()
