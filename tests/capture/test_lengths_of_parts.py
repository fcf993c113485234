"""Lengths vary also where not the whole of forward can be one graph: in its regions, and around what has a loop."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memrewrite
from memrewrite.capture import capture
from memrewrite.runtime.promise import FallbackWarning
from memrewrite.simulate import run_tracked
from memrewrite.workload.step import Inputs, Step

WORDS, WIDTH, LENGTH = 40, 16, 12  # the loops over tokens below are captured turn by turn
STEP = Step("train", torch.optim.AdamW, loss_fn=lambda loss: loss)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(torch.sigmoid(self.up(self.norm(x)))))


class Words(nn.Module):
    """A small model of tokens; ``mix`` is what each block of it is given through."""

    def __init__(self, mix: Callable[[], nn.Module] = nn.Identity) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.mixes = nn.ModuleList(mix() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for mix, block in zip(self.mixes, self.blocks, strict=True):
            x = block(mix(x))
        return functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class Checked(Words):
    """Looks at the values of what it is given, which no graph can hold."""

    def forward(self, ids: Tensor) -> Tensor:
        if int(ids.max()) >= WORDS:
            raise ValueError("There is no such word.")
        return super().forward(ids)


class Measured(Words):
    """Makes a tensor of a length."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) / torch.sqrt(torch.tensor(min(ids.shape[1], 2 * LENGTH), dtype=torch.float))


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(WORDS, (batch, length), generator=torch.Generator().manual_seed(length))


def taken(module: nn.Module, *given: Tensor) -> list[Tensor]:
    module.zero_grad(set_to_none=True)
    loss = module(*given)
    loss.backward()
    return [loss.detach(), *(p.grad for p in module.parameters() if p.grad is not None)]


def assert_runs_in_its_plan(result: Any, model: nn.Module, *sizes: tuple[int, int]) -> None:
    """At each size every bit is the model's, nothing runs the original forward, and the promise holds."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        for size in sizes:
            given = tokens(*size)
            assert all(map(torch.equal, taken(result, given), taken(model, given))), size
            result.zero_grad(set_to_none=True)
            assert run_tracked(result, Inputs((given,), {}), STEP).peak <= result.report.predicted_after.peak


def test_a_length_that_becomes_a_tensor_varies() -> None:
    captured = capture(Measured(), Inputs((tokens(4, LENGTH),), {}))
    assert all(isinstance(size, str) for size in captured.inputs.leaves[0].shape)
    model = Measured()
    result = memrewrite.optimize(model, (tokens(4, LENGTH),), budget="min", loss_fn=lambda loss: loss, verify=False)
    assert_runs_in_its_plan(result, model, (4, LENGTH), (4, 9), (3, 5))


@pytest.mark.filterwarnings("error::memrewrite.runtime.promise.FallbackWarning")
def test_regions_take_the_lengths_that_the_model_takes() -> None:
    model = Checked()
    result = memrewrite.optimize(model, (tokens(4, LENGTH),), budget="min", loss_fn=lambda loss: loss)
    assert result.report.equivalent
    assert result.report.config["regions"] == [f"blocks.{i}" for i in range(2)]
    assert_runs_in_its_plan(result, model, (4, LENGTH), (4, 9), (3, 5))


class Loop(Block):
    """Goes from token to token in Python."""

    def forward(self, x: Tensor) -> Tensor:
        state, found = torch.zeros_like(x[:, 0]), []
        for i in range(x.shape[1]):
            state = torch.tanh(state + x[:, i])
            found.append(state)
        return super().forward(torch.stack(found, 1))


def test_a_region_that_fixes_its_length_keeps_it_and_the_others_vary() -> None:
    model = Checked()
    model.blocks[1] = Loop()
    result = memrewrite.optimize(model, (tokens(4, LENGTH),), budget="min", loss_fn=lambda loss: loss, verify=False)
    assert_runs_in_its_plan(result, model, (4, LENGTH), (2, LENGTH))
    with pytest.warns(FallbackWarning) as told:
        assert all(map(torch.equal, taken(result, tokens(4, 9)), taken(model, tokens(4, 9))))
    assert [str(each.message).partition(" ran")[0] for each in told] == ["Optimized Loop"]


class Scan(nn.Module):
    """Goes from token to token in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        state, found = torch.zeros_like(x[:, 0]), []
        gated = self.gate(x)
        for i in range(x.shape[1]):
            state = torch.tanh(state + gated[:, i])
            found.append(state)
        return torch.stack(found, 1)


