"""A training loop in timm's style with one line more: ``memrewrite.optimize``. Random images, random weights.

    pip install -e ".[timm]"
    python examples/train_timm.py --amp bf16

``create_model``, ``create_optimizer_v2``, the scaler that steps, a schedule and an average of the weights (EMA), all
timm's. Trains twice from the same start, as it is and rewritten; losses and averages have to be the same.
"""

import argparse

import timm
import torch
from compare import AMP, Run, compare, scale, tolerance
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3, NativeScaler
from torch import Tensor, nn

import memrewrite


def train(batches: list[tuple[Tensor, Tensor]], amp: torch.dtype | None, budget: str | None) -> tuple[Run, nn.Module]:
    device = batches[0][0].device
    torch.manual_seed(0)
    model = timm.create_model("test_efficientnet", num_classes=10, drop_rate=0.1, drop_path_rate=0.1).to(device)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
    loss_fn = LabelSmoothingCrossEntropy()
    if budget is not None:
        options = {"optimizer": optimizer, "amp": amp, "loop": "drop-output,ema"}  # add prefetch with timm's loader
        model = memrewrite.optimize(model, batches[0][0], budget=budget, **options)  # the one line
    average = ModelEmaV3(model, decay=0.9)
    scheduler, _ = create_scheduler_v2(optimizer, sched="cosine", num_epochs=len(batches), warmup_epochs=1)
    scaler = NativeScaler(device.type)
    run = Run()
    torch.manual_seed(1)  # dropout and drop path
    for number, (images, labels) in enumerate(batches):
        with run.watched(model, optimizer, [images, labels, *average.parameters(), *average.buffers()]):
            with torch.autocast(device.type, amp, enabled=amp is not None):
                loss = loss_fn(model(images), labels)
            scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
            optimizer.zero_grad()
        average.update(model)
        scheduler.step(number + 1)
        run.losses.append(loss.item())
    return run, average.module


def main() -> None:
    parser = argparse.ArgumentParser(description="Train timm's smallest EfficientNet, as it is and rewritten.")
    parser.add_argument("--budget", default="60%")
    parser.add_argument("--amp", choices=("off", "bf16"), default="off")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()

    torch.manual_seed(0)
    size = 16 * scale(options.device)
    batches = [
        (torch.randn(size, 3, 96, 96, device=options.device), torch.arange(size, device=options.device) % 10)
        for _ in range(options.steps)
    ]
    before, average = train(batches, AMP[options.amp], None)
    after, rewritten = train(batches, AMP[options.amp], options.budget)
    allowed = tolerance(options.device, options.amp)
    compare(before, after, allowed)
    torch.testing.assert_close(rewritten.state_dict(), average.state_dict(), rtol=0, atol=allowed)


if __name__ == "__main__":
    main()
