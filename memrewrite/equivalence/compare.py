"""How two runs of a step are compared, tensor by tensor, and when a changed tensor is as good as the original.

**Exact.** Every value is the same bit for bit, not-a-number included, or no further off than the original is from
itself when it runs twice (``NOISE_FACTOR``), which on CUDA is not always zero. Where kernels add in no fixed order,
rounding hides it in most runs of most tensors, so a few runs show it in some tensors only: what counts is the largest
noise of a group in proportion to its tensors' largest values.

**Changed arithmetic.** Otherwise a floating-point tensor passes if, over all steps together,

    RMSE(rewritten, float64) <= multiplier * RMSE(original, float64) + tolerance / 10 * scale

This is the accuracy check of PyTorch's own benchmarks (``torch._dynamo.utils.same``), multiplier included, with the
tolerance made relative and never less than one unit in the last place: ``scale`` is the root mean square of the
float64 tensor, and at least ``GROUP_SHARE`` of that of its group (all gradients, say), so that a gradient that is zero
in mathematics (a convolution's bias before batch normalization) may be noise. One tensor's errors come from few sources
(a rounding of a mean shows in all its values), too small a sample to be the only yardstick: the original's relative
error over the whole group counts too and, where that is not enough, its largest error in a few runs with other last
bits in its weights (``memrewrite.equivalence.judging``). Integers must be equal.

**Changed arithmetic, known.** Of two models that were compared like this before, in another process or in an earlier
step, it is known what float64 left to each tensor: the error that was allowed, less the original's own, in proportion
to the scale (``Comparison.room``). One that is no further from the original than that is no further from float64 than
is allowed, if the original's own error is what it was, as errors add up at most. The errors of a verdict are those of
the steps that float64 judged.
"""

import math
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from memrewrite.equivalence.trial import Key, Record
from memrewrite.state.bits import fingerprint, same_bits

MULTIPLIER = 2.0
"""How many times the original's error is allowed; from ``torch._dynamo.utils.same``."""
HALF_MULTIPLIER = 3.0
"""The same for half types and under autocast; from ``torch._dynamo.utils.same``."""
HALF = (torch.float16, torch.bfloat16)
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 1e-2}
"""Relative tolerance, of which a tenth counts: 1e-4 is the default of PyTorch's benchmarks, 1e-2 what they use for
training under autocast; float64, which is its own reference, gets the same care in its own precision."""
GROUP_SHARE = 1e-3
"""The least scale of a tensor, as a share of its group's root mean square: small enough that the inner gradients of
networks with layer scale, some 1e-6 of the group, are still judged at their own size by the original's error."""
NOISE_RUNS = 3
"""How often the original runs again to see how far it is from itself, where models that run freely differ."""
NOISE_FACTOR = 4.0
"""How many times the largest difference between two runs of the original is allowed; only a few pairs are seen."""
_PART = 2**16
"""How many values are compared at once: few enough that float64 copies of them stay in the CPU's caches, which takes
an eighth of the time."""
_PART_ON_CUDA = 2**23
"""The same for values that are brought to CUDA: few enough to find room beside a model."""
_CPU = torch.device("cpu")
_FLOATING = {torch.complex64: torch.float32, torch.complex128: torch.float64}


@dataclass(frozen=True)
class TensorVerdict:
    """The verdict on one value of ``kind`` and ``name`` over all steps.

    Where arithmetic changed, ``error`` and ``reference_error`` are the root mean square errors of the rewritten and of
    the original model against float64; else, and where that alone would not do (``by_noise``), the largest difference
    between the two models, and between two runs of the original. A difference that is no number (missing, other shape,
    not finite) is infinite. One that is ``negligible`` is, in float64, far smaller than its group's values.
    """

    name: str
    kind: str
    bit_equal: bool
    error: float
    reference_error: float
    passed: bool
    allowed: float = 0.0
    by_noise: bool = False
    by_rounding: bool = False
    negligible: bool = False


@dataclass
class Sums:
    """Squared errors against float64 and squared values of one tensor over all steps."""

    count: int = 0
    rewritten: float = 0.0
    original: float = 0.0
    values: float = 0.0
    tolerance: float = 0.0

    def add(self, other: "Sums") -> None:
        """Add the sums of another step or tensor; the wider tolerance counts."""
        self.count += other.count
        self.rewritten += other.rewritten
        self.original += other.original
        self.values += other.values
        self.tolerance = max(self.tolerance, other.tolerance)

    def rms(self, total: float) -> float:
        """The root of ``total`` over the number of values."""
        return math.sqrt(total / self.count) if self.count else 0.0


