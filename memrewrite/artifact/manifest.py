"""``manifest.json``: what an artifact holds, so that it is found out when it is not what was written."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from memrewrite.records.errors import UsageError

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
MODEL = "memrewrite_model.py"
CONSTANTS = "constants.pt"
REPORT = "report.json"
PAGE = "report.html"
WEIGHTS = "weights.safetensors"
# Everything an artifact's folder may hold; Python itself adds the cache when the model file is imported.
OWN = frozenset({MANIFEST, MODEL, CONSTANTS, REPORT, PAGE, WEIGHTS, "__pycache__"})
TORCH_MINIMUM = "2.11"


def write(folder: Path, facts: dict[str, Any]) -> None:
    """Write the manifest of the files in ``folder``, with ``facts`` about them."""
    files = {file.name: _digest(file) for file in sorted(folder.iterdir()) if file.is_file() and file.name != MANIFEST}
    manifest = {"schema_version": SCHEMA_VERSION, **facts, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def find(folder: Path) -> Path:
    """The manifest's file in ``folder``; raises ``UsageError`` where there is none."""
    file = folder / MANIFEST
    if not file.is_file() or file.is_symlink():
        raise UsageError(f"{folder} is no artifact of memrewrite: it holds no {MANIFEST}.")
    return file


def read(folder: Path) -> dict[str, Any]:
    """The manifest in ``folder``, every file in it checked; raises ``UsageError`` for one that is not as written."""
    try:
        return _read(folder, find(folder))
    except OSError as error:
        raise UsageError(f"{error.filename or folder} cannot be read: {error.strerror}; make it readable.") from error


def _read(folder: Path, file: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        schema, files, facts = manifest["schema_version"], manifest["files"], manifest.get("torch", {})
        if not (isinstance(files, dict) and isinstance(facts, dict)):
            raise TypeError("a table is missing")
        if not isinstance(facts.get("minimum", ""), str):
            raise TypeError("a version is text")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"{file} is not a manifest as memrewrite writes it; make the artifact again.") from error
    if schema != SCHEMA_VERSION:
        raise UsageError(f"{file} has schema {schema!r}, known is {SCHEMA_VERSION}; use the memrewrite that wrote it.")
    for name, digest in files.items():
        _check(folder, name, digest)
    if MODEL not in files:
        raise UsageError(f"{file} names no {MODEL}; make the artifact again.")
    return {**manifest, "files": files}


def check_place(directory: Path, *, force: bool) -> None:
    """Raise ``UsageError`` when no artifact could be put at ``directory``; ``force`` allows replacing one."""
    target = Path(os.path.abspath(directory))
    if not target.parent.is_dir():
        raise UsageError(f"There is no folder {target.parent} to put {directory} in; make it first.")
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise UsageError(f"{directory} cannot be written, as its folder may not be; give another folder.")
    if not os.path.lexists(target):
        return
    if not force:
        raise UsageError(f"{directory} exists already; give another folder, or force to replace it.")
    if target.is_symlink() or not target.is_dir():
        raise UsageError(f"{directory} is not a folder; give another one, or remove it.")
    if not os.access(target, os.R_OK | os.W_OK | os.X_OK):
        raise UsageError(f"{directory} may not be replaced; give another folder, or make it writable.")
    if foreign := sorted({file.name for file in target.iterdir()} - OWN):
        raise UsageError(f"{directory} holds {foreign[0]}, which memrewrite did not write; give another folder.")


def _check(folder: Path, name: str, digest: Any) -> None:
    # An artifact is flat; anything but a plain name is an attempt to have another file read.
    if name in ("", ".", "..") or any(sign in name for sign in "/\\:\0"):
        raise UsageError(f"{folder / MANIFEST} names {name!r}, which is not a plain file name; do not use it.")
    file = folder / name
    if file.is_symlink():
        raise UsageError(f"{file} is a link, which an artifact never holds; do not use it.")
    if not file.is_file():
        raise UsageError(f"{file} is missing; make the artifact again.")
    if _digest(file) != digest:
        raise UsageError(f"{file} is not what was written (its SHA-256 differs); make the artifact again.")


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
