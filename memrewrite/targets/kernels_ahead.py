"""Compiled chains, several at a time: processes beside this one make the code that is called here afterwards.

A chain takes half a second to compile, most of it in Python, and a plan for the lowest peak of a language model meets
fifty to a hundred. What other processes make lies where ``runtime.kernels`` looks for it. They compile alone: no
tensors are there, and which configuration of a kernel is the fastest is timed here, by the one process that runs.
"""

import contextlib
import inspect
import pickle
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.compiler import config

from memrewrite.process.beside import Crew, free_cpus
from memrewrite.records.tensor_like import TensorLike
from memrewrite.runtime import fused, kernels
from memrewrite.runtime.kernel_files import Code, is_kept
from memrewrite.runtime.kernels import Kernel
from memrewrite.runtime.operations import AROUND_NODES, IN_GRAPHS
from memrewrite.torch_internals.fake_tensors import FakeTensorMode

CHAINED = {torch.ops.memrewrite.chain.default, torch.ops.memrewrite.chain_slopes.default}
"""The operators that call what is compiled."""
_MOST = 6  # processes
_ROOM = 8 * 2**30  # bytes that the device has free for each, of which its context takes a sixteenth
_SECONDS = 120.0  # until one that is not done is no longer waited for
_SETTINGS = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
_NAMES = """
import builtins, importlib, math, operator
import torch
aten = torch.ops.aten
inf, nan = math.inf, math.nan
"""  # what chains read of the head of a program; one that reads more is compiled where it is called
_crews: list[Crew] = []  # the one there is


@dataclass(frozen=True)
class Job:
    """A call of a chain, or of its gradients (``arguments`` of the operator, as ``transients.like`` tells them).

    The chain is pickled, or it is text. ``file`` is where the code is to be.
    """

    name: str
    chain: bytes | str
    arguments: tuple[Any, ...]
    file: str


@contextlib.contextmanager
def compiling_ahead(device: torch.device) -> Iterator[None]:
    """Have processes for ``Ahead`` meanwhile, as far as CPUs and the device have room for them."""
    count = min(_MOST, free_cpus())
    if device.type != "cuda" or not fused.has_triton():
        count = 0
    elif count:
        count = min(count, torch.cuda.mem_get_info(device)[0] // _ROOM)
    if count < 2 or _crews:
        yield
        return
    _crews.append(Crew(count, prepare, _SETTINGS))
    try:
        yield
    finally:
        stop_ahead()


def stop_ahead() -> None:
    """End the processes, if there are any: what the device has in use is to be this process's."""
    while _crews:
        _crews.pop().close()


class Ahead:
    """Code that processes make for calls, each the name of a chain and what its operator is given; None for another.

    They begin with the last of these, while who calls this begins with the first.
    """

    def __init__(self, calls: Sequence[tuple[str, tuple[Any, ...]] | None]) -> None:
        self._futures: dict[int, Future[bool | None]] = {}
        jobs: dict[str, Job] = {}
        places: dict[int, str] = {}
        for place, call in enumerate(calls if _crews else ()):
            if call is not None and (job := _job(call)) is not None:
                jobs[job.file], places[place] = job, job.file
        if len(jobs) > 1:
            made = dict(zip(jobs, _crews[0].asked(compiled, [(job,) for job in jobs.values()]), strict=True))
            self._futures = {place: made[file] for place, file in places.items()}

    def settle(self, place: int) -> None:
        """Have the code for a call, as far as a process is at it; else it is for who calls it to compile."""
        future = self._futures.get(place)
        if future is not None and not future.cancel():
            try:
                future.result(_SECONDS)
            except TimeoutError:
                stop_ahead()


def prepare(device: str = "cuda") -> None:
    """Compile what nobody calls, and keep no kernel of it: the first time, all that compilers consist of is loaded."""

    def averaged(given: Sequence[Any]) -> list[Tensor]:
        return [given[0] * given[0].float().mean(-1, keepdim=True)]

    settings: Any = config
    with contextlib.suppress(Exception), settings.patch(force_disable_caches=True), _nothing_is_there():
        Kernel(averaged, "averaged")([torch.empty(64, 64, dtype=torch.bfloat16, device=device)])


def compiled(job: Job) -> bool:
    """Write the code of a job to its file; False where that cannot be done here, or this process has other settings."""
    try:
        return _compiled(job)
    except Exception:  # whatever compilers raise, who calls the chain is told
        return False


def _compiled(job: Job) -> bool:
    if isinstance(job.chain, bytes):
        chain = pickle.loads(job.chain)  # noqa: S301  (by the process that started this one)
    else:
        names: dict[str, Any] = {**AROUND_NODES, **IN_GRAPHS}
        exec(_NAMES + job.chain, names)  # noqa: S102  (our own generated text)
        chain = names[job.name]
    fused.CHAINS[job.name] = chain
    with _nothing_is_there():
        kernel, given = _called(job.name, job.arguments)
        if kernel.file(kernels.look_of(given)) != job.file:
            return False
        kernel(given)
    return is_kept(job.file)


@contextlib.contextmanager
def _nothing_is_there() -> Iterator[None]:
    """Tensors are fake meanwhile, and code is made and not run."""
    with torch.no_grad(), FakeTensorMode(), mock.patch.object(kernels, "Code", _Unrun):
        yield


class _Unrun(Code):
    """Code that gives as many tensors as it has to, and computes none."""

    def __init__(self, graph: Any, inputs: Any) -> None:
        super().__init__(graph, inputs)
        self._results = len(graph.graph.output_node().args[0])

    def __call__(self, *args: Any) -> list[Tensor]:
        """Run nothing."""
        return [torch.empty(()) for _ in range(self._results)]


def _job(call: tuple[str, tuple[Any, ...]]) -> Job | None:
    """What another process is to do for such a call; None where there is nothing that it could."""
    name, arguments = call
    chain: Any = fused.CHAINS.get(name)
    if chain is None or fused.calls_a_graph(chain):
        return None
    with torch.no_grad(), FakeTensorMode():
        kernel, given = _called(name, arguments)
        file = kernel.file(kernels.look_of(given))
    if is_kept(file):
        return None
    if getattr(chain, "__module__", None) is not None:  # else pickle asks each module that is there for the name
        with contextlib.suppress(pickle.PicklingError, AttributeError, TypeError):
            return Job(name, pickle.dumps(chain), arguments, file)
    try:
        return Job(name, inspect.getsource(chain), arguments, file)
    except (OSError, TypeError):  # it has no text
        return None


def _called(name: str, arguments: tuple[Any, ...]) -> tuple[Kernel, list[Tensor | None]]:
    """The kernel for a call, and what stands for what it is given."""
    return fused.kernel_for(name, *map(_stand_in, arguments))


def _stand_in(value: Any) -> Any:
    if isinstance(value, TensorLike):
        return value.empty()
    return [_stand_in(each) for each in value] if isinstance(value, tuple) else value
