"""A small Llama under tensor parallelism in two processes, for ``tests/torch_internals/test_tensor_parallel.py``."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

import memrewrite
from memrewrite.simulate.memory.tracker import Tracker
from memrewrite.torch_internals.fsdp import seen_by
from memrewrite.torch_internals.spread import local_part
from memrewrite.torch_internals.tensor_parallel import parallelize

TOKENS = torch.arange(1024).reshape(4, 256) % 96
MESHES = ("tp=2", "fsdp=1,tp=2")
WIDTH, HEAD = 64, 16


class Block(nn.Module):
    """Attention and an MLP, of as many heads as its products have here."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, 160), nn.Linear(WIDTH, 160)
        self.down = nn.Linear(160, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        q, k, v = (each(normed).unflatten(-1, (-1, HEAD)).transpose(1, 2) for each in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        normed = self.norm_2(x)
        result: Tensor = x + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return result


class Decoder(nn.Module):
    """Takes tokens and returns logits: two blocks between an embedding and a head."""

    def __init__(self, block: Callable[[], nn.Module], norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(96, WIDTH)
        self.layers = nn.ModuleList(block() for _ in range(2))
        self.norm, self.head = norm(), nn.Linear(WIDTH, 96, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        result: Tensor = self.head(self.norm(x))
        return result


class Llama(Decoder):
    """Its plan has the words of transformers."""

    tp_plan: ClassVar[dict[str, str | ParallelStyle]] = {
        "embedding": "embedding_rowwise",
        "layers.*.q": "colwise",
        "layers.*.k": "colwise",
        "layers.*.v": "colwise",
        "layers.*.o": "rowwise",
        "layers.*.gate": "colwise",
        "layers.*.up": "colwise",
        "layers.*.down": "rowwise",
        "head": "colwise_gather_output",
    }

    def __init__(self) -> None:
        super().__init__(Block, lambda: nn.RMSNorm(WIDTH))


class Experts(nn.Module):
    """All of them work on all tokens, by weights."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 96, WIDTH) / 8)
        self.down = nn.Parameter(torch.randn(4, WIDTH, 96) / 8)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        inner = F.silu(torch.einsum("ewd,btd->betw", self.up, x)) * weights.transpose(1, 2).unsqueeze(-1)
        return torch.einsum("edw,betw->btd", self.down, inner)


class Mixture(nn.Module):
    """Attention with a norm of heads, then experts, in the words of transformers; an embedding tied to the head."""

    tp_plan: ClassVar[dict[str, str]] = {
        "q": "colwise",
        "o": "rowwise",
        "head_norm": "replicated_with_grad_allreduce",
        "experts": "moe_tp_experts",
        "experts.up": "packed_colwise",
        "experts.down": "rowwise",
        "head": "colwise_gather_output",
    }

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(96, WIDTH), nn.Linear(WIDTH, 96, bias=False)
        self.head.weight = self.embedding.weight
        self.q, self.o, self.head_norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.RMSNorm(HEAD)
        self.router, self.experts = nn.Linear(WIDTH, 4), Experts()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        q = self.head_norm(self.q(x).unflatten(-1, (-1, HEAD))).transpose(1, 2)
        x = x + self.o(F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2))
        x = x + self.experts(x, self.router(x).softmax(-1))
        result: Tensor = self.head(x).sigmoid()
        return result


class Latent(nn.Module):
    """Attention to latents: keys are positions, which all heads have in common, and what is made of the latents."""

    tp_plan: ClassVar[dict[str, str]] = {
        "q": "colwise",
        "latent": "mla_kv_a_proj",
        "key_value": "colwise",
        "o": "rowwise",
    }
    config = SimpleNamespace(qk_rope_head_dim=8)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(96, WIDTH), nn.Linear(WIDTH, 96, bias=False)
        self.q, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.latent, self.norm, self.key_value = (
            nn.Linear(WIDTH, 32 + 8),
            nn.RMSNorm(32),
            nn.Linear(32, WIDTH // HEAD * 24),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        q = self.q(x).unflatten(-1, (-1, HEAD)).transpose(1, 2)
        latent, position = self.latent(x).split([32, 8], dim=-1)
        k, v = self.key_value(self.norm(latent)).unflatten(-1, (-1, 24)).transpose(1, 2).split([8, 16], dim=-1)
        k = torch.cat([k, position.unsqueeze(1).expand_as(k)], dim=-1)
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        result: Tensor = self.head(x).sigmoid()
        return result


OF_PLANS = {"mixture": Mixture, "latent": Latent}


@dataclass(frozen=True)
class Trained:
    """What came of some steps: the peak in bytes of the later ones, losses, and gradients of the first step, whole.

    ``estimated`` is what ``estimate`` says in this process of the peak of the parallelized model, 0 if not asked.
    """

    peak: int
    losses: list[float]
    gradients: dict[str, Tensor]
    estimated: int = 0


def by_hand(model: nn.Module, mesh: Any) -> nn.Module:
    """The model parallelized as one writes it with PyTorch."""
    styles: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "layers.*.o": RowwiseParallel(),
        "layers.*.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
        **{f"layers.*.{name}": ColwiseParallel() for name in ("q", "k", "v", "gate", "up")},
    }
    return parallelize_module(model, mesh, styles)


def trainings(dtype: torch.dtype) -> dict[str, Trained]:
    """The model in each mesh of these two processes, and others divided as for an estimate, by their plans."""
    found = {}
    for name in MESHES:
        model: Any = Llama().to(dtype)
        estimated = 0
        if name == "tp=2":
            by_hand(model, init_device_mesh("cpu", (2,)))
            estimated = memrewrite.estimate(model, TOKENS).peak.bytes
        else:
            mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", "tp"))
            by_hand(model, mesh["tp"])
            for unit in model.layers:
                fully_shard(unit, mesh=mesh["shard"])
            fully_shard(model, mesh=mesh["shard"])
        found[name] = train(model, estimated)
    for name, kind in OF_PLANS.items():
        made = kind().to(dtype)
        parallelize(made, init_device_mesh("cpu", (2,)))
        found[name] = train(made)
    return found


def train(model: nn.Module, estimated: int = 0) -> Trained:
    """Steps of PyTorch's tutorial loop."""
    optimizer, tracker, tokens = torch.optim.AdamW(model.parameters()), Tracker("cpu"), TOKENS.clone()
    tracker.register([*model.parameters()], "parameters")
    tracker.register([tokens], "inputs")
    peaks, losses, gradients = [], [], {}
    with seen_by(tracker):
        for number in range(4):
            tracker.reset_peak()
            with tracker:
                output = model(tokens)
                loss = output.float().mean() if output.dtype is torch.float32 else output.mean()
                loss.backward()
            if not number:
                gradients = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
            with tracker:
                optimizer.step()
                optimizer.zero_grad()
            peaks.append(tracker.peak)
            losses.append(loss.item())
    return Trained(
        min(peaks[1:]), losses, gradients, estimated
    )  # gloo's threads may let go of a buffer later than that


def whole(gradient: Any) -> Tensor:
    """A gradient of all processes."""
    spread = local_part(gradient) is not gradient
    result: Tensor = gradient.full_tensor() if spread else gradient
    return result.detach().clone()
