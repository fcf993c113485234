"""A GPT-2 that ``fully_shard`` (FSDP2) spreads over the processes of torchrun, then ``memrewrite.optimize`` rewrites.

    torchrun --nproc-per-node 2 examples/train_fsdp.py

The loop runs twice from the same start, as it is and rewritten; the losses have to be the same in every process.
"""

import argparse
import os

import torch
import torch.distributed as dist
from compare import Run, compare, scale
from gpt2 import GPT2, Config, random_tokens
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import memrewrite

SIZES = Config(vocabulary=97, context=64, layers=3, heads=2, width=64)


def train(batches: list[tuple[Tensor, ...]], budget: str | None) -> Run:
    device = batches[0][0].device
    torch.manual_seed(0)
    model = GPT2(SIZES).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for module in (*model.h, model):
        fully_shard(module, mesh=mesh)
    if budget is not None:
        # The one line, in every process: the first one plans, the others run what it sends.
        memrewrite.optimize(model, batches[0], budget=budget, loop="drop-output", seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = Run()
    torch.manual_seed(1 + dist.get_rank())  # dropout
    for batch in batches:
        with run.watched(model, optimizer, batch):
            loss = model(*batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        run.losses.append(loss.item())
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small sharded GPT-2, as it is and rewritten.")
    parser.add_argument("--budget", default="70%")
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()

    on_cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_cuda else "gloo")
    torch.manual_seed(dist.get_rank())  # other data in each process
    rows = 8 * scale(device.type)
    batches = [tuple(t.to(device) for t in random_tokens(rows, SIZES, 64)) for _ in range(options.steps)]
    before, after = train(batches, None), train(batches, options.budget)
    if dist.get_rank() == 0:
        compare(before, after, tolerance=1e-2 if on_cuda else 0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
