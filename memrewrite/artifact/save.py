"""Write a rewritten model as a folder, whole or not at all.

The files are written beside the target, read back and applied to the model, and moved into place in one step.
"""

import contextlib
import inspect
import io
import os
import platform
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import nn

from memrewrite.artifact import manifest
from memrewrite.artifact.load import import_artifact
from memrewrite.artifact.render import render
from memrewrite.records.attached import report_of
from memrewrite.records.errors import InternalError, OutputError, UsageError, first_line
from memrewrite.records.outcomes import Measured
from memrewrite.records.report import Report
from memrewrite.report.files import json_text
from memrewrite.runtime.dropin import Program, own, programs
from memrewrite.runtime.likeness import describe
from memrewrite.runtime.matching import specs_of_tensors
from memrewrite.version import __version__
from memrewrite.workload.original import original_of

Check = Callable[[Path], Report | None]


def save(
    optimized: nn.Module,
    directory: str | os.PathLike[str],
    *,
    force: bool = False,
    report: Report | None = None,
    check: Check | None = None,
    weights: bool = False,
) -> None:
    """Write what ``memrewrite.optimize`` returned to the folder ``directory``, which must not exist unless ``force``.

    The result is read back and compared with ``optimized``; then ``check`` is called with the temporary folder and may
    raise to refuse it, or return a report that knows more than ``report`` (by default ``optimized.report``).
    ``weights`` adds ``weights.safetensors``, for ``safetensors.torch.load_model``.
    Raises ``OutputError`` when the folder cannot be written, ``UsageError`` when there is nothing to save or the folder
    is none to write to, and whatever ``check`` raises; then nothing is left behind and an existing folder is as it was.
    """
    target = Path(os.path.abspath(directory))
    rewritten = _programs(optimized)
    manifest.check_place(Path(directory), force=force)
    report = report or report_of(optimized)
    with _write_errors(directory), _draft(target) as draft:
        facts = _write_model(draft, optimized, rewritten)
        if weights:
            facts |= _write_weights(draft, optimized)
        _finish(draft, facts, report)
        _compare(draft, optimized, rewritten)
        if check is not None and (known := check(draft)) is not None:
            _finish(draft, facts, known)
        _move(draft, target)


def _programs(optimized: nn.Module) -> dict[str, Program]:
    found = programs(optimized)
    if not found:
        raise UsageError("The model is not a rewritten one, so there is nothing to save; optimize it first.")
    if not all(isinstance(program, Program) and "\n" in program.source for program in found.values()):
        raise UsageError("The model was made by an artifact; copy that folder instead.")
    return found


