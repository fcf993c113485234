"""Which sizes of inputs may vary in a capture: what is tried, and what has to become of the ranges that are named."""

import ast
import itertools
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.export import Dim

from memrewrite.capture.assumptions import Assumptions
from memrewrite.capture.captured import IN_CONDITIONS, Captured, InputSpec, NumberSpec, TensorSpec
from memrewrite.capture.normal import batch_size, bind
from memrewrite.capture.other_sizes import leads_to
from memrewrite.records.errors import FixedSizeError
from memrewrite.records.ranges import Range
from memrewrite.torch_internals.pytrees import tree_flatten, tree_leaves, tree_map
from memrewrite.workload.ranges import per_token, positions
from memrewrite.workload.step import Inputs

Shapes = Callable[[Mapping[str, Any], Collection[int]], Any]
"""Which sizes vary, as export takes it, and the numbers at these positions; None where nothing does.

The arguments of forward, by name, are positions among the leaves of the inputs.
"""
_ADVICE = "let it work with any, or leave the range out."
_TRIED = 4096  # sizes of a range that conditions are looked at for
_TRIED_UNASKED = 256  # of one that nobody named


def attempts(inputs: Inputs, ranges: Sequence[Range], elsewhere: Inputs | None) -> Iterator[Shapes]:
    """What may vary besides the ranges, the most first: sizes of tokens and the batch of others, batches, nothing.

    Before all that, the sizes that differ from those of the inputs ``elsewhere``, whose tensors may be in words.
    """
    batch = batch_size(inputs)
    leaves = tree_leaves((inputs.args, inputs.kwargs))
    differing = _differing(inputs, elsewhere) if elsewhere is not None else {}

    def batches(leaf: Any) -> Any:
        return {0: Dim.AUTO} if batch is not None and _has_batch(leaf, batch) else None

    def lengths(leaf: Any) -> Any:
        return dict.fromkeys(range(leaf.dim()), Dim.AUTO) if per_token(leaf) else batches(leaf)

    if any(differing.values()):
        yield _shapes(leaves, lambda leaf: differing.get(id(leaf)) or None, ranges)
    if any(map(per_token, inputs.tensors())):
        yield _shapes(leaves, lengths, ranges)
    if batch is not None:
        yield _shapes(leaves, batches, ranges)
    nothing = _shapes(leaves, lambda leaf: None, ranges)
    yield lambda arguments, numbers: nothing(arguments, numbers) if ranges or numbers else None


def _shapes(leaves: Sequence[Any], dims: Callable[[Any], Any], ranges: Sequence[Range]) -> Shapes:
    def shapes(arguments: Mapping[str, Any], numbers: Collection[int]) -> Any:
        whole = {i for i in numbers if isinstance(leaves[i], int)}  # of others export knows nothing
        found = tree_map(lambda i: Dim.AUTO if i in whole else dims(leaves[i]), _listed(dict(arguments)))
        for each in ranges:
            varies = Dim.AUTO(min=max(2, each.least))
            found[each.name] = {**(found[each.name] or {}), each.dim: varies}
        return found

    return shapes


def _listed(tree: Any) -> Any:
    """A nested value with lists in the place of what classes of the user's hold, of which export asks for that."""

    def is_own(each: Any) -> bool:
        return not isinstance(each, dict | list | tuple | int)

    def listed(each: Any) -> Any:
        if not is_own(each):
            return each
        return _listed(tree_flatten(each, is_leaf=lambda inner: inner is not each)[0])

    return tree_map(listed, tree, is_leaf=is_own)


def _differing(inputs: Inputs, elsewhere: Inputs) -> dict[int, dict[int, Any]]:
    """The dimensions of each tensor, by its id, that have another size elsewhere."""
    pairs = zip(tree_leaves((inputs.args, inputs.kwargs)), tree_leaves((elsewhere.args, elsewhere.kwargs)), strict=True)
    return {
        id(leaf): {dim: Dim.AUTO for dim, size in enumerate(leaf.shape) if size != other.shape[dim]}
        for leaf, other in pairs
        if isinstance(leaf, Tensor)
    }


