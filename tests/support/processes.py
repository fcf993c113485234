"""Work that some processes do together, over gloo on this machine."""

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

DEADLINE_S = 300
# What every one of them needs, and takes seconds to import: once, in the process that they are forked from.
PRELOADED = [
    "torch._dynamo",
    "torch.distributed.tensor.parallel",
    "torch.distributed.fsdp",
    "memrewrite.optimizing.run",
]


def together(work: Callable[..., Any], folder: Path, *given: Any, count: int = 2) -> list[Any]:
    """What ``work(*given)``, a function of a module, returns in each of ``count`` processes, in the order of ranks.

    All are gone afterwards. Raises ``AssertionError`` with the traceback of one that failed. Where all wait for ever,
    it prints where they were, and they start once more: seen twice in some thirty runs of all slow tests, and in none
    of 72 of the same work alone.
    """
    with contextlib.suppress(TimeoutError):
        return _together(work, folder, *given, count=count)
    stacks = "\n".join(each.read_text() for each in sorted(folder.glob("stacks *")))
    print(f"No process gave an answer within {DEADLINE_S} s:\n{stacks}", file=sys.__stderr__)
    (folder / "store").unlink()
    return _together(work, folder, *given, count=count)


def _together(work: Callable[..., Any], folder: Path, *given: Any, count: int) -> list[Any]:
    """The same once; raises ``TimeoutError`` where all wait for ever. All is handed over in files: starting a process
    that ends before it has read all of its arguments would never return."""
    (folder / "work").write_bytes(pickle.dumps((work, given)))
    context = multiprocessing.get_context("forkserver")  # which has no threads
    context.set_forkserver_preload(PRELOADED)
    processes = [context.Process(target=_run, args=(rank, count, folder), daemon=True) for rank in range(count)]
    for process in processes:
        process.start()
    answers, end = [folder / f"answer {rank}" for rank in range(count)], time.monotonic() + DEADLINE_S
    try:
        for process, answer in zip(processes, answers, strict=True):
            while process.is_alive() and not answer.exists() and time.monotonic() < end:
                time.sleep(0.05)
            if all(each.is_alive() for each in processes) and not any(each.exists() for each in answers):
                raise TimeoutError
            assert answer.exists(), f"a process gave no answer; its exit code is {process.exitcode}"
        found = [pickle.loads(answer.read_bytes()) for answer in answers]
        failed = [each.told for each in found if isinstance(each, _Failed)]
        assert not failed, failed[0]
        return found
    finally:
        for process in processes:
            process.join(5)
            process.kill()


class _Failed:
    """A process that raised, and what."""

    def __init__(self, told: str) -> None:
        self.told = told


def _run(rank: int, count: int, folder: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    stacks = (folder / f"stacks {rank}").open("w")
    faulthandler.dump_traceback_later(DEADLINE_S - 10, file=stacks)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=count)
    try:
        work, given = pickle.loads((folder / "work").read_bytes())
        found = work(*given)
    except Exception:
        found = _Failed(traceback.format_exc())
    unfinished = folder / f"unfinished {rank}"
    unfinished.write_bytes(pickle.dumps(found))
    unfinished.rename(folder / f"answer {rank}")
    faulthandler.cancel_dump_traceback_later()
    del found
    gc.collect()  # DDP goes first: it would wait for the group's threads while holding the interpreter's lock
    dist.destroy_process_group()
