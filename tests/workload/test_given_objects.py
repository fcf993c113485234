"""Objects among the inputs that a step writes: each run of ours has its own, and a result writes the caller's."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memrewrite
from tests.support.steps import assert_same


@dataclass
class Kept:
    """Of one layer."""

    total: Tensor | None = None


@dataclass
class Cache:
    """What a model keeps of each layer for the next call, as a cache of keys and values."""

    layers: list[Kept] = field(default_factory=lambda: [Kept(), Kept()])
    calls: int = 0

    def update(self, number: int, x: Tensor) -> Tensor:
        kept = self.layers[number]
        kept.total = x if kept.total is None else kept.total + x
        return kept.total


def filled() -> Cache:
    return Cache([Kept(torch.full((64, 16), float(number))) for number in range(2)], calls=1)


class Caching(nn.Module):
    """Writes attributes of the object it is given, and reads what was there before."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Sequential(nn.Linear(16, 96), nn.GELU(), nn.Linear(96, 16)) for _ in range(2))
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = x + layer(cache.update(number, x))
        cache.calls += 1
        return x


class WritingInPlace(Caching):
    """Writes the tensors themselves, where there are some."""

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        for kept, layer in zip(cache.layers, self.layers, strict=True):
            if kept.total is None:
                kept.total = torch.zeros_like(x)
            kept.total.index_copy_(0, torch.tensor([0]), x[:1].detach())
            x = x + layer(x + kept.total)
        return x


def contents(cache: Cache) -> list[Any]:
    found = (kept.total for kept in cache.layers)
    return [cache.calls, *(None if total is None else (type(total), total.tolist()) for total in found)]


@pytest.mark.parametrize("mode", ["train", "inference"])
@pytest.mark.parametrize("new", [Cache, filled], ids=["empty", "filled"])
@pytest.mark.parametrize("kind", [Caching, WritingInPlace])
def test_the_caller_s_object_is_written_by_the_caller_s_calls_alone(
    kind: type[Caching], new: Callable[[], Cache], mode: str
) -> None:
    torch.manual_seed(0)
    model, x, cache = kind().train(mode == "train"), torch.randn(64, 16), new()
    options: dict[str, Any] = {"example_kwargs": {"cache": cache}, "optimizer": "sgd"}
    result = memrewrite.optimize(model, x, budget="min", **options)
    assert memrewrite.measure(model, x, **options).peak == memrewrite.estimate(model, x, **options).peak.bytes
    assert memrewrite.measure(result, x, **options).peak == result.report.predicted_after.peak
    assert memrewrite.verify(model, result, x, **options).equivalent
    assert contents(cache) == contents(new())
    of_model, of_result = called(model, x, new()), called(result, x, new())
    assert contents(of_result[0]) == contents(of_model[0]) != contents(new())
    assert_same(of_result[1], of_model[1])


def called(model: nn.Module, x: Tensor, cache: Cache) -> tuple[Cache, dict[str, Tensor]]:
    """The cache after a call, and what that gives."""
    output = model(x, cache)
    trained = [*model.parameters()] if model.training else []
    gradients = torch.autograd.grad(output.sum(), trained) if trained else ()
    return cache, {str(number): tensor for number, tensor in enumerate((output, *gradients))}


class Thirds(WritingInPlace):
    """The same in other last bits."""

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        return super().forward(x, cache) / 3 * 3


def test_the_reference_has_the_object_s_tensors_in_double_precision() -> None:
    model, other = WritingInPlace(), Thirds()
    other.load_state_dict(model.state_dict())
    verdict = memrewrite.verify(model, other, torch.randn(64, 16), example_kwargs={"cache": filled()})
    assert any(not tensor.bit_equal and tensor.reference_error for tensor in verdict.tensors)


class Appending(Caching):
    """Changes a list that it is given."""

    def forward(self, x: Tensor, cache: Any) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
            cache.append(x)
        return x


def test_a_list_that_is_given_stays_as_it_is() -> None:
    model, given = Appending(), [torch.zeros(1)]
    before = [*given]
    memrewrite.measure(model, torch.randn(64, 16), example_kwargs={"cache": given})
    memrewrite.estimate(model, torch.randn(64, 16), example_kwargs={"cache": given})
    assert len(given) == 1
    assert given[0] is before[0]


def test_a_note_says_what_no_program_is_for() -> None:
    result = memrewrite.optimize(Caching(), torch.randn(64, 16), example_kwargs={"cache": Cache()}, budget="min")
    told = "Caching is called with what no program can take apart (Cache); leave that out, or give the tensors"
    assert told in result.report.notes[0]