@dataclass
class Comparison:
    """Everything known about the differences between two models, step by step.

    ``device`` is where values are compared that lie on the CPU, ``seen`` noise from before (``shares``).
    """

    half: bool
    device: torch.device = _CPU
    keys: dict[Key, None] = field(default_factory=dict)
    differences: list[dict[Key, float]] = field(default_factory=list)
    noise: list[dict[Key, float]] = field(default_factory=list)
    sizes: list[dict[Key, float]] = field(default_factory=list)
    sums: dict[Key, Sums] = field(default_factory=dict)
    rounded: set[Key] = field(default_factory=set)
    distances: dict[Key, Sums] = field(default_factory=dict)
    known: Mapping[Key, float] = field(default_factory=dict)
    seen: Mapping[str, float] = field(default_factory=dict)

    def add_step(self, original: Record, rewritten: Record) -> bool:
        """Compare one step; returns whether everything was bit-equal."""
        self.keys |= dict.fromkeys(original)
        self.keys |= dict.fromkeys(rewritten.keys() - original.keys())
        self.differences.append(differences(original, rewritten, self.device))
        self.noise.append({})
        self.sizes.append({})
        return not self.differences[-1]

    def add_noise(self, step: int, original: Record, again: Record) -> None:
        """Add how far the original is from itself in one step; the largest difference counts."""
        self.add_sizes(step, original)
        noise = self.noise[step]
        for key, difference in differences(original, again, self.device).items():
            noise[key] = max(noise.get(key, 0.0), difference)

    def add_sizes(self, step: int, original: Record) -> None:
        """Add how large the original's values are, in proportion to which noise counts."""
        if not self.sizes[step]:
            tensors = {key: value for key, value in original.items() if isinstance(value, Tensor)}
            self.sizes[step] = {key: _size(value, self.device) for key, value in tensors.items()}

    def add_luck(self, step: int, keys: Iterable[Key]) -> None:
        """Take for noise how far the two models differ in these values, whose bits they have shared in other runs."""
        for key in keys:
            self.noise[step][key] = max(self.noise[step].get(key, 0.0), self.differences[step][key])

    def add_reference(self, original: Record, rewritten: Record, reference: Record) -> None:
        """Add one step's errors against float64."""
        for key, found in self._errors(original, rewritten, reference):
            self.sums.setdefault(key, Sums()).add(found)

    def add_rounding(self, original: Record, others: Iterable[Record], reference: Record) -> None:
        """Let the original's error in the last step be its largest in ``others``, where its own allows too little."""
        largest: dict[Key, float] = {}
        for other in others:
            failed = {(each.kind, each.name) for each in self.verdicts() if not each.passed}
            left = {key: value for key, value in original.items() if key in failed}
            for key, found in self._errors(left, other, reference):
                own = largest.get(key, found.original)
                largest[key] = max(own, found.rewritten)
                self.sums[key].original += largest[key] - own
                self.rounded.add(key)

    def _errors(self, original: Record, other: Record, reference: Record) -> Iterator[tuple[Key, Sums]]:
        """The errors of two runs of a step against float64, of what has the same form in all three."""
        for key, value in original.items():
            runs = [run for run in (value, other.get(key), reference.get(key)) if isinstance(run, Tensor)]
            if len(runs) == 3 and len({run.shape for run in runs}) == 1 and _judged(key, value):
                sums = Sums()
                for mine, theirs, exact in _parts(self.device, *runs):
                    sums.add(_sums(mine, theirs, exact, self.half))
                yield key, sums

    def add_distance(self, original: Record, rewritten: Record, known: Mapping[Key, float]) -> None:
        """Add one step's distances between the two models; ``known`` is what is allowed of each (``room``)."""
        self.known = known
        for key, found in self._distances(original, rewritten, known).items():
            self.distances.setdefault(key, Sums()).add(found)

    def stays_within(self, step: int, original: Record, rewritten: Record) -> bool:
        """Whether all that differs in a step is no further apart than the steps allow that float64 has judged."""
        room, differing = self.room(), self.differences[step]
        if not room or not differing.keys() <= room.keys():
            return False
        found = self._distances(original, rewritten, room)
        groups = _grouped(found)
        return all(
            key in found and found[key].rms(found[key].rewritten) <= _left(room, key, found[key], groups)
            for key in differing
        )

    def _distances(self, original: Record, rewritten: Record, keys: Iterable[Key]) -> dict[Key, Sums]:
        """What there is between the two models in one step, where a tensor has the same form in both."""
        found: dict[Key, Sums] = {}
        for key in keys:
            value, other = original.get(key), rewritten.get(key)
            if isinstance(value, Tensor) and isinstance(other, Tensor) and value.shape == other.shape:
                found[key] = Sums()
                for mine, theirs in _parts(self.device, value, other):
                    found[key].add(_sums(mine, theirs, mine, self.half))
        return found

    def verdicts(self) -> tuple[TensorVerdict, ...]:
        """The verdict on every value, in the order they were computed."""
        groups, shares = _grouped(self.sums or self.distances), self.shares()
        return tuple(self._verdict(key, groups, shares) for key in self.keys)

    def passed(self) -> bool:
        """Whether all values pass by what has been added until now."""
        return all(verdict.passed for verdict in self.verdicts())

    def shows_noise(self) -> bool:
        """Whether the original has differed from itself in any run."""
        return bool(self.seen) or any(self.noise)

    def lacks_noise(self) -> bool:
        """Whether in a step that was not bit-equal the original has not run twice."""
        return any(differences and not sizes for differences, sizes in zip(self.differences, self.sizes, strict=True))

    def without(self, kind: str) -> "Comparison":
        """The same of all values that are not of this kind."""

        def others(steps: list[dict[Key, float]]) -> list[dict[Key, float]]:
            return [{key: value for key, value in values.items() if key[0] != kind} for values in steps]

        keys = {key: None for key in self.keys if key[0] != kind}
        differences, noise, sizes = others(self.differences), others(self.noise), others(self.sizes)
        return replace(self, keys=keys, differences=differences, noise=noise, sizes=sizes)

    def room(self) -> dict[Key, float]:
        """What is left to each value that float64 judged: the error allowed less the original's own, over the scale."""
        groups, found = _grouped(self.sums), {}
        for key, sums in self.sums.items():
            group = groups[_group(key[0])]
            scale, own = _scale(sums, group), sums.rms(sums.original)
            if scale > 0 and sums.rms(sums.rewritten) <= (allowed := self._allowed(sums, group)):
                found[key] = (allowed - own) / scale
        return found

    def shares(self) -> dict[str, float]:
        """Per kind, the largest noise of a tensor in proportion to its largest value, in any step: some is rare."""
        shares = dict(self.seen)
        for noise, sizes in zip(self.noise, self.sizes, strict=True):
            for key, difference in noise.items():
                if sizes.get(key, 0.0) > 0 and math.isfinite(difference):
                    shares[key[0]] = max(shares.get(key[0], 0.0), difference / sizes[key])
        return shares

    def _verdict(self, key: Key, groups: dict[str, Sums], shares: dict[str, float]) -> TensorVerdict:
        kind, name = key
        steps = [i for i, differences in enumerate(self.differences) if key in differences]
        errors = [self.differences[i][key] for i in steps]
        hidden = [shares.get(kind, 0.0) * self.sizes[i].get(key, 0.0) for i in steps]
        noise = [max(self.noise[i].get(key, 0.0), n) for i, n in zip(steps, hidden, strict=True)]
        noisy = all(math.isfinite(e) and e <= NOISE_FACTOR * n for e, n in zip(errors, noise, strict=True))
        worst, own_noise = max(errors, default=0.0), max(noise, default=0.0)
        sums = self.sums.get(key) if steps and math.isfinite(worst) else None
        if sums is not None:
            error, own = sums.rms(sums.rewritten), sums.rms(sums.original)
            group = groups[_group(kind)]
            allowed = self._allowed(sums, group)
            if error <= allowed or not noisy:
                how = {"by_rounding": key in self.rounded, "negligible": _scale(sums, group) > sums.rms(sums.values)}
                return TensorVerdict(name, kind, False, error, own, error <= allowed, allowed, **how)
        far = self.distances.get(key) if steps and math.isfinite(worst) else None
        if far is not None and not self.sums:
            error, allowed = far.rms(far.rewritten), _left(self.known, key, far, groups)
            if error <= allowed:
                return TensorVerdict(name, kind, False, error, 0.0, True, allowed)
        return TensorVerdict(name, kind, not steps, worst, own_noise, noisy, NOISE_FACTOR * own_noise, by_noise=True)

    def _allowed(self, sums: Sums, group: Sums) -> float:
        size, own = sums.rms(sums.values), sums.rms(sums.original)
        if group.values:
            own = max(own, size * math.sqrt(group.original / group.values))
        return (HALF_MULTIPLIER if self.half else MULTIPLIER) * own + sums.tolerance / 10 * _scale(sums, group)


