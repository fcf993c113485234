"""ResNet-50 with in-place ReLUs and in-place residual sums, as torchvision spells it; random weights.

memrewrite optimize examples/resnet50.py --budget 60% -o out
"""

import torch
from torch import Tensor, nn


class Bottleneck(nn.Module):
    """1x1, 3x3 (strided), 1x1 with a residual; the output has four times ``width`` channels."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or channels != 4 * width:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """Four stages of ``depths`` bottlenecks, the first of ``width`` channels."""

    def __init__(self, depths: tuple[int, int, int, int] = (3, 4, 6, 3), width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, padding=1)
        channels, stages = width, []
        for stage, depth in enumerate(depths):
            blocks = []
            for block in range(depth):
                blocks.append(Bottleneck(channels, width << stage, 2 if stage > 0 and block == 0 else 1))
                channels = 4 * (width << stage)
            stages.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def get_model() -> nn.Module:
    """ResNet-50: 25,557,032 parameters."""
    return ResNet()


def get_inputs(batch_size: int = 32) -> tuple[Tensor, ...]:
    return (torch.randn(batch_size, 3, 224, 224),)


def get_small_model() -> nn.Module:
    return ResNet(depths=(1, 1, 1, 1), width=8, classes=10)


def get_small_inputs(batch_size: int = 4) -> tuple[Tensor, ...]:
    return (torch.randn(batch_size, 3, 64, 64),)
