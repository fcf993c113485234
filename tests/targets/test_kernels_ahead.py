"""Chains that other processes compile before they are called: their code is found, and is what is compiled here."""

import sys
import threading
import types
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from memrewrite.process.beside import Crew
from memrewrite.runtime import fused, kernels
from memrewrite.runtime.kernel_files import is_kept
from memrewrite.runtime.texts import run_text
from memrewrite.targets import kernels_ahead
from memrewrite.targets.kernels_ahead import Ahead, Job, _job, compiled, compiling_ahead, prepare
from memrewrite.targets.transients import like

SOURCE = """import math
import torch

aten = torch.ops.aten

TREE_0 = treespec_loads


def chain_normed_ahead(x, w):
    h = aten.to.dtype(x, torch.float32)
    h = aten.mul.Tensor(h, aten.rsqrt.default(aten.mean.dim(aten.mul.Tensor(h, h), [-1], True)))
    return aten.mul.Tensor(h, w)


PROGRAM = 1
"""
NAME = "chain_normed_ahead"
X, W = torch.randn(4, 8, 16), torch.randn(16)
FORWARD = NAME, (like([X, W]),)


def slopes_of(gradient: Tensor) -> tuple[str, Any]:
    return NAME, (like([X, W]), like([gradient]), (True, True), (0, 1, 2, 0))


@pytest.fixture(autouse=True)
def chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A chain as a program has it, no code of which is kept; compilers do less, as in ``test_kernel_files``."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.compiler.reset()
    namespace: dict[str, Any] = {"treespec_loads": None}
    run_text(SOURCE, namespace)
    fused.CHAINS[NAME] = namespace[NAME]
    with torch._inductor.config.patch(cpp_cache_precompile_headers=False):
        yield namespace[NAME]
    del fused.CHAINS[NAME]


def job_of(call: tuple[str, Any]) -> Job:
    found = _job(call)
    assert found is not None
    return found


def called(arguments: tuple[Any, ...]) -> list[Tensor]:
    """What a call gives though nothing may be compiled."""
    refused = mock.patch.object(kernels.Kernel, "_compiled", side_effect=AssertionError("Dynamo was asked"))
    with torch.no_grad(), refused:
        kernel, given = fused.kernel_for(NAME, *arguments)
        return kernel(given)


def test_code_that_was_made_ahead_is_called(chain: Any) -> None:
    gradient = torch.randn(4, 8, 16)
    calls = [FORWARD, slopes_of(gradient)]
    jobs = [*map(job_of, calls)]
    assert [*map(compiled, jobs)] == [True, True]
    fused.CHAINS[NAME] = chain  # in the place of what was made of its text
    assert [_job(call) for call in calls] == [None, None]  # there is nothing left to do
    torch.testing.assert_close(called(([X, W],)), [chain(X, W)])
    leaves = [X.clone().requires_grad_(), W.clone().requires_grad_()]
    expected = torch.autograd.grad(chain(*leaves), leaves, gradient)
    torch.testing.assert_close(called(([X, W], [gradient], [True, True], [0, 1, 2, 0])), [*expected])


@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
def test_a_process_that_is_prepared_has_compiled_and_kept_nothing(tmp_path: Path) -> None:
    run = kernels_ahead._Unrun.__call__
    with mock.patch.object(kernels_ahead._Unrun, "__call__", autospec=True, side_effect=run) as ran:
        prepare("cpu")
    ran.assert_called_once()
    assert not [*(tmp_path / "memrewrite").iterdir()]


def test_with_other_settings_nothing_is_made() -> None:
    job = job_of(FORWARD)
    with torch._inductor.config.patch(max_fusion_size=3):
        assert not compiled(job)
    assert not is_kept(job.file)


