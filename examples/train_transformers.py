"""transformers' ``Trainer`` with one line more: ``optimize_trainer``. A small GPT-2 on random tokens, random weights.

    pip install -e ".[transformers]"
    python examples/train_transformers.py --amp bf16
    torchrun --nproc-per-node 2 examples/train_transformers.py
    torchrun --nproc-per-node 2 examples/train_transformers.py --fsdp

Several processes train by DDP, or with ``--fsdp`` by FSDP2.
Trains twice from the same start, as it is and rewritten; the losses have to be the same.
"""

import argparse
import tempfile
from contextlib import ExitStack
from typing import Any

import torch
from accelerate import DistributedType, FullyShardedDataParallelPlugin, PartialState
from compare import Run, compare, scale, tolerance
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from memrewrite.integrations.transformers import optimize_trainer

LENGTH = 64
VOCABULARY = 211
CONFIG = GPT2Config(
    vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=64, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0
)


class Tokens(Dataset):
    """Random tokens, all of one length; batches of real text may differ, and are planned for by the longest."""

    def __init__(self, count: int) -> None:
        self.rows = torch.randint(VOCABULARY, (count, LENGTH))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class Watch(TrainerCallback):
    """Keeps each step's loss and watches its memory."""

    def __init__(self) -> None:
        self.run = Run()
        self.step = ExitStack()

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.step.enter_context(self.run.watched(given["model"], given["optimizer"], []))

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.step.close()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **given: Any) -> None:
        if "loss" in logs:
            self.run.losses.append(logs["loss"])


def shard_on_cpu(trainer: Trainer) -> None:
    """What accelerate does by itself where there are GPUs; processes on the CPU it lets do DDP alone."""
    state = trainer.accelerator.state
    state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
    state.fsdp_plugin = plugin = FullyShardedDataParallelPlugin(**trainer.args.fsdp_plugin_args)
    if state.mixed_precision != "no":
        plugin.set_mixed_precision(state.mixed_precision)
    trainer.is_fsdp_enabled = True


def train(args: TrainingArguments, data: Dataset, budget: str | None) -> Run:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(CONFIG)
    watch = Watch()
    trainer = Trainer(model=model, args=args, train_dataset=data, callbacks=[watch])
    if args.fsdp and args.use_cpu:
        shard_on_cpu(trainer)
    if budget is not None:
        optimize_trainer(trainer, budget=budget)  # the one line
    trainer.train()
    return watch.run


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small GPT-2 with transformers, as it is and rewritten.")
    parser.add_argument("--budget", default="60%")
    parser.add_argument("--amp", choices=("off", "bf16"), default="off")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--label-smoothing", type=float, default=0.0)
    parser.add_argument("--fsdp", action="store_true")
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    data = Tokens(32 * scale(device))
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=8 * scale(device),
            max_steps=options.steps,
            bf16=options.amp == "bf16",
            use_cpu=device == "cpu",
            fsdp=options.fsdp,
            fsdp_config={"version": 2} if options.fsdp else None,
            dataloader_pin_memory=device == "cuda",
            label_smoothing_factor=options.label_smoothing,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        before = train(args, data, None)
        after = train(args, data, options.budget)
    compare(before, after, tolerance(device, options.amp))


if __name__ == "__main__":
    main()
