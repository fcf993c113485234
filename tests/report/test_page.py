"""The page holds everything the report says, needs nothing else, and gives foreign names no power; so does the picture.

What the page is made of is checked as text; what a browser makes of it, where there is a Chromium to ask.
"""

import base64
import hashlib
import json
import re
import shutil
import subprocess
from dataclasses import replace
from html import escape, unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import memrewrite
from memrewrite import cli
from memrewrite.records.errors import UsageError
from memrewrite.records.outcomes import Measured, ModuleBytes, Peaks, PeaksBySize
from memrewrite.records.report import Report
from memrewrite.report.page import rows
from memrewrite.report.page.chart import chart
from memrewrite.report.read import report_from
from tests.commands.test_cli import NET
from tests.support import reports
from tests.support.reports import full_report, net

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HOSTILE = "</script><script>alert(1)</script>\"'<img src=x onerror=alert(2)>&\x1b[2J"
ON_A_PAGE = HOSTILE.replace("\x1b", r"\x1b")


@pytest.fixture(scope="module")
def real() -> Report:
    """The report of a net as ``optimize`` makes it."""
    torch.manual_seed(0)
    return memrewrite.optimize(net(), torch.randn(256, 16), budget="80%").report


# Words


MEASURED = Measured(390_000_000, 450_000_000, 14.0, (), "NVIDIA H200 (cuda:0)")
OUT_OF_MEMORY = "The original does not fit: it ran out of memory"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({}, "peaks at 310.0 MB instead of 310.0 MB (0 %), within the budget of 400.0 MB."),
        ({"measured_after": None}, "is predicted to peak at 360.0 MB instead of 310.0 MB"),
        ({"budget": 300_000_000}, ", 10.0 MB over the budget of 300.0 MB."),
        ({"budget": None}, "instead of 310.0 MB (0 %)."),
        (
            {"measured_before": None, "notes": (OUT_OF_MEMORY,)},
            "peaks at 310.0 MB instead of the 600.0 MB predicted for the original (−48.3 %)",
        ),
        ({"mode": "inference"}, "The forward pass of model.py:Net on cuda peaks"),
    ],
    ids=["measured", "predicted", "over", "no budget", "does not fit", "inference"],
)
def test_the_headline(change: dict[str, Any], sentence: str) -> None:
    assert sentence in rows.headline(replace(full_report(), **change))


def test_nothing_to_rewrite_is_said() -> None:
    same = full_report().predicted_before
    report = replace(full_report(), rewrites=(), segments=(), predicted_after=same, measured_after=None)
    assert rows.headline(report).endswith("; nothing was to rewrite.")
    drawn = chart(report)
    assert drawn is not None
    assert [each.name for each in drawn.curves] == ["original"]


def test_the_original_that_does_not_fit_has_no_figures() -> None:
    report = replace(full_report(), measured_before=None, notes=(OUT_OF_MEMORY,))
    measured = [row for row in rows.figures(report) if row.name.endswith("measured")]
    assert [(row.before, row.change) for row in measured] == [("does not fit", "")] * 3
    assert [row.after for row in measured] == ["310.0 MB (295.6 MiB)", "350.0 MB (333.8 MiB)", "12.5 ms"]


@pytest.mark.parametrize(
    ("regions", "sentence"),
    [([""], "captured whole."), (["a", "b"], "Open to rewrites: a, b; the rest"), ([], "rewrites: no part of it; the")],
    ids=["whole", "regions", "nothing"],
)
def test_what_was_open_to_rewrites(regions: list[str], sentence: str) -> None:
    report = replace(full_report(), shares=(), config={"regions": regions})
    assert sentence in Reader(report.to_html()).text


def test_words_are_grouped_without_the_numbers_of_nodes() -> None:
    said = [("inplace", "a", "Its input linear_1 is a view."), ("inplace", "b", "Its input linear_12 is a view.")]
    both, other = rows.groups([("inplace", "c", "Its input relu_3 is a view."), *said])
    assert (both.words, [place.module for place in both.places]) == ("Its input linear is a view.", ["a", "b"])
    assert (other.words, len(other.places)) == ("Its input relu_3 is a view.", 1)


