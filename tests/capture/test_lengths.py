"""Texts of any length run in one plan: sizes of tokens vary like the batch, as far as forward allows it."""

import copy
import logging
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memrewrite
from memrewrite.capture import capture
from memrewrite.runtime.dropin import programs
from memrewrite.runtime.promise import BeyondPlanWarning, FallbackWarning
from memrewrite.simulate import run_tracked
from memrewrite.workload.step import Inputs, Step

WORDS, WIDTH, LONGEST = 50, 32, 48


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.again = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attend, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        parts = self.attend(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], mask)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(torch.relu(self.up(self.again(x))))


class Text(nn.Module):
    """A small causal language model that takes a mask of padding, and by ``multiple`` only lengths that it divides."""

    def __init__(self, multiple: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.multiple = multiple
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(1))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        length = ids.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()
        seen = causal & mask[:, None, None, :].bool()
        x = self.words(ids) + self.places(torch.arange(length, device=ids.device))
        if length % self.multiple:
            x = x * 2
        for block in self.blocks:
            x = block(x, seen)
        losses = functional.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        return (losses * mask[:, 1:].flatten()).mean()


def text(batch: int, length: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(WORDS, (batch, length), generator=torch.Generator().manual_seed(length))
    mask = torch.ones_like(ids)
    mask[0, length - 2 :] = 0
    return ids, mask


def taken(module: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    module.zero_grad(set_to_none=True)
    loss = module(*inputs)
    loss.backward()
    return [loss.detach(), *(p.grad for p in module.parameters() if p.grad is not None)]


@pytest.mark.filterwarnings("error::memrewrite.runtime.promise.FallbackWarning")
@pytest.mark.parametrize("amp", [None, "bf16"])
def test_any_length_runs_in_one_plan_and_within_its_peak(amp: Any) -> None:
    model = Text()
    result = memrewrite.optimize(model, text(8, 32), budget="min", loss_fn=lambda loss: loss, amp=amp)
    assert result.report.segments
    assert result.report.equivalent
    promised = result.report.predicted_after.peak
    step = Step("train", torch.optim.AdamW, loss_fn=lambda loss: loss, amp=None if amp is None else torch.bfloat16)
    for batch, length in ((8, 32), (8, 31), (5, 17), (2, 3), (3, 32)):
        inputs = text(batch, length)
        with torch.autocast("cpu", torch.bfloat16, enabled=amp is not None):
            assert all(map(torch.equal, taken(result, inputs), taken(model, inputs)))
        assert run_tracked(result, Inputs(inputs, {}), step).peak <= promised


def test_a_larger_size_than_was_planned_for_is_told_once_with_the_peak_that_it_takes() -> None:
    model = Text()
    result = memrewrite.optimize(model, text(4, 16), budget="min", loss_fn=lambda loss: loss, verify=False)
    step = Step("train", torch.optim.AdamW, loss_fn=lambda loss: loss)
    with pytest.warns(BeyondPlanWarning, match=r"Its peak may be above the budget\. Plan"):  # a copy knows no step
        peak = run_tracked(copy.deepcopy(result), Inputs(text(4, 24), {}), step).peak
    with pytest.warns(
        BeyondPlanWarning,
        match=f"Optimized Text takes inputs of size 24, planned for 16. A step on them takes {peak / 1e3:.2f} kB, and",
    ):
        found = taken(result, text(4, 24))
    assert all(map(torch.equal, found, taken(model, text(4, 24))))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        taken(result, text(4, 32))
        unbounded = memrewrite.optimize(Text(), text(4, 16), loss_fn=lambda loss: loss, verify=False)
        taken(unbounded, text(4, 24))


def test_autocast_that_decorates_a_forward_ends_with_it_where_a_peak_is_foreseen_inside() -> None:
    """As accelerate decorates it: one object is entered by each call."""
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))
    x = torch.randn(16, 32)
    result = memrewrite.optimize(model, x, budget="min", amp="bf16", verify=False)
    vars(result)["forward"] = torch.autocast("cpu", torch.bfloat16)(result.forward)
    with pytest.warns(BeyondPlanWarning, match="A step on them takes"):
        result(torch.cat([x, x]))
    assert not torch.is_autocast_enabled("cpu")


