"""What works piece by piece is counted again as it was counted when it ran, to the byte and event by event."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from memrewrite import simulate as simulating
from memrewrite.runtime.attention import attention_in_pieces
from memrewrite.runtime.cross_entropy import chunked_cross_entropy
from memrewrite.runtime.linear_cross_entropy import linear_cross_entropy
from memrewrite.runtime.tiles import in_tiles
from memrewrite.simulate import requests, run_tracked, simulate
from memrewrite.simulate.memory import repeats
from memrewrite.targets.allocator import Requests
from memrewrite.targets.cuda_from_cpu import CUDA_FROM_CPU
from memrewrite.targets.eager import EAGER, Target
from memrewrite.targets.transients import Taken, Transients
from memrewrite.workload.step import Inputs, Step
from memrewrite.workload.stepspec import StepSpec

WIDTH, LAYERS = 64, 3


def chain_mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, up)), down)


def chain_pair(x: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    wide = F.linear(x, up)
    return F.linear(wide.tanh(), down), x * 2


def chain_resizing(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return torch.empty(4).resize_(8).sum() + chain_mlp(x, up, down)


def mlp_without_a_name(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return chain_mlp(x, up, down)


class Layer(nn.Module):
    def __init__(self, part: Any) -> None:
        super().__init__()
        self.part = part
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, WIDTH // 4)).permute(2, 0, 3, 1, 4)
        x = x + attention_in_pieces(q, k, v, None, 2, is_causal=True).transpose(1, 2).flatten(2)
        made = in_tiles(self.part, (0,), (1, 2), 20, x, self.up.weight, self.down.weight)
        return x + (sum(made) if isinstance(made, tuple) else made)


class Net(nn.Module):
    """Layers, of which the first one runs twice, so that gradients of its weights are added up."""

    def __init__(self, part: Any = chain_mlp) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(part) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.layers[0], *self.layers):
            x = layer(x)
        return x


@contextmanager
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What ran, and what was counted again."""
    told: list[str] = []
    with monkeypatch.context() as patch:
        for name in ("_noted", "_again"):
            patch.setattr(repeats, name, telling(getattr(repeats, name), name, told))
        patch.setattr(repeats, "_KNOWN", {})
        yield told


def telling(own: Any, name: str, told: list[str]) -> Any:
    def run(*args: Any) -> Any:
        told.append(name)
        return own(*args)

    return run


def step_on(target: Target, **spec: Any) -> Step:
    return replace(StepSpec(**spec).build(), target=target)


def in_numbers(asked: Requests) -> list[tuple[int, int, bool]]:
    """What an allocator was asked for, with its blocks numbered."""
    numbers: dict[int, int] = {}
    each = itertools.chain.from_iterable(asked.steps)
    return [(numbers.setdefault(id(block), len(numbers)), size, spare) for block, size, spare in each]


def in_turn(asked: Requests) -> list[list[tuple[int, int, bool]]]:
    """What an allocator was asked for; what is given back at once comes in no order, as autocast's casts do."""
    runs = itertools.groupby(in_numbers(asked), key=lambda request: request[1] < 0)
    return [sorted(run) if given_back else [*run] for given_back, run in runs]


def counted_alike(
    module: nn.Module,
    inputs: Inputs,
    step: Step,
    monkeypatch: pytest.MonkeyPatch,
    written: Callable[[Requests], object] = in_numbers,
) -> tuple[list[str], dict[Any, Any]]:
    """What ran and was counted again, and what is known then; timelines and requests are those of all operators."""
    both = step.target is CUDA_FROM_CPU
    with monkeypatch.context() as patch:
        patch.setattr(simulating, "repeated", lambda trackers: nullcontext())
        expected = simulate(module, inputs, step, both=both)
        asked = written(requests(module, inputs, step))
    with counting(monkeypatch) as told:
        for _ in range(2):  # all of the second one is known
            assert simulate(module, inputs, step, both=both) == expected
        assert written(requests(module, inputs, step)) == asked
        return told, repeats._KNOWN


