"""``torch.compile`` after ``memrewrite.optimize``: the compiler fuses what is left and keeps to what was planned.

``compiled=True`` keeps the plan to what the compiler honours.

    python examples/train_compiled.py    # inductor on CUDA, else aot_eager, which needs no C++ compiler

Trains twice from the same start, compiled as it is and compiled after the rewrite; the losses have to be the same.
"""

import argparse
import copy
import warnings

import torch
from compare import Run, compare, scale, tolerance
from efficientnet import get_small_inputs, get_small_model
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

import memrewrite


def train(model: nn.Module, batches: list[tuple[Tensor, Tensor]], backend: str) -> Run:
    """Train; ``peak`` of the result is what the compiled forward keeps for the backward, weights aside."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    compiled = torch.compile(model, backend=backend)
    run = Run()
    for images, labels in batches:
        kept = {}

        def keep(tensor: Tensor, kept: dict[int, int] = kept) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with saved_tensors_hooks(keep, lambda tensor: tensor):
            output = compiled(images)
        for tensor in [*model.parameters(), *model.buffers()]:
            kept.pop(tensor.untyped_storage().data_ptr(), None)
        loss = functional.cross_entropy(output, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        run.losses.append(loss.item())
        run.peak = max(run.peak, sum(kept.values()))
    return run


def main() -> None:
    on_cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description="Train a small EfficientNet, compiled as it is and after the rewrite.")
    parser.add_argument("--budget", default="60%")
    parser.add_argument("--backend", default="inductor" if on_cuda else "aot_eager")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--device", default="cuda" if on_cuda else "cpu")
    options = parser.parse_args()

    warnings.simplefilter("error", memrewrite.FallbackWarning)
    torch.manual_seed(0)
    model = get_small_model().to(options.device)
    model.dropout.p = 0.0  # compilers draw random numbers of their own
    size = 32 * scale(options.device)
    batches = [
        (get_small_inputs(size)[0].to(options.device), torch.arange(size, device=options.device) % 10)
        for _ in range(options.steps)
    ]
    optimized = memrewrite.optimize(copy.deepcopy(model), batches[0][0], budget=options.budget, compiled=True)
    before = train(model, batches, options.backend)
    after = train(optimized, batches, options.backend)
    compare(before, after, tolerance(options.device, "off"), what="kept for backward")


if __name__ == "__main__":
    main()
