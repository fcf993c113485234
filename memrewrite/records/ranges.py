"""Ranges of sizes that the user names: ``x:2=64..256`` says that size 2 of the input x varies from 64 to 256.

    memrewrite.optimize(model, images, budget="8GB", dynamic={"x": {2: (64, 256), 3: (64, 256)}})
    memrewrite optimize model.py --budget 8GB --dynamic x:2=64..256 --dynamic x:3=64..256

The result runs at all of these sizes, and the budget holds: it is planned, verified and measured at the largest, to
which the example is brought by repeating or cutting its values. With a named input are enlarged all tokens, masks and
labels (whole numbers or truth values of more than one dimension) that have the same size at the same dimension, and for
dimension 0 all inputs that do. Smaller inputs run the original forward, with the warning; larger ones are told of as
without ranges. A forward that does not let such a size vary is refused.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from memrewrite.records.errors import UsageError

_GRAMMAR = re.compile(r"(?P<name>[A-Za-z_]\w*):(?P<dim>\d{1,3})=(?P<least>\d{1,12})\.\.(?P<most>\d{1,12})")
_FORM = "write NAME:DIM=MIN..MAX, as in x:2=64..256"


@dataclass(frozen=True)
class Range:
    """From ``least`` to ``most`` may be the size of the input ``name`` at the dimension ``dim``, counted from 0.

    ``name`` is a parameter of forward, or the keyword that the input is passed as. A range is ``implied`` where not the
    user named it, but that of another input reaches this one. Making one raises ``UsageError`` for sizes that cannot be
    meant.
    """

    name: str
    dim: int
    least: int
    most: int
    implied: bool = False

    def __post_init__(self) -> None:
        numbers = (self.dim, self.least, self.most)
        if not isinstance(self.name, str) or any(type(number) is not int for number in numbers):
            raise UsageError(f"Range {self} is not made of a name and whole numbers; {_FORM}.")
        if self.dim < 0:
            raise UsageError(f"Range {self} has a negative dimension; count dimensions from 0.")
        if self.least < 1:
            raise UsageError(f"Range {self} begins below 1; the smallest size is 1.")
        if self.least > self.most:
            raise UsageError(f"Range {self} ends before it begins; give the smaller size first.")
        if self.most < 2:
            raise UsageError(f"Range {self} ends at 1; a size that varies has to reach 2.")

    def __str__(self) -> str:
        return f"{self.name}:{self.dim}={self.least}..{self.most}"

    @property
    def words(self) -> str:
        """What varies."""
        return f"size {self.dim} of {self.name}"

    @classmethod
    def parse(cls, text: str) -> "Range":
        """Read ``x:2=64..256``; raises ``UsageError`` that says what is wrong."""
        match = _GRAMMAR.fullmatch(text.strip()) if isinstance(text, str) else None
        if match is None:
            raise UsageError(f"Range {text!r} is not of a form that is known; {_FORM}.")
        return cls(match["name"], int(match["dim"]), int(match["least"]), int(match["most"]))


Ranges = Mapping[str, Mapping[int, tuple[int, int]]] | Iterable[str | Range]
"""Ranges as they are given: ``{"x": {2: (64, 256)}}``, or texts that ``Range.parse`` reads."""


def parse_ranges(given: Ranges | None) -> tuple[Range, ...]:
    """What was given, each range once.

    Raises ``UsageError`` for what is neither of the two forms, for sizes that cannot be meant, and for two ranges of
    one dimension.
    """
    if isinstance(given, Mapping):
        found = [Range(name, dim, *sizes) for name, dims in given.items() for dim, sizes in _of_input(name, dims)]
    elif not isinstance(given, Iterable | None):
        raise UsageError(f"dynamic={given!r} names no sizes; give e.g. {{'x': {{2: (64, 256)}}}}.")
    else:
        texts = [given] if isinstance(given, str) else given or ()
        found = [each if isinstance(each, Range) else Range.parse(each) for each in texts]
    places = [(each.name, each.dim) for each in found]
    if twice := next((each for each, place in zip(found, places, strict=True) if places.count(place) > 1), None):
        raise UsageError(f"There are several ranges for {twice.words}; give one.")
    return tuple(found)


def _of_input(name: str, dims: object) -> list[tuple[int, tuple[int, int]]]:
    """The sizes of one input by dimension."""
    if not isinstance(dims, Mapping):
        raise UsageError(f"The ranges of {name!r} are {dims!r}; give sizes by dimension, as in {{2: (64, 256)}}.")
    for dim, sizes in dims.items():
        if not isinstance(sizes, tuple | list) or len(sizes) != 2:
            raise UsageError(
                f"The range of {name!r} at dimension {dim!r} is {sizes!r}; give two sizes, as in (64, 256)."
            )
    return [(dim, tuple(sizes)) for dim, sizes in dims.items()]
