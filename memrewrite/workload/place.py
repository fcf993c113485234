"""Where the text TARGET points, before anything is imported: ``path/model.py[:attr]`` or ``package.module:attr``."""

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from memrewrite.records.errors import TargetError

_DOTTED = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*")


@dataclass(frozen=True)
class Source:
    """Where the target's code lies: ``place`` as the user wrote it, ``file`` None for ``package.module``."""

    place: str
    attribute: str | None
    file: Path | None

    @classmethod
    def parse(cls, target: str) -> "Source":
        """Split on the last colon. Raises ``TargetError`` for another form, and for a file that is not there."""
        place, colon, attribute = (
            (target, "", "") if target.endswith(".py") or ":" not in target else target.rpartition(":")
        )
        if colon and not (place and _DOTTED.fullmatch(attribute)):
            raise TargetError(f"Target {target!r} is not of the form path/model.py[:attr] or package.module:attr.")
        path = Path(place).expanduser()
        if path.suffix == ".py":
            if path.is_dir():
                raise TargetError(f"{place} is a folder; give path/model.py[:attr] or package.module:attr.")
            if not path.is_file():
                raise TargetError(f"There is no file {place}{_nearby(path)}.")
            return cls(place, attribute or None, path.resolve())
        if not _DOTTED.fullmatch(place) or path.is_file() or (path.exists() and not attribute):
            raise TargetError(f"{place} is not a Python file; give path/model.py[:attr] or package.module:attr.")
        if not attribute:
            raise TargetError(f"Target {target!r} names no model; give path/model.py[:attr] or package.module:attr.")
        return cls(place, attribute, None)

    @property
    def folder(self) -> Path:
        """Where the imports of the target's code are looked up."""
        return self.file.parent if self.file else Path.cwd()

    def at(self, attribute: str) -> str:
        """The attribute as a target of its own."""
        return f"{self.place}:{attribute}"


def _nearby(path: Path) -> str:
    names = [file.name for file in path.parent.glob("*.py")]
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {path.parent / close[0]}" if close else "; check the path"
