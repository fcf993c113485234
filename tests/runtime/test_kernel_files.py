"""Compiled kernels on disk: found again for the same function of what looks the same, and for nothing else."""

import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx

from memrewrite.records.graph_calls import ChainCall
from memrewrite.runtime import fused
from memrewrite.runtime.kernel_files import Code, Order, file_of_code, keep_code, said_of
from memrewrite.runtime.kernels import Given, Kernel


def normed(given: Given) -> list[Tensor]:
    first, second = given[0].transpose(1, 2), given[1]
    return [first * second.sum(-1, keepdim=True) / first.shape[2], first + second]


def pair(rows: int) -> list[Tensor]:
    """Views, as a model's heads are, whose sizes Inductor is to take from Dynamo."""
    return [torch.randn(2, rows, 12).view(2, rows, 4, 3), torch.randn(1, 1, rows, 6)[..., :3]]


def without_dynamo(kernel: Kernel, given: Given) -> list[Tensor]:
    """What the kernel gives though nothing may be compiled."""
    with mock.patch.object(kernel, "_compiled", side_effect=AssertionError("Dynamo was asked")):
        return kernel(given)


@pytest.fixture
def quick() -> Iterator[None]:
    """Compilers do less: no headers are compiled. What instructions there are, PyTorch remembers for later tests."""
    with torch._inductor.config.patch(cpp_cache_precompile_headers=False):
        yield


@torch.no_grad()
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("rows", [(4,), (4, 5, 6)], ids=["one length", "any"])
def test_another_kernel_of_the_function_finds_its_code(
    rows: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.compiler.reset()
    first, given = Kernel(normed, "normed"), list(map(pair, rows))
    made = [first(each) for each in given]
    second = Kernel(normed, "normed")
    for each, results in zip(given, made, strict=True):
        found = without_dynamo(second, each)
        assert all(map(torch.equal, found, results))
        assert all(map(torch.equal, without_dynamo(second, each), results))
    for other in (Kernel(lambda given: normed(given)[::-1], "normed"), Kernel(normed, "another")):
        with pytest.raises(AssertionError, match="Dynamo was asked"):
            without_dynamo(other, given[0])
    for file in (tmp_path / "memrewrite").iterdir():
        file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(AssertionError, match="Dynamo was asked"):  # which it is for what is damaged
        without_dynamo(Kernel(normed, "normed"), given[0])
    assert all(map(torch.equal, Kernel(normed, "normed")(given[0]), made[0]))


def test_a_disk_that_takes_nothing_is_no_error(tmp_path: Path) -> None:
    class Full(Code):
        def __init__(self) -> None:
            """Nothing was compiled."""

        def save(self, file: str) -> bool:
            raise OSError(28, "No space left on device")

    keep_code(Full(), Order([(0, None)], [0]), str(tmp_path / "kernels" / "one"))
    assert not any((tmp_path / "kernels").iterdir())


@torch.no_grad()
def test_what_cannot_be_kept_is_called_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where its graph has no key, or caches are off."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: lambda graph, inputs: graph.forward)
    torch.compiler.reset()
    kernel, given = Kernel(normed, "normed"), pair(4)
    for found in (kernel(given), without_dynamo(kernel, given)):
        assert all(map(torch.equal, found, normed(given)))
    assert not any((tmp_path / "memrewrite").iterdir())


TEXT = """
def inner(x):
    return x * {factor}

def outer(given):
    return [inner(x).{method}() for x in given]
"""


def outer(**parts: Any) -> Callable[..., Any]:
    """A function that calls another one."""
    names: dict[str, Any] = {}
    exec(TEXT.format_map({"factor": 2, "method": "exp"} | parts), names)  # noqa: S102
    made: Callable[..., Any] = names["outer"]
    return made


def scaled_by(factor: Any) -> Callable[..., Any]:
    return lambda given: [x * factor for x in given]


def scaled_by_default(factor: Any) -> Callable[..., Any]:
    def scaled(given: Given, *, factor: Any = factor) -> list[Tensor]:
        return [x * factor for x in given]

    return scaled


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (outer(), outer(factor=3)),
        (outer(), outer(method="sin")),
        (scaled_by(2), scaled_by(3)),
        (scaled_by(2), scaled_by(2.0)),
        (scaled_by_default(2), scaled_by_default(3)),
        (scaled_by(torch.sin), scaled_by(torch.cos)),
        (functools.partial(torch.mul, other=2.0), functools.partial(torch.mul, other=3.0)),
        (functools.partial(outer(), 1), functools.partial(outer(factor=3), 1)),
    ],
    ids=[
        "constant of what is called",
        "method",
        "closure",
        "type",
        "default",
        "function of PyTorch's",
        "argument",
        "partial of another",
    ],
)
def test_what_computes_something_else_is_said_otherwise(one: Any, other: Any) -> None:
    assert said_of(one) != said_of(other)


@pytest.mark.parametrize(
    "make", [outer, lambda: scaled_by(torch.float32), lambda: functools.partial(outer(), [1, (2.0, None)])]
)
def test_what_computes_the_same_is_said_alike(make: Callable[[], Any]) -> None:
    assert said_of(make()) == said_of(make())


def test_chains_of_a_model_are_told_apart() -> None:
    """All are one function that calls a graph; their names say what that computes."""
    calls = [ChainCall(fx.symbolic_trace(each), (0,), (0,)) for each in (lambda x: x.sin(), lambda x: x.cos())]
    for call in calls:
        fused.CHAINS.setdefault(call.__name__, call._function)
    one, other = (fused._forward_of(call.__name__, call._function)._said for call in calls)
    assert one != other


def test_a_chain_that_was_written_takes_the_place_of_one_that_calls_a_graph() -> None:
    """Another process has the program alone, and looks for kernels of what is written there."""
    call = ChainCall(fx.symbolic_trace(lambda x: x.tan()), (0,), (0,))

    def tangent(x: Tensor) -> Tensor:
        return x.tan()

    def again(x: Tensor) -> Tensor:
        return x.tan()

    tangent.__name__ = again.__name__ = call.__name__
    x = torch.randn(3, requires_grad=True)
    for runs, stays in (
        (call._function, call._function),
        (tangent, tangent),
        (call._function, tangent),
        (again, tangent),
    ):
        assert torch.equal(fused.fused(runs, (0,), (0,), x), x.tan())
        assert fused.CHAINS[call.__name__] is stays


def test_other_settings_are_another_file() -> None:
    """What is kept is not called where compilers are turned off, say, or asked for something else."""
    usual = file_of_code("function", ())
    with torch._dynamo.config.patch(disable=True):
        assert file_of_code("function", ()) != usual
    with torch._inductor.config.patch(realize_opcount_threshold=5):
        assert file_of_code("function", ()) != usual
    assert file_of_code("function", ()) == usual


def test_another_process_looks_for_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    code = (
        "from tests.runtime.test_kernel_files import *\n"
        "print(file_of_code(said_of(normed), (torch.float32, torch.Size([2]))))"
    )
    environment = os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == file_of_code(said_of(normed), (torch.float32, torch.Size([2])))
