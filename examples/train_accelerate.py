"""accelerate's FSDP2 with one line more: ``memrewrite.optimize`` of what ``prepare`` returned. A small GPT-2.

    pip install -e ".[transformers]"
    torchrun --nproc-per-node 2 examples/train_accelerate.py

Under DDP, ``--strategy ddp``, it is the other way round: what ``optimize`` returns is prepared.
Trains twice from the same start, as it is and rewritten; the losses have to be the same in every process.
"""

import argparse
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState
from compare import AMP, Run, compare, scale, tolerance
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import memrewrite

LENGTH = 64
VOCABULARY = 211
CONFIG = GPT2Config(
    vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=64, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0
)
CONFIG.use_cache = False  # of keys and values, which training has no use for, and layers write into


def shard_on_cpu(state: Any, plugin: FullyShardedDataParallelPlugin) -> None:
    """What accelerate does by itself where there are GPUs; processes on the CPU it lets do DDP alone."""
    state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
    state.fsdp_plugin = plugin
    if state.mixed_precision != "no":
        plugin.set_mixed_precision(state.mixed_precision)


def prepared(strategy: str, amp: str, batch: dict[str, Tensor], budget: str | None) -> tuple[Any, Any, Accelerator]:
    """The model, its optimizer and the accelerator, as a script makes them."""
    on_cpu = not torch.cuda.is_available()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    precision = "no" if amp == "off" else amp
    accelerator = Accelerator(mixed_precision=precision, cpu=on_cpu, fsdp_plugin=plugin if strategy == "fsdp" else None)
    if on_cpu and strategy == "fsdp":
        shard_on_cpu(accelerator.state, plugin)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(CONFIG).to(accelerator.device)
    options = {"example_kwargs": batch, "budget": budget, "loop": "drop-output"}
    if budget is not None and strategy == "ddp":
        # The one line, before accelerate wraps what runs, in autocast too.
        mesh = f"ddp={accelerator.num_processes}"
        model = memrewrite.optimize(model, (), mesh=mesh, amp=AMP[amp], **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    if budget is not None and strategy == "fsdp":
        # The one line, once it is sharded: the model says in which units and types, and runs its programs from then on.
        memrewrite.optimize(model, (), **options)
    return model, optimizer, accelerator


def train(batches: list[dict[str, Tensor]], strategy: str, amp: str, budget: str | None) -> Run:
    model, optimizer, accelerator = prepared(strategy, amp, batches[0], budget)
    run = Run()
    torch.manual_seed(1 + accelerator.process_index)  # dropout
    for batch in batches:
        with run.watched(model, optimizer, batch.values()):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        run.losses.append(loss.item())
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small GPT-2 with accelerate, as it is and rewritten.")
    parser.add_argument("--strategy", choices=("fsdp", "ddp"), default="fsdp")
    parser.add_argument("--budget", default="70%")
    parser.add_argument("--amp", choices=("off", "bf16"), default="off")
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    state = PartialState(cpu=device == "cpu")
    torch.manual_seed(state.process_index)  # other data in each process
    rows = [torch.randint(VOCABULARY, (8 * scale(device), LENGTH)).to(state.device) for _ in range(options.steps)]
    batches = [{"input_ids": tokens, "labels": tokens} for tokens in rows]
    before = train(batches, options.strategy, options.amp, None)
    after = train(batches, options.strategy, options.amp, options.budget)
    if state.is_main_process:
        compare(before, after, tolerance(device, options.amp))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
