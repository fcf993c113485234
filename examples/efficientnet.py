"""EfficientNet-B0 (Tan and Le, 2019) with ``x * sigmoid(x)`` written out everywhere; random weights.

Autograd keeps both factors of every such product, which is why the network trains in far more memory than its
5.3 million parameters suggest.

    memrewrite optimize examples/efficientnet.py --budget 60% -o out
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn


class Stage(NamedTuple):
    """``blocks`` inverted residuals; the first one has the stride, the others 1."""

    expand: int
    kernel: int
    stride: int
    channels: int
    blocks: int


B0 = (
    Stage(1, 3, 1, 16, 1),
    Stage(6, 3, 2, 24, 2),
    Stage(6, 5, 2, 40, 2),
    Stage(6, 3, 2, 80, 3),
    Stage(6, 5, 1, 112, 3),
    Stage(6, 5, 2, 192, 4),
    Stage(6, 3, 1, 320, 1),
)


def swish(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def conv_norm(channels: int, out: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, out, kernel, stride, padding=kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(out, eps=1e-3, momentum=0.01),
    )


class SqueezeExcite(nn.Module):
    """Scales every channel by a gate computed from the channel means."""

    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.reduce = nn.Conv2d(channels, squeezed, 1)
        self.expand = nn.Conv2d(squeezed, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        gate = x.mean((2, 3), keepdim=True)
        return x * torch.sigmoid(self.expand(swish(self.reduce(gate))))


class InvertedResidual(nn.Module):
    """Expand, depthwise convolution, squeeze-and-excite, project; ``drop_path`` drops whole samples of the branch."""

    def __init__(self, channels: int, stage: Stage, stride: int, drop_path: float) -> None:
        super().__init__()
        inner = channels * stage.expand
        self.expand = conv_norm(channels, inner, 1) if stage.expand != 1 else None
        self.depthwise = conv_norm(inner, inner, stage.kernel, stride, groups=inner)
        self.gate = SqueezeExcite(inner, max(1, channels // 4))
        self.project = conv_norm(inner, stage.channels, 1)
        self.residual = stride == 1 and channels == stage.channels
        self.drop_path = drop_path

    def forward(self, x: Tensor) -> Tensor:
        out = x if self.expand is None else swish(self.expand(x))
        out = self.project(self.gate(swish(self.depthwise(out))))
        if not self.residual:
            return out
        if self.drop_path > 0 and self.training:
            kept = torch.rand(out.shape[0], 1, 1, 1, device=out.device, dtype=out.dtype) >= self.drop_path
            out = out * kept / (1 - self.drop_path)
        return x + out


class EfficientNet(nn.Module):
    """``stages`` between a stem of ``stem`` channels and a head of ``head`` channels."""

    def __init__(
        self,
        stages: tuple[Stage, ...] = B0,
        stem: int = 32,
        head: int = 1280,
        classes: int = 1000,
        dropout: float = 0.2,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        self.stem = conv_norm(3, stem, 3, stride=2)
        channels, blocks = stem, []
        for stage in stages:
            for block in range(stage.blocks):
                stride = stage.stride if block == 0 else 1
                blocks.append(InvertedResidual(channels, stage, stride, drop_path))
                channels = stage.channels
        self.blocks = nn.Sequential(*blocks)
        self.head = conv_norm(channels, head, 1)
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(head, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = swish(self.head(self.blocks(swish(self.stem(x)))))
        return self.classifier(self.dropout(x.mean((2, 3))))


def get_model(drop_path: float = 0.0) -> nn.Module:
    """EfficientNet-B0: 5,288,548 parameters."""
    return EfficientNet(drop_path=drop_path)


def get_inputs(batch_size: int = 16) -> tuple[Tensor, ...]:
    return (torch.randn(batch_size, 3, 224, 224),)


def get_small_model() -> nn.Module:
    stages = (Stage(1, 3, 1, 8, 1), Stage(4, 5, 2, 12, 2))
    return EfficientNet(stages, stem=8, head=32, classes=10)


def get_small_inputs(batch_size: int = 4) -> tuple[Tensor, ...]:
    return (torch.randn(batch_size, 3, 64, 64),)
