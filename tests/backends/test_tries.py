"""Budgets and the lowest peak are looked for by what code takes, which is another amount for each division."""

import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.async_compile import AsyncCompile
from torch.nn import functional as F  # noqa: N812

import memrewrite
from memrewrite.backends import entry
from memrewrite.backends.asked import Asked
from memrewrite.backends.choices import Options
from memrewrite.backends.observed import Seen
from memrewrite.backends.partition import Partition
from memrewrite.backends.plan import Division
from memrewrite.records.errors import BudgetInfeasibleError
from memrewrite.records.options import Budget
from tests.backends.test_partition import Block, Loss
from tests.support.divided import NOTHING, Divided

Beyond = Callable[[Division | None, bool], int]
"""What the code of a division takes besides what is foreseen of it, with gradients apart or not."""

SEEDS = range(6)
MOST = 8  # compilations of one graph


@pytest.fixture(scope="module")
def known() -> Options:
    """The plans that there are for a joint graph."""
    torch.manual_seed(0)
    divided = Divided(Loss(*(Block(32) for _ in range(3))), "100%", fused=True)
    divided.step(torch.randn(4, 32, 32))
    assert divided.partition.options is not None
    return divided.partition.options


def compiled(known: Options, budget: str | int, beyond: Beyond) -> tuple[Partition, int]:
    """The partition once its graph stays, and how often it was compiled; as ``entry`` does it, without a compiler."""
    partition, count = Partition(Asked(Budget.parse(budget)), NOTHING), 0
    partition.options = known
    while True:
        found = partition.chosen(known.frontier.facts, known.usual.order.saved)
        count += 1
        made = found.peaks.peak + beyond(known.division(found), partition.apart)
        if not partition.observe(Seen(made, 0)):
            partition.settle()
            return partition, count


def room(known: Options, budget: str | int, made: int) -> list[tuple[int, int]]:
    """The bytes foreseen of the first two plans, and the room of their kernels, where code takes ``made`` bytes."""
    partition, found = Partition(Asked(Budget.parse(budget)), NOTHING), list[tuple[int, int]]()
    partition.options = known
    assert partition.room(True) is None  # of which it made no graph yet
    for _ in range(2):
        plan = partition.chosen(known.frontier.facts, known.usual.order.saved)
        held = known.frontier.facts.held
        forward, backward = partition.room(False), partition.room(True)
        assert forward is not None
        assert backward is not None
        found.append((plan.peaks.peak, forward + held))
        assert forward - backward == sum(known.frontier.facts.sizes[i] for i in known.frontier.facts.tangents)
        partition.observe(Seen(made, 0))
    return found


def test_kernels_are_fused_within_what_is_foreseen_of_the_lowest(known: Options) -> None:
    assert all(foreseen == within for foreseen, within in room(known, "min", 10 * known.usual.peaks.peak))


def test_the_first_kernels_for_a_budget_may_take_all_of_it(known: Options) -> None:
    budget = int(1.1 * known.usual.peaks.peak)
    (_, first), (foreseen, second) = room(known, budget, budget + 1)
    assert first == budget
    assert second == foreseen < budget


def drawn(seed: int, low: float, high: float, peak: int) -> Beyond:
    """Amounts between two shares of a peak, drawn for each division."""
    found: dict[tuple[Division | None, bool], int] = {}

    def beyond(division: Division | None, apart: bool) -> int:
        chance = random.Random(f"{seed} {division} {apart}")  # noqa: S311  (no secret)
        return found.setdefault((division, apart), int(chance.uniform(low, high) * peak))

    return beyond


