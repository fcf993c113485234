"""What code for CUDA takes is what was foreseen, of models whose code once took more: written and read without CUDA."""

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from memrewrite.backends import entry, observed
from memrewrite.backends.observed import Seen, seen
from memrewrite.backends.partition import Partition
from memrewrite.torch_internals.fusions import fused_within
from memrewrite.torch_internals.written_over import written_over
from tests.support.cuda_code import compiled_for_cuda

GROWTH, LAYERS = 8, 4


class Dense(nn.Module):
    """Layers that are given what all layers before them made, and what they make joined to that, pooled."""

    def __init__(self, width: int) -> None:
        super().__init__()
        widths = [width + i * GROWTH for i in range(LAYERS)]
        self.layers = nn.ModuleList(
            nn.Sequential(
                *(nn.BatchNorm2d(each), nn.ReLU(), nn.Conv2d(each, 4 * GROWTH, 1, bias=False)),
                *(nn.BatchNorm2d(4 * GROWTH), nn.ReLU(), nn.Conv2d(4 * GROWTH, GROWTH, 3, padding=1, bias=False)),
            )
            for each in widths
        )
        last = width + LAYERS * GROWTH
        self.end = nn.Sequential(nn.BatchNorm2d(last), nn.ReLU(), nn.Conv2d(last, last // 2, 1), nn.AvgPool2d(2))

    def forward(self, x: Tensor) -> Tensor:
        made = [x]
        for layer in self.layers:
            made.append(layer(torch.cat(made, 1)))
        result: Tensor = self.end(torch.cat(made, 1))
        return result


def test_dense_layers_take_what_was_foreseen(partitions: list[Partition], monkeypatch: pytest.MonkeyPatch) -> None:
    """By the first code of a plan, however Inductor orders it and fuses kernels. It was 8 % more."""
    both: list[fx.GraphModule] = []
    divide = Partition.__call__

    def divided(*args: Any, **kwargs: Any) -> Any:
        both[:] = divide(*args, **kwargs)
        return tuple(both)

    monkeypatch.setattr(Partition, "__call__", divided)
    torch.manual_seed(0)
    model, x = nn.Sequential(Dense(16), Dense(24)), torch.randn(8, 16, 32, 32)
    compiled = torch.compile(model, backend=entry.memrewrite, options={"budget": "55%", "optimizer": "none"})
    compiled(x).sum().backward()
    (partition,) = partitions
    lean = torch._inductor.config.patch(allow_buffer_reuse=False)
    with fused_within(partition.room), written_over(), lean:
        codes = [compiled_for_cuda(graph, backward) for graph, backward in zip(both, (False, True), strict=True)]
    monkeypatch.setattr(observed, "transients_on", lambda device: None)  # which nobody can measure here
    monkeypatch.setattr(observed, "allocator_on", lambda *args: None)
    found = seen(codes)
    assert isinstance(found, Seen), found
    for made, backward in ((found.forward, False), (found.backward, True)):
        room = partition.room(backward)
        assert room is not None
        assert 0.8 * room < made <= 1.001 * room  # sums of a few channels are not foreseen to the byte
