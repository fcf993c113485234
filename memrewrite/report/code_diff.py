"""What a rewrite changed in the code of a graph, module by module.

Generated code says in a comment which submodule a statement comes from (``  # blocks.0.act``). The statements of each
submodule are compared by themselves, so that a segment, which moves statements into a function, shows nothing but its
own lines::

    == blocks.0.act
    -sigmoid = aten.sigmoid.default(linear)
    -mul = aten.mul.Tensor(linear, sigmoid)
    +silu_default = aten.silu.default(linear)

Where a local is dropped (``;  x = None``) or a submodule named (``self_norm = self.norm``) is left out: it follows from
the rest.
"""

import difflib
import re
from collections.abc import Iterator

from memrewrite.report.text import plain
from memrewrite.simulate.memory.places import comment, path_in

WHOLE = "the model itself"
_DROPPED = re.compile(r";  [\w =]+ = None$")
_NAMED = re.compile(r" *self_\w+ = (getattr\(.*\)|[\w.]+)$")


def code_diff(before: dict[str, str], after: dict[str, str]) -> str:
    """The generated code of each region, by its path, against what became of it; empty where nothing changed.

    Names of submodules are foreign text: what cannot be printed is spelled out.
    """
    parts = []
    for region, source in after.items():
        old, new = _by_module(before[region], region), _by_module(source, region)
        for path in dict.fromkeys([*old, *new]):
            lines = _changed(old.get(path, []), new.get(path, []))
            if lines:
                parts.append("\n".join([f"== {plain(path or WHOLE)}", *map(plain, lines)]))
    return "\n\n".join(parts)


def _changed(old: list[str], new: list[str]) -> list[str]:
    """A unified diff without the lines that would name files."""
    return list(difflib.unified_diff(old, new, lineterm="", n=1))[2:]


def _by_module(source: str, region: str) -> dict[str, list[str]]:
    """The statements of each submodule by its path in the model; functions' heads and ends are the region's own."""
    found: dict[str, list[str]] = {}
    for line in _functions(source):
        path = path_in(line)
        code = line.removesuffix(comment(path)).removeprefix("    ") if path else line
        found.setdefault(path or region, []).append(_DROPPED.sub("", code))
    return found


def _functions(source: str) -> Iterator[str]:
    """The lines of every function, heads included, that do more than name a submodule."""
    inside = False
    for line in source.splitlines():
        inside = line.startswith("def ") or (inside and line.startswith("    "))
        if inside and not _NAMED.fullmatch(line):
            yield line
