"""What the partitioner makes of joint graphs: the same numbers, fewer bytes, and peaks within what was given."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from memrewrite.backends import scratch
from memrewrite.backends.choices import Options
from memrewrite.backends.frontier import Found
from memrewrite.backends.partition import Partition
from memrewrite.backends.plan import Ways
from memrewrite.backends.tries import Search, Step, one
from memrewrite.records.errors import BudgetInfeasibleError
from memrewrite.runtime.linear_cross_entropy import LOSS, linear_cross_entropy
from memrewrite.targets.transients import Call, Taken, Transients
from memrewrite.torch_internals.operators import argument_names
from tests.support.divided import Divided, gradients

GRADIENT = 512  # bytes of the loss's gradient, which its backward holds


class Loss(nn.Module):
    """The mean of what a model gives, squared."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x.square().mean()


class Block(nn.Module):
    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))
        return result


class Checkpointed(Block):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return result


def mlp(depth: int = 8, width: int = 32) -> Loss:
    return Loss(*(part for _ in range(depth) for part in (nn.Linear(width, width), nn.ReLU())))


def conv() -> Loss:
    parts: list[nn.Module] = []
    for a, b in ((3, 8), (8, 8), (8, 8)):
        parts += [nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.SiLU()]
    return Loss(*parts)


MODELS: dict[str, Any] = {
    "mlp": (mlp, (256, 32)),
    "transformer": (lambda: Loss(*(Block(32) for _ in range(2))), (4, 32, 32)),
    "dropout": (lambda: Loss(*(Block(32, 0.3) for _ in range(2))), (4, 32, 32)),
    "batch norm": (conv, (4, 3, 12, 12)),
    "checkpoint": (lambda: Loss(Checkpointed(32), Block(32)), (4, 32, 32)),
}


