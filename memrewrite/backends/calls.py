"""The graphs of a step, and their calls."""

import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from memrewrite.backends.choices import InStep, Options
from memrewrite.backends.frontier import Found
from memrewrite.backends.known import KnownPart
from memrewrite.backends.partition import Partition
from memrewrite.torch_internals.compiling import forget_code
from memrewrite.torch_internals.pytrees import tensors_in


def recorded(results: Any) -> Iterator[Tensor]:
    """The tensors among the results of a call that backward may come to."""
    return (each for each in tensors_in(results) if each.grad_fn is not None)


@dataclass
class Part:
    """A graph of a step: what divided it, and the code that Dynamo has it from.

    ``before`` are the bytes that were kept as it was compiled, ``at`` how many calls of the step had been, ``kept``
    what these were known to keep. ``again``: it is to be compiled once more; until then what was ``made`` is told of,
    which is ``there`` as long as Dynamo has it. ``usual`` is the peak of the step with PyTorch's own plans, ``more``
    what is kept at a later call of it and not at the first one, and ``before_loss`` what is there besides what it keeps
    once forward is through, where they are known.
    """

    partition: Partition
    made: Callable[..., Any] | None
    there: Callable[[], Any]
    code: types.CodeType | None
    before: int
    at: int
    kept: int
    again: bool = False
    usual: int | None = None
    more: int = 0
    before_loss: int | None = None

    @property
    def options(self) -> Options:
        """The plans that it had; to be asked for until it is settled."""
        assert self.partition.options is not None  # noqa: S101  (see there)
        return self.partition.options

    @property
    def is_unknown(self) -> bool:
        """Whether it has a backward of which no plans for this step are known, such as from a cache."""
        known = self.partition.options is not None and not self.partition.known
        return not known and self.partition.has_plans and self.code is not None

    @property
    def now(self) -> Found:
        """The plan that it was compiled with, until it is settled."""
        assert self.options.chosen is not None  # noqa: S101  (see there)
        return self.options.chosen

    @property
    def ms(self) -> float:
        """What its forward and backward take, where nothing runs again."""
        return sum(self.options.frontier.facts.ms)

    def plan(self, told: InStep) -> Found:
        """What its partition makes of what is told."""
        return self.options.told(told, self.partition.base)

    @property
    def most(self) -> int:
        """The room with which nothing is to be gained by more."""
        return self.options.frontier.takes(self.options.usual)

    def settle(self, told: InStep, found: Found, peak: int, above: bool) -> None:
        """Have it compiled again where ``found``, the plan for what is told now, is another; else its step takes
        ``peak`` bytes.

        That is a guess: where it is ``above`` the budget, what is kept by then tells.
        """
        if (above or found.order.saved != self.now.order.saved) and self.code is not None:
            self.forget()
        else:
            usual = found is self.options.usual
            self.partition.keep("lowest" if not told.room else "usual" if usual else "cheapest", peak)
            self.partition.set_before(self.usual)
            self.made = None
        self.partition.options = None  # holds graphs

    def known(self, told: InStep | None) -> KnownPart:
        """It, as it is compiled once the step is settled by what is ``told``."""
        partition = self.partition
        if self.again:
            return KnownPart(told, self.more, self.before_loss, self.usual)
        told, own = partition.in_step, (partition.choice, partition.peak or 0)
        return KnownPart(told, partition.more, self.before_loss, self.usual, *own)

    def take(self, known: KnownPart) -> None:
        """It is settled, as it was in a process before."""
        self.more, self.before_loss, self.usual = known.more, known.before_loss, known.usual
        self.partition.set_before(known.usual)
        if known.choice:
            self.partition.keep(known.choice, known.peak)
        self.made = self.partition.options = None

    def forget(self) -> None:
        """Have it compiled again when its code is next called."""
        assert self.code is not None  # noqa: S101  (else nothing can be forgotten)
        self.again = True
        forget_code(self.code)


@dataclass(frozen=True)
class Call:
    """A call of a graph in a step: the ``weights`` that it was given, by identity, with their bytes.

    ``asks`` gives None once nobody can ask it for gradients any more, and is None where there are none.
    """

    key: str
    asks: Callable[[], object] | None
    weights: Mapping[int, int]

    def shared(self, others: Iterable["Call"]) -> int:
        """The bytes of its weights that others were given, too."""
        there = set[int]().union(*(other.weights for other in others))
        return sum(size for weight, size in self.weights.items() if weight in there)
