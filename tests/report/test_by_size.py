"""Peaks by size are those that steps on smaller inputs really take, found out only where somebody looks at them."""

import gc
import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memrewrite
from memrewrite import cli
from memrewrite.optimizing.by_size import by_size
from memrewrite.records.outcomes import PeaksBySize
from memrewrite.records.report import Report
from memrewrite.report.later import completed
from memrewrite.report.page import rows
from memrewrite.report.page.sizes import size_chart
from tests.capture.test_lengths import Text, text
from tests.support.reports import full_report, net
from tests.support.schema import assert_answer

BATCH, LENGTH = 8, 32


def its_loss(loss: Tensor) -> Tensor:
    return loss


def shorter(length: int) -> tuple[Tensor, ...]:
    return tuple(part[:, :length].clone() for part in text(BATCH, LENGTH))


def optimized(model: nn.Module, inputs: Any = None, **options: Any) -> Any:
    given = text(BATCH, LENGTH) if inputs is None else inputs
    return memrewrite.optimize(model, given, **{"budget": "75%", "loss_fn": its_loss, "verify": False, **options})


@pytest.mark.parametrize("amp", [None, "bf16"])
def test_the_figures_are_what_steps_of_those_sizes_take(amp: str | None) -> None:
    model = Text()
    result = optimized(model, amp=amp)
    known = [(each.training, dict(vars(each))) for each in result.modules()]
    found = by_size(result, result.report)
    assert known == [(each.training, dict(vars(each))) for each in result.modules()]
    assert found is not None
    assert found.sizes == {"ids, size 1": (3, 8, 16, 24, 32)}
    for module, peaks in ((model, found.original), (result, found.rewritten)):
        taken = (
            memrewrite.measure(module, shorter(n), loss_fn=its_loss, amp=amp, steps=1).peak
            for n in found.sizes["ids, size 1"]
        )
        assert list(peaks) == list(taken)
    assert max(found.rewritten) <= result.report.budget < found.original[-1]


def test_where_no_length_varies_it_is_the_batch() -> None:
    inputs = torch.randn(64, 16)
    model = net()
    result: Any = memrewrite.optimize(model, inputs, verify=False)
    found = by_size(result, result.report)
    assert found is not None
    assert found.sizes == {"input, size 0": (2, 16, 32, 48, 64)}
    for module, peaks in ((model, found.original), (result, found.rewritten)):
        assert list(peaks) == [
            memrewrite.measure(module, inputs[:n].clone(), steps=1).peak for n in (2, 16, 32, 48, 64)
        ]


def test_sizes_that_the_program_is_not_for_are_left_out() -> None:
    result = optimized(Text(multiple=4))
    found = by_size(result, result.report)
    assert found is not None
    assert found.sizes == {"ids, size 1": (8, 16, 24, 32)}


def test_a_mode_of_afterwards_and_hooks_of_the_user_change_nothing() -> None:
    result = optimized(Text())
    found = by_size(result, result.report)
    called: list[Any] = []
    result.register_forward_hook(lambda *given: called.append(given))
    inner = result.forward

    def around(*given: Any) -> Any:
        called.append(given)
        return inner(*given)

    result.forward = around
    result.eval()
    assert by_size(result, result.report) == found
    assert not called
    assert result.forward is around
    assert not any(module.training for module in result.modules())


class Fixed(nn.Module):
    """Has two rows of four whatever it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 64), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x.view(2, 4))
        return self.second(hidden * torch.sigmoid(hidden))


def test_nothing_is_drawn_where_nothing_varies_or_nothing_was_rewritten() -> None:
    result: Any = memrewrite.optimize(Fixed(), torch.randn(2, 4), verify=False)
    assert result.report.changed
    assert by_size(result, result.report) is None
    model: Any = nn.Linear(4, 4)
    kept: Any = memrewrite.optimize(model, torch.randn(8, 4), budget="8GB")
    assert kept is model
    assert by_size(kept, kept.report) is None


class Deciding(nn.Module):
    """A part of it can be captured, the whole cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.part = net()

    def forward(self, x: Tensor) -> Tensor:
        x = self.part(x)
        return x * 2 if x.sum() > 0 else x