@contextlib.contextmanager
def _write_errors(directory: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(f"{directory} cannot be written: {error.strerror or error}; nothing was written.") from error


@contextlib.contextmanager
def _draft(target: Path) -> Iterator[Path]:
    """A new folder beside ``target``, on the same file system, gone at the end unless it was moved."""
    draft = target.with_name(f".{target.name}.tmp-{secrets.token_hex(6)}")
    try:
        draft.mkdir()
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _write_model(draft: Path, optimized: nn.Module, rewritten: dict[str, Program]) -> dict[str, Any]:
    """Write the code and its constants; returns what the manifest says of them."""
    likeness = describe(optimized)
    parts = {path: part for path in rewritten if (part := own(optimized.get_submodule(path))) is not None}
    constants = {path: part.constants for path, part in parts.items()}
    captured = {path: [] if part.guards is None else part.guards.captured for path, part in parts.items()}
    moving = {path: _moving(program, constants[path]) for path, program in rewritten.items()}
    sources = {path: program.source for path, program in rewritten.items()}
    (draft / manifest.MODEL).write_text(render(sources, likeness, moving, captured), encoding="utf-8")
    if any(constants.values()):
        saved = {path: {name: t.detach().cpu() for name, t in found.items()} for path, found in constants.items()}
        content = io.BytesIO()  # to a full device torch.save itself ends in an error of its own
        torch.save(saved, content)
        (draft / manifest.CONSTANTS).write_bytes(content.getbuffer())
    base = type(original_of(optimized))
    return {
        "memrewrite": __version__,
        "model": f"{base.__module__}.{base.__qualname__}",
        "source": {n.removeprefix("class "): facts["code"] for n, facts in likeness.items() if n.startswith("class ")},
        "torch": {"written_with": torch.__version__, "minimum": manifest.TORCH_MINIMUM},
        "python": platform.python_version(),
    }


def _moving(program: Program, constants: dict[str, torch.Tensor]) -> dict[str, bool]:
    """Which constants lie where the inputs do, and so have to follow the parameters."""
    device = next((spec[1] for spec in specs_of_tensors(program.leaves)), None)
    return {name: device is None or tensor.device.type == device for name, tensor in constants.items()}


def _write_weights(draft: Path, optimized: nn.Module) -> dict[str, Any]:
    """Write parameters and persistent buffers, tied ones once; the manifest says which, and which lie channels-last."""
    from safetensors import SafetensorError
    from safetensors.torch import save_model

    state = optimized.state_dict(keep_vars=True)
    if others := [name for name, value in state.items() if not isinstance(value, torch.Tensor)]:
        raise UsageError(f"weights.safetensors cannot hold {others[0]}, which is not a tensor; save without weights.")
    try:
        save_model(optimized, str(draft / manifest.WEIGHTS))
    except SafetensorError as error:  # as that says that the device is full
        raise OutputError(f"{manifest.WEIGHTS} cannot be written: {first_line(error)}; nothing was written.") from error
    except RuntimeError as error:
        raise UsageError(f"weights.safetensors cannot hold this model: {error}; save without weights.") from error
    owners: dict[int, str] = {}
    first = {name: owners.setdefault(id(tensor), name) for name, tensor in state.items()}
    channels_last = [name for name, tensor in state.items() if _is_channels_last(tensor)]
    tied = {name: owner for name, owner in first.items() if name != owner}
    return {"weights": {"tied": tied, "channels_last": channels_last}}


def _is_channels_last(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 4 and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last)


def _finish(draft: Path, facts: dict[str, Any], report: Report) -> None:
    """Write the report, as data and as a page, and the manifest over everything."""
    (draft / manifest.REPORT).write_text(json_text(report.to_json()), encoding="utf-8")
    (draft / manifest.PAGE).write_text(report.to_html(), encoding="utf-8")
    peaks = {
        "predicted_before": report.predicted_before.peak,
        "predicted_after": report.predicted_after.peak,
        "measured_before": _peak(report.measured_before),
        "measured_after": _peak(report.measured_after),
    }
    manifest.write(draft, {**facts, "budget": report.budget, "peaks": peaks})


def _peak(measured: Measured | None) -> int | None:
    return None if measured is None else measured.peak


def _compare(draft: Path, optimized: nn.Module, rewritten: dict[str, Program]) -> None:
    """Read the draft back and apply it to the model: it must run the very instructions that were verified."""
    known = set(sys.modules)
    module = import_artifact(draft)
    try:
        applied = module.apply(original_of(optimized))
    finally:
        if module.__name__ not in known:
            del sys.modules[module.__name__]
    read = programs(applied)
    if {p: _essence(found) for p, found in read.items()} != {p: _essence(found) for p, found in rewritten.items()}:
        raise InternalError("The artifact runs another program than the model; please report it.")
    mine, theirs = ([(n, b.dtype, b.shape) for n, b in m.named_buffers()] for m in (optimized, applied))
    if mine != theirs:
        raise InternalError("The artifact has other buffers than the model; please report it.")


def _essence(program: Any) -> tuple[Any, ...]:
    """Everything a program is but its text and its place: what calls it takes and the instructions it runs."""
    run = program.run
    prefix = run.__name__.removesuffix("graph")
    functions = [f for f in run.__globals__.values() if inspect.isfunction(f) and _is_generated(f.__name__, prefix)]
    code = sorted((f.__name__, _instructions(f.__code__)) for f in functions)
    calls = program.leaves, program.training, program.dtype, program.reads, program.ranges
    return program.names, program.tree, repr(calls), code


def _is_generated(name: str, prefix: str) -> bool:
    return name == f"{prefix}graph" or name.startswith((f"{prefix}segment_", f"{prefix}region_"))


def _instructions(code: CodeType) -> str:
    constants = [_instructions(c) if isinstance(c, CodeType) else c for c in code.co_consts]
    return repr((code.co_code, code.co_names, code.co_varnames, constants))


def _move(draft: Path, target: Path) -> None:
    """Put ``draft`` in the place of ``target``; what was there is gone only when the new one is there."""
    aside = target.with_name(f".{target.name}.old-{secrets.token_hex(6)}")
    replaced = os.path.lexists(target)
    try:
        if replaced:
            os.replace(target, aside)
        os.replace(draft, target)
    except BaseException:
        if aside.exists() and not target.exists():
            os.replace(aside, target)
        raise
    if replaced:
        shutil.rmtree(aside, ignore_errors=True)
