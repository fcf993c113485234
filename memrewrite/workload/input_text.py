"""The text of ``--input``, read before PyTorch is imported; ``memrewrite.workload.inputs`` says what it means."""

import difflib
import re
from dataclasses import dataclass

from memrewrite.records.errors import UsageError

_GRAMMAR = re.compile(
    r"(?:(?P<name>[A-Za-z_]\w*)=)?(?P<sizes>\d{1,12}(?:x\d{1,12})*)(?::(?P<dtype>\w+)(?::(?P<below>\d{1,18}))?)?"
)
_LARGEST = {"int8": 2**7 - 1, "int16": 2**15 - 1, "int32": 2**31 - 1, "int64": 2**63 - 1, "uint8": 2**8 - 1}
_DTYPES = ("float32", "float16", "bfloat16", "float64", "complex64", "bool", *_LARGEST)


@dataclass(frozen=True)
class InputText:
    """One ``--input``: ``dtype`` by its name in ``torch``; ``below`` is that of ``RandomInput``."""

    name: str | None
    sizes: tuple[int, ...]
    dtype: str
    below: int | None

    @classmethod
    def parse(cls, text: str) -> "InputText":
        """Read one ``--input``; raises ``UsageError`` that says what is wrong and shows the form."""
        match = _GRAMMAR.fullmatch(text.strip())
        if match is None:
            raise UsageError(
                f"Input {text!r} is not of the form [NAME=]32x3x224x224[:float32]; for integers ids=8x128:int64:50257."
            )
        sizes = tuple(int(size) for size in match["sizes"].split("x"))
        dtype = match["dtype"] or "float32"
        if dtype not in _DTYPES:
            raise UsageError(f"Input {text!r} has the unknown dtype {dtype!r}; {did_you_mean(dtype, list(_DTYPES))}")
        if 0 in sizes:
            raise UsageError(f"Input {text!r} has a size of zero; every size must be at least 1.")
        if match["below"] and dtype not in _LARGEST:
            raise UsageError(
                f"Input {text!r} bounds {dtype} values; only integer dtypes take a bound, e.g. :int64:50257."
            )
        below = int(match["below"] or 2) if dtype in _LARGEST else None
        if below is not None and not 0 < below <= _LARGEST[dtype] + 1:
            raise UsageError(f"Input {text!r} has the bound {below}, which {dtype} cannot draw below; give 1 or more.")
        return cls(match["name"], sizes, dtype, below)


def did_you_mean(name: str, known: list[str]) -> str:
    """The end of a sentence about a name that is not known: the one that was meant, or all there are."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"it has {', '.join(known) or 'none'}."