def test_a_loss_that_does_not_take_another_size_leaves_its_peak_unknown_and_nothing_is_logged() -> None:
    classes = torch.zeros(4, 1, 8, 8, dtype=torch.long)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Sigmoid(), nn.Conv2d(8, 4, 3, padding=1))
    inputs = torch.randn(4, 3, 8, 8)
    result = memrewrite.optimize(model, inputs, budget="min", loss_fn=lambda y: y.gather(1, classes).mean())
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(handler)
    try:
        with pytest.warns(FallbackWarning, match=r"captured as \('\w+', 3, 8, 8\)\.$"):
            result(inputs[..., :4, :4])
    finally:
        logger.removeHandler(handler)
    assert not logged


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("copied", [False, True], ids=["planned here", "a copy"])
def test_a_strict_result_refuses_what_may_take_more_and_nothing_else(copied: bool) -> None:
    model = Text()
    result = memrewrite.optimize(model, text(8, 32), budget="min", loss_fn=lambda loss: loss, strict=True)
    result = copy.deepcopy(result) if copied else result
    told = "takes inputs of size 40, planned for 32. " + ("Its peak may be" if copied else "A step on them takes")
    inputs = text(8, 40)
    random = torch.get_rng_state()
    with pytest.raises(memrewrite.BeyondPlanError, match=told):
        result(*inputs)
    assert torch.equal(random, torch.get_rng_state())
    with pytest.raises(memrewrite.BeyondPlanError, match="strict, and would have done this: it ran its original"):
        result(*(part.int() for part in text(8, 32)))
    if not copied:  # longer, and yet no more; and what the original does in as little
        inputs = text(2, 40)
        assert all(map(torch.equal, taken(result, inputs), taken(model, inputs)))
        inputs = text(1, 8)
        for warned in (True, False):
            with pytest.warns(FallbackWarning, match="the budget is") if warned else nullcontext():
                assert all(map(torch.equal, taken(result, inputs), taken(model, inputs)))
    with torch.no_grad():
        result(*text(8, 40))


@pytest.mark.filterwarnings("error")
def test_strict_needs_a_budget_and_a_rewritten_model() -> None:
    with pytest.raises(memrewrite.UsageError, match="give a budget"):
        memrewrite.optimize(Text(), text(4, 16), strict=True)
    model: nn.Module = nn.Linear(4, 4)
    kept = memrewrite.optimize(model, torch.randn(2, 4), budget="8GB", strict=True)
    assert kept is model
    assert "strict has no effect" in " ".join(kept.report.notes)


def test_what_forward_asks_of_a_length_is_kept_to() -> None:
    model = Text(multiple=4)
    result = memrewrite.optimize(model, text(8, 32), budget="min", loss_fn=lambda loss: loss, verify=False)
    assert "ids must have a size 1 with size % 4 == 0; others run the original forward." in result.report.notes
    for length in (32, 8, 16):
        assert all(map(torch.equal, taken(result, text(4, length)), taken(model, text(4, length))))
    with pytest.warns(FallbackWarning, match=r"for inputs of \(4, 30\) forward takes another path than at capture"):
        found = taken(result, text(4, 30))
    assert all(map(torch.equal, found, taken(model, text(4, 30))))


class Parts(nn.Module):
    """Divides a length by what comes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        length = ids.shape[1]
        x = self.words(ids)
        if length % 8 == 0 and length % (length // 8) == 0:
            x = x.unflatten(1, (length // 8, -1)).flatten(1, 2)
        return functional.mse_loss(self.layer(x).mean(-1).flatten(), labels.flatten().float())


def test_of_what_forward_asks_only_that_is_told_which_says_more() -> None:
    ids = torch.randint(WORDS, (4, 32))
    captured = capture(Parts(), Inputs((ids, ids.clone()), {}))
    assert len(captured.inputs.conditions) > 2
    told = "ids must have a size 1 with {}; others run the original forward."
    assert captured.notes == (told.format("size % 8 == 0"), told.format("size // 8 != 1"))


class Pairs(nn.Module):
    """Asks for the batch as Python does, as losses over pairs do."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.layer = nn.Parameter(torch.rand(1, WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x) + self.start.expand(len(x), -1)
        return functional.cross_entropy(hidden @ hidden.T, torch.arange(len(x)))


@pytest.mark.filterwarnings("error::memrewrite.runtime.promise.FallbackWarning")
def test_the_batch_varies_where_its_len_is_taken() -> None:
    model = Pairs()
    result = memrewrite.optimize(model, torch.randn(64, WIDTH), budget="min", loss_fn=lambda loss: loss)
    assert result.report.equivalent
    assert programs(result)
    for rows in (64, 9, 2):
        x = torch.randn(rows, WIDTH)
        assert all(map(torch.equal, taken(result, (x,)), taken(model, (x,))))


class Turns(nn.Module):
    """Takes turns, as recurrent policies do, and of two inputs one row in each."""

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        state = torch.zeros_like(x[0])
        for turn in range(x.shape[0]):
            state = torch.tanh(state * weights[turn] + x[turn])
        return state


def test_a_loop_is_told_of_by_its_last_turn() -> None:
    captured = capture(Turns(), Inputs((torch.randn(6, 4), torch.rand(6, 4)), {}))
    assert captured.notes == ("weights must have a size 0 with size > 5; others run the original forward.",)


def test_sizes_of_numbers_with_fractions_stay_but_for_the_batch() -> None:
    captured = capture(nn.Sequential(nn.Linear(4, 4)), Inputs((torch.randn(6, 5, 4),), {}))
    assert captured.inputs.leaves[0].shape[1:] == (5, 4)
    assert isinstance(captured.inputs.leaves[0].shape[0], str)
