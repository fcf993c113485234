"""Files that are written whole or not at all."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from memrewrite.records.errors import OutputError


@contextlib.contextmanager
def whole(file: Path) -> Iterator[Path]:
    """A name beside ``file`` to write to; it becomes ``file`` at the end, or is gone where anything went wrong.

    What a link leads to is replaced, and not the link. What is no file, such as a device or a pipe, is written to as it
    stands. Raises ``OutputError`` when the disk refuses.
    """
    place = Path(os.path.realpath(file))  # a link stays one
    draft = place.with_name(f".{place.name}.{os.getpid()}")
    try:
        if file.exists() and not file.is_file() and not file.is_dir():
            yield file
            return
        try:
            yield draft
            os.replace(draft, place)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(f"{file} cannot be written: {error.strerror}; it is as it was.") from error


def fill(file: Path, content: bytes) -> None:
    """Write ``content`` to ``file`` as ``whole`` does."""
    with whole(file) as draft:
        draft.write_bytes(content)
