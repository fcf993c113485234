"""What two processes do in ``tests/torch_internals/test_parallelized.py``: optimize tensor-parallel models, train them.

Models are written by hand, or come from transformers; all are parallelized as PyTorch's tutorial and torchtitan do it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import memrewrite
from memrewrite.runtime.dropin import programs
from memrewrite.simulate.memory.tracker import Tracker
from memrewrite.torch_internals.fsdp import seen_by
from memrewrite.torch_internals.spread import local_part
from tests.support import tensor_parallel
from tests.support.tensor_parallel import HEAD, TOKENS, WIDTH

ROWS = torch.randn(512, 64, generator=torch.Generator().manual_seed(3))


class Mlp(nn.Module):
    """Residual layers of two products, with dropout in between."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = (
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64), nn.Tanh())
            for _ in range(3)
        )
        self.layers, self.head = nn.ModuleList(layers), nn.Linear(64, 33)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        result: Tensor = self.head(x)
        return result


class Attention(nn.Module):
    """Of as many heads as its products have here."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for each in (self.q, self.k, self.v))
        result: Tensor = self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return result


class FeedForward(nn.Module):
    """Gated by SiLU."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(WIDTH, 160), nn.Linear(WIDTH, 160), nn.Linear(160, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return result


class Norm(nn.Module):
    """A norm of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)


class Block(nn.Module):
    """Attention and an MLP, each in a module of its own, between norms."""

    def __init__(self, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.norm, self.norm_2 = norm(), norm()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        result: Tensor = x + self.feed_forward(self.norm_2(x))
        return result


def mlp(mesh: Any) -> nn.Module:
    """Divided in the first product of each layer, and summed after the second."""
    return parallelize_module(Mlp(), mesh, {"layers.*.0": ColwiseParallel(), "layers.*.3": RowwiseParallel()})


def llama(mesh: Any) -> nn.Module:
    """With norms that every process has all of."""
    return tensor_parallel.by_hand(tensor_parallel.Llama(), mesh)


def sequence(mesh: Any) -> nn.Module:
    """Sequence parallel: norms and residuals have a part of the tokens, which the products gather."""
    model = tensor_parallel.Decoder(lambda: Block(Norm), Norm)
    products = dict.fromkeys((f"attention.{name}" for name in "qkv"), ColwiseParallel(input_layouts=Shard(1)))
    products |= dict.fromkeys(("feed_forward.gate", "feed_forward.up"), ColwiseParallel(input_layouts=Shard(1)))
    return _sequence_parallel(model, mesh, products)


def prepared(mesh: Any) -> nn.Module:
    """The same, but that attention and MLP are given what was gathered once, as in torchtitan."""
    norm = partial(nn.RMSNorm, WIDTH)
    model = tensor_parallel.Decoder(lambda: Block(norm), norm)
    names = (*(f"attention.{name}" for name in "qkv"), "feed_forward.gate", "feed_forward.up")
    gathered = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    styles = {**dict.fromkeys(names, ColwiseParallel()), "attention": gathered, "feed_forward": gathered}
    return _sequence_parallel(model, mesh, styles)


def _sequence_parallel(model: nn.Module, mesh: Any, of_layers: Mapping[str, ParallelStyle]) -> nn.Module:
    whole: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for name in ("norm", "norm_2"):
        whole[f"layers.*.{name}"] = SequenceParallel()
    for name in ("attention.o", "feed_forward.down"):
        whole[f"layers.*.{name}"] = RowwiseParallel(output_layouts=Shard(1))
    return parallelize_module(model, mesh, whole | {f"layers.*.{name}": style for name, style in of_layers.items()})


def of_transformers(mesh: Any) -> nn.Module:
    """A small Llama of transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": WIDTH, "intermediate_size": 160, "max_position_embeddings": 256}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, use_cache=False)).train()
    styles: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "model.layers.*.self_attn.o_proj": RowwiseParallel(),
        "model.layers.*.mlp.down_proj": RowwiseParallel(),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    products = (*(f"self_attn.{name}_proj" for name in "qkv"), "mlp.gate_proj", "mlp.up_proj")
    return parallelize_module(model, mesh, styles | {f"model.layers.*.{name}": ColwiseParallel() for name in products})