def test_modules_are_summed_where_there_are_many() -> None:
    many = [ModuleBytes(f"blocks.{i}.{j}", 10 - i, 1) for i in range(10) for j in range(5)]
    table = rows.modules([*many, ModuleBytes("", 5, 5), ModuleBytes(None, 1, 1)])
    assert [bar.name for bar in table][:2] == ["blocks.0", "blocks.1"]
    assert (table[0].before, table[0].after, table[0].before_width, table[0].after_width) == ("50 B", "5 B", 100, 10)
    assert {"the model itself", "outside the model"} < {bar.name for bar in table}
    assert len(rows.every_module(many)) == 50


@pytest.mark.parametrize(("count", "shown"), [(1, 1), (14, 14), (15, 12)])
def test_many_segments_are_folded(count: int, shown: int) -> None:
    found = [replace(full_report().segments[0], saved_bytes=size) for size in range(count)]
    most, others = rows.segments(found)
    assert [segment.saved_bytes for segment in [*most, *others]] == list(range(count))[::-1]
    assert len(most) == shown
    page = Reader(replace(full_report(), segments=tuple(found)).to_html()).text
    assert (f"{count - shown} that free less" in page) == (count > shown)


# The page


class Reader(HTMLParser):
    """Collects text, tags and the addresses that a page names."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.tags: list[str] = []
        self.scripts: list[str] = []
        self.handlers: list[str] = []
        self.addresses: list[str] = []
        self.feed(page)
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.handlers += [name for name, _ in attrs if name.startswith("on")]
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]

    def handle_data(self, data: str) -> None:
        (self.scripts if self.tags[-1:] == ["script"] else self.words).append(data)


@pytest.mark.parametrize(
    "sentence",
    [
        "The training step of model.py:Net on cuda peaks at 310.0 MB",
        "Equivalent worst gradient a.weight, error 1e-9",
        "Peak, predicted 600.0 MB (572.2 MiB) 360.0 MB (343.3 MiB) −40.0 %",
        "Step time, predicted 10.0 ms 12.0 ms +20.0 %",
        "Reserved, measured 350.0 MB",
        "budget 400.0 MB",
        "original 600.0 MB blocks.1 · add",
        "rewritten 360.0 MB blocks.1 · add",
        "activations 500.0 MB 260.0 MB −48.0 %",
        "blocks.1 300.0 MB 100.0 MB −66.7 %",
        "a.conv model.py:9 to b.conv 7 200.0 MB 1.25 ms",
        "a.act to b.conv inside another 2 50.0 MB 0.25 ms",
        "are not kept for the backward pass but run again in it. This frees 200.0 MB and costs 1.5 ms a step",
        "With swish , autograd keeps 150.0 MB less for the backward pass.",
        "swish x * sigmoid(x) saves x alone 2 a.act model.py:12 and 1 more b.act model.py:12",
        "inplace_activation Autograd keeps its input. 1 the model itself",
        "everything else 10.0 % a hook",
        "parameter gradients 9 ✓ 7 of 9 bit-equal; worst a.weight: error 1e-09, the original's own 8e-10, allowed",
        "outputs 2 ✓ bit-equal",
        "A hook was found.",
        "torch 2.13.0",
        "memrewrite optimize model.py --budget 400MB",
        "step 1, forward 300.0 MB",
        "where input_ids, size 1 is smaller than planned for",
        "input_ids, size 1 Original Rewritten Change 2 not known 110.0 MB 512 240.0 MB 160.0 MB −33.3 %",
    ],
)
def test_the_page_says(sentence: str) -> None:
    assert sentence in Reader(full_report().to_html()).text


REPORTS = {
    "everything": full_report(),
    "bare": Report("Net", "train", "cpu", {}, None, Peaks(0, 0, (), {}, 0), Peaks(0, 0, (), {}, 0)),
    "no curve after": replace(full_report(), curve_after=None),
    "failed": replace(full_report(), equivalent=False, verdict="not equivalent: output"),
}


@pytest.mark.parametrize("report", REPORTS.values(), ids=REPORTS)
def test_the_page_needs_nothing_else(report: Report) -> None:
    page = report.to_html()
    read = Reader(page)
    assert read.addresses == []
    assert "@import" not in page
    assert not re.search(r"url\(|https?://", page.replace("http://www.w3.org", ""))
    assert not {"link", "iframe", "img", "object", "embed", "base", "form"} & set(read.tags)
    assert len(page) < 600_000


def test_only_our_script_may_run() -> None:
    page = full_report().to_html()
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert len(digests) == 1
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digests[0]}'"
    assert f'content="{policy}"' in page


def hostile() -> Report:
    """A report in which every name and sentence would like to be markup."""
    report, name = full_report(), HOSTILE
    assert report.curve_after is not None
    return replace(
        report,
        model=name,
        verdict=f"equivalent: {name}",
        config={name: name},
        rewrites=(("swish", f"{name} (m.py:1)", name), (name, name, name)),
        refusals=((name, name, name),),
        segments=(replace(report.segments[0], first=name, last=f"{name} (m.py:1)"),),
        shares=(replace(report.shares[0], path=name, untouched=name),),
        checks=(replace(report.checks[1], group=name, worst=name),),
        notes=(name,),
        versions={name: name},
        freed={name: 5},
        modules=(ModuleBytes(name, 2, 1),),
        curve_after=replace(report.curve_after, makers=tuple((name, name) for _ in report.curve_after.makers)),
        command_line=name,
        by_size=PeaksBySize({name: (2, 8)}, (None, 2), (1, 1)),
    )


def test_names_cannot_be_markup() -> None:
    page = hostile().to_html()
    read = Reader(page)
    assert "img" not in read.tags
    assert read.handlers == []
    assert read.tags.count("script") == 2, "the data of the drawing and what reads it"
    assert "\x1b" not in page
    assert read.text.count(" ".join(ON_A_PAGE.split())) > 15
    points = json.loads(unescape(re.findall(r'class="points">(.*?)</script>', page, re.DOTALL)[0]))
    assert points["curves"][1]["makers"][0][0] == ON_A_PAGE


def test_a_page_can_be_made_again_from_json(real: Report) -> None:
    again = report_from(json.loads(json.dumps(real.to_json())))
    assert again == real
    assert again.to_html() == real.to_html()


def test_points_are_few(real: Report) -> None:
    drawn = chart(real)
    assert drawn is not None
    for each in drawn.curves:
        assert len(each.points["x"]) <= 1500
        assert max(each.points["total"]) in (real.predicted_before.peak, real.predicted_after.peak)


# Files


def test_saving(real: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for ending, start in ((".html", b"<!doctype html>"), (".png", b"\x89PNG"), (".json", b"{")):
        real.save(tmp_path / f"report{ending}")
        assert (tmp_path / f"report{ending}").read_bytes().startswith(start)
    with pytest.raises(UsageError, match=r"ends in none of \.html, \.png, \.json"):
        real.save(tmp_path / "report.pdf")
    with pytest.raises(UsageError, match="cannot be written: No such file"):
        real.save(tmp_path / "missing" / "report.html")
    with pytest.raises(UsageError, match="has no timeline to draw"):
        replace(real, curve_before=None, curve_after=None).save(tmp_path / "none.png")
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"pip install 'memrewrite\[plots\]'"):
        real.save(tmp_path / "other.png")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["report.html", "report.json", "report.png"]


def test_the_picture_takes_any_names(tmp_path: Path) -> None:
    odd = replace(hostile(), model="$x^{$ 层 " + HOSTILE)
    assert odd.curve_after is not None
    makers = tuple(("$a_$", "$b^$") for _ in odd.curve_after.makers)
    replace(odd, curve_after=replace(odd.curve_after, makers=makers)).save(tmp_path / "odd.png")
    assert (tmp_path / "odd.png").stat().st_size > 10_000


def test_the_command_line_writes_what_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("page_net.py").write_text(NET)
    asked = ["page_net.py", "--no-measure", "--no-verify", "-q"]
    assert cli.run(["optimize", *asked, "--report", "r.html", "--png", "r.png"]) == 0
    page = Path("r.html").read_text()
    assert "page_net.py:SmallNet" in page
    assert "memrewrite optimize page_net.py --no-measure --no-verify -q --report r.html --png r.png" in page
    assert Path("r.png").read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    for option in ("--report", "--png", "--snapshot"):
        assert cli.run(["optimize", *asked, option, "no/where"]) == 2
        assert f"no folder for the {option} file" in capsys.readouterr().err
        assert cli.run(["optimize", "page_net.py", "--check", "--budget", "1GB", option, "x"]) == 2
        assert f"leave out {option}" in capsys.readouterr().err


# In a browser


def browse(page: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed, so no browser has looked at the page")
    common = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0", "--disable-extensions"]
    profile = f"--user-data-dir={page.parent / 'profile'}"
    command = [CHROMIUM, *common, profile, "--virtual-time-budget=2000", *arguments, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)


def complaints(log: str) -> list[str]:
    """What the page's console said; the browser's own troubles are none of its business."""
    return [line for line in log.splitlines() if "CONSOLE" in line]


POINT = """<script>
addEventListener("load", () => {
  const canvas = document.querySelector(".canvas"), box = canvas.getBoundingClientRect();
  canvas.dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + box.width / 2, clientY: box.top + 9}));
  const wide = [...document.querySelectorAll("body *")].filter(
    (each) => !each.closest(".scroll") && each.getBoundingClientRect().right > innerWidth + 1);
  const labels = document.querySelectorAll(".label, .tick, .phase, .at");
  const boxes = [...labels].map((each) => each.getBoundingClientRect());
  const apart = (a, b) => a.right <= b.left || b.right <= a.left || a.bottom <= b.top || b.bottom <= a.top;
  const over = boxes.filter((a, i) => boxes.some((b, j) => i < j && !apart(a, b)));
  Object.assign(parent.document.body.dataset, {
    width: innerWidth,
    overlaps: over.length,
    wide: wide.map((each) => each.className || each.tagName).join(" "),
    requests: performance.getEntriesByType("resource").length,
    readout: document.querySelector(".readout").innerText,
  });
});
</script></body>"""


@pytest.mark.parametrize("report", [full_report(), hostile()], ids=["plain", "hostile"])
def test_a_browser_shows_it_without_complaint(report: Report, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(report.to_html())
    done = browse(file, "--dump-dom")
    assert complaints(done.stderr) == []
    assert '<table class="compare">' in done.stdout
    assert done.stdout.count('class="outline of-') == 2


def near() -> Report:
    """Two peaks and a budget so close that their labels have to make way."""
    return replace(full_report(), budget=540_000_000, curve_after=reports.curve(45_000_000))


def beside() -> Report:
    """The same with the rewritten model's peak half the drawing further right, and long names."""
    near_peak = near()
    assert near_peak.curve_after is not None
    kept, late = (90_000_000,) * 8, (0, 0, 0, 0, 0, 1_000_000, 440_000_000, 450_000_000)
    makers = (("a.long.path.of.a.module", "operator_with_a_long_name"),) * 4
    return replace(
        near_peak,
        curve_after=replace(near_peak.curve_after, bytes={"parameters": kept, "temporaries": late}, makers=makers),
    )


