"""GPT-2 (124M) with the tanh form of GELU written out, dropout and tied embeddings; random weights.

Called with targets the model returns the loss alone, so that nothing keeps the logits alive after it.

    memrewrite optimize examples/gpt2.py --budget 60% --amp bf16 -o out
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Config:
    """Sizes; the defaults are the 124M model."""

    vocabulary: int = 50257
    context: int = 1024
    layers: int = 12
    heads: int = 12
    width: int = 768
    dropout: float = 0.1


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class Attention(nn.Module):
    """Causal self-attention with dropout on its weights and on its output."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.c_attn = nn.Linear(config.width, 3 * config.width)
        self.c_proj = nn.Linear(config.width, config.width)
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.c_attn(x).split(width, dim=2)
        )
        dropout = self.dropout if self.training else 0.0
        out = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.resid_dropout(self.c_proj(out.transpose(1, 2).reshape(batch, length, width)))


class Mlp(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.width, 4 * config.width)
        self.c_proj = nn.Linear(4 * config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(gelu(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.width)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.width)
        self.mlp = Mlp(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT2(nn.Module):
    """Token and position embeddings, pre-norm blocks, and a head that shares the token embedding's weight."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocabulary, config.width)
        self.wpe = nn.Embedding(config.context, config.width)
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.ln_f = nn.LayerNorm(config.width)
        self.lm_head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                depth = math.sqrt(2 * config.layers) if name.endswith("c_proj.weight") else 1.0
                nn.init.normal_(parameter, std=0.02 / depth)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.wte(tokens) + self.wpe(positions))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        if targets is None:
            return logits
        return functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def random_tokens(batch_size: int, config: Config, length: int) -> tuple[Tensor, ...]:
    """Tokens and the targets that follow them."""
    tokens = torch.randint(config.vocabulary, (batch_size, length + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


SMALL = Config(vocabulary=97, context=32, layers=2, heads=2, width=32)


def get_model() -> nn.Module:
    """GPT-2: 124,439,808 parameters, the tied weight counted once."""
    return GPT2(Config())


def get_inputs(batch_size: int = 4) -> tuple[Tensor, ...]:
    return random_tokens(batch_size, Config(), Config().context)


def get_small_model() -> nn.Module:
    return GPT2(SMALL)


def get_small_inputs(batch_size: int = 4) -> tuple[Tensor, ...]:
    return random_tokens(batch_size, SMALL, SMALL.context)