def _grouped(sums: Mapping[Key, Sums]) -> dict[str, Sums]:
    """The sums of each group."""
    groups: dict[str, Sums] = {}
    for (kind, _), each in sums.items():
        groups.setdefault(_group(kind), Sums()).add(each)
    return groups


def _scale(sums: Sums, group: Sums) -> float:
    return max(sums.rms(sums.values), GROUP_SHARE * group.rms(group.values))


def _left(room: Mapping[Key, float], key: Key, distance: Sums, groups: Mapping[str, Sums]) -> float:
    """What float64 left to a value, for one of this scale."""
    return room[key] * _scale(distance, groups[_group(key[0])])


def _size(tensor: Tensor, device: torch.device) -> float:
    """The largest absolute value that is a number."""
    if not tensor.is_floating_point() or not tensor.numel():
        return 0.0
    return max(float(part.abs().nan_to_num(0.0, 0.0, 0.0).max()) for (part,) in _parts(device, tensor))


def differences(original: Record, rewritten: Record, device: torch.device) -> dict[Key, float]:
    """How far the values that are not bit-equal differ.

    Buffers that only the rewritten model has (constants of its graph) and flags of modules that only one has are no
    part of the original's behaviour.
    """
    found: dict[Key, float] = {}
    for key in {**original, **rewritten}:
        if key not in original and key[0] == "buffer":
            continue
        if key[0] == "training flag" and not (key in original and key in rewritten):
            continue
        if key not in original or key not in rewritten:
            found[key] = math.inf
        elif (difference := _difference(original[key], rewritten[key], device)) is not None:
            found[key] = difference
    return found