def made(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model, shape = MODELS[name]
    return model(), torch.randn(shape)


@pytest.mark.parametrize("name", MODELS)
def test_numbers_stay_and_bytes_fall(name: str) -> None:
    """Bit for bit, with buffers written once and random numbers drawn as ever; each peak counted within its budget."""
    model, x = made(name)
    stock = copy.deepcopy(model)
    usual = Divided(stock, None)
    loss, expected = usual.step(x), gradients(stock)
    kept, peak = [], 0
    for budget in ("100%", "75%", "min"):
        tried = copy.deepcopy(model)
        ours = Divided(tried, budget)
        try:
            got = ours.step(x)
        except BudgetInfeasibleError as error:
            peak = error.lowest
            continue
        assert torch.equal(got, loss)
        assert all(map(torch.equal, gradients(tried), expected))
        assert all(map(torch.equal, tried.buffers(), stock.buffers()))
        foreseen = ours.partition.foreseen
        assert foreseen is not None
        if budget.endswith("%"):
            assert foreseen.after <= float(budget[:-1]) / 100 * foreseen.before
        assert 0.95 * foreseen.after <= ours.peak <= foreseen.after + GRADIENT
        kept.append(ours.kept)
    assert kept == sorted(kept, reverse=True)
    assert kept[-1] < kept[0]
    assert peak <= (foreseen.after if foreseen else 0)


@pytest.mark.parametrize("name", ["mlp", "transformer"])
def test_fused_kernels_are_counted_for_less(name: str) -> None:
    model, x = made(name)
    found = []
    for fused in (False, True):
        ours = Divided(copy.deepcopy(model), "min", fused)
        ours.step(x)
        assert ours.partition.foreseen is not None
        found.append(ours.partition.foreseen.after)
    assert found[1] <= found[0]


def test_more_recomputation_never_takes_more() -> None:
    """pytorch#197838: with one copy of each node that runs again, all of them live at once."""
    torch.manual_seed(0)
    model, x = mlp(depth=12), torch.randn(1024, 32)
    peaks = []
    for budget in ("100%", "80%", "65%", "min"):
        ours = Divided(copy.deepcopy(model), budget)
        ours.step(x)
        peaks.append(ours.peak)
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < 0.6 * peaks[0]


@pytest.mark.parametrize("name", ["transformer", "dropout", "batch norm"])
def test_gradients_that_are_made_apart_are_the_same(name: str) -> None:
    model, x = made(name)
    found = []
    for apart in (False, True):
        tried = copy.deepcopy(model)
        ours = Divided(tried, "min")
        ours.partition.taken = [10**9] * apart  # the code of the plan before took too much
        found.append((ours.step(x), gradients(tried), ours.nodes.count("memrewrite.settle.default")))
    (loss, expected, none), (other, got, some) = found
    assert torch.equal(loss, other)
    assert all(map(torch.equal, got, expected))
    assert none == 0
    assert some >= 1


@pytest.mark.parametrize("early", [2, 8])
@pytest.mark.parametrize("name", ["mlp", "transformer", "dropout"])
def test_regions_may_begin_to_make_things_again_before_their_own(
    name: str, early: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more bytes are kept, fewer of one region, and the numbers are the same."""
    model, x = made(name)
    stock = copy.deepcopy(model)
    loss, expected = Divided(stock, None).step(x), gradients(stock)

    def search(self: Partition, options: Options, limit: int | None) -> Search:
        known = options.frontier.facts
        cuts = max((row.cuts for row in options.frontier.rows), key=len)
        found.append([options.frontier.look(Ways(cuts, known.costly & known.may_rerun, each)) for each in (0, early)])
        return (yield from one(found[0][1], "lowest", Step(0, 0)))

    found: list[list[Found]] = []
    monkeypatch.setattr(Partition, "_search", search)
    tried = copy.deepcopy(model)
    ours = Divided(tried, "min")
    assert torch.equal(ours.step(x), loss)
    assert all(map(torch.equal, gradients(tried), expected))
    ((plain, plan),) = found
    assert 0.95 * plan.peaks.peak <= ours.peak <= plan.peaks.peak + GRADIENT
    assert ours.kept == plan.peaks.saved <= plain.peaks.saved
    assert plan.order.saved != plain.order.saved
    assert plan.order.length > plain.order.length


def test_a_value_may_run_again_in_several_places() -> None:
    model, x = made("mlp")
    ours = Divided(model, "min")
    ours.step(x)
    assert ours.partition.foreseen is not None
    assert ours.partition.foreseen.regions > 1
    assert ours.nodes.count("aten.addmm.default") + ours.nodes.count("aten.mm.default") > 2 * 8


def test_backward_draws_no_random_numbers_that_nobody_reads() -> None:
    """Where they are eager's, and what dropout reads is made again, the draw was, too."""
    model = Loss(*(part for _ in range(3) for part in (nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.3), nn.RReLU())))
    with torch._inductor.config.patch(fallback_random=True):
        ours = Divided(model, "min")
        loss = ours.compiled(torch.randn(64, 32))
        after_forward = torch.get_rng_state()
        loss.backward()
    assert torch.equal(torch.get_rng_state(), after_forward)


def test_checkpoints_of_the_user_run_again() -> None:
    model, x = made("checkpoint")
    ours = Divided(model, "100%")
    ours.step(x)
    handed = {node.name for _, b in ours.graphs for node in b.graph.find_nodes(op="placeholder")}
    assert not any("erf" in name for name in handed)


class Counting(nn.Module):
    """What it makes depends on a buffer, read before and after forward has written it."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.part(x) * (self.calls + 3)
        self.calls.add_(1)
        return (x / self.calls).square().mean()


@pytest.mark.parametrize("budget", [None, "100%", "min"])
def test_backward_reads_a_buffer_as_it_was_in_forward(budget: str | None) -> None:
    """PyTorch's own partition computes from it again once it is written: gradients are a fraction of what they are."""
    model = Counting()
    plain, x = copy.deepcopy(model), torch.randn(4, 8)
    ours = Divided(model, budget)
    for _ in range(2):
        plain(x).backward()
        ours.step(x)
    torch.testing.assert_close(gradients(model), gradients(plain))


def test_lengths_that_vary() -> None:
    model, _ = made("transformer")
    plain = copy.deepcopy(model)
    ours = Divided(model, "min", dynamic=True)
    for length in (24, 48):
        x = torch.randn(4, length, 32)
        torch.testing.assert_close(ours.step(x), plain(x).detach())
    assert len(ours.graphs) == 1


def test_of_a_fraction_of_sizes_backward_is_given_whole_numbers() -> None:
    """Inductor's caches take no others, and tell so in a traceback."""
    model = Loss(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU())
    plain = copy.deepcopy(model)
    ours = Divided(model, "100%", dynamic=True)
    for size in (12, 16):
        x = torch.randn(4, 3, size, size)
        torch.testing.assert_close(ours.step(x), plain(x).detach())
    ((_, backward),) = ours.graphs
    given = [node.meta["val"] for node in backward.graph.find_nodes(op="placeholder")]
    assert {type(each) for each in given if not isinstance(each, Tensor)} == {torch.SymInt}


def test_what_does_not_fit_says_what_would() -> None:
    model, x = made("mlp")
    with pytest.raises(BudgetInfeasibleError, match=r"No plan for torch\.compile fits 1000 B: the lowest foreseen"):
        Divided(model, 1000).step(x)


def test_what_libraries_take_while_they_run_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of convolutions in either memory format; measured on real tensors, while PyTorch traces on fake ones."""
    asked: list[Call] = []
    taken = {True: 50_000, False: 20_000}

    def measure(calls: Sequence[Call]) -> list[Taken]:
        asked.extend(calls)
        assert type(torch.ones(1)) is Tensor
        return [Taken(taken[args[0].stride[1] == 1]) for _, args, _ in calls]

    table = Transients(measure)
    model, x = made("batch norm")
    plain = Divided(copy.deepcopy(model), "min", fused=True)
    plain.step(x)
    monkeypatch.setattr(scratch, "transients_on", lambda device: table)
    with_scratch = Divided(model, "min", fused=True)
    with_scratch.step(x)
    assert {func.__name__ for func, _, _ in asked} == {"convolution.default", "convolution_backward.default"}
    before, after = plain.partition.foreseen, with_scratch.partition.foreseen
    assert before is not None
    assert after is not None
    assert before.after < after.after <= before.after + taken[True]
    assert before.before + taken[False] < after.before <= before.before + taken[True]


class Head(nn.Module):
    """A head with its loss, after a layer that is ``wide``."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(16, wide), nn.Linear(wide, 16), nn.Linear(16, CLASSES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x + self.down(self.up(x).relu())
        target = torch.arange(len(x), device=x.device) % CLASSES
        how: Any = {"reduction": 1, "ignore_index": -100, "label_smoothing": 0.0}
        return linear_cross_entropy(hidden, self.head.weight, None, target, None, (), **how, rows=ROWS, early=True)


CLASSES, ROWS, GIVEN = 64, 1024, 2048


@pytest.mark.parametrize(
    ("wide", "budget", "rows"),
    [(8, "100%", ROWS), (8, "min", 128), (64, "min", ROWS // 2), (192, "min", ROWS), (8, 600_000, ROWS // 4)],
)
def test_a_loss_makes_fewer_rows_at_a_time_where_its_logits_are_the_peak(
    monkeypatch: pytest.MonkeyPatch, wide: int, budget: str | int, rows: int
) -> None:
    """But as many as the rest of the step leaves room for."""
    place = argument_names(LOSS).index("rows")
    table = Transients(lambda calls: [Taken(8 * CLASSES * args[place] if f is LOSS else 0) for f, args, _ in calls])
    monkeypatch.setattr(scratch, "transients_on", lambda device: table)
    torch.manual_seed(0)
    model, x = Head(wide), torch.randn(GIVEN, 16)
    divided = Divided(copy.deepcopy(model), budget, fused=True)
    torch.testing.assert_close(divided.step(x), model(x).detach())
    forward, _ = divided.graphs[-1]
    (loss,) = forward.graph.find_nodes(op="call_function", target=LOSS)
    assert loss.args[place] == rows
    if isinstance(budget, int):
        assert divided.partition.foreseen is not None
        assert divided.partition.foreseen.after <= budget
