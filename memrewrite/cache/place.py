"""Where plans are kept: what is asked for, what the environment says, or the system's habit. Needs no PyTorch."""

import os
from pathlib import Path

from memrewrite.records.errors import UsageError

VARIABLE = "MEMREWRITE_CACHE"
OFF, USUAL = ("off", "0"), ("", "on", "1")

Asked = str | os.PathLike[str] | bool | None
"""A folder, False for none, None or True for what the environment says, else the user's folder for caches."""


def folder(asked: Asked = None) -> Path | None:
    """The folder of plans, which need not be there, None where none are to be kept.

    Raises ``UsageError`` for what is no folder.
    """
    if asked is False:
        return None
    if asked is None or asked is True:
        said = os.environ.get(VARIABLE, "")
        if said.lower() in OFF:
            return None
        return _usual() if said.lower() in USUAL else _checked(Path(said), VARIABLE)
    if not isinstance(asked, str | os.PathLike) or not os.fspath(asked):
        raise UsageError(f"The cache {asked!r} is no folder; give its path, False for none, or None for the usual one.")
    return _checked(Path(asked), "The cache")


def _usual() -> Path:
    from platformdirs import user_cache_path  # not every run needs it

    return user_cache_path("memrewrite", appauthor=False) / "plans"


def _checked(place: Path, who: str) -> Path:
    if os.path.lexists(place) and not place.is_dir():
        raise UsageError(f"{who} is to be in {place}, which is not a folder; name another one.")
    return place.absolute()
