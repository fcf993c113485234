"""An old question: how much memory will this net take in mini-batches of 128? Answered before anything runs.

The net of the question has 532,752 activations and 19,072,984 parameters for images of 180 x 50 x 1; its layers were
not told. This one has the same counts: four convolutions with pooling, three fully connected layers. The rule of thumb
gives 742.34 MB for it (MB of 2**20 bytes, and each term rounded before they are added):

    parameters x 3:     19,072,984 * 3 * 4 / 2**20 = 218.27     weights, gradients, momentum
    activations x 2:       532,752 * 2 * 4 / 2**20 =   4.06     each output and its error; times 128
    inputs:                  128 * 9,000 * 4 / 2**20 =   4.39
                                4.06 * 128 + 218.27 + 4.39 = 742.34 MB

What a step really takes follows from what autograd keeps, what the optimizer holds, and when things are freed:

    python examples/seed_batch_memory.py [--optimizer sgd-momentum] [--device cuda]
    memrewrite estimate examples/seed_batch_memory.py --device-memory 2GB
"""

import argparse
from itertools import pairwise

import torch
from torch import Tensor, nn


def get_model() -> nn.Module:
    """Convolutions over 50 x 180 pixels, each halved by pooling, and fully connected layers to 800 classes."""
    layers: list[nn.Module] = []
    for before, after in pairwise((1, 40, 40, 96, 192)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    layers.append(nn.Flatten())  # 3 x 11 pixels are left
    for before, after in pairwise((192 * 3 * 11, 1760, 3008)):
        layers += [nn.Linear(before, after), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.Linear(3008, 800))


def get_inputs(batch_size: int = 128) -> tuple[Tensor, ...]:
    return (torch.randn(batch_size, 1, 50, 180),)


def main() -> None:
    """Print the estimate for a training step, the textbook's figure beside the exact one."""
    from rich.console import Console

    import memrewrite
    from memrewrite.report import estimate_table

    parser = argparse.ArgumentParser(description="The memory of a mini-batch, by the rule of thumb and exactly.")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    found = memrewrite.estimate(
        get_model(), get_inputs(options.batch_size), optimizer=options.optimizer, device=options.device
    )
    estimate_table.show(found, Console(width=80))


if __name__ == "__main__":
    main()
