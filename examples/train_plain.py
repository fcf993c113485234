"""A plain training loop with one line more: ``memrewrite.optimize``. Random images; autocast and GradScaler by option.

    python examples/train_plain.py --amp bf16

The loop runs twice from the same start, as it is and rewritten; the losses have to be the same.
"""

import argparse
import copy

import torch
from compare import AMP, Run, compare, scale, tolerance
from efficientnet import get_small_inputs, get_small_model
from torch import Tensor, nn
from torch.nn import functional

import memrewrite


def train(model: nn.Module, batches: list[tuple[Tensor, Tensor]], amp: torch.dtype | None, budget: str | None) -> Run:
    device = batches[0][0].device.type
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(device, enabled=amp == torch.float16)
    if budget is not None:
        # The one line. Its step is this loop's: inputs, optimizer, precision, and no name for the output below.
        options = {"optimizer": optimizer, "amp": amp, "loop": "drop-output"}
        model = memrewrite.optimize(model, batches[0][0], budget=budget, **options)
    run = Run()
    torch.manual_seed(1)  # dropout
    for images, labels in batches:
        with run.watched(model, optimizer, [images, labels]):
            with torch.autocast(device, amp, enabled=amp is not None):
                loss = functional.cross_entropy(model(images), labels)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
        run.losses.append(loss.item())
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small EfficientNet on random images, as it is and rewritten.")
    parser.add_argument("--budget", default="60%")
    parser.add_argument("--amp", choices=AMP, default="off")
    parser.add_argument("--batch-size", type=int, help="by default 32, on a GPU 1024")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()

    torch.manual_seed(0)
    size = options.batch_size or 32 * scale(options.device)
    model = get_small_model().to(options.device)
    batches = [
        (get_small_inputs(size)[0].to(options.device), torch.arange(size, device=options.device) % 10)
        for _ in range(options.steps)
    ]
    before = train(copy.deepcopy(model), batches, AMP[options.amp], None)
    after = train(model, batches, AMP[options.amp], options.budget)
    # Written out as x * sigmoid(x), Swish is rounded once more than as one operation.
    compare(before, after, tolerance(options.device, options.amp))


if __name__ == "__main__":
    main()