@pytest.mark.parametrize("part", [chain_mlp, chain_pair, chain_resizing])
@pytest.mark.parametrize("target", [EAGER, CUDA_FROM_CPU])
def test_a_repeated_timeline_is_that_of_all_operators(
    part: Any, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, _ = counted_alike(Net(part), Inputs((torch.randn(4, 24, WIDTH),), {}), step_on(target), monkeypatch)
    assert told.count("_noted") == 3 * 4  # kinds of calls, in batches of three sizes
    assert told.count("_again") > 4 * (LAYERS + 1) * 3


class Headed(nn.Module):
    """A loss with its head, some rows of logits at a time."""

    def __init__(self, early: bool, bias: bool, weighted: bool) -> None:
        super().__init__()
        self.early = early
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 100, bias=bias)
        self.register_buffer("weight", torch.rand(100) if weighted else None)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        given = self.body(x).relu(), self.head.weight, self.head.bias, target, self.weight
        steps = (("to", torch.float32), ("div", 30.0), ("tanh",))
        return linear_cross_entropy(*given, steps, 1, -100, 0.1, 7, self.early)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("early", "bias", "weighted"),
    [(True, False, False), (True, True, True), (False, False, False), (False, True, True)],
)
@pytest.mark.parametrize("target", [EAGER, CUDA_FROM_CPU])
def test_rows_of_logits_are_counted_again(
    early: bool, bias: bool, weighted: bool, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = Inputs((torch.randn(40, WIDTH), torch.randint(100, (40,))), {})
    told, known = counted_alike(Headed(early, bias, weighted), inputs, step_on(target), monkeypatch)
    assert None not in known.values()
    assert "_again" in told


class Chunked(nn.Module):
    """A loss by some rows of logits at a time, which are whole."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 100)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return chunked_cross_entropy(self.head(x), target, torch.float32, 1, -100, 8)


@pytest.mark.parametrize(
    ("module", "amp", "kinds"),
    [
        (Chunked(), "off", {"_losses_of_some", "_slope_of_some"}),
        (Chunked(), "bf16", {"_losses_of_some", "_slope_of_some"}),
        (Headed(True, True, True), "bf16", {"_early", "_slope_at_once"}),
        (Headed(False, True, False), "off", {"_late", "_late_slopes", "_head_losses_of_some", "_slope_by_losses"}),
    ],
)
@pytest.mark.parametrize("target", [EAGER, CUDA_FROM_CPU])
def test_rows_that_are_alike_run_once(
    module: nn.Module, amp: Any, kinds: set[str], target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    def counted(rows: int) -> tuple[set[str], int, int]:
        inputs = Inputs((torch.randn(rows, WIDTH), torch.randint(100, (rows,))), {})
        told, known = counted_alike(module, inputs, step_on(target, amp=amp), monkeypatch, in_turn)
        return {call[0].__qualname__ for call in known}, told.count("_noted"), told.count("_again")

    few, many = counted(7 * 8 * 2), counted(7 * 8 * 6)
    assert few[0] == many[0] == kinds
    assert few[1] == many[1]
    assert many[2] >= few[2]


def test_what_is_counted_again_belongs_to_the_submodule_that_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    module, inputs, step = Net(), Inputs((torch.randn(4, 24, WIDTH),), {}), step_on(EAGER)
    with monkeypatch.context() as patch:
        patch.setattr(simulating, "repeated", lambda trackers: nullcontext())
        expected = simulate(module, inputs, step, attribute=True)
    with counting(monkeypatch) as told:
        assert simulate(module, inputs, step, attribute=True) == expected
    assert "_again" in told
    assert len({life.module for life in expected.lives}) > LAYERS


def test_a_repeated_timeline_is_the_real_one(monkeypatch: pytest.MonkeyPatch) -> None:
    module, inputs, step = Net(), Inputs((torch.randn(4, 24, WIDTH),), {}), step_on(EAGER)
    with counting(monkeypatch) as told:
        simulated = simulate(module, inputs, step)
    assert "_again" in told
    real = run_tracked(module, inputs, step)
    assert (simulated.peak, simulated.phases, simulated.events) == (real.peak, real.phases, real.events)


def test_what_is_known_of_pieces_holds_while_more_is_learned_of_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Transients(lambda calls: [Taken(2**20)] * len(calls))
    monkeypatch.setattr(Target, "transients", lambda target, device, probe=True: table)
    step = step_on(EAGER)
    with counting(monkeypatch) as told:
        found = simulate(Net(), Inputs((torch.randn(4, 24, WIDTH),), {}), step)
        pieces = told.count("_noted")
        table.lookup(torch.ops.aten.exp.default, (torch.randn(3),), {})
        assert table.probe()
        again = simulate(Net(), Inputs((torch.randn(4, 24, WIDTH),), {}), step)
        assert (again.peak, again.phases) == (found.peak, found.phases)
        assert told.count("_noted") == pieces
    with monkeypatch.context() as patch:
        patch.setattr(simulating, "repeated", lambda trackers: nullcontext())
        assert simulate(Net(), Inputs((torch.randn(4, 24, WIDTH),), {}), step).peak == found.peak


def test_what_may_differ_runs_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    module, inputs = Net(mlp_without_a_name), Inputs((torch.randn(4, 24, WIDTH),), {})
    with counting(monkeypatch):
        simulate(module, inputs, step_on(EAGER))
        assert not any("Tiles" in call[0].__qualname__ for call in repeats._KNOWN)


class InSegments(Net):
    """Layers that run as they do in segments, whose casts autocast does not keep."""

    def forward(self, x: Tensor) -> Tensor:
        torch.set_autocast_cache_enabled(False)
        try:
            return super().forward(x)
        finally:
            torch.set_autocast_cache_enabled(True)


@pytest.mark.parametrize("target", [EAGER, CUDA_FROM_CPU])
@pytest.mark.parametrize(("module", "forward"), [(Net, False), (InSegments, True)])
def test_under_autocast_what_keeps_no_casts_is_counted_again(
    module: type[Net], forward: bool, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, inputs = step_on(target, amp="bf16"), Inputs((torch.randn(4, 24, WIDTH),), {})
    told, known = counted_alike(module(), inputs, step, monkeypatch, in_numbers if forward else in_turn)
    counted = {call[0].__qualname__ for call, found in known.items() if found is not None}
    assert {"_Tiles.run", "_Tiles.slopes"} <= counted
    assert ("_attended" in counted) == forward
    assert told.count("_again") > (1 + forward) * (LAYERS + 1) * 3


def test_other_arguments_are_other_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    module, step = Net(), step_on(EAGER)
    peaks = []
    with counting(monkeypatch) as told:
        for length in (24, 32):
            peaks.append(simulate(module, Inputs((torch.randn(4, length, WIDTH),), {}), step).peak)
    assert told.count("_noted") == 8
    assert peaks[0] < peaks[1]


KEPT: list[Tensor] = []


def chain_keeping(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    KEPT.append(torch.empty_like(x))
    return chain_mlp(x, up, down)


def test_what_stays_besides_results_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    module, inputs, step = Net(chain_keeping), Inputs((torch.randn(4, 24, WIDTH),), {}), step_on(EAGER)
    with counting(monkeypatch):
        simulate(module, inputs, step)
        refused = [call[0].__qualname__ for call, known in repeats._KNOWN.items() if known is None]
    KEPT.clear()
    assert any("run" in name for name in refused)
