"""The options of the command line that several commands share, each defined once, in groups: ``@flags.model``."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from memrewrite.records.loop import HABITS, TUTORIAL
from memrewrite.records.mesh import Ddp, Fsdp
from memrewrite.workload.stepspec import AMP, IN_BACKWARD, MODES, OPTIMIZERS

Function = Callable[..., Any]

PATH = click.Path(path_type=Path)
_LONGEST = 2_000_000  # seconds: three weeks, in milliseconds of 31 bits
# What a project may set once for all; what writes, prints or overwrites is said at each call.
CONFIGURABLE: dict[str, type] = {
    "budget": str,
    "reserved": bool,
    "input": list,
    "batch_size": int,
    "micro_batches": int,
    "loop": str,
    "mesh": str,
    "optimizer": str,
    "loss": str,
    "amp": str,
    "mode": str,
    "device": str,
    "device_memory": str,
    "passes": str,
    "exact": bool,
    "strict": bool,
    "returns": str,
    "dynamic": list,
    "compiled": bool,
    "seed": int,
    "verify": bool,
    "measure": bool,
    "timeout": float,
    "cache": Path,
}
TARGET = """TARGET is path/model.py[:attr] or package.module:attr. Its code runs with your rights.

Without attr it is get_model, build_model, model, or the only nn.Module subclass in the file. Example inputs come from
--input, else from get_inputs() or example_inputs in the file. [tool.memrewrite] in pyproject.toml sets defaults."""
EXIT_CODES = """\b
Exit codes:
  0    The command did what it was asked to.
  1    It does not fit: --check, --device-memory, or the measured peak.
  2    The request cannot be meant: a target, an input, an option, a folder.
  3    The model cannot be captured.
  4    The rewritten model is not equivalent; nothing was written.
  5    The device ran out of memory, or the measuring process died.
  6    No plan fits the budget; the lowest peak that can be reached is told.
  70   Something is wrong in memrewrite itself.
  74   The result cannot be written: the device is full, or the reader gone.
  130  The run was interrupted.
"""


class Command(click.Command):
    """A command that says what a TARGET is, if it takes one, and what the exit codes mean."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"epilog": EXIT_CODES, **kwargs})
        if any(parameter.name == "target" for parameter in self.params):
            self.help = f"{inspect.cleandoc(self.help or '')}\n\n{TARGET}"


def group(*options: Callable[[Function], Function]) -> Callable[[Function], Function]:
    """Several arguments and options as one decorator, in the order of ``--help``."""

    def add(function: Function) -> Function:
        for option in reversed(options):
            function = option(function)
        return function

    return add


def sizes(context: click.Context, option: click.Parameter, text: str | None) -> tuple[int, ...]:
    """The batch sizes in ``32,64,128``; raises ``click.BadParameter`` for anything else."""
    words = text.split(",") if text else []
    if not all(word.isascii() and word.isdigit() and int(word) for word in words) or len({*words}) < len(words):
        raise click.BadParameter(f"{text!r} is not a list of different batch sizes such as 32,64,128.")
    return tuple(map(int, words))


def seconds(context: click.Context, option: click.Parameter, value: float) -> float:
    """A time to wait; raises ``click.BadParameter`` for one that is none, or longer than the system can wait."""
    if not 0 < value <= _LONGEST:
        raise click.BadParameter(f"{value:g} is not a number of seconds above 0, of up to {_LONGEST}.")
    return value


budget = click.option("--budget", help="Bound the peak: 8GB (10^9), 8GiB (2^30), 60% of the original's, or min.")
reserved = click.option(
    "--reserved", is_flag=True, help="Let the budget bound what CUDA's allocator reserves, as a cap on a process does."
)
dynamic = click.option(
    "--dynamic",
    multiple=True,
    metavar="NAME:DIM=MIN..MAX",
    help="Plan for sizes of this input from MIN to MAX, as in x:2=64..256. Repeatable.",
)
cache = click.option("--cache", type=click.Path(), metavar="DIR", help="Keep plans in this folder, for the next time.")
timeout = click.option(
    "--timeout",
    type=float,
    callback=seconds,
    default=600.0,
    metavar="SECONDS",
    help="Wait this long for each measuring process.",
)
model = group(
    click.argument("target", type=click.Path()),
    click.option(
        "--input",
        multiple=True,
        metavar="SPEC",
        help="Draw this input: [NAME=]32x3x224x224[:float32], for integers ids=8x128:int64:50257. Repeatable.",
    ),
    click.option(
        "--batch-size",
        type=click.IntRange(min=1),
        metavar="N",
        help="Repeat or cut the example inputs to this batch size.",
    ),
    click.option(
        "--micro-batches",
        type=click.IntRange(min=1),
        default=1,
        metavar="N",
        help="Accumulate the gradients of this many batches before each step of the optimizer.",
    ),
    click.option(
        "--loop",
        default=TUTORIAL,
        metavar="HABITS",
        help=f"Say what your loop does otherwise, separated by commas: {', '.join(HABITS)}.",
    ),
    click.option(
        "--mesh",
        metavar="MESH",
        help="Take the step of one of several processes: ddp=8, fsdp=8 or tp=8 (tensor parallel by the model's plan); "
        "fsdp=64,tp=8 is both. Arguments come after a comma: "
        f"{', '.join(Ddp.words)}; {', '.join(Fsdp.words)}.",
    ),
    click.option(
        "--optimizer",
        default="adamw",
        help=f"Use {', '.join(OPTIMIZERS)}, or your own module:factory; {IN_BACKWARD} after one lets it step while "
        "backward runs.",
    ),
    click.option("--loss", help="Use this module:function to make a scalar of the model's output."),
    click.option("--amp", type=click.Choice(AMP), default="off", help="Run the forward under autocast."),
    click.option(
        "--mode",
        type=click.Choice(MODES),
        default="train",
        help="Take training steps, or only forwards.",
    ),
    click.option(
        "--device", default="auto", help="Run on auto, cpu or cuda:0. Without CUDA, optimize plans for cuda:0."
    ),
    click.option("--seed", type=int, default=0, metavar="N", help="Seed all random numbers."),
)
output = group(
    click.option("--json", metavar="FILE", help="Write the result as JSON to this file; - is stdout."),
    click.option("-v", "--verbose", is_flag=True, help="Explain every decision; show tracebacks of errors."),
    click.option("-q", "--quiet", is_flag=True, help="Show no progress."),
)
