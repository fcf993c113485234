"""What memrewrite answers as JSON is what its published schema says, no more and no less."""

import json
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from memrewrite import cli
from memrewrite.records.outcomes import PeaksBySize
from memrewrite.records.report import Report
from memrewrite.report.files import json_text
from memrewrite.report.read import report_from
from tests.commands.test_cli import NET
from tests.support.reports import full_report
from tests.support.schema import SCHEMA, VALIDATOR, assert_answer

REPORT = VALIDATOR.evolve(schema={**SCHEMA["$defs"]["report"], "$defs": SCHEMA["$defs"]})


def plain_data(report: Report) -> dict[str, Any]:
    """As it comes back from a file."""
    data: dict[str, Any] = json.loads(json_text(report.to_json()))
    return data


REPORTS = {
    "everything": full_report(),
    "nothing measured": replace(full_report(), measured_before=None, measured_after=None),
    "nothing verified": replace(full_report(), equivalent=None, checks=()),
    "no size": replace(full_report(), by_size=None),
    "no peaks by size": replace(full_report(), by_size=PeaksBySize({}, (), (), "why")),
    "no budget, no curves": replace(full_report(), budget=None, curve_before=None, curve_after=None, versions=None),
}


def test_the_schema_is_one() -> None:
    Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("report", REPORTS.values(), ids=REPORTS)
def test_reports_are_valid_and_come_back(report: Report) -> None:
    data = plain_data(report)
    REPORT.validate(data)
    assert report_from(data) == report


def test_the_schema_knows_every_field() -> None:
    known = SCHEMA["$defs"]["fields"]
    assert set(known["properties"]) == set(known["required"]) == set(full_report().to_json())
    assert {field.name for field in fields(Report)} < set(known["properties"])


def damaged() -> dict[str, dict[str, Any]]:
    """Valid data with one thing wrong each."""
    found: dict[str, dict[str, Any]] = {}

    def wrong(name: str, *path: Any, value: Any) -> None:
        data = found[name] = plain_data(full_report())
        place = data
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = value

    wrong("text for bytes", "predicted_after", "peak", value="1 GB")
    wrong("negative bytes", "segments", 0, "saved_bytes", value=-1)
    wrong("unknown phase", "predicted_after", "phases", value=[["lunch", 3]])
    wrong("two words for three", "rewrites", 0, value=["swish", "act"])
    wrong("new field", "surprise", value=1)
    wrong("new field inside", "checks", 0, "surprise", value=1)
    wrong("one size", "by_size", "sizes", value={"x, size 0": [8]})
    wrong("half a curve", "curve_after", "moments", value=[])
    for name in full_report().to_json():
        found[f"without {name}"] = plain_data(full_report())
        del found[f"without {name}"][name]
    return found


@pytest.mark.parametrize("data", damaged().values(), ids=damaged())
def test_what_is_no_report_is_refused(data: dict[str, Any]) -> None:
    assert not VALIDATOR.is_valid(data)


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model file alone in the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small_net.py").write_text(NET)
    monkeypatch.delitem(sys.modules, "small_net", raising=False)
    return "small_net.py"


@pytest.mark.parametrize(
    "arguments",
    [["--budget", "90%"], ["--no-verify", "--diff"], ["--mode", "inference"], ["--check", "--budget", "1GB"]],
    ids=["budget", "diff", "inference", "check"],
)
def test_the_command_line_answers_by_the_schema(
    net: str, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    no_children = [] if "--check" in arguments else ["--no-measure"]
    assert cli.run(["optimize", net, *no_children, *arguments, "--json", "-"]) == 0
    data = json.loads(capsys.readouterr().out)
    VALIDATOR.validate(data)
    assert not VALIDATOR.is_valid({**data, "surprise": 1})
    assert not VALIDATOR.is_valid({key: value for key, value in data.items() if key != "exit_code"})


def test_the_other_commands_answer_by_the_schema(net: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Those that need no other process; what ``measure`` and ``verify`` answer is looked at where they run."""
    assert cli.run(["optimize", net, "--no-measure", "--no-verify", "-q", "-o", "out", "--cache", "plans"]) == 0
    capsys.readouterr()
    commands = {
        ("cache", "--cache", "plans"): 0,
        ("cache", "--cache", "plans", "--clear"): 0,
        ("show", "out"): 0,
        ("estimate", net, "--device-memory", "1MB"): 0,
        ("estimate", net, "--device-memory", "10KB"): 1,
        ("estimate", net, "--mode", "inference"): 0,
    }
    for command, code in commands.items():
        assert cli.run([*command, "-q", "--json", "-"]) == code
        assert_answer(command[0], json.loads(capsys.readouterr().out))


def test_the_artifact_holds_a_report_by_the_schema(net: str) -> None:
    assert cli.run(["optimize", net, "--no-measure", "--no-verify", "-q", "-o", "out"]) == 0
    data = json.loads(Path("out/report.json").read_text())
    REPORT.validate(data)
    assert data["command_line"] == f"memrewrite optimize {net} --no-measure --no-verify -q -o out"
    assert report_from(data).to_html() == Path("out/report.html").read_text()


def test_json_is_indented_and_figures_stay_on_a_line() -> None:
    text = json_text({"a": [1, 2], "b": [[1], {"c": []}], "d": {}})
    assert text == '{\n  "a": [1, 2],\n  "b": [\n    [1],\n    {\n      "c": []\n    }\n  ],\n  "d": {}\n}\n'
    assert json.loads(text) == {"a": [1, 2], "b": [[1], {"c": []}], "d": {}}
