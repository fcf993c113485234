"""Work that two processes do together, over gloo on this machine."""

import gc
import multiprocessing
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

DEADLINE_S = 300


def together(work: Callable[..., Any], folder: Path, *given: Any) -> list[Any]:
    """What ``work(*given)``, a function of a module, returns in each of two processes, in the order of their ranks.

    Both are gone afterwards. Raises ``AssertionError`` with the traceback of one that failed.
    """
    context = multiprocessing.get_context("spawn")
    answers: Any = context.Queue()
    arguments = [(work, rank, folder / "store", given, answers) for rank in range(2)]
    processes = [context.Process(target=_run, args=each, daemon=True) for each in arguments]
    for process in processes:
        process.start()
    try:
        found = dict(answers.get(timeout=DEADLINE_S) for _ in processes)
        failed = [answer for answer in found.values() if isinstance(answer, _Failed)]
        assert not failed, failed[0].told
        return [found[rank] for rank in range(2)]
    finally:
        for process in processes:
            process.join(5)
            process.kill()


class _Failed:
    """A process that raised, and what."""

    def __init__(self, told: str) -> None:
        self.told = told


def _run(work: Callable[..., Any], rank: int, store: Path, given: tuple[Any, ...], answers: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        answers.put((rank, work(*given)))
    except Exception:
        answers.put((rank, _Failed(traceback.format_exc())))
    finally:
        gc.collect()  # DDP goes first: it would wait for the group's threads while holding the interpreter's lock
        dist.destroy_process_group()
