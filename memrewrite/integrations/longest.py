"""The largest batch of texts that a framework will meet: what the longest examples make once they are collated.

A padded batch is as long as the longest of its examples, in each of their fields. So those that are the longest in any
field make the largest batch that there can be, together with as many others as a batch has.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from memrewrite.integrations.told import note
from memrewrite.records.errors import UsageError
from memrewrite.workload.step import Inputs

READ = 50_000
"""Of how many examples the lengths are looked at: reading more may take longer than planning does."""


@dataclass(frozen=True)
class Asked:
    """For which batch of a dataset to plan: one of ``count`` texts, whose tokens are in the field ``name``.

    ``longest`` is how many tokens they are to have, None for those of the longest; ``labels`` are the names of fields
    that are not tokens and may be as long. ``column`` has the lengths, where the dataset has one of that name;
    ``reads_all`` says that training looks at the length of each example anyway.
    """

    name: str
    count: int
    longest: int | None = None
    labels: Sequence[str] = ("labels",)
    column: str | None = None
    reads_all: bool = False


def largest_batch(dataset: Any, asked: Asked) -> tuple[Any, str]:
    """The dataset of the examples of the largest batch, None for those of the first one, and in words what it is.

    Examples are read, which may draw random numbers. Raises ``UsageError`` where ``longest`` is asked of no texts.
    """
    if asked.longest is not None:
        first = None if dataset is None else next(iter(dataset), None)
        return [lengthened(first, asked.longest, asked.name, asked.labels)] * asked.count, "texts as long as asked for"
    at_any_place = all(hasattr(dataset, name) for name in ("__len__", "__getitem__"))
    if not at_any_place or not len(dataset) or asked.name not in lengths(dataset[0]):
        return None, "the first batch; give longest= if others are longer"
    found = _lengths_of(dataset, asked)
    if found is None:
        return (
            None,
            f"the first batch, as lengths of more than {READ} texts are not read; give longest= for longer ones",
        )
    positions = largest(found, asked.count, asked.name)
    # A dataset of the library ``datasets`` stays one: frameworks look at its columns.
    chosen = dataset.select(positions) if hasattr(dataset, "select") else Subset(dataset, positions)
    return chosen, "the longest texts of the dataset"


def _lengths_of(dataset: Any, asked: Asked) -> list[dict[str, int]] | None:
    """The lengths of each example: of its column, where the dataset has one, else read unless there are too many."""
    if asked.column in (getattr(dataset, "column_names", None) or ()):
        return [{asked.name: length} for length in dataset[asked.column]]
    if len(dataset) > READ and not (asked.reads_all or isinstance(dataset, list | tuple)):
        return None
    return [lengths(dataset[position]) for position in range(len(dataset))]


def lengths(example: Any) -> dict[str, int]:
    """The length of each field of an example that is a row of whole numbers, as tokens and their labels are."""
    if not isinstance(example, Mapping):
        return {}
    return {str(name): len(value) for name, value in example.items() if _is_row(value)}


def _is_row(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 1 and not value.is_floating_point()
    if hasattr(value, "dtype"):  # NumPy's
        return value.ndim == 1 and value.dtype.kind in "biu"
    return isinstance(value, list | tuple) and all(isinstance(number, int) for number in value[:1])


def largest(found: Sequence[Mapping[str, int]], count: int, name: str) -> list[int]:
    """The positions of ``count`` examples of these lengths that make the largest batch, by the field ``name`` first."""

    def longest_first(field: str) -> list[int]:
        return sorted(range(len(found)), key=lambda position: -found[position].get(field, 0))

    fields = dict.fromkeys((name, *(field for each in found for field in each)))
    best = (max(range(len(found)), key=lambda position: found[position].get(field, 0)) for field in fields)
    return list(dict.fromkeys((*best, *longest_first(name))))[:count]


def lengthened(example: Any, length: int, name: str, others: Sequence[str] = ()) -> dict[str, Any]:
    """A text of that many tokens, by repeating its own, with as many of all that it has for each, and of ``others``.

    Raises ``UsageError`` for an example that has no tokens in the field ``name``.
    """
    known = lengths(example)
    if not known.get(name):
        raise UsageError(f"longest= is for texts; the examples have no tokens as {name!r}.")
    rows = {field for field, size in known.items() if size and (size == known[name] or field in others)}
    return {field: _resized(value, length) if field in rows else value for field, value in example.items()}


def _resized(value: Any, length: int) -> Any:
    times = -(-length // len(value))
    if isinstance(value, list | tuple):
        return (list(value) * times)[:length]
    return torch.as_tensor(value).repeat(times)[:length]


def planned_for(result: nn.Module, inputs: Inputs, name: str, why: str) -> None:
    """Let the report of ``result`` say what batch of texts it was planned for, and ``why`` that one."""
    tokens = inputs.kwargs.get(name, next(iter(inputs.tensors()), None))
    if not isinstance(tokens, Tensor) or tokens.is_floating_point():
        return
    note(result, f"Planned for {name} of {tuple(tokens.shape)}, {why}.")
