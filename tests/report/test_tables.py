"""The printed result: figures in place, 80 columns, foreign names without effect."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from memrewrite.records.outcomes import Measured, Option, Peaks, PeaksBySize, Segment, Share
from memrewrite.records.report import Report
from memrewrite.report.printed import WIDTH
from memrewrite.report.tables import over_budget, show
from memrewrite.report.text import plain

BEFORE = Peaks(10 * 10**9, 9 * 10**9, (), {}, 12 * 10**9)
AFTER = Peaks(6 * 10**9, 6 * 10**9, (), {}, 7 * 10**9)
UNCHANGED = Report("model.py:Net", "train", "cuda:0", {}, None, BEFORE, BEFORE, verdict="bit-equal", equivalent=True)
OLD = Measured(10 * 10**9, 11 * 10**9, 50.0, (), "H200")
NEW = Measured(7 * 10**9, 8 * 10**9, 60.0, (), "H200")
FULL = replace(
    UNCHANGED,
    budget=8 * 10**9,
    predicted_after=AFTER,
    rewrites=(("swish", "act1", "silu"), ("swish", "act2", "silu"), ("inplace_activation", "relu", "relu_")),
    refusals=(("swish", "act3", "its sigmoid is used elsewhere"), ("swish", "act4", "its sigmoid is used elsewhere")),
    segments=(Segment("conv1", "conv2", 7, 2 * 10**9, 3.25), Segment("conv3", "conv4", 5, 10**9, 1.5)),
    measured_before=OLD,
    measured_after=NEW,
    notes=("a note",),
    by_size=PeaksBySize(
        {"input_ids, size 1": (2, 512, 1024)}, (None, 6 * 10**9, 10 * 10**9), (2 * 10**9, 4 * 10**9, 6 * 10**9)
    ),
)


def printed(report: Report, *, verbose: bool = False, fits: bool = True) -> str:
    stream = io.StringIO()
    show(report, Console(file=stream, width=WIDTH), verbose=verbose, fits=fits)
    return stream.getvalue()


def squeeze(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize(
    "sentence",
    [
        "model.py:Net: train step on cuda:0, budget 8.00 GB (7.45 GiB)",
        "predicted peak 10.00 GB (9.31 GiB) 6.00 GB (5.59 GiB) -40.0 %",
        "measured peak 10.00 GB (9.31 GiB) 7.00 GB (6.52 GiB) -30.0 %",
        "step time 50.0 ms 60.0 ms x1.20",
        "Rewrites: swish 2, inplace_activation 1",
        "Checkpoint segments: 2, free 3.00 GB (2.79 GiB), run again 4.8 ms",
        "swish 2 its sigmoid is used elsewhere",
        "Equivalence: bit-equal",
        "Budget: the measured peak fits with 1.00 GB (0.93 GiB) to spare",
        "Note: a note",
        "input_ids, size 1 original rewritten change 2 not known 2.00 GB (1.86 GiB) 512 6.00 GB",
        "Written: nothing",
    ],
)
def test_a_full_report(sentence: str) -> None:
    assert sentence in squeeze(printed(FULL))


@pytest.mark.parametrize("sentence", ["act1", "act2", "act3", "act4", "conv1 .. conv2", "3.25 ms"])
def test_verbose_lists_everything(sentence: str) -> None:
    assert sentence in squeeze(printed(FULL, verbose=True))
    assert sentence not in squeeze(printed(FULL))


def test_an_expensive_budget_names_the_way_to_others() -> None:
    assert "A step takes x1.20 of its time; --advise lists what else would fit." in squeeze(printed(FULL))
    assert "--advise" not in printed(replace(FULL, measured_after=replace(NEW, step_ms=54.0)))
    assert "--advise" not in printed(replace(FULL, measured_before=None))
    predicted = replace(FULL, measured_before=None, predicted_ms_before=10.0, predicted_ms_after=13.0)
    assert "A step takes x1.30 of its time" in squeeze(printed(predicted))
    advised = replace(FULL, options=(Option("2 micro-batches of 4", 5 * 10**9, True, "2 passes"),))
    assert "2 micro-batches of 4 5.00 GB yes 2 passes" in squeeze(printed(advised))
    assert "--advise" not in printed(advised)


def test_verbose_explains_segments() -> None:
    text = squeeze(printed(FULL, verbose=True))
    assert "these free enough for the budget in the least time found" in text
    assert "conv1 .. conv2 7 2.00 GB (1.86 GiB) 3.25 ms 615.4 MB" in text
    lowest = replace(FULL, budget=None)
    assert "these reach the lowest peak found" in squeeze(printed(lowest, verbose=True))
    none = replace(FULL, segments=())
    assert "none; the predicted peak fits the budget without them" in squeeze(printed(none, verbose=True))
    assert "without them" not in printed(none)
    listed = (("swish", "act1", "silu"), ("checkpoint_segments", "conv1", "7 nodes"))
    assert "7 nodes" not in printed(replace(FULL, rewrites=listed), verbose=True)


def test_the_share_of_the_activations_in_regions() -> None:
    shares = (
        Share("", 10**9, "x is a hazard"),
        Share("a", 6 * 10**9),
        Share("b", 3 * 10**9, "twice"),
        Share("c", 0, "no"),
    )
    text = squeeze(printed(replace(FULL, shares=shares)))
    assert "Regions: 1, with 60.0 % of the 10.00 GB (9.31 GiB) of activations that forward keeps" in text
    assert "all else 10.0 % x is a hazard b 30.0 % twice" in text
    assert "c 0.0 % no" not in text
    assert "c 0.0 % no" in squeeze(printed(replace(FULL, shares=shares), verbose=True))
    assert "Regions" not in printed(FULL)


def test_nothing_to_rewrite() -> None:
    text = squeeze(printed(UNCHANGED))
    assert "Nothing was to rewrite: the model is returned unchanged." in text
    assert "no budget" in text
    assert "Equivalence" not in text
    assert "measured peak not measured not measured" in text


def test_the_original_does_not_fit() -> None:
    text = squeeze(printed(replace(FULL, measured_before=None), fits=False))
    assert "measured peak does not fit 7.00 GB (6.52 GiB)" in text
    assert "step time does not fit 60.0 ms" in text


@pytest.mark.parametrize(
    ("report", "over", "sentence"),
    [
        (FULL, False, "the measured peak fits"),
        (replace(FULL, budget=65 * 10**8), True, "the measured peak is over by 500.0 MB (476.8 MiB)"),
        (replace(FULL, measured_after=None, measured_before=None), False, "the predicted peak fits"),
        (replace(FULL, budget=None, config={}), False, "no budget"),
        (replace(FULL, budget=None, config={"budget": "min"}), False, "train step on cuda:0, budget min"),
    ],
    ids=["fits", "over", "predicted", "no-budget", "lowest"],
)
def test_the_budget(report: Report, over: bool, sentence: str) -> None:
    assert over_budget(report) == over
    assert sentence in squeeze(printed(report))


@pytest.mark.parametrize("verbose", [False, True])
def test_eighty_columns_and_no_colour_off_a_terminal(verbose: bool) -> None:
    long = "a.very.long.module.path." * 8
    report = replace(FULL, rewrites=(("swish", long, "silu"),), refusals=(("swish", long, "because " * 30),))
    text = printed(report, verbose=verbose)
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "\x1b" not in text


def test_no_color_is_respected_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    stream = io.StringIO()
    show(FULL, Console(file=stream, width=WIDTH, force_terminal=True))
    assert "\x1b[3" not in stream.getvalue()


def test_foreign_names_have_no_effect() -> None:
    report = replace(FULL, model="[red]x[/red]\x1b[2J", refusals=(("swish", "a", "[/nonsense] :smile: \x07"),))
    text = printed(report)
    assert r"[red]x[/red]\x1b[2J" in text
    assert r"[/nonsense] :smile: \x07" in text


def test_a_report_is_printed_without_what_is_of_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for report in (FULL, UNCHANGED):
        *lines, last = printed(report).splitlines()
        assert last.startswith("Written: nothing")
        with monkeypatch.context() as colours:
            colours.setenv("FORCE_COLOR", "1")
            assert str(report).splitlines() == [line.rstrip() for line in lines]


def test_plain_keeps_letters() -> None:
    assert plain("blocks.0 größe") == "blocks.0 größe"