def _has_batch(leaf: Any, batch: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and (leaf.shape[0] == batch or leads_to(batch, leaf))


def ranged(
    captured: Captured,
    model: nn.Module,
    inputs: Inputs,
    ranges: Sequence[Range],
    lines: Mapping[int, str],
    noted: Assumptions,
) -> Captured:
    """The capture with its ranges, and notes of conditions that not all sizes up to the largest meet.

    ``lines`` says of sizes which line of the user's fixed them, ``noted`` which submodules did.
    Raises ``FixedSizeError`` where a size that the user named does not vary, or only together with what never comes.
    """
    if not ranges and not captured.inputs.conditions:
        return captured
    _, order = bind(model, inputs)
    places = positions(model, inputs)
    found: list[tuple[str, Range]] = []
    for each in ranges:
        size = captured.inputs.leaves[order.index(places[each.name])].shape[each.dim]
        if isinstance(size, str):
            found.append((size, each))
        elif not each.implied and each.least < each.most:
            line = f", as {fixing} has it" if (fixing := lines.get(size)) else ""
            told = f"its forward takes no other {each.words} than {size}{line}"
            said = f"{type(model).__name__} cannot take {each}: {told}; {_ADVICE}"
            raise FixedSizeError(said, f"{told}.", noted.settled(size))
    spec = replace(captured.inputs, ranges=tuple(found))
    varying = _varying(spec, {position: name for name, position in places.items()}, order)
    words = {size: f"{each.name}.size({each.dim})" for size, each in varying.items()}
    words |= {leaf.name: name for name, leaf in _named(spec) if isinstance(leaf, NumberSpec)}
    _refuse_fixed(spec, type(model).__name__, words, noted)
    others = [(size, each) for size, each in varying.items() if size not in dict(spec.ranges)]
    notes = _notes(replace(spec, ranges=(*spec.ranges, *others)), words)
    return replace(captured, inputs=spec, notes=(*captured.notes, *notes))


def length_left(captured: Captured, model: nn.Module, inputs: Inputs) -> str:
    """A sentence about the first size of a text that does not vary although nobody named a range; "" without one."""
    _, order = bind(model, inputs)
    leaves = tree_leaves((inputs.args, inputs.kwargs))
    for name, position in positions(model, inputs).items():
        shape = captured.inputs.leaves[order.index(position)].shape if per_token(leaves[position]) else ()
        for dim, size in enumerate(shape):
            if dim and isinstance(size, int) and size > 1:
                asked = f"dynamic={{'{name}': {{{dim}: (2, {size})}}}}"
                return (
                    f"{name} has {size} as its size {dim} in this program, as something in forward fixes it; others "
                    f"run the original forward. Where submodules do, {asked} keeps those as calls and lets it vary."
                )
    return ""


def _refuse_fixed(spec: InputSpec, model: str, words: Mapping[str, str], noted: Assumptions) -> None:
    """Raise ``FixedSizeError`` for a range of which the conditions leave one size."""
    for symbol, each in spec.ranges:
        if each.implied or each.least == each.most:
            continue
        if not _leaves_others(spec, symbol, " and ".join(f"({each})" for each in spec.conditions) or "True"):
            own = [text for text in spec.conditions if symbol in _names(text)]
            alone = [text for text in own if not _leaves_others(spec, symbol, text)]
            asked = " and ".join(_in_words(text, words) for text in alone or own)
            told = f"its forward takes no other {each.words} in it than {each.most}, as it needs {asked}"
            raise FixedSizeError(  # of the first, as others may say the same later, elsewhere
                f"{model} cannot take {each}: {told}; {_ADVICE}",
                f"{told}.",
                set().union(*map(noted.asked, alone[:1] or own)),
            )


def _leaves_others(spec: InputSpec, symbol: str, text: str) -> bool:
    """Whether a condition holds for a size that is not the example's."""
    holds, most = function(spec, text), dict(spec.example)[symbol]
    return any(sizes[symbol] < most and holds(**sizes) for sizes in _sizes(spec, symbol, falling=True))


def _notes(spec: InputSpec, words: Mapping[str, str]) -> Iterator[str]:
    """What sizes in the ranges have to be besides, each in a sentence."""
    for _, each in spec.ranges:
        if each.least == 1 and not each.implied:
            yield f"{each}: 1 runs the original forward, because sizes that vary are captured from 2 on."
    for text in _telling(spec):
        if len(_names(text)) > 1:
            yield f"The program is for inputs with {_in_words(text, words)}; others run the original forward."
            continue
        symbol, each = next((symbol, each) for symbol, each in spec.ranges if symbol in _names(text))
        condition = ast.unparse(ast.parse(re.sub(rf"\b{symbol}\b", "size", text)))
        yield f"{each.name} must have a size {each.dim} with {condition}; others run the original forward."


def _telling(spec: InputSpec) -> list[str]:
    """The conditions that not all sizes in the ranges meet, without those that others leave nothing for."""
    known: dict[str, Callable[..., bool]] = {}
    for text in sorted(spec.conditions, key=len):  # shorter ones are easier to read
        if _excludes(spec, text, known.values()):
            known[text] = function(spec, text)
    for text in [*known]:
        holds = known.pop(text)
        if _excludes(spec, text, known.values()):
            known[text] = holds
    return [text for text in spec.conditions if text in known]


def _excludes(spec: InputSpec, text: str, others: Iterable[Callable[..., bool]]) -> bool:
    """Whether a condition excludes sizes in the ranges that all others hold for."""
    holds, others = function(spec, text), [*others]
    in_it = [symbol for symbol in dict.fromkeys(symbol for symbol, _ in spec.ranges) if symbol in _names(text)]
    tried = (sizes for symbol in in_it for sizes in _sizes(spec, symbol, falling=False))
    return any(not holds(**sizes) and all(other(**sizes) for other in others) for sizes in tried)


def _sizes(spec: InputSpec, symbol: str, falling: bool) -> Iterator[Mapping[str, int]]:
    """The sizes of a range, the others as in the example and then all that have ranges as far from it.

    Where nobody named the range, other sizes that are the same in the example are the same in all.
    """
    example = dict(spec.example)
    all_of = dict(spec.ranges)
    least = max(2, *(each.least for other, each in spec.ranges if other == symbol))
    most = example[symbol]
    named = not all_of[symbol].implied
    alike = () if named else [other for other, size in example.items() if size == most]
    sizes = range(most, least - 1, -1) if falling else range(least, most + 1)
    for size in itertools.islice(sizes, _TRIED if named else _TRIED_UNASKED):
        yield {**example, **dict.fromkeys(alike, size), symbol: size}
        if named:
            away = {other: max(2, each.least, example[other] - (most - size)) for other, each in all_of.items()}
            yield {**example, **away, symbol: size}


def function(spec: InputSpec, text: str) -> Callable[..., bool]:
    """A condition as a function of the sizes and numbers by name; not met where it divides by zero."""
    numbers = {number.name: number.example for number in spec.numbers}
    names = ", ".join({**dict(spec.example), **numbers})
    asked = eval(f"lambda {names}: {text}", {"math": math})  # noqa: S307  (tracing's own text)

    def holds(**sizes: float) -> bool:
        try:
            return bool(asked(**{**numbers, **sizes}))
        except ZeroDivisionError:
            return False

    return holds


def _varying(spec: InputSpec, names: Mapping[int, str], order: Sequence[int]) -> dict[str, Range]:
    """What each size that varies is a size of, up to the example's."""
    found: dict[str, Range] = {}
    for leaf, position in zip(spec.leaves, order, strict=True):
        for dim, size in enumerate(leaf.shape if isinstance(leaf, TensorSpec) else ()):
            if isinstance(size, str):
                name, most = names.get(position, "an input"), dict(spec.example)[size]
                found.setdefault(size, Range(name, dim, 1, most, implied=True))
    return found


def _named(spec: InputSpec) -> Iterable[tuple[str, Any]]:
    """The leaves, and the names of the arguments that they are."""
    names = spec.parameters if len(spec.parameters) == len(spec.leaves) else ("a number",) * len(spec.leaves)
    return zip(names, spec.leaves, strict=True)


def _in_words(text: str, words: Mapping[str, str]) -> str:
    for symbol in _names(text):
        text = re.sub(rf"\b{symbol}\b", words.get(symbol, symbol), text)
    return text


def _names(text: str) -> set[str]:
    """The sizes that a condition speaks of."""
    return {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)} - IN_CONDITIONS
