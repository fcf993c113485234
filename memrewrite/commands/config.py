"""Defaults from ``[tool.memrewrite]`` in the nearest ``pyproject.toml``; the command line wins.

Before, in ``pyproject.toml``::

    [tool.memrewrite]
    budget = "8GB"
    batch-size = 32
    input = ["32x3x224x224"]

After: ``memrewrite optimize model.py`` means ``memrewrite optimize model.py --budget 8GB --batch-size 32 --input ...``.
"""

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memrewrite.records.errors import UsageError

_WANTED: dict[type, str] = {
    str: "text",
    Path: "text",
    list: "a list of texts",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
}


def defaults(folder: Path, kinds: Mapping[str, type]) -> dict[str, Any]:
    """The options that the nearest ``pyproject.toml`` at or above ``folder`` sets, by their Python names.

    ``kinds`` maps each name that may be set (``batch_size``) to ``str``, ``int``, ``float``, ``bool``, ``list`` (of
    text) or ``Path``, which is text that is taken from the folder of the file. Raises ``UsageError`` for a file that is
    not TOML or cannot be read, an unknown option and a value of another kind.
    """
    file = next((place / "pyproject.toml" for place in _upwards(folder) if (place / "pyproject.toml").is_file()), None)
    if file is None:
        return {}
    try:
        tools = tomllib.loads(file.read_text(encoding="utf-8")).get("tool", {})
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} is not valid TOML: {error}.") from error
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}; its [tool.memrewrite] sets defaults.") from error
    table = tools.get("memrewrite", {}) if isinstance(tools, dict) else tools
    if not isinstance(table, dict):
        raise UsageError(f"tool.memrewrite in {file} is not a table; write [tool.memrewrite].")
    return {key.replace("-", "_"): _value(key, value, kinds, file) for key, value in table.items()}


def _upwards(folder: Path) -> list[Path]:
    place = folder.resolve()
    return [place, *place.parents]


def _value(key: str, value: Any, kinds: Mapping[str, type], file: Path) -> Any:
    kind = kinds.get(key.replace("-", "_"))
    if kind is None:
        names = [name.replace("_", "-") for name in kinds]
        close = difflib.get_close_matches(key, names, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(names)}."
        raise UsageError(f"[tool.memrewrite] in {file} sets the unknown option {key!r}; {hint}")
    fits = type(value) is (str if kind is Path else kind) or (kind is float and type(value) is int)
    if not fits or (kind is list and not all(isinstance(item, str) for item in value)):
        raise UsageError(f"[tool.memrewrite] in {file} sets {key} to {value!r}; it must be {_WANTED[kind]}.")
    return str(file.parent / value) if kind is Path else value
