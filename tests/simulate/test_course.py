"""A pass that was noted counts as it would if it ran once more: event by event, block by block."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memrewrite import optimize
from memrewrite.search.bench import Bench
from memrewrite.simulate import Noted, requests, simulate
from memrewrite.simulate.memory.course import Noting
from memrewrite.targets.cuda_from_cpu import CUDA_FROM_CPU
from memrewrite.targets.eager import EAGER, Target
from memrewrite.targets.transients import Taken, Transients
from memrewrite.workload.step import Inputs, Step
from memrewrite.workload.stepspec import StepSpec
from tests.simulate.test_repeats import Headed, Net, in_turn, telling


class Convolved(nn.Module):
    """Statistics in buffers, a segment, dropout, a weight that is used twice, and one that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.again = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 10)
        self.head.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.norm(self.first(x)).relu()
        x = checkpoint(self._inside, x, use_reentrant=False)
        x = torch.dropout(x.mean((2, 3)), 0.1, True)
        return {"logits": self.head(x), "features": x}

    def _inside(self, x: Tensor) -> Tensor:
        return self.again(self.again(x).relu())


class Keeping(nn.Module):
    """Keeps a table from its first call on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.ones(8)
        return self.layer(x) * self.table


IMAGES = Inputs((torch.randn(4, 3, 16, 16),), {})
ROWS = Inputs((torch.randn(4, 24, 64),), {})
TEXTS = Inputs((torch.randn(40, 64), torch.randint(100, (40,))), {})


def loss_of(output: dict[str, Tensor]) -> Tensor:
    return output["logits"].square().mean() + output["features"].mean()


def step_on(target: Target, loss_fn: Any = None, **spec: Any) -> Step:
    return replace(StepSpec(**spec).build(), target=target, loss_fn=loss_fn)


def both_ways(module: nn.Module, inputs: Inputs, step: Step, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many passes were counted again; timelines and requests are those of passes that ran."""
    both, again = step.target is CUDA_FROM_CPU, list[str]()
    monkeypatch.setattr(Noting, "_again", telling(Noting._again, "again", again))
    expected = simulate(module, inputs, step, both=both)
    asked = in_turn(requests(module, inputs, step))
    assert expected.passes_alike
    attributed = simulate(module, inputs, step, attribute=True)
    assert simulate(module, inputs, step, attribute=True, noted=Noted(alike=True)) == attributed
    noted = Noted(alike=True)
    simulate(module, inputs, replace(step, optimizer=None), steps=1, blocks=False, noted=noted)
    for _ in range(2):
        assert simulate(module, inputs, step, both=both, noted=noted) == expected
    assert simulate(module, inputs, step, attribute=True, noted=noted) == attributed
    assert in_turn(requests(module, inputs, step, noted=noted)) == asked
    return len(again)


