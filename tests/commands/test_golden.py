"""What the terminal shows, to the letter, at 80 columns: helps, tables, errors.

``python -m pytest tests/commands/test_golden.py --update-golden`` takes them as they are now; look at the diff.
"""

import io
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import pytest
from rich.console import Console

from memrewrite import cli
from memrewrite.records.errors import DoesNotFitError, OtherInputsError
from memrewrite.records.outcomes import Check, Measured
from memrewrite.report import contents, kept_plans, measured, proof, tables
from memrewrite.report.contents import Contents
from memrewrite.report.measured import Failure, Pair
from memrewrite.report.printed import WIDTH
from memrewrite.workload.step import PHASES
from tests.commands.test_wrong_use import FILES, WRONG
from tests.report.test_tables import FULL, UNCHANGED

Golden = Callable[[str, str], None]
COMMANDS = ["", *sorted(cli.main.commands)]
# Click's own sentences differ between its versions; "device-index" counts the devices of the machine.
VARYING = {"no-command", "no-target", "unknown-command", "unknown-option", "batch-size", "amp", "device-index"}
SAME_CLICK = tuple(map(int, version("click").split(".")[:2])) >= (8, 2)

GB = 10**9
PHASE_BYTES = [524, 1552, 1552, 1044, 1044, 1044, 2072, 2072, 1044, 1044]
OLD = Measured(
    47_070_000_000,
    48_120_000_000,
    197.1,
    tuple(zip(PHASES * 2, [b * 10**7 for b in PHASE_BYTES], strict=True)),
    "NVIDIA H200 (cuda:0)",
    49_900_000_000,
)
NEW = Measured(
    29_270_000_000,
    31_000_000_000,
    234.5,
    tuple(zip(PHASES * 2, [b * 6 * 10**6 for b in PHASE_BYTES], strict=True)),
    "NVIDIA H200 (cuda:0)",
    32_500_000_000,
)
SMALL = Measured(31_000, 31_000, 0.4, tuple(zip(PHASES * 2, PHASE_BYTES, strict=True)), "cpu")
FULL_DEVICE = Failure(DoesNotFitError("The training step of Net ran out of memory on cuda:0, which has 139.8 GiB."))
ODD = Failure(OtherInputsError("The rewritten model was not made for these inputs. Optimized Net ran its original."))
CHECKS = (
    Check("output", 2, 1, True, "output", 2.3e-07, 2.3e-07, 5.8e-06),
    Check("gradient", 120, 0, False, "blocks.0.conv.weight", 0.25, 1.2e-07, 4.1e-06),
    Check("buffer", 3, 2, False, "norm.running_mean", None, None, None),
    Check("random state", 2, 2, True),
)
DIGESTS = {"memrewrite_model.py": "37d5eeaea8b96588" * 4, "report.json": "df27a42139eb942b" * 4}
MANIFEST = {
    "memrewrite": "0.1.0",
    "model": "model.Net",
    "torch": {"written_with": "2.13.0", "minimum": "2.11"},
    "python": "3.11.7",
    "files": DIGESTS,
}
CONTENTS = Contents(
    "out", MANIFEST, FULL, {"memrewrite_model.py": 39922, "report.json": 5801}, "memrewrite_model.py", 881
)

PLANS: list[dict[str, Any]] = [
    {"key": "7d" * 32, "bytes": 18798, "model": "Net", "device": "cpu", "budget": None, "made": "2026-11-25"},
    {"key": "e4" * 32, "bytes": 2_345_678, "model": "Odd[b]", "device": "cuda", "budget": 8 * GB, "made": "2026-11-24"},
]

Show = Callable[[Console], None]
TABLES: dict[str, Show] = {
    "report": lambda c: tables.show(FULL, c),
    "report-verbose": lambda c: tables.show(FULL, c, verbose=True, written=Path("out")),
    "report-unchanged": lambda c: tables.show(UNCHANGED, c),
    "measure-original": lambda c: measured.show([Pair(None, OLD)], "net.py: train step", c),
    "measure-both": lambda c: measured.show([Pair(None, OLD, NEW)], "net.py: train step", c),
    "measure-does-not-fit": lambda c: measured.show([Pair(8, FULL_DEVICE, NEW)], "net.py: train step", c),
    "measure-small": lambda c: measured.show([Pair(8, SMALL)], "net.py: train step", c),
    "measure-sweep": lambda c: measured.show([Pair(8, SMALL), Pair(16, OLD)], "net.py: train step", c),
    "measure-sweep-both": lambda c: measured.show(
        [Pair(1, SMALL, ODD), Pair(64, OLD, NEW), Pair(256, FULL_DEVICE, NEW), Pair(512, FULL_DEVICE, FULL_DEVICE)],
        "net.py: train step",
        c,
        plot=Path("peaks.png"),
    ),
    "verify": lambda c: proof.show(
        "out against net.py: train step on cpu", CHECKS, "not equivalent: gradient a, error 0.25", DIGESTS, c
    ),
    "verify-verbose": lambda c: proof.show(
        "out against net.py: train step on cpu", CHECKS[::3], "equivalent: worst output", DIGESTS, c, verbose=True
    ),
    "cache": lambda c: kept_plans.show(PLANS, Path("plans"), c),
    "cache-empty": lambda c: kept_plans.show([], Path("plans"), c),
    "show": lambda c: contents.show(CONTENTS, c),
}


@pytest.mark.skipif(not SAME_CLICK, reason="an older click lays helps out otherwise")
@pytest.mark.parametrize("command", COMMANDS)
def test_help(
    command: str, golden: Golden, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.run([*command.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    golden(f"help-{command or 'memrewrite'}", text)


@pytest.mark.parametrize("command", [name for name in COMMANDS if name])
def test_every_option_is_helped_in_a_full_sentence(command: str) -> None:
    for option in cli.main.commands[command].params:
        if isinstance(option, click.Option):
            assert option.help is not None, option.name
            assert option.help[0].isupper(), option.help
            assert option.help.endswith("."), option.help


@pytest.mark.parametrize("name", TABLES)
def test_tables(name: str, golden: Golden) -> None:
    stream = io.StringIO()
    TABLES[name](Console(file=stream, width=WIDTH))
    text = stream.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text
    golden(f"table-{name}", text)


def test_errors(
    golden: Golden, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for file, text in FILES.items():
        Path(file).write_text(text)
    lines: list[str] = []
    for name, (arguments, code, _) in WRONG.items():
        if code == 2 and name not in VARYING:
            assert cli.run(arguments) == code
            err = capsys.readouterr().err.replace(str(tmp_path), "FOLDER")
            lines += [f"$ memrewrite {' '.join(arguments)}", err[err.rindex("memrewrite: ") :].rstrip(), ""]
    golden("errors", "\n".join(lines))
