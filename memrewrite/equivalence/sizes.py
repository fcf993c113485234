"""Smaller inputs of the same kind: what a drop-in runs at any size is verified at more than one."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memrewrite.records.errors import MeasurementError
from memrewrite.runtime.matching import numbers_of, values_of
from memrewrite.torch_internals.pytrees import tree_leaves
from memrewrite.workload.ranges import per_token
from memrewrite.workload.step import Inputs

LEAST = 2
"""The smallest that a size which varies may be."""
# For the smallest and for one in between, what is tried until the program takes it: a share of the sizes that vary, and
# so much more than the least.
_SHARES = (((0.0, 0), (0.0, 1), (0.25, 0)), ((0.5, 0), (0.75, 0)))
_MORE = range(16)  # where the user names ranges: forward may take only sizes that something divides


@dataclass(frozen=True)
class Place:
    """A size that varies: of the tensor ``leaf``, which is (in) the input of that name, at ``dim``.

    Those of the same ``symbol`` are the same in each call. It is to be ``least`` at least, if the user ``named`` that.
    """

    name: str
    leaf: Tensor
    dim: int
    symbol: str
    least: int = LEAST
    named: bool = False

    @property
    def size(self) -> int:
        """What it is in this call."""
        return self.leaf.shape[self.dim]

    def shortened(self, share: float, more: int) -> int:
        """A share of it, or of what is above the least that the user named, but so much more than the least."""
        if self.named:
            return min(self.size, self.least + more + int(share * max(0, self.size - self.least)))
        return min(self.size, max(LEAST + more, int(share * self.size)))


def varying(rewritten: nn.Module, inputs: Inputs) -> list[Place]:
    """All sizes of ``inputs`` that vary; none where only parts inside of the model are rewritten."""
    program: Any = getattr(type(rewritten), "_memrewrite", None)
    if program is None:
        return []
    values = values_of(rewritten, program, inputs.args, inputs.kwargs)
    if values is None:  # the call fills other parameters
        return []
    named = zip(program.names, values, strict=True) if program.names else _unnamed(inputs)
    leaves = zip(_names(named), tree_leaves(values), program.leaves, strict=True)
    ranges = {symbol: max(LEAST, least) for symbol, (_, least, _) in program.ranges.items()}
    return [
        Place(name, leaf, dim, symbol, ranges.get(symbol, LEAST), symbol in ranges)
        for name, leaf, spec in leaves
        if isinstance(leaf, Tensor)
        for dim, symbol in enumerate(spec[2])
        if isinstance(symbol, str)
    ]


def _unnamed(inputs: Inputs) -> Iterator[tuple[str, Any]]:
    """Arguments of a forward that does not name them."""
    yield from ((f"input {number}", value) for number, value in enumerate(inputs.args, start=1))
    yield from inputs.kwargs.items()


def _names(named: Iterable[tuple[str, Any]]) -> Iterator[str]:
    """What each leaf is called: as its parameter, with a number where that has several."""
    for name, value in named:
        count = len(tree_leaves(value))
        yield from (name if count == 1 else f"{name} {number}" for number in range(1, count + 1))


def smaller_inputs(rewritten: nn.Module, inputs: Inputs, *, named: bool = False) -> list[list[Inputs]]:
    """The first elements along all sizes that vary: for each of two kinds of size, the candidates.

    The smallest is the least of a range that the user named; with ``named``, the others stay as they are. None where no
    size varies, or only parts inside of the model are rewritten.
    """
    places = varying(rewritten, inputs)
    fixed = _fixed_elsewhere(places, inputs)
    cut_at = [place for place in places if place.symbol not in fixed and (place.named or not named)]
    if not any(place.size > place.least for place in cut_at):
        return []
    program: Any = vars(type(rewritten))["_memrewrite"]
    kinds = []
    numbers = dict(numbers_of(rewritten, program, inputs.args, inputs.kwargs))
    for shares in _SHARES:
        tried = [*((shares[0][0], more) for more in _MORE), *shares[1:]] if program.ranges else shares
        sizes = [{place.symbol: place.shortened(*share) for place in cut_at} for share in tried]
        full = {place.symbol: place.size for place in places} | numbers
        fit = [each for each in sizes if not program.ranges or program.fits(**{**full, **each})]
        kinds.append([cut(inputs, cut_at, each) for each in fit])
    return kinds


def _fixed_elsewhere(places: list[Place], inputs: Inputs) -> set[str]:
    """Those of a batch, or of tokens, that another input has, too, and does not vary: as masks of a model for 4 texts.

    The original may do without a mask that is for fewer, if that masks nothing; the program does not.
    """
    varied = {(id(place.leaf), place.dim) for place in places}
    fixed = {
        (dim, size)
        for leaf in inputs.tensors()
        for dim, size in enumerate(leaf.shape)
        if (id(leaf), dim) not in varied and _in_step(leaf, dim)
    }
    return {place.symbol for place in places if _in_step(place.leaf, place.dim) and (place.dim, place.size) in fixed}


def _in_step(leaf: Tensor, dim: int) -> bool:
    """Whether other inputs have this size, too, if they have it in the example: a batch, or a length of tokens."""
    return dim == 0 or per_token(leaf)


def sizes_of(rewritten: nn.Module, inputs: Inputs) -> dict[str, int]:
    """The sizes of inputs that vary, by the names that the program of the whole model has for them."""
    return {place.symbol: place.size for place in varying(rewritten, inputs)}


def cut(inputs: Inputs, places: Iterable[Place], sizes: Mapping[str, int]) -> Inputs:
    """The first elements at these places, as many as ``sizes`` says of their symbols."""
    dims: dict[int, dict[int, int]] = defaultdict(dict)
    for place in places:
        dims[id(place.leaf)][place.dim] = sizes[place.symbol]

    def part_of(leaf: Tensor) -> Tensor:
        if id(leaf) not in dims:
            return leaf
        part = leaf.detach()
        for dim, size in dims[id(leaf)].items():
            part = part.narrow(dim, 0, size)
        return part.clone().requires_grad_(leaf.requires_grad)

    return inputs.changed(part_of)


def batch_of(inputs: Inputs) -> int | None:
    """Dimension 0 of the first tensor that has one."""
    return next((tensor.shape[0] for tensor in inputs.tensors() if tensor.dim() > 0), None)


def halved(rewritten: nn.Module, inputs: Inputs) -> Inputs:
    """The first half of dimension 0 of every tensor that has the batch size there.

    Of the largest other size that varies, where the program of ``rewritten`` takes no such batch. Raises
    ``MeasurementError`` where there is no half.
    """
    torch.cuda.empty_cache()
    batch = batch_of(inputs)
    places = varying(rewritten, inputs)
    of_batch = [place for place in places if place.dim == 0 and place.size == batch]
    others = [place for place in places if place.symbol not in {each.symbol for each in of_batch}]
    longest = max(others, key=lambda place: place.size, default=None)
    if any(place.size // 2 < place.least for place in of_batch) and longest and longest.size // 2 >= longest.least:
        same = [place for place in places if place.symbol == longest.symbol]
        return cut(inputs, same, {longest.symbol: longest.size // 2})
    if batch is None or batch < 2:
        raise MeasurementError(
            f"The step does not fit in memory even at batch {batch}, so it could not be verified; "
            "verify on the CPU or with smaller example inputs."
        )
    return inputs.changed(lambda leaf: leaf[: batch // 2] if leaf.dim() > 0 and leaf.shape[0] == batch else leaf)


def cut_down(inputs: Inputs, full: Inputs) -> tuple[str, str, str] | None:
    """What ``halved`` made smaller: the batch, or the inputs, as they are now and as they were; None if nothing."""
    now, whole = (", ".join(str(tuple(t.shape)) for t in each.tensors()) for each in (inputs, full))
    if batch_of(inputs) != batch_of(full):
        return "batch", str(batch_of(inputs)), str(batch_of(full))
    return ("inputs of", now, whole) if now != whole else None


def at_less(inputs: Inputs, full: Inputs) -> str:
    """What ends the sentence of a verdict on ``inputs`` that ``halved`` made smaller; "" where they are in full."""
    less = cut_down(inputs, full)
    return f"; verified at {less[0]} {less[1]}, as {less[2]} does not fit in memory" if less else ""
