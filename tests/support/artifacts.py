"""A model with everything an artifact must carry, and a folder that holds its file and its artifact."""

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import memrewrite
from memrewrite.artifact.save import save

# Batch normalization, dropout and a swish to recompute, a tied weight, a plain attribute, a constant made in forward.
NET = """
import torch
from torch import nn

OFFSETS = (0.1, -0.0, 1e-40, 3.0)

def gated(x):
    return x * torch.sigmoid(x)

class Block(nn.Module):
    def __init__(self, width, p):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(width)
        self.drop = nn.Dropout(p)

    def forward(self, x):
        x = self.bn(self.conv(x))
        return self.drop(gated(x))

class ArtifactNet(nn.Module):
    def __init__(self, width=4, p=0.1, gain=0.5):
        super().__init__()
        self.gain = gain
        self.stem = nn.Conv2d(3, width, 3)
        self.blocks = nn.Sequential(Block(width, p), Block(width, p), Block(width, p))
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.second.weight = self.first.weight

    def forward(self, x):
        x = self.blocks(self.stem(x)).mean((2, 3)) + torch.tensor(OFFSETS)
        return self.gain * self.second(self.first(x).tanh())

    def greet(self):
        return "hello"

def get_inputs():
    return torch.randn(8, 3, 12, 12)
"""
# What a step gives: outputs, gradients, buffers and random state, in a form that compares bit for bit.
STEP = """
import torch

def take_step(model):
    torch.manual_seed(7)
    x = torch.randn(8, 3, 12, 12, requires_grad=True)
    model.zero_grad()
    output = model(x)
    output.square().sum().backward()
    found = {"output": output, "input": x.grad, "random": torch.get_rng_state(), **dict(model.named_buffers())}
    found |= {f"{name}.grad": parameter.grad for name, parameter in model.named_parameters()}
    return {name: tensor.detach().clone() for name, tensor in found.items()}
"""


def written(place: Path) -> Iterator[Path]:
    """Write the files into ``place``; their modules can be imported until the generator goes on."""
    (place / "artifact_net.py").write_text(NET)
    (place / "artifact_step.py").write_text(STEP)
    sys.path.insert(0, str(place))
    try:
        save(optimized(), place / "out", weights=True)
        yield place
    finally:
        sys.path.remove(str(place))
        for name in ("artifact_net", "artifact_step"):
            sys.modules.pop(name, None)


def net(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return importlib.import_module("artifact_net").ArtifactNet(**options)


def optimized() -> nn.Module:
    model = memrewrite.optimize(net(), torch.randn(8, 3, 12, 12), budget="min", optimizer="sgd")
    assert "run_segment" in vars(type(model))["_memrewrite"].source
    return model


def take_step(model: nn.Module) -> dict[str, Tensor]:
    return importlib.import_module("artifact_step").take_step(model)


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def listing(place: Path) -> list[str]:
    return sorted(name for name in os.listdir(place) if name != "__pycache__")
