"""A few tiny real models that several tests share; each comes with inputs it runs on."""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memrewrite.workload.step import Inputs


class Block(nn.Module):
    """Convolution, BatchNorm and ReLU around a residual."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn: nn.Module = nn.BatchNorm2d(channels)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x + self.bn(self.conv(x)))


class ResidualNet(nn.Module):
    scale: Tensor

    def __init__(self, channels: int = 8, depth: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3)
        self.blocks = nn.Sequential(*[Block(channels) for _ in range(depth)])
        self.head = nn.Linear(channels, 10)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)) * self.scale)


class CheckpointedNet(ResidualNet):
    """The residual net with every block recomputed in backward; without buffers, which that would update twice."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            cast(Block, block).bn = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x.mean((2, 3)) * self.scale)


class SwishNet(nn.Module):
    """Linear layers with ``x * sigmoid(x)`` spelled out, and dropout."""

    def __init__(self, width: int = 32, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x = self.dropout(x * torch.sigmoid(x))
        return x


class TinyTransformer(nn.Module):
    """One pre-norm attention block with dropout, a token embedding and a causal mask."""

    def __init__(self, vocabulary: int = 50, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Embedding(vocabulary, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(0.1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).flatten(2)))
        return x + self.mlp(self.norm2(x))


class TiedNet(nn.Module):
    """An output layer that is the embedding's own weight, a frozen layer, and a tensor in a plain attribute."""

    def __init__(self, vocabulary: int = 40, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.shift = torch.ones(width)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.frozen(self.embed(ids))) + self.shift)


def images(batch: int = 2) -> Inputs:
    return Inputs((torch.randn(batch, 3, 12, 12),), {})


def rows(batch: int = 4, width: int = 32) -> Inputs:
    return Inputs((torch.randn(batch, width),), {})


def tokens(batch: int = 2) -> Inputs:
    return Inputs((torch.randint(40, (batch, 8)),), {})


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Inputs]]] = {
    "residual": (ResidualNet, images),
    "checkpointed": (CheckpointedNet, images),
    "swish": (SwishNet, rows),
    "transformer": (TinyTransformer, tokens),
    "tied": (TiedNet, tokens),
}


def make(name: str, seed: int = 0) -> tuple[nn.Module, Inputs]:
    """A model of ``MODELS`` and its inputs, the same ones for the same seed."""
    torch.manual_seed(seed)
    build, inputs = MODELS[name]
    return build(), inputs()