@pytest.mark.parametrize("target", [EAGER, CUDA_FROM_CPU])
@pytest.mark.parametrize(
    "loop", ["tutorial", "drop-output", "zero-before-backward", "drop-output,zero-before-backward", "ema,prefetch"]
)
@pytest.mark.parametrize("amp", ["off", "bf16"])
def test_a_pass_counts_again_as_it_ran(loop: str, amp: str, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    step = step_on(target, loss_of, loop=loop, amp=amp)
    # One with submodules, two twice, two with submodules that were noted before, and three around smaller batches.
    assert both_ways(Convolved(), IMAGES, step, monkeypatch) == 10


@pytest.mark.parametrize(("module", "inputs"), [(Net(), ROWS), (Headed(True, True, True), TEXTS)])
def test_so_does_what_works_piece_by_piece(module: nn.Module, inputs: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    assert both_ways(module, inputs, step_on(CUDA_FROM_CPU), monkeypatch) == 10


@pytest.mark.parametrize(
    ("module", "inputs", "spec"),
    [
        (Keeping(), Inputs((torch.randn(2, 8),), {}), {}),
        (nn.Linear(8, 8), Inputs((torch.randn(2, 8, requires_grad=True),), {}), {}),
        (nn.Linear(8, 8), Inputs((torch.randn(2, 8),), {}), {"loop": "zero-in-place"}),
        (nn.Linear(8, 8), Inputs((torch.randn(2, 8),), {}), {"micro_batches": 2}),
        (nn.Linear(8, 8), Inputs((torch.randn(2, 8),), {}), {"loop": "scaler"}),
    ],
    ids=["keeps a tensor", "an input's gradient", "adds up", "twice", "a scale"],
)
def test_passes_of_which_more_stays_run_each_time(module: nn.Module, inputs: Inputs, spec: dict[str, Any]) -> None:
    step, noted = step_on(EAGER, **spec), Noted(alike=True)
    expected = simulate(module, inputs, step)
    for _ in range(2):
        assert simulate(module, inputs, step, noted=noted) == expected
    assert not any(noted.courses.values())


def test_what_is_known_of_a_pass_holds_while_more_is_learned_of_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    table, noting = Transients(lambda calls: [Taken(2**20)] * len(calls)), list[str]()
    monkeypatch.setattr(Target, "transients", lambda target, device, probe=True: table)
    monkeypatch.setattr(Noting, "_note", telling(Noting._note, "noted", noting))
    step, noted = step_on(EAGER), Noted(alike=True)
    module, inputs = nn.Linear(8, 8), Inputs((torch.randn(2, 8),), {})
    found = simulate(module, inputs, step, noted=noted)
    assert found.peak > 2**20
    assert len(noting) == 1
    table.lookup(torch.ops.aten.exp.default, (torch.randn(3),), {})
    assert table.probe()
    assert simulate(module, inputs, step, noted=noted) == found
    assert len(noting) == 1
    other, unknown = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), Noted(alike=True)
    found = simulate(other, inputs, step, noted=unknown)
    assert found == simulate(other, inputs, step)
    assert simulate(other, inputs, step, noted=unknown) == found
    assert len(noting) == 2  # before it was known what its operators take


def test_passes_run_once_where_operators_are_measured_as_they_are_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what the first steps did, the others count what operators take; smaller batches are noted as well."""
    table, ran = Transients(lambda calls: [Taken(2**20)] * len(calls)), list[str]()
    monkeypatch.setattr(Target, "transients", lambda target, device, probe=True: table)
    monkeypatch.setattr(Convolved, "_inside", telling(Convolved._inside, "inside", ran))
    module, step, noted = Convolved(), step_on(EAGER, loss_of), Noted()
    found = simulate(module, IMAGES, step, attribute=True)
    assert found.peak > 2**20
    assert len(ran) == 2 * 2  # in two steps, forward and again
    assert simulate(module, IMAGES, step, attribute=True) == found
    ran.clear()
    asked = requests(module, IMAGES, step, noted=noted)
    assert len(ran) == 4 * 2
    assert noted.steady
    assert in_turn(asked) == in_turn(requests(module, IMAGES, step))


def test_a_loss_that_changes_is_seen() -> None:
    taken: list[int] = []

    def changing(output: Tensor) -> Tensor:
        taken.append(1)
        return (output.exp() if len(taken) > 1 else output).sum()

    timeline = simulate(nn.Linear(8, 8), Inputs((torch.randn(2, 8),), {}), step_on(EAGER, changing))
    assert not timeline.passes_alike


@pytest.mark.parametrize("asked", [{"budget": "60%"}, {"budget": "70%", "reserved": True}, {"budget": "min"}])
def test_programs_count_as_they_run(asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that takes its memory in one piece, by what was noted of it without."""
    own_look, own_requests, rooms = Bench._look, Bench._requests_of, set[int]()

    def look(bench: Bench, programs: Any, written: Any, blocks: bool, noted: Noted | None) -> None:
        own_look(bench, programs, written, blocks, noted)
        if noted is not None and noted.alike:
            ran = bench.predict(bench.model, written=written, blocks=blocks, both=True)
            told = bench._simulated[True, programs], bench._simulated[False, programs]
            assert told == (replace(ran, asked_for=None), ran.asked_for)
            rooms.add(noted.room)

    def asked_for(bench: Bench, written: Any, noted: Noted | None) -> Any:
        found = own_requests(bench, written, noted)
        ran = own_requests(bench, written, None)
        assert found is not None
        assert ran is not None
        assert in_turn(found) == in_turn(ran)
        return found

    monkeypatch.setattr(Bench, "_look", look)
    monkeypatch.setattr(Bench, "_requests_of", asked_for)
    layers = [nn.Sequential(nn.Linear(width, 1500), nn.GELU(), nn.Linear(1500, 512)) for width in (512,) * 4]
    model = nn.Sequential(*layers)
    optimize(model, (torch.randn(4000, 512),), device="cuda", verify=False, cache=False, optimizer="sgd", **asked)
    assert 0 in rooms
    assert len(rooms) > 1 or not asked.get("reserved")
