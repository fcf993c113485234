"""Operators on lists of tensors that are spread over a mesh, as optimizers use them. Read in PyTorch 2.11 to 2.14.

How a result is spread is found for each tensor of a list on its own, but each time by a look at the whole lists: for
the many hundred parameters of a large model this takes longer than the rest of a simulated step. Most of them are
alike, so that a list of those that differ tells as much. PyTorch 2.11 keeps the function it looks with from its start:
there nothing changes.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

_ONE_BY_ONE = ("aten::_foreach_", "aten::_fused_")  # what the names of operators begin with that treat each alone


@contextlib.contextmanager
def alike_found_once() -> Iterator[None]:
    """Find once how the results for tensors of a list are spread that are given alike; the same is found as before."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    name = "propagate_op_sharding_non_cached"
    find: Any = getattr(ShardingPropagator, name, None)
    with contextlib.nullcontext() if find is None else mock.patch.object(ShardingPropagator, name, _found_by(find)):
        yield


def _found_by(find: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def found(propagator: Any, schema: Any) -> Any:
        places = _places(schema)
        if places is None:
            return find(propagator, schema)
        short = find(propagator, _shortened(schema, places))
        spread = short.output_spec
        if short.needs_redistribute or not (spread is None or isinstance(spread, tuple)):
            return find(propagator, schema)
        return short if spread is None else replace(short, output_spec=tuple(spread[i] for i in places))

    return found


def _places(schema: Any) -> list[int] | None:
    """Which of those that differ each element of the lists is; None where all differ or nothing is known of that."""
    lists = [each for each in schema.args_schema if isinstance(each, list | tuple) and each]
    apart = schema.op.name().startswith(_ONE_BY_ONE) and len({len(each) for each in lists}) == 1
    if not apart or any(isinstance(each, list | tuple) for each in schema.kwargs_schema.values()):
        return None
    numbers: dict[Any, int] = {}
    given = zip(*lists, strict=True)
    places = [numbers.setdefault(tuple((type(each), each) for each in one), len(numbers)) for one in given]
    return places if len(numbers) < len(places) else None


def _shortened(schema: Any, places: list[int]) -> Any:
    """The call with the first of all elements that are alike."""
    first = [places.index(number) for number in range(max(places) + 1)]
    args = tuple(type(a)(a[i] for i in first) if isinstance(a, list | tuple) and a else a for a in schema.args_schema)
    return type(schema)(schema.op, args, schema.kwargs_schema, schema.schema_info)