MODELS: dict[str, tuple[Callable[[Any], nn.Module], Tensor]] = {
    "mlp": (mlp, ROWS),
    "llama": (llama, TOKENS),
    "sequence": (sequence, TOKENS),
    "prepared": (prepared, TOKENS),
    "transformers": (of_transformers, TOKENS),
}


BEFORE = "llama, planned before"


def loss_of(output: Any) -> Tensor:
    """The mean of logits."""
    logits: Tensor = getattr(output, "logits", output)
    return logits.mean()


@dataclass(frozen=True)
class Trained:
    """What came of some steps: the peak in bytes of the later ones, and all numbers by name.

    Of a model that was optimized besides the peaks before and after, the budget, the notes of the report and programs.
    """

    peak: int
    numbers: dict[str, Tensor]
    predicted: tuple[int, int, int] = (0, 0, 0)
    notes: tuple[str, ...] = ()
    programs: dict[str, str] = field(default_factory=dict)


def trainings(names: list[str]) -> dict[str, tuple[Trained, Trained]]:
    """Each model as it is, and what was made of it in this process."""
    found = {}
    for name in names:
        make, inputs = MODELS[name.partition(",")[0]]
        mesh = init_device_mesh("cpu", (2,))
        original = train(make(mesh), inputs)
        passes = None if name == "mlp" else ["checkpoint_segments"]
        asked: dict[str, Any] = {"budget": "60%", "loss_fn": loss_of, "passes": passes}
        model: Any = (
            tensor_parallel.by_hand(memrewrite.optimize(tensor_parallel.Llama(), inputs, mesh="tp=2", **asked), mesh)
            if name == BEFORE
            else memrewrite.optimize(make(mesh), inputs, **asked)
        )
        report, trained = model.report, train(model, inputs)
        peaks = report.predicted_before.peak, report.predicted_after.peak, report.budget
        written = {path: program.source for path, program in programs(model).items()}
        found[name] = original, Trained(trained.peak, trained.numbers, peaks, report.notes, written)
    return found


def train(model: nn.Module, inputs: Tensor) -> Trained:
    """Steps of PyTorch's tutorial loop, from the same random state."""
    torch.manual_seed(1)
    optimizer, tracker, x = torch.optim.AdamW(model.parameters()), Tracker("cpu"), inputs.clone()
    tracker.register([*model.parameters()], "parameters")
    tracker.register([*model.buffers()], "buffers")
    tracker.register([x], "inputs")
    peaks: list[int] = []
    numbers: dict[str, Tensor] = {}
    with seen_by(tracker):
        for number in range(6):
            tracker.reset_peak()
            with tracker:
                output = model(x)
                loss = loss_of(output)
                loss.backward()
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    numbers[f"gradient {number} {name}"] = local_part(parameter.grad).clone()
            with tracker:
                optimizer.step()
                optimizer.zero_grad()
            peaks.append(tracker.peak)
            numbers[f"loss {number}"] = loss.detach().clone()
    numbers |= {name: local_part(parameter).detach().clone() for name, parameter in model.named_parameters()}
    return Trained(min(peaks[1:]), numbers)  # gloo's threads may let go of a buffer later than that


def assert_budget_holds(original: Trained, rewritten: Trained) -> None:
    """Both take what was predicted of them, and the rewritten one no more than its budget."""
    before, after, budget = rewritten.predicted
    assert original.peak == before
    assert rewritten.peak == after <= budget < before


def assert_trained_alike(original: Trained, rewritten: Trained, mesh: str) -> None:
    """All numbers have the same bits, and the report says where that was verified."""
    assert original.numbers.keys() == rewritten.numbers.keys()
    assert [key for key, value in original.numbers.items() if not torch.equal(value, rewritten.numbers[key])] == []
    assert any(note.startswith(f"Verified in each process of the mesh {mesh}") for note in rewritten.notes)
