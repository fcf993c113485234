"""Lightning's ``Trainer`` with one callback more: ``Optimize``. A small U-Net on random images, random weights.

    pip install -e ".[lightning]"
    python examples/train_lightning.py --amp bf16
    torchrun --nproc-per-node 2 examples/train_lightning.py
    torchrun --nproc-per-node 2 examples/train_lightning.py --fsdp

Several processes train by DDP, or with ``--fsdp`` by FSDP2, which is Lightning's ``ModelParallelStrategy``.
Trains twice from the same start, as it is and rewritten; the losses have to be the same.
"""

import argparse
import os
from contextlib import ExitStack
from typing import Any

import torch
from compare import Run, compare, scale, tolerance
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from unet import UNet

from memrewrite.integrations.lightning import Optimize


class Segmenter(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = UNet(base=8, levels=2)

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            # The submodule that will be optimized last: it is the model for memrewrite.
            for part in (*self.net.down, *self.net.up, self.net):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, masks = batch
        return functional.cross_entropy(self.net(images), masks)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Watch(Callback):
    """Keeps each step's loss and watches its memory; listed last, so that it begins after the others."""

    def __init__(self) -> None:
        self.run = Run()
        self.step = ExitStack()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.step.enter_context(self.run.watched(pl_module, trainer.optimizers[0], batch))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.step.close()
        self.run.losses.append(outputs["loss"].item())


def strategy(fsdp: bool) -> ModelParallelStrategy | str:
    if fsdp:
        return ModelParallelStrategy(data_parallel_size=int(os.environ["WORLD_SIZE"]), tensor_parallel_size=1)
    return "ddp" if "WORLD_SIZE" in os.environ else "auto"


def train(data: DataLoader, amp: str, fsdp: bool, *callbacks: Callback) -> Run:
    torch.manual_seed(0)
    watch = Watch()
    trainer = Trainer(
        max_epochs=1,
        strategy=strategy(fsdp),
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        precision="bf16-mixed" if amp == "bf16" else "32-true",
        callbacks=[*callbacks, watch],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Segmenter(), data)
    return watch.run


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small U-Net with Lightning, as it is and rewritten.")
    parser.add_argument("--budget", default="70%")  # on a GPU, convolutions' workspaces are a third
    parser.add_argument("--amp", choices=("off", "bf16"), default="off")
    parser.add_argument("--fsdp", action="store_true")
    options = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = 8 * scale(device)
    images = TensorDataset(torch.randn(4 * size, 3, 64, 64), torch.randint(2, (4 * size, 64, 64)))
    data = DataLoader(images, batch_size=size)
    before = train(data, options.amp, options.fsdp)
    after = train(data, options.amp, options.fsdp, Optimize("net", budget=options.budget))  # the one callback
    compare(before, after, tolerance(device, options.amp))


if __name__ == "__main__":
    main()
