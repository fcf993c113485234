"""What is planned for each workload, for CUDA without using it, as text to compare: the same before and after a change?

    python -m tests.benchmarks.plans FILE [--only resnet50 unet] [--tiny]

FILE gets a line of JSON for each workload and way to ask: a hash of the programs that run, predicted peaks and all
that the report says besides. Two files of the same plans are the same, byte by byte; ``diff`` shows which are not.
"""

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

from memrewrite import optimize
from memrewrite.records.errors import BudgetInfeasibleError
from memrewrite.runtime.dropin import programs
from tests.benchmarks.models import WORKLOADS
from tests.benchmarks.workload import Workload

WAYS: dict[str, dict[str, Any]] = {
    "half": {"budget": "60%"},
    "lowest": {"budget": "min"},
    "compiled": {"budget": "60%", "compiled": True},
    "reserved": {"budget": "60%", "reserved": True},
}


def planned(workload: Workload, tiny: bool, way: dict[str, Any]) -> dict[str, Any]:
    """What ``optimize`` makes of a workload, asked in this way."""
    torch.manual_seed(0)
    model, inputs, step = workload.build(tiny), workload.inputs(2 if tiny else workload.batch, tiny), workload.step()
    asked = {"optimizer": workload.optimizer, "amp": step.amp, "device": "cuda", "verify": False, "cache": False, **way}
    try:
        result = optimize(model, inputs.args, example_kwargs=inputs.kwargs, **asked)
    except BudgetInfeasibleError as error:
        return {"refused": str(error)}
    report = result.report
    said = report.rewrites, report.refusals, report.segments, report.modules
    return {
        "programs": {path: _hash(program.source) for path, program in programs(result).items()},
        "before": repr(report.predicted_before),
        "after": repr(report.predicted_after),
        "said": _hash(repr(said)),
        "notes": report.notes,
    }


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def main() -> int:
    """Write a line as each is planned."""
    parser = argparse.ArgumentParser(description="Plans of the workloads, for CUDA without using it.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", nargs="+", default=list(WORKLOADS), help="these workloads only")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--tiny", action="store_true", help="tiny models of the same families")
    options = parser.parse_args()
    with options.file.open("w", encoding="utf-8") as file:
        for name in options.only:
            for way in options.ways:
                row = {"workload": name, "way": way, **planned(WORKLOADS[name], options.tiny, WAYS[way])}
                print(json.dumps(row), file=file, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
