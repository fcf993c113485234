"""Node costs: the roofline, and the profile that replaces it where a device can be timed."""

import contextlib
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from filelock import FileLock, Timeout
from torch import Tensor, fx, nn

from memrewrite.costs import ROOFLINES, Costs, Times, roofline_costs
from memrewrite.costs.calls import Call, call_of
from memrewrite.costs.fused import when_fused
from memrewrite.costs.profile import Profile, profile_on
from memrewrite.costs.table import Table, cache_file, environment
from memrewrite.costs.timer import Measure, timing_on
from memrewrite.observe.effects import Effects, observe
from memrewrite.observe.watermarks import Watermarks
from memrewrite.plan_facts.chain import chain, compute_nodes
from tests.support.timing import Net, Recorded, node_named, observed, opened

CPU = torch.device("cpu")
CUDA = ROOFLINES["cuda"]


@pytest.fixture(scope="module")
def effects() -> Effects:
    torch.manual_seed(0)
    return observed(Net(), torch.randn(4, 8))


@pytest.mark.parametrize("front_end", ["export", "dynamo"])
def test_each_distinct_signature_is_timed_once(front_end: str) -> None:
    found = observed(Net(), torch.randn(4, 8), front_end)
    measure = Recorded()
    profile = Profile(Table("here", None), opened(measure))
    costs = profile.costs(found, None)
    assert len(measure.calls) == len(set(measure.calls))
    assert sum("linear" in text for text in measure.calls) == 3  # the first one's input has no gradient
    assert len(costs.measured) == len(compute_nodes(found)) == 14
    profile.costs(found, None)
    assert len(measure.calls) == len(set(measure.calls))
    profile.costs(found, torch.bfloat16)
    assert sum("linear" in text for text in measure.calls) == 6


def test_another_model_of_the_process_knows_the_times_too(effects: Effects) -> None:
    table, measure = Table("here", None), Recorded()
    first = Profile(table, opened(measure)).costs(effects, None)
    count = len(measure.calls)
    assert Profile(table, opened(measure)).costs(effects, None).measured == first.measured
    assert len(measure.calls) == count


def test_times_last_in_the_file(effects: Effects, tmp_path: Path) -> None:
    file = tmp_path / "below" / "times.json"
    measure = Recorded()
    first = Profile(Table("here", file), opened(measure)).costs(effects, None)
    assert {entry.name for entry in file.parent.iterdir()} == {"times.json", "times.json.lock"}
    again = Recorded()
    assert Profile(Table("here", file), opened(again)).costs(effects, None).measured == first.measured
    assert again.calls == []
    elsewhere = Recorded()
    Profile(Table("elsewhere", file), opened(elsewhere)).costs(effects, None)
    assert elsewhere.calls == measure.calls


SOUND = {"version": 1, "environment": "here", "times": {"old": [1.0, 2.0, 3.0, 4.0]}}
CORRUPT = {
    "no json": "{",
    "nothing": "",
    "a list": "[]",
    "no times": json.dumps({"version": 1, "environment": "here"}),
    "another version": json.dumps({**SOUND, "version": 0}),
    "too few figures": json.dumps({**SOUND, "times": {"old": []}}),
    "words": json.dumps({**SOUND, "times": {"old": ["a"]}}),
    "not finite": json.dumps({**SOUND, "times": {"old": [float("nan"), 0, 0, 0]}}),
    "negative": json.dumps({**SOUND, "times": {"old": [-1, 0, 0, 0]}}),
}


@pytest.mark.parametrize("content", CORRUPT.values(), ids=CORRUPT)
def test_a_corrupt_file_is_ignored_and_written_anew(content: str, effects: Effects, tmp_path: Path) -> None:
    file = tmp_path / "times.json"
    file.write_text(content, encoding="utf-8")
    measure = Recorded()
    Profile(Table("here", file), opened(measure)).costs(effects, None)
    assert Table("here", file).known.keys() == set(measure.calls)


def test_what_others_wrote_meanwhile_stays(effects: Effects, tmp_path: Path) -> None:
    file = tmp_path / "times.json"
    measure = Recorded()
    profile = Profile(Table("here", file), opened(measure))
    file.write_text(json.dumps(SOUND), encoding="utf-8")
    profile.costs(effects, None)
    assert Table("here", file).known.keys() == {"old", *measure.calls}


def test_one_process_measures_at_a_time_and_the_next_knows_its_times(effects: Effects, tmp_path: Path) -> None:
    file = tmp_path / "times.json"
    first, second = Recorded(), Recorded()
    alone: list[bool] = []

    @contextlib.contextmanager
    def while_locked() -> Iterator[Measure]:
        with pytest.raises(Timeout):
            FileLock(f"{file}.lock", timeout=0).acquire()
        alone.append(True)
        yield first

    other = Profile(Table("here", file), opened(second))
    Profile(Table("here", file), while_locked).costs(effects, None)
    other.costs(effects, None)
    assert alone
    assert first.calls
    assert second.calls == []


