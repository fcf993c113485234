"""Every model of the zoo through ``optimize``, one fresh process each; writes ``tests/benchmarks/ZOO.md``.

    OMP_NUM_THREADS=1 python -m tests.zoo.run rows.jsonl     # everything not yet in rows.jsonl
    python -m tests.zoo.run rows.jsonl --only timm/cait --again
    python -m tests.zoo.run rows.jsonl --jobs 16       # so many models at a time, one core each
    python -m tests.zoo.run bf16.jsonl --amp bf16      # under autocast; writes no table
    python -m tests.zoo.run rows.jsonl --table         # only write the table

The budget is the floor plus 60 % of what lies above it: floor + 0.6 * (peak - floor), both predicted. A row of an
earlier run stays until ``--again`` replaces it. Needs timm, transformers, diffusers and torchvision (see
``tests/zoo/models.py``). The optimizer is AdamW, but SGD where an entry says so.
"""

import argparse
import json
import multiprocessing
import resource
import time
import warnings
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

import torch

import memrewrite
from memrewrite.measurement.original import simulate_original
from memrewrite.plan.segments import Chain
from memrewrite.records.errors import MemrewriteError
from memrewrite.search import planning
from memrewrite.search.candidate import Candidate
from memrewrite.simulate import run_tracked
from memrewrite.workload.step import Step
from memrewrite.workload.stepspec import amp_dtype, optimizer_factory
from tests.zoo.models import ZOO, Entry, build
from tests.zoo.table import write

SHARE = 0.6
LIMIT_S = 420
MEMORY_BYTES = 10 * 2**30
# One server imports everything once; every process is a fork of it that has run nothing yet.
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["tests.zoo.libraries"])


@dataclass
class Row:
    """One model: sizes in bytes, times in seconds, None where it did not come to that.

    ``outcome`` is ``verified`` (rewritten, proved, within the budget), ``refused`` (``sentence`` says why) or
    ``crashed``. ``overhead`` is the share of the forward's milliseconds that is computed again.
    ``regions`` counts the submodules captured on their own, 0 where the whole model is one graph.
    """

    library: str
    family: str
    name: str
    parameters: int | None = None
    outcome: str = "crashed"
    sentence: str = ""
    front_end: str = ""
    regions: int = 0
    before: int | None = None
    budget: int | None = None
    predicted: int | None = None
    tracked: int | None = None
    segments: int | None = None
    overhead: float | None = None
    verdict: str = ""
    seconds: float = 0.0
    torch: str = torch.__version__.partition("+")[0]
    amp: str = "off"

    @property
    def key(self) -> str:
        """The key of its ``Entry``."""
        return f"{self.library}/{self.family}"


def examine(entry: Entry, amp: str = "off") -> Row:
    """Optimize one model in this process; every error ends in the row."""
    row = Row(entry.library, entry.family, entry.name, amp=amp)
    started = time.perf_counter()
    try:
        _fill(row, entry)
    except MemrewriteError as error:
        row.outcome, row.sentence = "refused", f"{type(error).__name__}: {error}"
    except Exception as error:  # whatever comes is what the table is about
        row.sentence = f"{type(error).__name__}: {error}".strip()
    row.seconds = row.seconds or time.perf_counter() - started
    return row


def _fill(row: Row, entry: Entry) -> None:
    torch.manual_seed(0)
    model, inputs = build(entry)
    row.parameters = sum(p.numel() for p in model.parameters())
    step = Step(optimizer=optimizer_factory(entry.optimizer), amp=amp_dtype(row.amp))
    before = simulate_original(model, inputs, step, 0)
    row.before, row.budget = before.peak, int(before.floor + SHARE * (before.peak - before.floor))
    started = time.perf_counter()
    chains: list[Chain] = []
    whole = planning._joined

    def joined(bare: Candidate, held: int) -> Chain:
        chains.append(whole(bare, held))
        return chains[-1]

    with mock.patch.object(planning, "_joined", joined):
        result = memrewrite.optimize(
            model,
            inputs.args,
            example_kwargs=inputs.kwargs,
            budget=row.budget,
            optimizer=entry.optimizer,
            amp=step.amp,
            cache=False,
        )
    row.seconds = time.perf_counter() - started
    report = memrewrite.report_of(result)
    row.front_end = report.config["front_end"]
    row.regions = sum(path != "" for path in report.config["regions"])
    row.predicted, row.segments, row.verdict = report.predicted_after.peak, len(report.segments), report.verdict
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # the original forward ran instead
        row.tracked = run_tracked(result, inputs, step).peak
    row.overhead = sum(s.rerun_ms for s in report.segments) / float(chains[-1].ms.sum())
    proved = report.equivalent or not report.changed
    row.outcome = "verified" if proved and row.predicted <= row.budget else "crashed"
    row.sentence = "" if row.outcome == "verified" else "The result is over budget or unproved, and nobody said so."


def in_child(entry: Entry, amp: str = "off") -> Row:
    """Examine one model in a fresh process with a limit on time and memory; the libraries are imported once for all."""
    started = time.perf_counter()
    row = Row(entry.library, entry.family, entry.name, amp=amp)
    receiver, sender = _PROCESSES.Pipe(duplex=False)
    child = _PROCESSES.Process(target=_send, args=(entry, amp, sender), daemon=True)
    child.start()
    sender.close()
    if receiver.poll(LIMIT_S):
        try:
            return Row(**json.loads(receiver.recv()))
        except EOFError:
            child.join()
            row.sentence = f"The process died ({child.exitcode})."
    else:
        child.kill()
        row.sentence = f"No answer within {LIMIT_S} s."
    row.seconds = time.perf_counter() - started
    return row


def _send(entry: Entry, amp: str, sender: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sender.send(json.dumps(asdict(examine(entry, amp))))


def read(path: Path) -> dict[str, Row]:
    """The rows of a JSON-lines file by key, the last one of each."""
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [Row(**json.loads(line)) for line in lines]
    return {row.key: row for row in rows}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path, nargs="?", help="JSON-lines file to append to")
    parser.add_argument("--only", default="", help="keys (library/family) that start with this, separated by commas")
    parser.add_argument("--again", action="store_true", help="also models that have a row")
    parser.add_argument("--failed", action="store_true", help="also models whose row is not verified")
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--amp", choices=["off", "bf16"], default="off", help="train under autocast")
    parser.add_argument("--jobs", type=int, default=1, help="models at a time")
    options = parser.parse_args()
    known = read(options.rows)
    wanted = [
        entry
        for entry in ([] if options.table else ZOO)
        if entry.key.startswith(tuple(options.only.split(",")))
        and (options.again or entry.key not in known or (options.failed and known[entry.key].outcome != "verified"))
    ]
    with ThreadPoolExecutor(options.jobs) as threads, options.rows.open("a") as file:
        for done in as_completed([threads.submit(in_child, entry, options.amp) for entry in wanted]):
            row = done.result()
            print(json.dumps(asdict(row)), file=file, flush=True)
            print(f"{row.outcome:9} {row.key:40} {row.seconds:6.1f} s  {row.sentence[:300]}", flush=True)
    if options.amp == "off":
        write(list(read(options.rows).values()))


if __name__ == "__main__":
    main()