TARGET = torch.randn(64, 4)
CASES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "compiled": (net(), {"compiled": True}, "what a compiled step takes"),
    "parts": (Deciding(), {}, "only parts of the model were rewritten"),
    "targets of that size": (net(), {"loss_fn": lambda out: (out - TARGET).square().mean()}, "simulation knows none"),
}


@pytest.mark.parametrize(("model", "options", "why"), CASES.values(), ids=CASES)
def test_where_there_are_no_figures_a_sentence_says_why(model: Any, options: dict[str, Any], why: str) -> None:
    result: Any = memrewrite.optimize(model, torch.randn(64, 16), verify=False, **options)
    found = by_size(result, result.report)
    assert found is not None
    assert found.missing.startswith(f"Peaks at other sizes are not drawn: {why}")
    report = replace(result.report, by_size=found)
    assert size_chart(report) is None
    assert rows.notes(report)[-1] == found.missing
    assert "<h2>Peak at smaller sizes" not in report.to_html()


def test_only_a_page_and_a_picture_ask_for_them_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def counted(result: nn.Module, report: Report) -> PeaksBySize | None:
        asked.append(report)
        return by_size(result, report)

    monkeypatch.setattr("memrewrite.optimizing.by_size.by_size", counted)
    result = optimized(Text())
    report = result.report
    report.save(tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text())["by_size"] is None
    assert not asked
    report.save(tmp_path / "report.html")
    report.save(tmp_path / "report.png")
    assert len(asked) == 1
    page = (tmp_path / "report.html").read_text()
    assert "<h2>Peak at smaller sizes" in page
    assert "ids, size 1" in page
    assert result.report.by_size is None


def test_a_report_keeps_neither_the_result_nor_its_inputs() -> None:
    inputs = torch.randn(64, 16)
    result: Any = memrewrite.optimize(net(), inputs, verify=False)
    report, gone = result.report, (weakref.ref(inputs), weakref.ref(result.get_parameter("0.inner.weight")))
    del inputs, result
    gc.collect()
    assert [each() for each in gone] == [None, None]
    assert completed(report) is report
    assert completed(full_report()).by_size == full_report().by_size


TEXT = """
from tests.capture.test_lengths import Text, text

def get_model():
    return Text()

def get_inputs():
    return text(8, 32)
"""


@pytest.mark.parametrize("asked", [True, False], ids=["page", "no page"])
def test_the_command_line_says_in_json_what_was_computed(
    asked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sized_text.py").write_text(TEXT)
    page = ["--report", "r.html"] if asked else []
    command = ["optimize", "sized_text.py", "--budget", "75%", "--no-measure", "--no-verify", "-q", "--json", "-"]
    assert cli.run([*command, *page]) == 0
    data = json.loads(capsys.readouterr().out)
    assert_answer("optimize", data)
    assert (data["by_size"] is not None) == asked
    if asked:
        assert data["by_size"]["sizes"] == {"ids, size 1": [3, 8, 16, 24, 32]}
        assert data["by_size"]["rewritten"][-1] == data["predicted_after"]["peak"]
        assert "Peak at smaller sizes" in Path("r.html").read_text()


class Loose(nn.Module):
    """Takes its inputs by whatever names, and labels that could be of another length than its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.text = Text()

    def forward(self, **given: Tensor) -> Tensor:
        loss: Tensor = self.text(given["ids"], given["mask"])
        return loss + 0 * given["labels"].sum()


def test_what_is_as_long_as_another_is_named_once() -> None:
    ids, mask = text(BATCH, LENGTH)
    given = {"ids": ids, "mask": mask, "labels": ids.clone()}
    result: Any = memrewrite.optimize(Loose(), (), example_kwargs=given, budget="75%", loss_fn=its_loss, verify=False)
    found = by_size(result, result.report)
    assert found is not None
    assert found.sizes == {"ids, size 1": (3, 8, 16, 24, 32)}