class Chunks(nn.Module):
    """Adds up chunks of a text that it fills up."""

    def forward(self, x: Tensor) -> Tensor:
        missing = -x.shape[1] % 6
        filled = functional.pad(x, (0, 0, 0, missing)) if missing else x
        parts = filled.unflatten(1, (-1, 6))
        return torch.tanh(parts.cumsum(1).flatten(1, 2)[:, : x.shape[1]])


@pytest.mark.parametrize("mix", [Scan, Chunks])
def test_what_fixes_a_length_stays_a_call_where_a_range_is_named(mix: type[nn.Module]) -> None:
    model = Words(mix)
    example, ranges = (tokens(4, LENGTH),), {"ids": {1: (3, LENGTH)}}
    result = memrewrite.optimize(model, example, budget="min", loss_fn=lambda loss: loss, dynamic=ranges)
    assert result.report.equivalent
    told = f"mixes.0 ({mix.__name__}) and 1 more stay calls that the model makes: its forward takes no other size 1"
    assert told in " ".join(result.report.notes)
    assert_runs_in_its_plan(result, model, (4, LENGTH), (4, 9), (4, 8), (3, 5))


class Halves(Scan):
    """Goes through every other token in Python, and gives no more."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([torch.tanh(self.gate(x[:, i])) for i in range(0, x.shape[1], 2)], 1)


class Filled(Scan):
    """Fills a text up to whole chunks, and gives those."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.pad(super().forward(x), (0, 0, 0, -x.shape[1] % 5))


class Between(nn.Module):
    """Brings what another submodule gives to the length that it was given."""

    def __init__(self, inner: type[nn.Module]) -> None:
        super().__init__()
        self.inner = nn.ModuleList([inner()])

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner[0](x)[:, torch.arange(x.shape[1]) // 2])


@pytest.mark.parametrize(("inner", "call"), [(Halves, "mixes.0.inner.0 (Halves)"), (Filled, "mixes.0 (Between)")])
def test_a_call_gives_a_length_of_its_own_or_what_has_it_inside_is_the_call(inner: type[nn.Module], call: str) -> None:
    model = Words(partial(Between, inner))
    example, ranges = (tokens(4, LENGTH),), {"ids": {1: (3, LENGTH)}}
    result = memrewrite.optimize(model, example, budget="min", loss_fn=lambda loss: loss, dynamic=ranges)
    assert result.report.equivalent
    assert f"{call} and 1 more stay calls that the model makes" in " ".join(result.report.notes)
    assert_runs_in_its_plan(result, model, (4, LENGTH), (4, 9), (4, 8), (3, 5))


class FilledAround(Words):
    """Fills a text up to whole chunks before what it has inside, which settles no length."""

    def forward(self, ids: Tensor) -> Tensor:
        x = functional.pad(self.words(ids), (0, 0, 0, -ids.shape[1] % 6))
        for mix, block in zip(self.mixes, self.blocks, strict=True):
            x = block(mix(x))
        return functional.cross_entropy(self.head(x)[:, : ids.shape[1]].flatten(0, 1), ids.flatten())


class Looks(nn.Module):
    """Lets values decide, as no graph can."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) if float(x.detach().sum()) < 1e9 else x


def test_a_call_may_be_given_a_length_that_most_others_are_filled_up_to() -> None:
    model = FilledAround(Looks)
    result = memrewrite.optimize(model, (tokens(4, LENGTH - 1),), budget="min", loss_fn=lambda loss: loss)
    assert result.report.equivalent
    assert "mixes.0 (Looks) and 1 more stay calls that the model makes" in " ".join(result.report.notes)
    assert_runs_in_its_plan(result, model, (4, LENGTH - 1), (4, 9), (3, 5))


class Noted(Scan):
    """Has a note of what it gave last."""

    last: Tensor | None = None


class Remembers(nn.Module):
    """Takes a note of what it has inside, and may be given something that it does not need."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Noted()

    def forward(self, x: Tensor, far: Tensor | None = None) -> Tensor:
        found: Tensor = self.inner(x)
        self.inner.last = found.detach()
        return found


class Windowed(Words):
    """Gives what it has inside something more where a text is as long as the example."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        far = torch.ones_like(x) if torch.compiler.is_compiling() or ids.shape[1] >= LENGTH else None
        for mix, block in zip(self.mixes, self.blocks, strict=True):
            x = block(mix(x, far))
        return functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def test_a_call_may_be_given_something_at_some_lengths_alone() -> None:
    model = Windowed(Remembers)
    example, ranges = (tokens(4, LENGTH),), {"ids": {1: (3, LENGTH)}}
    result = memrewrite.optimize(model, example, budget="min", loss_fn=lambda loss: loss, dynamic=ranges)
    assert result.report.equivalent
    assert "mixes.0 (Remembers) and 1 more stay calls that the model makes" in " ".join(result.report.notes)
    assert_runs_in_its_plan(result, model, (4, LENGTH), (4, 9), (3, 5))


class Carrying(Words):
    """Goes on from the state that a recurrent layer had, whose second size is the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, ids: Tensor, state: Tensor | None = None) -> Tensor:
        x, _ = self.layer(self.words(ids), state)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


