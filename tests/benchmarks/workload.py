"""What a benchmark trains: a model, its inputs, its step, and what its peers need."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import nn

from memrewrite.workload.step import Inputs, Step
from memrewrite.workload.stepspec import StepSpec


@dataclass(frozen=True)
class Workload:
    """A training step to measure.

    ``build(tiny)`` makes the model on the current default device, ``inputs(batch, tiny)`` its inputs likewise.
    ``blocks`` matches the paths of modules that run one after another, each fed by the one before; "" where the model
    is no such chain. ``checkpoint_blocks`` turns on the model's own block checkpointing. ``samples`` is what one unit
    of the batch counts for in a throughput: 1 image or the tokens of a sequence. ``returns`` is "loss" where nobody
    reads what the model returns beside it, as nobody can under Liger's kernels; memrewrite then has all passes.
    ``chunk_loss`` lets the model take its loss in chunks, where it is a causal language model.
    """

    build: Callable[[bool], nn.Module]
    inputs: Callable[[int, bool], Inputs]
    batch: int
    blocks: str
    checkpoint_blocks: Callable[[nn.Module], None]
    amp: str = "off"
    optimizer: str = "adamw"
    samples: int = 1
    returns: Literal["all", "loss"] = "all"
    chunk_loss: Callable[[nn.Module], None] | None = None

    def step(self) -> Step:
        """The step that every contender takes."""
        return StepSpec(optimizer=self.optimizer, amp=self.amp).build()
