"""What compiles the kernel for batch normalizations: once for each width that is asked for, and nothing else."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from memrewrite.records.tensor_like import TensorLike
from memrewrite.runtime.batch_norm import as_matrix
from memrewrite.targets import normalizing

aten = torch.ops.aten
CPU = torch.device("cpu")
Compiled = list[tuple[Any, torch.dtype, torch.dtype]]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Compiled:
    """The matrices that the kernel was given, where it runs on the CPU; with the types of inputs and weights."""
    found: Compiled = []

    def apply(x: Tensor, statistics: list[Tensor], weight: Tensor, bias: Tensor, *how: Any) -> Tensor:
        assert all(each.numel() == x.shape[1] and each.dtype == torch.float32 for each in statistics)
        found.append((as_matrix(x), x.dtype, weight.dtype))
        return x

    monkeypatch.setattr(normalizing, "apply_statistics", apply)
    monkeypatch.setattr(normalizing, "kernel_runs_on", lambda device: True)
    return found


def call(x: Tensor, func: Any = aten.cudnn_batch_norm.default, weighted: bool = True, training: bool = True) -> Any:
    weight = TensorLike.of(torch.ones(x.shape[1])) if weighted else None
    return func, (TensorLike.of(x), weight, weight, None, None, training, 0.1, 1e-5), {}


def run(runs: list[Callable[[], object]]) -> None:
    for each in runs:
        each()


def test_each_width_is_compiled_once(compiled: Compiled) -> None:
    images, half = torch.ones(6, 16, 40, 40), torch.ones(6, 8, 40, 40).bfloat16()
    last = images.to(memory_format=torch.channels_last)
    runs = normalizing.compiling([call(each) for each in (images, images[:2], half, last, torch.ones(4, 30))])
    run(runs)
    assert compiled == [
        ((1, 1600, True), torch.float32, torch.float32),
        ((1, 1600, True), torch.bfloat16, torch.float32),
        ((1, 16, False), torch.float32, torch.float32),
        ((1, 30, False), torch.float32, torch.float32),
    ]


def test_nothing_is_compiled_for_what_has_no_use_for_it(compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(2, 4, 3, 3)
    others = [
        call(x, weighted=False),
        call(x, training=False),
        call(x, aten.cudnn_batch_norm_backward.default),
        call(x.double()),
        call(x[:, :, ::2]),
        (aten.convolution.default, (TensorLike.of(x),), {}),
    ]
    assert normalizing.compiling(others) == []
    monkeypatch.setattr(normalizing, "kernel_runs_on", lambda device: False)
    run(normalizing.compiling([call(x)]))
    assert compiled == []
