"""U-Net (Ronneberger et al., 2015) with BatchNorm and padded convolutions; random weights.

memrewrite optimize examples/unet.py --budget 60% -o out
"""

import torch
from torch import Tensor, nn


class DoubleConv(nn.Sequential):
    """Twice: 3x3 convolution, BatchNorm, in-place ReLU."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__(
            nn.Conv2d(channels, out, 3, padding=1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(inplace=True),
            nn.Conv2d(out, out, 3, padding=1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(inplace=True),
        )


class Up(nn.Module):
    """Doubles the resolution, joins the encoder's features of that level, convolves."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(channels, channels // 2, 2, stride=2)
        self.conv = DoubleConv(channels, channels // 2)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.conv(torch.cat([skip, self.up(x)], dim=1))


class UNet(nn.Module):
    """``levels`` halvings of the resolution, each doubling the channels from ``base``."""

    def __init__(self, channels: int = 3, classes: int = 2, base: int = 64, levels: int = 4) -> None:
        super().__init__()
        self.inc = DoubleConv(channels, base)
        self.pool = nn.MaxPool2d(2)
        self.down = nn.ModuleList(DoubleConv(base << level, base << (level + 1)) for level in range(levels))
        self.up = nn.ModuleList(Up(base << level) for level in range(levels, 0, -1))
        self.outc = nn.Conv2d(base, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = [self.inc(x)]
        for down in self.down:
            skips.append(down(self.pool(skips[-1])))
        x = skips.pop()
        for up in self.up:
            x = up(x, skips.pop())
        return self.outc(x)


def get_model() -> nn.Module:
    """U-Net from 3 channels to 2 classes: 31,037,698 parameters."""
    return UNet()


def get_inputs(batch_size: int = 2, size: int = 512) -> tuple[Tensor, ...]:
    return (torch.randn(batch_size, 3, size, size),)


def get_small_model() -> nn.Module:
    return UNet(base=8, levels=2)


def get_small_inputs(batch_size: int = 2) -> tuple[Tensor, ...]:
    return (torch.randn(batch_size, 3, 64, 64),)
