"""What stands for Inductor in tests of the back end, so that they need no compiler."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func  # type: ignore[import-untyped]
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table

from memrewrite.backends import entry
from memrewrite.backends.partition import Partition
from memrewrite.torch_internals import compiling
from memrewrite.torch_internals.partitioning import stock_partition


@pytest.fixture(autouse=True)
def notes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where a test finds what it notes, and nothing of what others did."""
    place = compiling._note
    monkeypatch.setattr(compiling, "_note", lambda key: tmp_path / "notes" / place(key).name)
    return tmp_path / "notes"


@pytest.fixture
def partitions(monkeypatch: pytest.MonkeyPatch) -> list[Partition]:
    """What divided each graph; in place of Inductor nothing makes kernels."""
    found: list[Partition] = []

    def compiled(
        graph: Any, inputs: Any, mode: Any, options: Any, partitioner: Any, *, cached: bool, room: Any
    ) -> Callable[..., Any]:
        if partitioner is not None:
            found.append(partitioner._partition)
        with torch._inductor.config.patch(options):
            run = aot_autograd(
                fw_compiler=lambda g, _: make_boxed_func(g),
                bw_compiler=lambda g, _: make_boxed_func(g),
                partition_fn=partitioner or stock_partition,
                decompositions=select_decomp_table(),
            )
            return run(graph, inputs)

    monkeypatch.setattr(entry, "inductor", compiled)
    torch._dynamo.reset()
    return found
