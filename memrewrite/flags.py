"""The options of the command line that several commands share, each defined once, in groups: ``@flags.model``."""

from collections.abc import Callable
from typing import Any

import click

Command = Callable[..., Any]

# What a project may set once for all; what writes, prints or overwrites is said at each call.
CONFIGURABLE: dict[str, type] = {
    "budget": str,
    "input": list,
    "batch_size": int,
    "optimizer": str,
    "loss": str,
    "amp": str,
    "mode": str,
    "device": str,
    "device_memory": str,
    "passes": str,
    "exact": bool,
    "seed": int,
    "verify": bool,
    "measure": bool,
    "timeout": float,
}


def group(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Several arguments and options as one decorator, in the order of ``--help``."""

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


budget = click.option("--budget", help="Peak of a step: 8GB (10^9), 8GiB (2^30), 60% of the original, or min.")
timeout = click.option(
    "--timeout", type=click.FloatRange(min=0, min_open=True), default=600.0, help="Seconds one measurement may take."
)
model = group(
    click.argument("target"),
    click.option("--input", multiple=True, help="[NAME=]32x3x224x224[:float32], ids=8x128:int64:50257; repeatable."),
    click.option(
        "--batch-size", type=click.IntRange(min=1), help="Repeat or cut the example inputs to this batch size."
    ),
    click.option("--optimizer", default="adamw", help="none, sgd, sgd-momentum, adam, adamw, or module:factory."),
    click.option("--loss", help="module:function from the model's output to a scalar."),
    click.option("--amp", type=click.Choice(["off", "bf16", "fp16"]), default="off", help="Forward under autocast."),
    click.option("--mode", type=click.Choice(["train", "inference"]), default="train", help="What a step is."),
    click.option("--device", default="auto", help="auto, cpu or cuda:0; where there is no CUDA, cuda plans for it."),
    click.option("--seed", type=int, default=0, help="Seed for the model, verification and measuring."),
)
output = group(
    click.option("--json", help="Write the result as JSON to this file, replacing it, or to stdout with -."),
    click.option("-v", "--verbose", is_flag=True, help="Every rewrite and refusal; tracebacks of errors."),
    click.option("-q", "--quiet", is_flag=True, help="No progress."),
)
