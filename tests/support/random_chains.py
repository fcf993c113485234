"""Random chains that look like what training steps are made of: shapes of networks, operations, sizes, times."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from memrewrite.plan.segments import Chain, Held

UNIT = 512
_SMALLEST, _LARGEST = 1, 20_000  # units: 512 bytes to 10 MB
_MS_PER_UNIT = UNIT / 5e8  # 0.5 TB/s
_LAUNCH_MS = 0.005


@dataclass(frozen=True)
class Operation:
    """What a kind of node does: keeps its inputs or its output or a part of its size for itself; relative time."""

    weight: float
    inputs: bool = False
    output: bool = False
    private: float = 0.0
    time: float = 1.0
    parameters: bool = False
    makes: bool = True


OPERATIONS = {
    "conv": Operation(5, inputs=True, time=12, parameters=True),
    "norm": Operation(3, inputs=True, private=0.001, time=2, parameters=True),
    "relu": Operation(3, output=True),
    "silu": Operation(2, inputs=True),
    "dropout": Operation(1, private=0.25),
    "attention": Operation(1, inputs=True, output=True, private=0.01, time=6),
    "add": Operation(2),
    "view": Operation(1, makes=False, time=0),
    "block": Operation(1, inputs=True, output=True, private=3.0, time=20, parameters=True),
}

Inputs = Callable[[np.random.Generator, int, int], list[int]]


def _stack(random: np.random.Generator, i: int, n: int) -> list[int]:
    return [i - 1]


def _residual(random: np.random.Generator, i: int, n: int) -> list[int]:
    return [i - 1, max(i - 4, 0)] if i % 4 == 0 else [i - 1]


def _unet(random: np.random.Generator, i: int, n: int) -> list[int]:
    return [i - 1, n - i] if i > n // 2 and i % 2 == 0 else [i - 1]


def _branches(random: np.random.Generator, i: int, n: int) -> list[int]:
    stem = i // 9 * 9
    return [i - 1, max(i - 4, 0), max(i - 7, 0)] if i == stem else [stem if (i - stem) % 3 == 1 else i - 1]


def _dense(random: np.random.Generator, i: int, n: int) -> list[int]:
    return [i - 1, *range(i // 8 * 8, i - 1)]


def _any(random: np.random.Generator, i: int, n: int) -> list[int]:
    others = random.integers(0, i, int(random.integers(0, 3)))
    return sorted({i - 1 - int(random.integers(0, 2)) * (i > 1), *(int(other) for other in others)})


KINDS: dict[str, Inputs] = {
    "stack": _stack,
    "residual": _residual,
    "unet": _unet,
    "branches": _branches,
    "dense": _dense,
    "any": _any,
}


@dataclass
class _Value:
    units: int
    producer: int
    uses: list[int] = field(default_factory=list)
    saver: int | None = None

    def held(self) -> Held:
        uses = tuple(sorted({use for use in self.uses if use > self.producer})) or (self.producer,)
        return Held(UNIT * self.units, self.producer, uses, self.saver)


def random_chain(seed: int) -> tuple[str, Chain]:
    """The kind and the chain of a seed: 10 to 40 nodes."""
    random = np.random.default_rng(seed)
    kind = list(KINDS)[seed % len(KINDS)]
    n = int(random.integers(10, 41))
    names, weights = list(OPERATIONS), np.array([operation.weight for operation in OPERATIONS.values()])
    operations = [OPERATIONS[names[i]] for i in random.choice(len(names), n, p=weights / weights.sum())]
    sizes = _sizes(random, n, kind == "unet")
    values: list[_Value] = []
    output: list[_Value | None] = []  # of each node; that of a view is what it looks at
    read: list[list[_Value]] = []
    for i, operation in enumerate(operations):
        inputs = [output[j] for j in KINDS[kind](random, i, n)] if i else []
        read.append([value for value in inputs if value is not None])
        for value in read[i]:
            value.uses.append(i)
            if operation.inputs and value.saver is None:
                value.saver = i
        if not operation.makes:
            output.append(read[i][0] if read[i] else None)
            continue
        made = _Value(int(sizes[i]), i, saver=i if operation.output else None)
        output.append(made)
        values.append(made)
        if operation.private:
            values.append(_Value(max(int(sizes[i] * operation.private), 1), i, [i], i))
    if output[-1] is not None:
        output[-1].uses.append(n)
    return kind, _chain(random, operations, sizes, values, read)


def _sizes(random: np.random.Generator, n: int, narrow_inside: bool) -> NDArray[np.int64]:
    """Units of each node's output: now and then another resolution, around which they vary."""
    stages = np.cumsum(random.random(n) < 0.15)
    exponent = random.uniform(np.log(_LARGEST) / 2, np.log(_LARGEST), n)[stages]
    if narrow_inside:
        exponent = np.log(_LARGEST) - 4 * np.minimum(np.arange(n), np.arange(n)[::-1]) / n
    spread = np.where(random.random(n) < 0.15, random.uniform(-7, 0, n), random.uniform(-0.7, 0.0, n))
    return np.clip(np.exp(exponent + spread), _SMALLEST, _LARGEST).astype(np.int64)


def _chain(
    random: np.random.Generator,
    operations: list[Operation],
    sizes: NDArray[np.int64],
    values: list[_Value],
    read: list[list[_Value]],
) -> Chain:
    n = len(operations)
    moved = np.array([size + sum(value.units for value in inputs) for size, inputs in zip(sizes, read, strict=True)])
    time = np.array([operation.time for operation in operations])
    ms = _MS_PER_UNIT * moved * time * random.lognormal(0, 0.5, n) + np.where(time > 0, _LAUNCH_MS, 0.0)
    saves = np.array([op.inputs or op.output or op.private > 0 for op in operations], dtype=np.bool_)
    makes = np.array([operation.makes for operation in operations])
    gradients = np.where([op.parameters for op in operations], random.integers(1, 400, n), 0)
    passing = np.zeros(n, dtype=np.int64)
    for value in values:
        if value.saver is None:
            passing[value.producer : value.held().last_use + 1] += value.units
    scratch = np.where(random.random(n) < 0.3, random.integers(1, 2000, n), 0)
    later = gradients[::-1].cumsum()[::-1]
    return Chain(
        ms=ms,
        rerun_ms=ms * random.choice([0.0, 0.5, 1.0], n, p=[0.3, 0.1, 0.6]) * saves,
        saves=saves,
        barrier=_barriers(random, n),
        work=UNIT * (moved * makes + scratch + later),
        forward=UNIT * (passing + scratch),
        pending=UNIT * (sizes * makes + later - gradients),
        storages=tuple(value.held() for value in values),
        segment_ms=float(random.choice([0.01, 0.05])),
        gradients=UNIT * int(gradients.sum()),
    )


def _barriers(random: np.random.Generator, n: int) -> NDArray[np.int64]:
    """Most nodes may run again; some never, and before some writes no interval may begin that goes beyond them."""
    found = np.full(n, n, dtype=np.int64)
    for never in np.flatnonzero(random.random(n) < random.choice([0.0, 0.03, 0.1]))[::-1]:
        found[: never + 1] = np.minimum(found[: never + 1], never)
    for write in np.flatnonzero(random.random(n) < random.choice([0.0, 0.05])):
        first = max(int(write) - int(random.integers(1, 6)), 0)
        found[first : write + 1] = np.minimum(found[first : write + 1], write)
    return found
