"""One model after the other, each in a process of its own, for the benchmarks that try many."""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

DEADLINE_S = 600.0
Row = dict[str, Any]


def each_in_a_process(
    module: str, text: str | None, names: Iterable[str], attempt: Callable[[str, bool], Row], line: Callable[[Row], str]
) -> None:
    """The command line of the benchmark ``module``: prints a line for each model that is asked for, appends its row.

    ``attempt`` takes a name, and whether small sizes on the CPU are wanted. A row has ``model``, ``ok`` and
    ``seconds``, and where it is not ok a ``note``.
    """
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="rows are appended to it")
    parser.add_argument("--models", nargs="+", default=[*names], choices=names)
    parser.add_argument("--tiny", action="store_true", help="small sizes on the CPU")
    parser.add_argument("--deadline", type=float, default=DEADLINE_S, help="seconds for each model")
    parser.add_argument("--only", choices=names, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.only:
        print(json.dumps(attempt(asked.only, asked.tiny)))
        return
    for name in asked.models:
        row = in_process(module, name, asked.tiny, asked.deadline)
        shown = line(row) if row["ok"] else f"{name:24s} {row['seconds']:6.0f} s  {row['note']}"
        print(shown, flush=True)
        with Path(asked.file).open("a", encoding="utf-8") as rows:
            rows.write(json.dumps(row) + "\n")


def in_process(module: str, name: str, tiny: bool, deadline: float) -> Row:
    """The row of a fresh process, which is given ``deadline`` seconds."""
    command = [sys.executable, "-m", module, "-", "--only", name, *(["--tiny"] if tiny else [])]
    start = time.perf_counter()
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=deadline)
    except subprocess.TimeoutExpired:
        note = f"not done within {deadline:.0f} s"
    else:
        if ran.returncode == 0:
            row: Row = json.loads(ran.stdout.splitlines()[-1])
            return row
        note = (ran.stderr.strip().splitlines() or [f"died with {ran.returncode}"])[-1]
    return {"model": name, "tiny": tiny, "ok": False, "seconds": time.perf_counter() - start, "note": note}
