"""Random models that do what breaks memory optimisers, as data: hypothesis draws and shrinks a ``Recipe``.

A model holds a pool of parts, which its steps call once, several times or not at all, and a growing list of tensors of
one shape, of which each step reads two and adds one. So residuals, reuse, aliases and in-place operations arise
wherever they fall. A recipe whose model is itself wrong (a saved tensor written in place) is a valid case too.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (the name the whole field uses)
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memrewrite.workload.step import Inputs
from tests.fuzz.check import EXACT, Ask
from tests.fuzz.opaque import (
    Chosen,
    Counting,
    Damped,
    Lucky,
    Quantized,
    Routed,
    hooked,
    hooked_backward,
    hooked_before,
    straight_through,
)

SHAPES = {"image": (4, 4, 8, 8), "rows": (16, 64), "tokens": (4, 16, 16)}
LENGTHS = {"image": 2, "rows": 0, "tokens": 1}  # the dimension that may have a range; layers know the last


@dataclass(frozen=True)
class Part:
    """A submodule: what it is, whether its parameters are frozen, whether it stays in eval mode."""

    kind: str
    frozen: bool = False
    eval: bool = False


@dataclass(frozen=True)
class Do:
    """One step of forward: an operation on the tensors ``a`` and ``b`` (counted back from the newest), option ``k``."""

    op: str
    a: int = 0
    b: int = 0
    k: int = 0


@dataclass(frozen=True)
class Recipe:
    """A model, its inputs and its mode."""

    layout: str
    parts: tuple[Part, ...]
    steps: tuple[Do, ...]
    output: str = "head"
    double: bool = False
    input_gradient: bool = False
    training: bool = True


class RandomNet(nn.Module):
    """The model of a recipe."""

    level: Tensor
    seen: Tensor

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        shape = SHAPES[recipe.layout]
        self.parts = nn.ModuleList(_part(part.kind, recipe.layout, shape) for part in recipe.parts)
        self.join = nn.Linear(2 * shape[-1], shape[-1])
        self.head = nn.Linear(shape[-1], 3)
        self.beta = nn.Parameter(torch.tensor(1.25))
        self.register_buffer("level", torch.full((shape[-1],), 0.5))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.to(torch.float64 if recipe.double else torch.float32).train(recipe.training)
        for part, module in zip(recipe.parts, self.parts, strict=True):
            module.requires_grad_(not part.frozen)
            module.train(recipe.training and not part.eval)

    def forward(self, x: Tensor) -> Any:
        values = [x]
        for do in self.recipe.steps:
            a, b = (values[-1 - place % len(values)] for place in (do.a, do.b))
            values.append(OPS[do.op](self, a, b, do.k))
        return OUTPUTS[self.recipe.output](self, self.head(values[-1]), values)

    @property
    def in_half(self) -> bool:
        """Whether values pass through half precision."""
        return any(do.op == "half" for do in self.recipe.steps)

    @property
    def varies(self) -> bool:
        """Whether the values that come in decide how many there are of something."""
        return any(part.kind == "chosen" for part in self.recipe.parts)

    def part(self, k: int) -> nn.Module:
        """Part ``k`` of the pool, however small that is."""
        return self.parts[k % len(self.parts)]


def make(recipe: Recipe, seed: int = 0) -> tuple[RandomNet, Inputs]:
    """The model of ``recipe`` and inputs for it, the same ones for the same seed."""
    torch.manual_seed(seed)
    net = RandomNet(recipe)
    x = torch.randn(SHAPES[recipe.layout], dtype=torch.float64 if recipe.double else torch.float32)
    return net, Inputs((x.requires_grad_(recipe.input_gradient),), {})


def _part(kind: str, layout: str, shape: tuple[int, ...]) -> nn.Module:
    mix = PARTS["conv" if layout == "image" else "linear"]
    if kind == "mix":
        return mix(shape)
    if kind == "block":
        return nn.Sequential(mix(shape), PARTS["batch_norm"](shape), nn.ReLU(inplace=True))
    return PARTS[kind](shape)


def _batch_norm(shape: tuple[int, ...], **options: Any) -> nn.Module:
    return (nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d)(shape[1], **options)


PARTS: dict[str, Callable[[tuple[int, ...]], nn.Module]] = {
    "conv": lambda shape: nn.Conv2d(shape[1], shape[1], 3, padding=1),
    "linear": lambda shape: nn.Linear(shape[-1], shape[-1]),
    "batch_norm": _batch_norm,
    "batch_norm_stateless": lambda shape: _batch_norm(shape, track_running_stats=False),
    "layer_norm": lambda shape: nn.LayerNorm(shape[-1]),
    "group_norm": lambda shape: nn.GroupNorm(2, shape[1]),
    "dropout": lambda shape: nn.Dropout(0.3),
    "dropout_inplace": lambda shape: nn.Dropout(0.3, inplace=True),
    "feature_dropout": lambda shape: nn.FeatureAlphaDropout(0.2),
    "relu": lambda shape: nn.ReLU(),
    "relu_inplace": lambda shape: nn.ReLU(inplace=True),
    "relu6": lambda shape: nn.ReLU6(inplace=True),
    "leaky_relu": lambda shape: nn.LeakyReLU(0.1, inplace=True),
    "elu": lambda shape: nn.ELU(inplace=True),
    "silu": lambda shape: nn.SiLU(),
    "silu_inplace": lambda shape: nn.SiLU(inplace=True),
    "gelu": lambda shape: nn.GELU(),
    "hardswish": lambda shape: nn.Hardswish(inplace=True),
    "tanh": lambda shape: nn.Tanh(),
    "sigmoid": lambda shape: nn.Sigmoid(),
    "softmax": lambda shape: nn.Softmax(-1),
    "prelu": lambda shape: nn.PReLU(),
    "rrelu": lambda shape: nn.RReLU(),
    "quantized": lambda shape: Quantized(),
    "routed": lambda shape: Routed(shape[-1]),
    "chosen": lambda shape: Chosen(),
    "lucky": lambda shape: Lucky(),
    "counting": lambda shape: Counting(),
    "damped": lambda shape: Damped(),
    "hooked": lambda shape: hooked(nn.Tanh()),
    "hooked_before": lambda shape: hooked_before(nn.LayerNorm(shape[-1])),
    "hooked_backward": lambda shape: hooked_backward(nn.Sigmoid()),
}
KINDS = ("mix", "block", "batch_norm", *(kind for kind in PARTS if kind not in ("conv", "linear", "batch_norm")))

OUTPUTS: dict[str, Callable[[RandomNet, Tensor, list[Tensor]], Any]] = {
    "head": lambda net, head, values: head,
    "last": lambda net, head, values: values[-1] * net.beta,
    "tuple": lambda net, head, values: (head, values[-1], values[len(values) // 2]),
    "dict": lambda net, head, values: {"loss": head.float().square().mean(), "hidden": values[-1], "same": values[-1]},
    "all": lambda net, head, values: [head, *values],
}

Op = Callable[[RandomNet, Tensor, Tensor, int], Tensor]


def _frozen_path(net: RandomNet, a: Tensor, b: Tensor, k: int) -> Tensor:
    with torch.no_grad():
        scale = torch.tanh(b).mean(-1, keepdim=True)
    return a * scale


def _statistics(net: RandomNet, a: Tensor, b: Tensor, k: int) -> Tensor:
    """Read a running value, then move it, as hand-written normalisations do."""
    out = a - net.level
    if net.training:
        net.seen.add_(1)
        net.level.lerp_(b.detach().flatten(0, -2).mean(0).to(net.level.dtype), 0.1)
    return out


def _checkpointed(part: nn.Module, a: Tensor) -> Tensor:
    """What PyTorch's own checkpoint gives wrong gradients is left alone.

    That is RReLU (pytorch#193671), and what counts its calls: in backward it gives what another call would have.
    """
    return part(a) if isinstance(part, nn.RReLU | Counting) else checkpoint(part, a, use_reentrant=False)


def _write_part(net: RandomNet, a: Tensor, b: Tensor, k: int) -> Tensor:
    out = a.clone()
    out[..., : 1 + k % 4] = b[..., : 1 + k % 4]
    return out


def _write_through_view(net: RandomNet, a: Tensor, b: Tensor, k: int) -> Tensor:
    view = a.unflatten(-1, (2, -1))
    view[..., k % 2, :].mul_(0.5)
    return a


def _attend(net: RandomNet, a: Tensor, b: Tensor, k: int) -> Tensor:
    q, v = (t.reshape(len(t), 1, -1, t.shape[-1]) for t in (a, b))
    drop = 0.2 if net.training and k % 2 else 0.0
    return F.scaled_dot_product_attention(q, q, v, dropout_p=drop).reshape(a.shape)


def _swap_halves(net: RandomNet, a: Tensor, b: Tensor, k: int) -> Tensor:
    left, right = a.chunk(2, -1)
    return torch.cat([right, left.relu() if k % 2 else left], -1)


OPS: dict[str, Op] = {
    "part": lambda net, a, b, k: net.part(k)(a),
    "add": lambda net, a, b, k: a + b,
    "sub": lambda net, a, b, k: a - 0.5 * b,
    "gate": lambda net, a, b, k: a * torch.tanh(b),
    "maximum": lambda net, a, b, k: torch.maximum(a, b),
    "join": lambda net, a, b, k: net.join(torch.cat([a, b], -1)),
    "swap_halves": _swap_halves,
    "attend": _attend,
    "add_": lambda net, a, b, k: a.add_(b),
    "mul_": lambda net, a, b, k: a.mul_(0.5),
    "relu_": lambda net, a, b, k: F.relu(a, inplace=True),
    "sigmoid_": lambda net, a, b, k: a.sigmoid_(),
    "clone_tanh_": lambda net, a, b, k: a.clone().tanh_(),
    "dropout": lambda net, a, b, k: F.dropout(a, 0.2, training=net.training),
    "dropout_": lambda net, a, b, k: F.dropout(a, 0.2, training=net.training, inplace=True),
    "noise": lambda net, a, b, k: a + 0.1 * torch.randn_like(b),
    "bernoulli": lambda net, a, b, k: a * torch.bernoulli(torch.full_like(a, 0.8)),
    "view": lambda net, a, b, k: a.view(a.shape),
    "slice": lambda net, a, b, k: a[:],
    "turn": lambda net, a, b, k: a.transpose(-1, -2) if a.shape[-1] == a.shape[-2] else a.flip(-1),
    "expand": lambda net, a, b, k: a.mean(0, keepdim=True).expand_as(a),
    "write_part": _write_part,
    "write_through_view": _write_through_view,
    "detach": lambda net, a, b, k: a + b.detach(),
    "no_grad": _frozen_path,
    "statistics": _statistics,
    "checkpoint": lambda net, a, b, k: _checkpointed(net.part(k), a),
    "straight_through": lambda net, a, b, k: straight_through(a),
    "where": lambda net, a, b, k: torch.where(a > 0, a, b),
    "half": lambda net, a, b, k: a.to(torch.bfloat16).to(a.dtype),
    "swish": lambda net, a, b, k: a * torch.sigmoid(a),
    "swish_method": lambda net, a, b, k: a.sigmoid().mul(a),
    "swish_inplace": lambda net, a, b, k: a.clone().mul_(a.sigmoid()),
    "swish_timm": lambda net, a, b, k: a.mul_(a.sigmoid()),
    "swish_quick": lambda net, a, b, k: a * torch.sigmoid(1.702 * a),
    "swish_learned": lambda net, a, b, k: a * torch.sigmoid(net.beta * a),
    "swish_seen": lambda net, a, b, k: (lambda gate: a * gate + gate)(torch.sigmoid(a)),
    "swish_other": lambda net, a, b, k: b * torch.sigmoid(a),
    "tanh_gelu": lambda net, a, b, k: 0.5 * a * (1 + torch.tanh(0.7978845608028654 * (a + 0.044715 * a**3))),
    "erf_gelu": lambda net, a, b, k: a * 0.5 * (1.0 + torch.erf(a / 1.4142135623730951)),
    "hard_swish": lambda net, a, b, k: a * F.relu6(a + 3) / 6,
    "mish": lambda net, a, b, k: a * torch.tanh(F.softplus(a)),
}


def parts() -> st.SearchStrategy[Part]:
    """Any submodule."""
    rarely = st.sampled_from([False, False, False, True])
    return st.builds(Part, st.sampled_from(KINDS), rarely, rarely)


def steps() -> st.SearchStrategy[Do]:
    """Any step; half of them call a part, and most read the newest tensor."""
    name = st.one_of(st.just("part"), st.sampled_from(sorted(OPS)))
    return st.builds(Do, name, st.sampled_from([0, 0, 0, 1, 2, 3]), st.integers(0, 5), st.integers(0, 7))


@st.composite
def recipes(draw: st.DrawFn, longest: int = 14) -> Recipe:
    """Any model; ``longest`` bounds its steps."""
    recipe = Recipe(
        layout=draw(st.sampled_from(sorted(SHAPES))),
        parts=tuple(draw(st.lists(parts(), min_size=1, max_size=5))),
        steps=tuple(draw(st.lists(steps(), min_size=2, max_size=longest))),
        output=draw(st.sampled_from(sorted(OUTPUTS))),
        double=draw(st.booleans()),
    )
    rarely = st.sampled_from([False] * 5 + [True])
    return replace(recipe, input_gradient=draw(rarely), training=not draw(rarely))


def asks() -> st.SearchStrategy[Ask]:
    """Any call of ``optimize``; half of them with passes that keep every bit."""
    return st.builds(
        Ask,
        share=st.one_of(st.none(), st.just("min"), st.floats(0.3125, 1.0, width=16)),
        passes=st.sampled_from([None, EXACT]),
        optimizer=st.sampled_from(["none", "sgd", "adamw"]),
        amp=st.sampled_from([None, None, None, torch.bfloat16]),
        exact=st.booleans(),
        compiled=st.booleans(),
        lengths=st.one_of(st.just(()), st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.75]), max_size=2).map(tuple)),
    )
