"""The loop a step runs in: what it keeps alive beside the step itself, which decides the peak as the model does.

Unless habits are named it is the loop of PyTorch's tutorials::

    for x, y in batches:
        output = model(x)            # the last step's output and loss are there until the names mean these
        loss = criterion(output, y)
        loss.backward()              # output, loss and target are there
        optimizer.step()
        optimizer.zero_grad()        # no gradient is there while forward runs

In inference ``output = model(x)`` under ``no_grad`` likewise keeps the last output while the next forward runs. Habits
are written as text, ``drop-output,prefetch``; ``HABITS`` has them all. ``step.Running`` is the loop under way.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from memrewrite.records.errors import UsageError

TUTORIAL = "tutorial"
HABITS = {
    "drop-output": "output and loss are let go of as soon as backward and the step have no use for them",
    "zero-before-backward": "gradients are freed just before backward, and so are there while forward runs",
    "zero-in-place": "zero_grad(set_to_none=False): gradients are never freed",
    "prefetch": "the next batch is loaded ahead; prefetch=3 the next three",
    "scaler": "a torch.amp.GradScaler scales the loss",
    "ema": "an average of the weights, as torch.optim.swa_utils.AveragedModel keeps it, is updated in each step",
}
_AHEAD = re.compile(r"prefetch(?:=([1-9]\d{0,3}))?")


@dataclass(frozen=True)
class Habit:
    """One thing a loop keeps alive, in words, and the ``loop`` that is the same without it.

    ``trains`` says that it is part of the training, which would be another one without it.
    """

    words: str
    loop: "Loop"
    trains: bool = False


@dataclass(frozen=True)
class Loop:
    """What a training loop keeps from one step to the next; ``str`` writes it as ``parse`` reads it.

    ``keeps_output`` says that the model's output and the loss stay alive in backward and while the next forward runs;
    ``zero_grad`` where gradients are freed, or that they are filled with zeros; ``ahead`` is the number of batches
    (inputs, and what the loss function holds) that are on the device besides the one in work; ``scaler`` and
    ``average`` are what lives beside the model. Accumulated gradients are ``Step.micro_batches``.
    """

    keeps_output: bool = True
    zero_grad: Literal["after step", "before backward", "in place"] = "after step"
    ahead: int = 0
    scaler: bool = False
    average: bool = False

    @classmethod
    def parse(cls, value: "str | Loop") -> "Loop":
        """Read habits separated by commas, or ``tutorial``; raises ``UsageError`` for one that is unknown."""
        if isinstance(value, Loop):
            return value
        if not isinstance(value, str):
            raise UsageError(f"Loop {value!r} is not text; write e.g. 'drop-output,prefetch'.")
        found = cls()
        for word in (part.strip() for part in value.split(",")):
            if word not in ("", TUTORIAL):
                found = found._with(word)
        return found

    def _with(self, word: str) -> "Loop":
        if match := _AHEAD.fullmatch(word):
            return replace(self, ahead=int(match[1] or 1))
        if word in ("zero-before-backward", "zero-in-place"):
            if self.zero_grad != "after step":
                raise UsageError("A loop frees gradients in one way; give zero-before-backward or zero-in-place.")
            return replace(self, zero_grad="before backward" if word == "zero-before-backward" else "in place")
        if word == "drop-output":
            return replace(self, keeps_output=False)
        if word == "scaler":
            return replace(self, scaler=True)
        if word == "ema":
            return replace(self, average=True)
        known = f"{', '.join([TUTORIAL, *HABITS][:-1])} and {[*HABITS][-1]}"
        raise UsageError(f"The loop habit {word!r} is unknown; known are {known}.")

    def __str__(self) -> str:
        zeroing = {"before backward": "zero-before-backward", "in place": "zero-in-place"}
        words = (
            "" if self.keeps_output else "drop-output",
            zeroing.get(self.zero_grad, ""),
            "" if not self.ahead else "prefetch" if self.ahead == 1 else f"prefetch={self.ahead}",
            "scaler" if self.scaler else "",
            "ema" if self.average else "",
        )
        return ",".join(filter(None, words)) or TUTORIAL

    def keeps(self, mode: Literal["train", "inference"] = "train") -> Iterator[Habit]:
        """What this loop keeps alive that it need not, each thing with the loop that does not."""
        if self.keeps_output:
            yield Habit("keeping the output", replace(self, keeps_output=False))
        if self.ahead:
            loaded = "the next batch" if self.ahead == 1 else f"the next {self.ahead} batches"
            yield Habit(f"loading {loaded} ahead", replace(self, ahead=0))
        if mode == "inference":
            return
        if self.zero_grad != "after step":
            kept = "zero_grad before backward" if self.zero_grad == "before backward" else "zero_grad in place"
            yield Habit(kept, replace(self, zero_grad="after step"))
        if self.scaler:
            yield Habit("the gradient scaler", replace(self, scaler=False), trains=True)
        if self.average:
            yield Habit("the average of the weights", replace(self, average=False), trains=True)


TUTORIAL_LOOP = Loop()
