"""What is drawn: curves of few points with the same maximum, axes that two curves share, colours for everybody."""

import itertools
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import memrewrite
from memrewrite.records.report import Report
from memrewrite.report.axes import phases, places, ticks
from memrewrite.report.curves import by_module, curve, thinned
from memrewrite.report.kinds import KINDS, gathered
from memrewrite.simulate import Timeline, run_tracked, simulate
from memrewrite.targets.transients import Taken, Transients
from memrewrite.workload.step import Inputs, Step
from tests.support import reports
from tests.support.reports import net


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    step = Step(optimizer=torch.optim.AdamW)
    return simulate(net(), Inputs((torch.randn(64, 16),), {}), step, workspace_bytes=100_352, attribute=True)


@pytest.fixture(scope="module")
def real() -> Report:
    """The report of a net as ``optimize`` makes it."""
    torch.manual_seed(0)
    return memrewrite.optimize(net(), torch.randn(256, 16), budget="80%").report


# Curves


def test_a_curve_reaches_the_peak_and_is_made_of_its_categories(timeline: Timeline) -> None:
    whole = curve(timeline)
    highest = whole.highest
    assert whole.totals[highest] == timeline.peak
    assert {name: row[highest] for name, row in whole.bytes.items() if row[highest]} == timeline.categories
    assert [name for name, _ in whole.phases] == ["data", "forward", "loss", "backward", "step"]
    ends = dict(zip(whole.moments, whole.totals, strict=True))
    starts = [start for _, start in whole.phases[1:]] + [whole.length]
    assert [ends[start - 1] for start in starts] == [size for _, size in timeline.phases[5:]]
    assert {whole.makers[maker][0] for maker in whole.made_by} >= {"0.inner", "1.outer", "0", "2"}


class Scratch(Transients):
    """Multiplications of matrices take scratch memory while they run, as convolutions do on CUDA."""

    def lookup(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Taken:
        return Taken(1_000_000 if func in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default) else 0)


def test_what_operators_take_while_they_run_is_in_the_curve() -> None:
    step = Step(optimizer=torch.optim.SGD)
    timeline = run_tracked(net(), Inputs((torch.randn(64, 16),), {}), step, Scratch(lambda calls: []), attribute=True)
    drawn = curve(timeline)
    assert drawn.totals[drawn.highest] == timeline.peak > 1_000_000
    assert drawn.bytes["operator workspace"][drawn.highest] == 1_000_000
    assert set(drawn.bytes["operator workspace"]) == {0, 1_000_000}
    assert sum(gathered(timeline.categories).values()) == timeline.peak


@pytest.mark.parametrize("points", [20, 30, 50])
def test_a_thinned_curve_keeps_its_maximum_and_its_phases(timeline: Timeline, points: int) -> None:
    whole, thin = curve(timeline), curve(timeline, points)
    assert len(thin.moments) <= points < len(whole.moments)
    assert max(thin.totals) == timeline.peak
    assert (thin.length, thin.phases) == (whole.length, whole.phases)
    starts = {start for _, start in thin.phases}
    assert starts | {start - 1 for start in starts if start} | {whole.length - 1} <= set(thin.moments)
    known = dict(zip(whole.moments, whole.totals, strict=True))
    assert all(known[moment] == size for moment, size in zip(thin.moments, thin.totals, strict=True))


def test_long_curves_are_thinned() -> None:
    sizes = np.random.default_rng(0).integers(1, 1000, 50_000)
    sizes[31_234] = 5000
    kept = thinned(sizes, [0, 20_000, 40_000], 1000)
    assert len(kept) <= 1000
    assert {31_234, 0, 19_999, 20_000, 40_000, 49_999} <= set(kept)


def test_activations_by_module(timeline: Timeline) -> None:
    found = {row.path: (row.before, row.after) for row in by_module(timeline, timeline)}
    wide = 64 * 64 * 4
    assert found["0.inner"] == found["1.inner"] == (wide, wide)
    assert found["0"] == found["1"] == (2 * wide + 64 * 16 * 4,) * 2, "the sigmoid, the product and the sum"
    assert found["2"] == (64 * 4 * 4,) * 2


def test_a_report_carries_its_curves(real: Report) -> None:
    assert real.curve_before is not None
    assert real.curve_after is not None
    assert max(real.curve_before.totals) == real.predicted_before.peak
    assert max(real.curve_after.totals) == real.predicted_after.peak
    assert sum(row.before for row in real.modules) > sum(row.after for row in real.modules) > 0
    assert real.freed["swish"] == 2 * 256 * 64 * 4, "one sigmoid less in each block"


def test_inference_has_a_curve_too() -> None:
    report = memrewrite.optimize(net().eval(), torch.randn(256, 16)).report
    assert report.curve_before is not None
    assert [name for name, _ in report.curve_before.phases] == ["data", "forward"]
    assert max(report.curve_before.totals) == report.predicted_before.peak
    assert report.modules
    page = report.to_html()
    assert "What each module holds at the peak" in page
    assert "Memory through a forward pass" in page


# Axes


def test_phases_share_the_axis() -> None:
    short, long = reports.curve(1), replace(reports.curve(1), length=19)
    axis = phases([short, long])
    assert [phase.name for phase in axis] == ["forward", "loss", "backward", "step"], "nothing happens in data"
    assert (axis[0].start, round(axis[-1].end, 9)) == (0.0, 1.0)
    assert all(a.end == b.start for a, b in itertools.pairwise(axis))
    assert min(phase.end - phase.start for phase in axis) > 0.06
    for each in (short, long):
        at = places(each, axis)
        assert list(at) == sorted(at)
        assert at[-1] >= axis[-1].start
        assert at[5] == axis[2].start, "backward begins at the same place in both"


@pytest.mark.parametrize("highest", [1, 700, 1500, 123_456_789, 5_800_000_000, 79_000_000_000, 3 * 10**12])
def test_ticks_are_few_and_round(highest: int) -> None:
    top, marks = ticks(highest)
    assert highest <= top <= 1.2 * highest + 1
    assert 3 <= len(marks) <= 6 or highest == 1
    assert all(0 <= mark.at <= 1 for mark in marks)
    assert all(re.fullmatch(r"0|\d+(\.\d+)? (B|kB|MB|GB|TB)", mark.text) for mark in marks)


# Colours


def seen(colour: str, matrix: "list[list[float]] | None") -> "np.ndarray[Any, Any]":
    """CIELAB of a colour as somebody sees it whose eyes ``matrix`` stands for (Machado, Oliveira, Fernandes 2009)."""
    channels = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    linear = np.clip(np.array(matrix) @ linear, 0, 1) if matrix else linear
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = np.cbrt(np.maximum(to_xyz @ linear / [0.9505, 1.0, 1.089], 1e-6))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


EYES = {
    "usual": None,
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}


@pytest.mark.parametrize("eyes", EYES.values(), ids=EYES)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_everybody_can_tell_the_colours_apart(theme: str, eyes: "list[list[float]] | None") -> None:
    colours = {kind.key: seen(getattr(kind, theme), eyes) for kind in KINDS}
    for (one, a), (other, b) in itertools.combinations(colours.items(), 2):
        assert np.linalg.norm(a - b) > 10, f"{one} and {other}"
    for (one, a), (other, b) in itertools.pairwise(colours.items()):
        assert np.linalg.norm(a - b) > 18, f"{one} beside {other}"


def test_every_category_has_a_colour(timeline: Timeline) -> None:
    assert sum(gathered(timeline.categories).values()) == timeline.peak
    assert {name for kind in KINDS for name in kind.categories} >= set(timeline.categories)