def peak_of(partition: Partition) -> int:
    assert partition.observed is not None
    return partition.observed


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("shares", [(0.0, 0.4), (-0.1, 0.2), (0.05, 0.1)], ids=str)
def test_every_budget_above_the_lowest_is_met(known: Options, seed: int, shares: tuple[float, float]) -> None:
    usual, _ = compiled(known, "100%", lambda *_: 0)
    beyond = drawn(seed, *shares, peak_of(usual))
    lowest, count = compiled(known, "min", beyond)
    least = peak_of(lowest)
    assert count <= MOST
    for share in (1.0, 1.001, 1.01, 1.03, 1.1, 1.2, 1.4, 2.0):
        budget = int(least * share)
        met, count = compiled(known, budget, beyond)
        assert peak_of(met) <= budget
        assert count <= MOST
    with pytest.raises(BudgetInfeasibleError) as caught:
        compiled(known, max(least * 4 // 5, known.lowest().peaks.peak * 3 // 4), beyond)  # just below some are met
    assert caught.value.lowest == least


@pytest.mark.parametrize("seed", SEEDS)
def test_the_lowest_peak_is_the_lowest_that_was_compiled(known: Options, seed: int) -> None:
    taken: list[int] = []
    amounts = drawn(seed, 0.0, 0.4, 100_000)

    def beyond(division: Division | None, apart: bool) -> int:
        taken.append(amounts(division, apart))
        return taken[-1]

    partition, count = compiled(known, "min", beyond)
    assert partition.foreseen is not None
    assert count == len(taken)
    assert peak_of(partition) == min(partition.taken)
    assert peak_of(partition) - partition.foreseen.after in taken


def test_code_as_foreseen_is_compiled_once(known: Options) -> None:
    lowest, count = compiled(known, "min", lambda *_: 0)
    assert count == 1
    for budget in ("100%", "60%", peak_of(lowest)):
        _, count = compiled(known, budget, lambda *_: 0)
        assert count == 1


def test_what_one_division_takes_is_not_expected_of_another(known: Options) -> None:
    """A budget just above what is foreseen of the lowest plan, of whose division the code takes twice as much."""
    plain, _ = compiled(known, "min", lambda *_: 0)
    assert known.chosen is not None
    dear = known.division(known.chosen)
    others = [each for each in known.lowest_of_each() if known.division(each) != dear]
    second = min(each.peaks.peak for each in others)

    def beyond(division: Division | None, apart: bool) -> int:
        return peak_of(plain) if division == dear else 0

    lowest, _ = compiled(known, "min", beyond)
    assert peak_of(lowest) == second
    met, count = compiled(known, second, beyond)
    assert peak_of(met) == second
    assert count <= 5


def test_a_budget_far_below_the_lowest_is_refused_at_once(known: Options) -> None:
    lowest, _ = compiled(known, "min", lambda *_: 0)

    def never(division: Division | None, apart: bool) -> int:
        raise AssertionError("it was compiled")

    with pytest.raises(BudgetInfeasibleError) as caught:
        compiled(known, peak_of(lowest) // 2, never)
    assert caught.value.lowest == peak_of(lowest)


def test_code_that_takes_less_than_foreseen_meets_lower_budgets(known: Options) -> None:
    lowest, _ = compiled(known, "min", lambda *_: -10_000)
    assert lowest.foreseen is not None
    assert peak_of(lowest) == lowest.foreseen.after - 10_000
    met, count = compiled(known, peak_of(lowest), lambda *_: -10_000)
    assert (peak_of(met), count) == (peak_of(lowest), 1)
    with pytest.raises(BudgetInfeasibleError) as caught:
        compiled(known, peak_of(lowest) - 1, lambda *_: -10_000)
    assert caught.value.lowest == peak_of(lowest)


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


class Gated(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.down = Norm(width), nn.Linear(3 * width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        result: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return result


class Language(nn.Module):
    """Gated MLPs and a head, of which code takes up to an eighth less than foreseen, and a twentieth more."""

    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Gated(width) for _ in range(layers)))
        self.norm, self.head = Norm(width), nn.Linear(width, 512, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(self.blocks(x))), x.new_zeros(len(x), dtype=torch.long))


def by_code(budget: str | int, tries: list[Partition]) -> int:
    """The peak by Inductor's code of what is compiled for a budget; ``tries`` has the partition of each."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    options: Any = {"budget": budget, "optimizer": "none"}
    compiled: Any = torch.compile(Language(), backend=entry.memrewrite, options=options)
    chosen = Partition.chosen

    def counted(self: Partition, *args: Any) -> Any:
        tries.append(self)
        return chosen(self, *args)

    no_graphs = torch._inductor.config.patch(fx_graph_cache=False)  # that call no kernels are to be found again
    no_pairs = torch._functorch.config.patch(enable_autograd_cache=False)
    with mock.patch.object(Partition, "chosen", counted), no_graphs, no_pairs:
        compiled(torch.randn(512, 64))
    return memrewrite.report_of(compiled).peak or 0


@pytest.mark.parametrize("within", [True, False], ids=["fused within the room", "fused as ever"])
def test_budgets_from_the_lowest_on_are_met_by_real_code(within: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the first code, for the lowest of them, where kernels are fused within the room that there is."""
    if not within:
        monkeypatch.setattr(Partition, "room", lambda self, backward: None)
    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda *_, **__: lambda *_: None)  # no kernel has to be made
    lowest = by_code("min", [])
    counts = []
    for share in (1.0, 1.05, 1.2):
        tries: list[Partition] = []
        assert by_code(int(lowest * share), tries) <= int(lowest * share)
        counts.append(len(tries))
    assert max(counts) <= MOST
    assert (counts[:2] == [1, 1]) == within
