"""What two processes do with transformers' ``Trainer`` in ``tests/integrations/test_in_processes.py``.

    torchrun --nproc-per-node 2 -m tests.support.trainers fsdp FOLDER

Parameters have to be those of the same training without memrewrite, after each of two times, and as they are saved.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import DistributedType, FullyShardedDataParallelPlugin, PartialState
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import memrewrite
from memrewrite.integrations.transformers import optimize_trainer

CONFIG = GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=3, n_head=2, bos_token_id=0, eos_token_id=0)


def padded(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    tokens = [row["input_ids"] for row in rows]
    ids = nn.utils.rnn.pad_sequence(tokens, batch_first=True)
    return {"input_ids": ids, "labels": nn.utils.rnn.pad_sequence(tokens, batch_first=True, padding_value=-100)}


def made(sharded: bool, folder: Path) -> Any:
    """A trainer of texts of several lengths, in four steps of two micro-batches."""
    torch.manual_seed(0)
    data = [{"input_ids": torch.randint(64, (length,))} for length in range(17, 33) for _ in range(4)]
    args = TrainingArguments(
        str(folder / "runs"),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=4,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        fsdp=sharded,
        fsdp_config={"version": 2} if sharded else None,
    )
    found = Trainer(model=GPT2LMHeadModel(CONFIG), args=args, train_dataset=data, data_collator=padded)
    if sharded:  # which accelerate does by itself where there are GPUs
        state = found.accelerator.state
        state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
        state.fsdp_plugin = FullyShardedDataParallelPlugin(**args.fsdp_plugin_args)
        found.is_fsdp_enabled = True
    return found


def parameters(trainer: Any) -> dict[str, Tensor]:
    """Whole ones, by name; all processes call this."""
    named = trainer.model.named_parameters()
    return {name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for name, p in named}


def trained(sharded: bool, folder: Path, rewritten: bool) -> tuple[Any, list[dict[str, Tensor]]]:
    """A trainer that has trained twice, and the parameters after each time."""
    found, after = made(sharded, folder), []
    if rewritten:
        optimize_trainer(found, budget="min")
    for time in range(2):
        torch.manual_seed(time + dist.get_rank())  # dropout
        found.train()
        after.append(parameters(found))
    return found, after


def main(strategy: str, folder: Path) -> None:
    sharded = strategy == "fsdp"
    _, there = trained(sharded, folder, rewritten=False)
    ours, here = trained(sharded, folder, rewritten=True)
    torch.testing.assert_close(here, there, rtol=1e-6, atol=1e-6)
    report = memrewrite.report_of(ours.model)
    ours.save_model(str(folder / "saved"))
    dist.barrier()
    saved = GPT2LMHeadModel.from_pretrained(folder / "saved")
    assert all(torch.equal(saved.get_parameter(name), value) for name, value in parameters(ours).items())
    if dist.get_rank() == 0:
        print(report.config["mesh"], "rewritten" if report.changed else "as it was", *report.notes)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