MADE = {"near": near(), "beside": beside()}


@pytest.mark.parametrize("width", [1200, 390])
@pytest.mark.parametrize("made", ["real", *MADE])
def test_the_pointer_and_the_width(real: Report, made: str, width: int, tmp_path: Path) -> None:
    """In a frame as wide as a telephone, and with the policy taken out for a script that looks from inside."""
    page = MADE.get(made, real).to_html()
    page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page).replace("</body>", POINT)
    frame = f'<iframe style="border:0;height:900px;width:{width}px" srcdoc="{escape(page)}"></iframe>'
    (tmp_path / "frame.html").write_text(f"<!doctype html><body>{frame}</body>")
    done = browse(tmp_path / "frame.html", "--dump-dom")
    assert complaints(done.stderr) == []
    found = dict(re.findall(r'data-(\w+)="([^"]*)"', done.stdout[: done.stdout.index("<iframe")]))
    assert (found["width"], found["wide"], found["requests"], found["overlaps"]) == (str(width), "", "0", "0")
    for name in ("original", "rewritten"):
        assert re.search(rf"{name} \d+\.\d (kB|MB) in backward at \S+ · \w+\s+temporaries", found["readout"])


def test_a_foreign_script_is_stopped_by_the_policy(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(full_report().to_html().replace("</body>", "<script>document.title = 'taken'</script></body>"))
    done = browse(file, "--dump-dom")
    assert "<title>taken" not in done.stdout
    assert any("Content Security Policy" in line for line in complaints(done.stderr))
