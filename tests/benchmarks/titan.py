"""The step of torchtitan's published Llama 3.1 8B, estimated for one GPU of 8 and of 128.

    python -m tests.benchmarks.titan [--sizes 8 128] [--layers 32] [--tiny]

Its table says what CUDA's allocator reserved at most, in GiB: 82.4 on 8 GPUs and 67.0 on 128, with two texts of 8,192
tokens on each. Blocks are checkpointed by operator there: results of attention and of every second product stay. Units
are the blocks, of which the last keeps its parameters after forward, bf16 with gradients reduced in float32.
"""

import argparse
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import memrewrite
from memrewrite.records.mesh import Fsdp

_BATCH, _LENGTH, _VOCABULARY = 2, 8192, 128256
_PUBLISHED = {8: 82.4, 128: 67.0}  # GiB
_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}


class Attention(nn.Module):
    """Four heads of queries for one of keys."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.size = width // heads
        self.wq, self.wo = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(width, width // 4, bias=False) for _ in range(2))

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, self.size)) for each in (self.wq, self.wk, self.wv))
        q, k = turned(q, turns), turned(k, turns)
        k, v = (each.repeat_interleave(4, dim=2) for each in (k, v))
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        result: Tensor = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(result.transpose(1, 2).contiguous().flatten(2))


def turned(x: Tensor, turns: Tensor) -> Tensor:
    """Queries or keys with their positions, by complex numbers of float32."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns.unsqueeze(1)).flatten(3).type_as(x)


class Block(nn.Module):
    """Attention and a gated MLP, each after a norm."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.w1, self.w3 = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.w2 = nn.Linear(inner, width, bias=False)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        return checkpoint(self._run, x, turns, use_reentrant=False, context_fn=contexts, preserve_rng_state=False)

    def _run(self, x: Tensor, turns: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), turns)
        normed = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(normed)) * self.w3(normed))


def contexts() -> Any:
    """What keeps attention and every second product in a checkpoint."""
    counts = {False: 0, True: 0}

    def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        product = func is torch.ops.aten.mm.default
        counts[context.is_recompute] += product
        kept = func in _ATTENTION or (product and counts[context.is_recompute] % 2)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Llama(nn.Module):
    """Takes tokens and returns logits."""

    turns: Tensor

    def __init__(self, width: int, layers: int, heads: int, inner: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width, heads, inner) for _ in range(layers))
        self.norm, self.output = nn.RMSNorm(width, eps=1e-5), nn.Linear(width, vocabulary, bias=False)
        angles = torch.zeros(length, width // heads // 2)
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, self.turns)
        result: Tensor = self.output(self.norm(x))
        return result


def mesh(size: int, layers: int) -> Fsdp:
    """That of so many GPUs."""
    return Fsdp(
        size,
        param_dtype="bf16",
        reduce_dtype="fp32",
        reshard_root=True,
        paths=tuple(f"layers.{i}" for i in range(layers)),
        reshards=((f"layers.{layers - 1}", False),),
    )


def loss_of(labels: Tensor) -> Callable[[Tensor], Tensor]:
    """That of logits in float32."""
    return lambda logits: F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))


def figures(size: int, layers: int, tiny: bool) -> str:
    """The line of one estimate."""
    sizes = (64, layers, 4, 128, 97, 32) if tiny else (4096, layers, 32, 14336, _VOCABULARY, _LENGTH)
    with torch.device("meta"):
        model = Llama(*sizes)
    tokens, labels = (torch.zeros(_BATCH, sizes[-1], dtype=torch.long) for _ in range(2))
    found = memrewrite.estimate(
        model,
        tokens,
        loss_fn=loss_of(labels),
        optimizer="adamw-fused",
        loop="drop-output",
        mesh=mesh(size, layers),
        device="cuda",
    )
    peak, reserved = (count / 2**30 for count in (found.peak.bytes, found.peak.reserved or math.nan))
    published = _PUBLISHED.get(size, math.nan)
    of = {kind: round(count / 2**30, 2) for kind, count in found.peak.categories.items() if count >= 2**26}
    return (
        f"{size} GPUs: peak {peak:.1f} GiB, reserved {reserved:.1f} GiB, published {published:.1f} GiB, "
        f"{reserved / published - 1:+.1%}; at the peak, in {found.peak.phase}: {of}"
    )


def main() -> int:
    """Estimate and print."""
    parser = argparse.ArgumentParser(description="The step of torchtitan's published Llama 3.1 8B, estimated.")
    parser.add_argument("--sizes", type=int, nargs="+", default=[*_PUBLISHED], help="numbers of GPUs")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tiny", action="store_true", help="a tiny model of the same kind")
    asked = parser.parse_args()
    for size in asked.sizes:
        print(figures(size, asked.layers, asked.tiny), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