@pytest.mark.filterwarnings("error::memrewrite.runtime.promise.FallbackWarning")
def test_a_length_varies_beside_a_batch_that_something_else_fixes() -> None:
    model, state = Carrying(), torch.rand(1, 4, WIDTH)
    example, ranges = (tokens(4, LENGTH), state), {"ids": {1: (3, LENGTH)}}
    result = memrewrite.optimize(model, example, budget="min", loss_fn=lambda loss: loss, dynamic=ranges)
    assert result.report.equivalent
    assert result.report.segments
    assert "layer (GRU) stays a call that the model makes" in " ".join(result.report.notes)
    for length in (LENGTH, 9, 5):
        ours, theirs = (taken(each, tokens(4, length), state) for each in (result, model))
        assert all(map(torch.equal, ours, theirs)), length


@pytest.mark.parametrize(("mix", "fixed"), [(Scan, True), (nn.Identity, False)])
def test_a_length_that_is_fixed_says_how_it_would_vary(mix: type[nn.Module], fixed: bool) -> None:
    result = memrewrite.optimize(Words(mix), (tokens(4, LENGTH),), loss_fn=lambda loss: loss, verify=False)
    said = f"ids has {LENGTH} as its size 1 in this program, as something in forward fixes it;"
    asked = f"dynamic={{'ids': {{1: (2, {LENGTH})}}}} keeps those as calls"
    notes = " ".join(result.report.notes)
    assert (said in notes, asked in notes) == (fixed, fixed)


class Cut(nn.Module):
    """Works on as many rows as values or random numbers choose, between two parts that can be graphs."""

    def __init__(self, chosen: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.chosen = chosen
        self.first, self.second = (nn.Sequential(Block(), Block()) for _ in range(2))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        result: Tensor = self.second(self.chosen(self.first(x), lengths)).mean()
        return result


@pytest.mark.filterwarnings("error::memrewrite.runtime.promise.FallbackWarning")
@pytest.mark.parametrize(
    "chosen",
    [
        lambda x, lengths: x[:, : int(lengths.max())],
        lambda x, lengths: x[:, torch.unique(torch.randint(LENGTH, (LENGTH,)))],
    ],
    ids=["lengths", "random numbers"],
)
def test_regions_take_as_many_rows_as_values_decide(chosen: Callable[[Tensor, Tensor], Tensor]) -> None:
    model, x, lengths = Cut(chosen), torch.randn(4, LENGTH, WIDTH), torch.tensor([LENGTH, 3, 5, 2])
    result = memrewrite.optimize(model, (x, lengths), budget="min")
    for seed in range(5):
        given, found = (torch.randn(4, LENGTH, WIDTH), torch.randint(1, LENGTH, (4,))), []
        for each in (result, model):
            torch.manual_seed(seed)
            found.append(taken(each, *given))
        assert all(map(torch.equal, *found))