def test_a_folder_that_cannot_be_made_is_no_error(effects: Effects, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    costs = Profile(Table("here", tmp_path / "file" / "times.json"), opened(Recorded())).costs(effects, None)
    assert costs.measured


def test_where_the_file_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    name = environment(CPU)
    assert torch.__version__ in name
    assert cache_file(name).parent == tmp_path / "memrewrite"
    assert cache_file(name) != cache_file(name + "x")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_file(name).parent == tmp_path / "home" / ".cache" / "memrewrite"


def test_timing_stops_when_its_seconds_are_spent_and_the_dearest_come_first(effects: Effects) -> None:
    now = iter(range(100))
    measure = Recorded()
    profile = Profile(Table("here", None), opened(measure), seconds=3, clock=lambda: float(next(now)))
    costs = profile.costs(effects, None)
    assert len(measure.calls) == 2
    assert all("silu" in text or "relu" in text for text in measure.calls)  # four of each
    left = node_named(effects, "linear", -1)
    assert left not in costs.measured
    profile.costs(effects, None)
    assert len(measure.calls) == 2


def test_what_is_not_timed_is_scaled_as_what_was(effects: Effects) -> None:
    costs = Profile(Table("here", None), opened(Recorded(untimed="silu"))).costs(effects, None)
    silu, relu = node_named(effects, "silu"), node_named(effects, "relu")
    facts = effects.of[silu]
    timed = [node for node in costs.measured if effects.of[node].moved]
    guess = sum(CUDA.ms((effects.of[n].flops, effects.of[n].moved), None) for n in timed)
    assert silu not in costs.measured
    assert costs.scale == pytest.approx(2.0 * len(timed) / guess)
    assert costs.ms(silu, facts) == pytest.approx(costs.scale * CUDA.ms((facts.flops, facts.moved), None))
    assert costs.ms(relu, effects.of[relu]) == 2.0
    untimed = Profile(Table("here", None), opened(Recorded(None))).costs(effects, None)
    assert (untimed.measured, untimed.scale) == ({}, 1.0)


def test_what_could_not_be_timed_is_not_tried_again_nor_written(effects: Effects, tmp_path: Path) -> None:
    table, measure = Table("here", tmp_path / "times.json"), Recorded(untimed="silu")
    Profile(table, opened(measure)).costs(effects, None)
    count = len(measure.calls)
    Profile(table, opened(measure)).costs(effects, None)
    assert len(measure.calls) == count
    assert not any("silu" in text for text in Table("here", tmp_path / "times.json").known)


def test_a_chain_takes_the_costs_it_is_given(effects: Effects) -> None:
    nodes = compute_nodes(effects)
    costs = Profile(Table("here", None), opened(Recorded())).costs(effects, None)
    levels = dict.fromkeys(nodes, Watermarks())
    numbers = chain(effects, levels, costs)
    is_view = [not effects.of[node].moved for node in nodes]
    assert any(is_view)
    assert numbers.ms.tolist() == [0.0 if view else 2.0 for view in is_view]
    kept = {"linear": 0.0, "silu": 0.0, "relu": 2.0}  # what is saved: inputs, inputs, the output
    for name, ms in kept.items():
        assert numbers.rerun_ms[nodes.index(node_named(effects, name))] == ms, name
    assert chain(effects, levels, roofline_costs("cuda", None)).ms.tolist() != numbers.ms.tolist()
    assert numbers.segment_ms == CUDA.segment_ms


def test_a_node_that_saves_in_the_middle_reruns_in_part() -> None:
    found = observed(Net(), torch.randn(4, 8), amp=torch.bfloat16)
    node = node_named(found, "linear")
    facts = found.of[node]
    assert 0 < facts.rerun[1] < facts.moved
    costs = Costs(CUDA, torch.bfloat16, {node: Times(2.0)})
    assert 0 < costs.rerun_ms(node, facts) < 2.0


class Odd(nn.Module):
    """Calls that cannot be timed alone, or must not be."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        first, second = torch.chunk(self.layer(x) + torch.arange(8), 2, -1)
        with torch.no_grad():
            mask = (x[:, :4] > 0).logical_not_()
        with torch.autocast("cpu", torch.bfloat16):
            third = F.linear(second, self.layer.weight[:4, :4])
        return torch.where(mask, first, third).relu_()


def test_what_is_no_call_on_tensors_is_left_to_the_roofline() -> None:
    found = observed(Odd(), torch.randn(4, 8), "dynamo")
    measure = Recorded()
    costs = Profile(Table("here", None), opened(measure)).costs(found, None)
    named = {node: getattr(node.target, "__name__", str(node.target)) for node in compute_nodes(found)}
    left = {name for node, name in named.items() if node not in costs.measured}
    assert {"arange", "_set_grad_enabled", "_enter_autocast", "_exit_autocast", "linear"} <= left
    assert not any("autocast" in text or "grad_enabled" in text for text in measure.calls)
    assert all(str(call.grad) in call.text for node in named if (call := call_of(node, found.of[node], None)))


@pytest.mark.parametrize("front_end", ["export", "dynamo"])
@pytest.mark.parametrize("build", [Net, Odd], ids=["net", "odd"])
def test_calls_run_on_tensors_of_their_own(build: type[nn.Module], front_end: str) -> None:
    model, x = build(), torch.randn(4, 8)
    found = observed(model, x, front_end)
    before = [x.clone(), *(p.detach().clone() for p in model.parameters())]
    torch.manual_seed(3)
    random.seed(3)
    state, python = torch.get_rng_state(), random.getstate()
    profile = Profile(Table("here", None), lambda: timing_on(CPU))
    costs = profile.costs(found, None)
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == python
    assert all(torch.equal(a, b) for a, b in zip(before, [x, *model.parameters()], strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")
    linear = node_named(found, "linear")
    assert linear in costs.measured
    assert costs.measured[linear].forward > 0
    assert costs.measured[linear].backward > 0
    written = [node for node in costs.measured if found.of[node].writes]
    assert bool(written) == (build is Odd)


class Drawing(nn.Module):
    """Draws random numbers, updates running statistics and needs no gradient at first."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x.abs())


@pytest.mark.parametrize("amp", [None, torch.bfloat16], ids=str)
def test_timing_under_autocast_with_statistics_and_random_numbers(amp: torch.dtype | None) -> None:
    model, x = Drawing(), torch.randn(4, 8)
    found = observed(model, x, amp=amp)
    seen: list[tuple[str, bool]] = []

    @contextlib.contextmanager
    def timing() -> Iterator[Measure]:
        with timing_on(CPU) as measure:

            def watched(call: Call) -> Times | None:
                times = measure(call)
                seen.append((call.text, times is not None))
                return times

            yield watched

    costs = Profile(Table("here", None), timing).costs(found, amp)
    assert not torch.is_autocast_enabled("cpu")
    assert seen
    assert all(timed for _, timed in seen), seen
    absolute = node_named(found, "abs")
    assert costs.measured[absolute].backward == 0.0
    assert model.body[0].num_batches_tracked == 0


def test_an_assertion_is_not_tried_on_other_values() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(torch._assert_async, (graph.call_method("all", (graph.call_function(torch.lt, (x, 9)),)),))
    graph.output((graph.call_function(torch.mul, (x, 2)),))
    found = observe(fx.GraphModule(nn.Module(), graph), [torch.randn(4)])
    timed = {node.name for node in compute_nodes(found) if call_of(node, found.of[node], None)}
    assert timed == {"lt", "all_1", "mul"}


def test_a_call_that_fails_takes_no_time(effects: Effects) -> None:
    node = node_named(effects, "linear")
    call = call_of(node, effects.of[node], None)
    assert call is not None
    broken = replace(call, args=call.args[:1], kwargs={})
    with timing_on(CPU) as measure:
        assert measure(broken) is None
        assert measure(call) is not None


def test_there_is_no_profile_off_cuda() -> None:
    assert profile_on(CPU) is None


class Mixed(nn.Module):
    """Products, and what lies between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.first(x)).relu()
        return self.second(y.permute(0, 2, 3, 1)).sigmoid() * 2


@pytest.mark.parametrize("amp", [None, torch.bfloat16])
def test_compiled_only_products_and_what_they_are_handed_take_time(amp: torch.dtype | None) -> None:
    effects = observed(Mixed(), torch.randn(2, 3, 8, 8), amp=amp)
    costs = roofline_costs("cuda", amp)
    compiled = when_fused(costs, effects)
    times = {part: compiled.again_ms(node := node_named(effects, part), effects.of[node]) for part in PARTS}
    relu, element = node_named(effects, "relu"), 4 if amp is None else 2
    assert times["relu"] == costs.roofline.ms((0, 2 * relu.meta["val"].numel() * element), None)
    assert times["batch_norm"] == times["sigmoid"] == times["mul"] == times["permute"] == 0.0
    for product in ("conv2d", "linear"):
        node = node_named(effects, product)
        assert times[product] == costs.ms(node, effects.of[node]) > 0.0


PARTS = ("conv2d", "batch_norm", "relu", "permute", "linear", "sigmoid", "mul")
