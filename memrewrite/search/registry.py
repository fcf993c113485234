"""The passes there are, by name; the only place that knows them all."""

from collections.abc import Callable

from memrewrite.capture.returned import StepsTo
from memrewrite.passes.attention_in_pieces import AttentionInPieces
from memrewrite.passes.checkpoint_segments import CheckpointSegments
from memrewrite.passes.chunked_cross_entropy import ChunkedCrossEntropy
from memrewrite.passes.composites import Composites
from memrewrite.passes.functionalize import Functionalize
from memrewrite.passes.fused_chains import FusedChains
from memrewrite.passes.inplace_activation import InplaceActivation
from memrewrite.passes.linear_cross_entropy import LinearCrossEntropy, steps_to
from memrewrite.passes.swish import Swish
from memrewrite.passes.tied_embeddings import TiedEmbeddings
from memrewrite.passes.tiles import Tiles
from memrewrite.records.options import check_passes
from memrewrite.rewriting.contract import Pass

PATTERNS: dict[str, Callable[[bool], Pass]] = {
    Swish.name: lambda exact: Swish(exact_forward=exact),
    Composites.name: lambda exact: Composites(),
    TiedEmbeddings.name: lambda exact: TiedEmbeddings(),
}
SLOWER: dict[str, Callable[[], Pass]] = {ChunkedCrossEntropy.name: ChunkedCrossEntropy}
LOWER: dict[str, Callable[[int, bool], Pass]] = {
    LinearCrossEntropy.name: lambda rows, fused: LinearCrossEntropy(rows=rows, fused=fused)
}
LOWEST: dict[str, Callable[[int], Pass]] = {
    Tiles.name: lambda rows: Tiles(rows=rows),
    AttentionInPieces.name: lambda _: AttentionInPieces(),
}
ON_REQUEST: dict[str, Callable[[], Pass]] = {FusedChains.name: FusedChains}
NAMES = (*PATTERNS, *SLOWER, *LOWER, *LOWEST, *ON_REQUEST, CheckpointSegments.name, InplaceActivation.name)


def patterns(names: tuple[str, ...] | None, exact: bool, for_cuda: bool) -> list[Pass]:
    """What runs before planning: functionalisation, then chains on request, then the pattern rewrites asked for.

    Chains are compiled, ``for_cuda`` in a step that is not compiled as a whole. ``exact`` leaves out those that cannot
    keep the forward bit-equal. Raises ``UsageError`` for an unknown name.
    """
    check_passes(names)
    wanted = [make() for name, make in ON_REQUEST.items() if for_cuda and name in (names or ())]
    wanted += [make(exact) for name, make in PATTERNS.items() if names is None or name in names]
    return [Functionalize(), *(p for p in wanted if not exact or p.exact or p.name == Swish.name)]


def slower(names: tuple[str, ...] | None) -> list[Pass]:
    """Rewrites that cost time, of those asked for: for a step that would not fit without them."""
    return [make() for name, make in SLOWER.items() if names is None or name in names]


def lower(names: tuple[str, ...] | None, rows: int, for_cuda: bool) -> list[Pass]:
    """Rewrites for a step that no plan without them would let fit, of those asked for.

    They work on ``rows`` rows at a time, or as few as make the lowest peak where that is 0; compiled ``for_cuda``, if
    that was asked for.
    """
    fused = for_cuda and FusedChains.name in (names or ())
    return [make(rows, fused) for name, make in LOWER.items() if names is None or name in names]


def lowest(names: tuple[str, ...] | None, rows: int) -> list[Pass]:
    """Rewrites for a step that no plan with all others would let fit, of those asked for: ``rows`` rows at a time."""
    return [make(rows) for name, make in LOWEST.items() if names is None or name in names]


def without_one_of_the_lowest(names: tuple[str, ...] | None) -> list[tuple[str, ...]]:
    """The names asked for, None for all, without each in turn of the rewrites for the lowest peak, the last one first.

    None where there are fewer than two of these.
    """
    asked = NAMES if names is None else names
    there = [name for name in LOWEST if name in asked]
    return [tuple(n for n in asked if n != name) for name in reversed(there)] if len(there) > 1 else []


def compiles(names: tuple[str, ...] | None) -> bool:
    """Whether one of the passes by these names writes what has to be compiled."""
    return FusedChains.name in (names or ())


def allowed(names: tuple[str, ...] | None, exact: bool) -> tuple[str, ...] | None:
    """Of the names asked for, None for all, those that may be used where every bit has to stay."""
    if not exact:
        return names
    return tuple(name for name in (NAMES if names is None else names) if name not in (*LOWER, *LOWEST, *ON_REQUEST))


def in_rows(names: tuple[str, ...] | None, exact: bool) -> StepsTo:
    """What tells of logits how a loss can be made of them as by ``linear_cross_entropy``, if that may be used."""
    may = allowed(names, exact)
    return steps_to if may is None or LinearCrossEntropy.name in may else lambda _: None