@pytest.mark.parametrize(
    "text", ["def chain_normed_ahead(x, w):\n    return x.nothing()\n", "def of_another_name(): 0\n", "("]
)
def test_what_does_not_compile_is_left_to_who_calls_it(text: str) -> None:
    job = job_of(FORWARD)
    assert not compiled(Job(job.name, text, job.arguments, job.file))


def test_a_function_of_a_module_goes_there_by_its_name() -> None:
    fused.CHAINS[NAME] = torch.nn.functional.silu
    assert isinstance(job_of((NAME, (like([X]),))).chain, bytes)


def test_no_module_is_asked_for_a_chain(chain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of transformers import others then: it took a second."""
    lazy, asked = types.ModuleType("lazy"), list[str]()
    monkeypatch.setattr(lazy, "__getattr__", asked.append, raising=False)
    monkeypatch.setitem(sys.modules, "lazy", lazy)
    assert isinstance(job_of(FORWARD).chain, str)
    assert NAME not in asked


def test_a_chain_without_text_is_compiled_where_it_is_called(chain: Any) -> None:
    fused.CHAINS[NAME] = types.FunctionType((lambda x, w: x * w).__code__.replace(co_filename="<nowhere>"), {})
    assert _job(FORWARD) is None
    vars(chain)["calls_a_graph"] = True
    fused.CHAINS[NAME] = chain
    assert _job(FORWARD) is None
    assert _job(("chain_unheard_of", (like([X]),))) is None


def test_a_crew_compiles_what_there_is_no_code_for(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, waiting = Future[bool](), Future[bool]()
    begun.set_running_or_notify_cancel()
    crew = mock.Mock(spec=Crew)
    crew.asked.return_value = [waiting, begun]
    monkeypatch.setattr(kernels_ahead, "_crews", [crew])
    Ahead([FORWARD, None, FORWARD]).settle(0)  # one alone takes no longer here
    crew.asked.assert_not_called()
    ahead = Ahead([None, FORWARD, slopes_of(X), FORWARD])
    ((function, jobs), _) = crew.asked.call_args
    assert (function, len(jobs)) == (compiled, 2)
    ahead.settle(0)
    assert not waiting.cancelled()
    ahead.settle(1)
    assert waiting.cancelled()  # it is compiled here
    threading.Timer(0.2, begun.set_result, (True,)).start()
    ahead.settle(2)
    assert begun.done()
    ahead.settle(3)
    crew.close.assert_not_called()


def test_what_takes_too_long_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    never = Future[bool]()
    never.set_running_or_notify_cancel()
    crew = mock.Mock(spec=Crew)
    crew.asked.return_value = [never, never]
    monkeypatch.setattr(kernels_ahead, "_crews", [crew])
    monkeypatch.setattr(kernels_ahead, "_SECONDS", 0.1)
    Ahead([FORWARD, slopes_of(X)]).settle(0)
    crew.close.assert_called_once()
    assert not kernels_ahead._crews
    Ahead([FORWARD, slopes_of(X)]).settle(0)  # nobody is asked
    crew.asked.assert_called_once()


@pytest.mark.parametrize(
    ("cpus", "free_gb", "count"), [(15, 70, 6), (3, 70, 3), (15, 20, 2), (15, 12, None), (1, 70, None), (0, 70, None)]
)
def test_processes_are_as_many_as_there_is_room_for(
    cpus: int, free_gb: int, count: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    crew = mock.Mock()
    monkeypatch.setattr(kernels_ahead, "Crew", crew)
    monkeypatch.setattr(kernels_ahead, "free_cpus", lambda: cpus)
    monkeypatch.setattr(fused, "has_triton", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free_gb * 2**30, 80 * 2**30))
    with compiling_ahead(torch.device("cpu")):
        crew.assert_not_called()
    with compiling_ahead(torch.device("cuda")), compiling_ahead(torch.device("cuda")):  # there is one at a time
        assert [call.args[0] for call in crew.call_args_list] == ([] if count is None else [count])
    assert crew.return_value.close.called == (count is not None)
    assert not kernels_ahead._crews
