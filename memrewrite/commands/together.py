"""One command in several processes, as torchrun starts them: the first answers, and all end as it does.

Each says when it has loaded the model and when it is done, so that none waits for another that is gone, and an error of
one is the first one's to tell.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from memrewrite.commands.launched import is_first, processes
from memrewrite.optimizing.ranks import PATIENCE
from memrewrite.records.errors import InternalError, MeasurementError, MemrewriteError, UsageError
from memrewrite.records.mesh import Mesh


class _AgreedError(Exception):
    """Every process knows of the error that caused this."""


def run(mesh: str, work: Callable[[Callable[[], None]], int]) -> int:
    """The exit code of ``work`` in the first process, which each calls once; raises what any of them raises.

    ``work`` is given what it calls once the model is loaded, and nothing but a plan is left to be made together.
    """
    asked, count = Mesh.parse(mesh), processes()
    if asked.processes != count:
        raise UsageError(
            f"A launcher started {count} processes, and the mesh {asked} has {asked.processes}; give --mesh "
            f"ddp={count} or fsdp={count} say, or start one process."
        )
    loaded = False

    def ready() -> None:
        nonlocal loaded
        loaded = True
        _agree(None, 0)

    with _group():
        code, error = 0, None
        try:
            code = work(ready)
        except _AgreedError as known:
            raise known.__cause__ or known from None
        except Exception as found:
            error = found
        try:
            return _agree(error, code)
        except _AgreedError as known:
            raise known.__cause__ or known from None


@contextlib.contextmanager
def _group() -> Iterator[None]:
    """The processes can talk to each other; a target that makes a group of its own finds this one.

    None of it is left afterwards: a thread of it that returns to an interpreter which is ending ends the process by a
    signal. PyTorch's functions on a group have, as a default, the one that is there when they are imported, and would
    keep this one; so they are imported first (seen in PyTorch 2.13 and 2.14).
    """
    import torch.distributed.nn.functional  # noqa: F401

    dist.init_process_group("gloo", timeout=PATIENCE)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _agree(error: Exception | None, code: int) -> int:
    """The exit code of the first process; raises an error for the first that has one, of this process its own."""
    told: list[Any] = [None] * dist.get_world_size()
    try:
        dist.all_gather_object(told, (_sendable(error), code))
    except RuntimeError:  # as gloo says that a process is gone, which is what an error of gloo's before was, too
        gone = MeasurementError("A process ended before the command did.")
        raise _AgreedError from error if isinstance(error, MemrewriteError) else gone
    for each, _ in told:
        if each is not None:
            raise _AgreedError from error or each
    return int(told[0][1])


def _sendable(error: Exception | None) -> MemrewriteError | None:
    if error is None or isinstance(error, MemrewriteError):
        return error
    return InternalError(f"internal error in another process, {type(error).__name__}: {error}".splitlines()[0])


def silent(request: Any) -> Any:
    """The request of a process that does not answer: it writes and prints nothing."""
    nothing = dict.fromkeys(("output", "report", "png", "snapshot", "json"))
    return request if is_first() else replace(request, **nothing, quiet=True, verbose=False)