def fingerprints(record: Record, keys: Container[Key]) -> dict[Key, bytes]:
    """Of the tensors of a run that are asked for: so many runs can be remembered."""
    return {key: fingerprint(value) for key, value in record.items() if isinstance(value, Tensor) and key in keys}


def _difference(a: Any, b: Any, device: torch.device) -> float | None:
    """None for the same bits, else the largest absolute difference, infinite where it is no number."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return None if type(a) is type(b) and _same_object(a, b) else math.inf
    if same_bits(a, b):
        return None
    if a.dtype != b.dtype or a.shape != b.shape:
        return math.inf
    return max(_largest(*parts) for parts in _parts(device, a, b))


def _largest(a: Tensor, b: Tensor) -> float:
    """The largest absolute difference, infinite where it is no number."""
    a, b = a.double(), b.double()
    if math.isfinite(largest := float((a - b).abs().max())):  # then all are: numbers are all there is, nearly always
        return largest
    finite = a.isfinite() & b.isfinite()
    same = finite | (a == b) | (a.isnan() & b.isnan())
    if not bool(same.all()):
        return math.inf
    return float((a - b)[finite].abs().max()) if bool(finite.any()) else 0.0


def _same_object(a: Any, b: Any) -> bool:
    if a is b or (isinstance(a, float) and math.isnan(a) and math.isnan(b)):
        return True
    equal = a == b
    return bool(equal.all() if hasattr(equal, "all") else equal)


def _parts(device: torch.device, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The values of tensors of one shape side by side, some at a time, on a device; complex numbers as pairs."""
    real = (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor for tensor in tensors)
    size = _PART if device.type == "cpu" else _PART_ON_CUDA
    for parts in zip(*(tensor.reshape(-1).split(size) for tensor in real), strict=True):
        yield tuple(part.to(device) for part in parts)


def _sums(original: Tensor, rewritten: Tensor, reference: Tensor, half: bool) -> Sums:
    dtype = original.dtype
    a, b, r = original.double(), rewritten.double(), reference.double()
    total, *squares = _added_up(a, b, r)
    if not math.isfinite(total):
        r = torch.where(r.isfinite(), r, a)  # no reference there: the original is the measure
        finite = a.isfinite() & b.isfinite()  # elsewhere they must agree, which _difference sees to
        a, b, r = a[finite], b[finite], r[finite]
        _, *squares = _added_up(a, b, r)
    tolerance = max(TOLERANCES[torch.bfloat16 if half else dtype], 10 * torch.finfo(dtype).eps)
    rewritten_error, original_error, values = squares
    return Sums(a.numel(), rewritten_error, original_error, values, tolerance)


def _added_up(a: Tensor, b: Tensor, r: Tensor) -> list[float]:
    """The sum of all values, finite where they are, and of the squares of both errors and of the reference's values.

    They are asked for at once, as the device is waited for each time.
    """
    squares = [(t * t).sum() for t in (b - r, a - r, r)]
    return torch.stack([a.sum() + b.sum() + r.sum(), *squares]).tolist()


def _judged(key: Key, value: Tensor) -> bool:
    floating = _FLOATING.get(value.dtype, value.dtype) in TOLERANCES
    return floating and key[0] in ("output", "loss", "gradient", "input gradient", "buffer")


def _group(kind: str) -> str:
    return "output" if kind == "loss" else kind
