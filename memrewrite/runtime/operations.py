"""What generated programs call by name: the one table that the generator, drop-ins and artifacts read. Torch only.

In the order in which their files need each other, because an artifact has all of them in one.
"""

from collections.abc import Callable
from typing import Any

from memrewrite.runtime.attention import attention_in_pieces
from memrewrite.runtime.batch_norm import normalize, rectify
from memrewrite.runtime.compiled import draw, in_turn, settled
from memrewrite.runtime.cross_entropy import chunked_cross_entropy
from memrewrite.runtime.fused import fused
from memrewrite.runtime.launches import launch
from memrewrite.runtime.lazy_output import lazy_output
from memrewrite.runtime.linear_cross_entropy import linear_cross_entropy
from memrewrite.runtime.room import make_room
from memrewrite.runtime.segment import as_autocast, keep, once, run_segment
from memrewrite.runtime.swish import exact_swish, swish
from memrewrite.runtime.tied_embedding import tied_embedding
from memrewrite.runtime.tiles import in_pieces, in_tiles

Operation = Callable[..., Any]


def _named(*operations: Operation) -> dict[str, Operation]:
    return {operation.__name__: operation for operation in operations}


# What the generator puts around nodes, before all of them, or in the place of an output.
AROUND_NODES = _named(
    *(
        make_room,
        draw,
        in_turn,
        settled,
        run_segment,
        keep,
        once,
        normalize,
        rectify,
        launch,
        fused,
        in_tiles,
        in_pieces,
    ),
    lazy_output,
)
# What a pass may put into a graph, as the target of a node.
IN_GRAPHS = _named(
    as_autocast, swish, exact_swish, tied_embedding, chunked_cross_entropy, linear_cross_entropy, attention_in_pieces
)
