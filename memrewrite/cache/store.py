"""Plans as files, one for each: a zip of ``plan.json``, which is data, and of the tensors that its programs hold.

A file is written under another name and then put in its place, so that no process reads half of one. What is damaged
counts as missing and is removed. Needs no PyTorch.
"""

import io
import json
import zipfile
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memrewrite.cache.place import Asked, folder
from memrewrite.records.errors import OutputError
from memrewrite.report.writing import fill

_VERSION = 1  # of the files and of what stands in them
_ENDING = ".plan"
_FACTS, _TENSORS = "plan.json", "constants.pt"
_LARGEST = 2**28  # bytes of a file; where a model holds more tensors than that, planning again is no dearer
_DAMAGE = (OSError, ValueError, LookupError, TypeError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)


@dataclass(frozen=True)
class Entry:
    """One plan: ``facts`` is plain data for JSON, ``tensors`` what ``torch.save`` made of the rest."""

    facts: dict[str, Any]
    tensors: bytes = b""


@dataclass(frozen=True)
class Listed:
    """What a list of entries says of one: its key, size in bytes, time in seconds since 1970, and facts in words."""

    key: str
    bytes: int
    written: float
    facts: dict[str, Any]


@dataclass(frozen=True)
class Store:
    """The plans in a folder, which is made when the first one comes."""

    folder: Path

    def get(self, key: str) -> Entry | None:
        """The entry of this key; None where there is none, or none that can be read."""
        file = self._file(key)
        try:
            return _read(file.read_bytes(), key)
        except FileNotFoundError:
            return None
        except _DAMAGE:
            self.drop(key)
            return None

    def put(self, key: str, entry: Entry) -> None:
        """Keep an entry, where there is room and the right to."""
        content = _written(entry, key)
        with suppress(OSError, OutputError):  # then the next process plans again
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if len(content) <= _LARGEST:
                fill(self._file(key), content)

    def drop(self, key: str) -> None:
        """Remove an entry, if it is there."""
        with suppress(OSError):
            self._file(key).unlink()

    def listed(self) -> list[Listed]:
        """All entries that can be read, the newest first."""
        found = []
        for file in self._files():
            with suppress(*_DAMAGE):  # gone by now, or no plan
                about, content = file.stat(), file.read_bytes()
                facts = _read(content, file.stem).facts
                found.append(Listed(file.stem, about.st_size, about.st_mtime, facts["about"]))
        return sorted(found, key=lambda each: -each.written)

    def clear(self) -> tuple[int, int]:
        """Remove every entry, and what a process left that was ended while it wrote: how many entries, and all bytes.

        Nothing is read, so that it takes no longer for large ones.
        """
        files, freed = self._files(), 0
        drafts = self.folder.glob(f".*{_ENDING}.*")
        for file in (*files, *drafts):
            with suppress(FileNotFoundError):  # another process was faster
                size = file.stat().st_size
                file.unlink()
                freed += size
        return len(files), freed

    def _file(self, key: str) -> Path:
        return self.folder / f"{key}{_ENDING}"

    def _files(self) -> list[Path]:
        return [file for file in self.folder.glob(f"*{_ENDING}") if file.is_file()]


def store_in(asked: Asked) -> Store | None:
    """The store in the folder that is meant, None for none; raises ``UsageError`` for what is no folder."""
    found = folder(asked)
    return None if found is None else Store(found)


def _written(entry: Entry, key: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr(_FACTS, json.dumps({"version": _VERSION, "key": key, **entry.facts}))
        packed.writestr(_TENSORS, entry.tensors)
    return buffer.getvalue()


def _read(content: bytes, key: str) -> Entry:
    with zipfile.ZipFile(io.BytesIO(content)) as packed:  # which checks sums
        facts = json.loads(packed.read(_FACTS))
        if (facts["version"], facts["key"]) != (_VERSION, key):
            raise ValueError("another entry")
        return Entry(facts, packed.read(_TENSORS))
