"""An attention of kernels over packed texts, as flash-attn has it: a Function with bounds and statistics of its own.

They ask for the memory of what they are given, views of one product, and loop over as many texts as there are.
"""

import itertools
import warnings
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import memrewrite
from memrewrite.runtime.dropin import programs
from memrewrite.runtime.promise import FallbackWarning
from memrewrite.simulate import run_tracked
from memrewrite.workload.step import Inputs, Step

WORDS, WIDTH, HEADS, LENGTH = 40, 32, 4, 48
RANGES = {"ids": {1: (2, LENGTH)}, "bounds": {0: (2, 8)}}


def _texts(bounds: Tensor) -> list[slice]:
    return [slice(*pair) for pair in itertools.pairwise(bounds.numpy().tolist())]


def _scores(q: Any, k: Any, scale: float) -> Any:
    """Of rows by heads, each row against those before it."""
    scores = np.einsum("ihd,jhd->hij", q, k) * scale
    return np.where(np.tri(len(q), dtype=bool), scores, -np.inf)


class Flash(torch.autograd.Function):
    """Attention inside each of the texts that lie one after another in the rows."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, scale: float) -> Any:
        assert longest <= q.shape[0] or not bounds.any()
        out, statistics = torch.zeros_like(v), torch.zeros(HEADS, q.shape[0], dtype=torch.float32)
        for text in _texts(bounds):
            scores = _scores(q.detach().numpy()[text], k.detach().numpy()[text], scale)
            sums = np.log(np.exp(scores).sum(-1)) if scores.size else scores.sum(-1)
            statistics.numpy()[:, text] = sums
            out.numpy()[text] = np.einsum("hij,jhd->ihd", np.exp(scores - sums[..., None]), v.detach().numpy()[text])
        ctx.save_for_backward(q, k, v, out, statistics, bounds)
        ctx.scale = scale
        ctx.mark_non_differentiable(statistics)
        return out, statistics

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Any:
        q, k, v, out, statistics, bounds = ctx.saved_tensors
        found = [torch.zeros_like(each) for each in (q, k, v)]
        for text in _texts(bounds):
            ours = [each.detach().numpy()[text] for each in (q, k, v, out, grad)]
            weights = np.exp(_scores(ours[0], ours[1], ctx.scale) - statistics.numpy()[:, text, None])
            come = np.einsum("ihd,jhd->hij", ours[4], ours[2]) - np.einsum("ihd,ihd->hi", ours[4], ours[3])[..., None]
            slopes = weights * come * ctx.scale
            found[0].numpy()[text] = np.einsum("hij,jhd->ihd", slopes, ours[1])
            found[1].numpy()[text] = np.einsum("hij,ihd->jhd", slopes, ours[0])
            found[2].numpy()[text] = np.einsum("hij,ihd->jhd", weights, ours[4])
        return *found, None, None, None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attend, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, bounds: Tensor) -> Tensor:
        q, k, v = self.attend(self.norm(x)).unflatten(-1, (3, HEADS, -1)).flatten(0, 1).unbind(1)
        mixed, _ = cast(Any, Flash).apply(q, k, v, bounds, x.shape[1], (WIDTH // HEADS) ** -0.5)
        x = x + self.out(mixed.flatten(1)).view_as(x)
        return x + self.down(torch.tanh(torch.sigmoid(self.up(x))))


class Packed(nn.Module):
    """A language model of texts without padding: all in one row, each counted from its own beginning."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places, self.head = (
            nn.Embedding(WORDS, WIDTH),
            nn.Embedding(64, WIDTH),
            nn.Linear(WIDTH, WORDS),
        )
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, ids: Tensor, position_ids: Tensor, bounds: Tensor) -> Tensor:
        x = self.words(ids) + self.places(position_ids)
        for block in self.blocks:
            x = block(x, bounds)
        return functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def packed(*lengths: int) -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.randint(WORDS, (1, sum(lengths)), generator=torch.Generator().manual_seed(len(lengths)))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return ids, positions, torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def taken(module: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    module.zero_grad(set_to_none=True)
    loss = module(*inputs)
    loss.backward()
    return [loss.detach(), *(p.grad for p in module.parameters() if p.grad is not None)]


def test_the_gradients_of_the_attention_are_right() -> None:
    q, k, v = (torch.randn(9, HEADS, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    bounds = torch.tensor([0, 5, 9])

    def attend(*given: Tensor) -> Any:
        return cast(Any, Flash).apply(*given, bounds, 5, 0.5)[0]

    assert torch.autograd.gradcheck(attend, (q, k, v), atol=1e-4)


def test_packed_texts_run_in_one_plan() -> None:
    model = Packed()
    result: Any = memrewrite.optimize(model, packed(20, 20, 8), budget="min", loss_fn=lambda loss: loss, dynamic=RANGES)
    assert result.report.verdict.startswith("bit-equal")
    assert list(programs(result)) == [""]
    assert result.report.segments
    step = Step("train", torch.optim.AdamW, loss_fn=lambda loss: loss)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        for lengths in ((20, 20, 8), (1, 46, 1), (30, 3), (5, 3, 4, 1)):
            given = packed(*lengths)
            assert all(map(torch.equal, taken(result, given), taken(model, given))), lengths
            result.zero_grad(set_to_none=True)
            assert run_tracked(result, Inputs(given, {}), step).peak <= result.report.predicted_after.peak
