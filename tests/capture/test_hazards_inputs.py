"""Strange inputs, outputs and layers through the whole line: the numbers of three steps are those of the original."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memrewrite.capture import capture
from memrewrite.workload.step import Inputs
from tests.support.capture_models import CASES, Pair, Result
from tests.support.layers import WIDTH, Prepare, model
from tests.support.steps import assert_right

NOTHING_TRAINS = ("eval_mode", "odd_parameter_names")


@pytest.mark.parametrize("name", [name for name in CASES if name not in NOTHING_TRAINS])
def test_what_a_capture_is_asked_for(name: str) -> None:
    case = CASES[name]
    assert_right(case.make(), lambda k: case.inputs())


def batch(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def hidden(self: Any, x: Tensor) -> Tensor:
    """A few layers between which there is something to recompute."""
    for _ in range(3):
        x = torch.tanh(self.other(torch.sigmoid(self.linear(x))) * 1.1)
    return x


def a_dict(self: Any, x: Tensor, extra: Any = None) -> Any:
    return {"logits": hidden(self, x), "none": extra, "nested": [hidden(self, x).sum(), ("text", 1)]}


def a_dataclass(self: Any, x: Tensor) -> Any:
    h = hidden(self, x)
    return Result(h, (h * 2, h.mean()))


def a_named_tuple(self: Any, x: Tensor) -> Any:
    return Pair(hidden(self, x), None)


def a_keyword(self: Any, x: Tensor, *, mask: Tensor | None = None, scale: float = 1.0) -> Any:
    h = hidden(self, x) * scale
    return h if mask is None else h.masked_fill(mask, 0.0)


def a_batch_of_dicts(self: Any, batch: dict[str, Any]) -> Any:
    return hidden(self, batch["x"]) * (1 if batch["weight"] is None else batch["weight"])


def zero_dim(self: Any, x: Tensor, t: Tensor) -> Any:
    return hidden(self, x) * torch.tanh(torch.exp(t) * self.scale)


def scalar_only(self: Any, t: Tensor) -> Any:
    return torch.tanh(torch.sigmoid(t * self.scale) * 2) * self.linear.weight.mean()


def empty(self: Any, x: Tensor, e: Tensor) -> Any:
    return hidden(self, x), torch.tanh(self.linear(e)).sum(0)


def complex_values(self: Any, z: Tensor) -> Any:
    h = torch.tanh(torch.complex(self.linear(z.real), self.other(z.imag)))
    return torch.fft.ifft(torch.sigmoid(h) * z).abs(), h * complex(0.5, -0.0)


def integers(self: Any, i: Tensor, b: Tensor) -> Any:
    h = hidden(self, nn.functional.embedding(i, self.linear.weight))
    return h * torch.sigmoid(b.long()).unsqueeze(-1), i + b


def written_input(self: Any, x: Tensor) -> Any:
    x.mul_(0.5)
    return hidden(self, x) + torch.tanh(x)


def written_view(self: Any, x: Tensor) -> Any:
    h = hidden(self, x) * 1
    h[:, :2].mul_(3).clamp_(-1, 1)
    h[1] = 0.5
    return torch.sigmoid(torch.relu_(h.view(-1))) + h.view(-1).sum()


def swish_by_hand(self: Any, x: Tensor) -> Any:
    h = self.linear(x)
    return hidden(self, (h * 1).mul_(torch.sigmoid(h))) * torch.sigmoid(h)


def unused_draws(self: Any, x: Tensor) -> Any:
    torch.rand(3)
    self.dropout(x)
    self.counter.add_(1)
    h = hidden(self, self.linear(x) * torch.sigmoid(self.linear(x)))
    self.norm1(h)
    return self.dropout(h)


def images_last(self: Any, x: Tensor) -> Any:
    h = torch.relu(self.norm(self.conv(x)))
    return torch.tanh(h) + h, h.contiguous(), h.flatten(1)


def rrelu_last(self: Any, x: Tensor) -> Any:
    return nn.functional.rrelu(hidden(self, x), training=True)


def no_grad_between(self: Any, x: Tensor) -> Any:
    h = hidden(self, x)
    with torch.no_grad():
        target = torch.sigmoid(hidden(self, h)) + self.dropout(h)
    return hidden(self, h) - target


def autocast_between(self: Any, x: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        h = hidden(self, x)
        with torch.autocast("cpu", enabled=False):
            exact = hidden(self, x)
    return h.float() * exact


def autocast_without_cache(self: Any, x: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        h = hidden(self, x)
    return h.float()


def one_relu_twice(self: Any, x: Tensor) -> Any:
    h = self.linear(x)
    kept = self.relu(h * 1)
    return self.relu(self.norm2(kept)) + kept


def tied(self: Any, x: Tensor) -> Any:
    h = torch.tanh(self.linear(self.dropout(hidden(self, x))))
    return torch.sigmoid(h) @ self.linear.weight


def frozen_in_between(self: Any, x: Tensor) -> Any:
    return hidden(self, torch.tanh(self.frozen(torch.sigmoid(self.frozen(x)))))


def tried(self: Any, x: Tensor) -> Tensor:
    try:
        x = self.linear(x).view(5, -1)
    except RuntimeError:  # of so many rows it has none
        x = torch.tanh(self.linear(x))
    return self.other(x)


def freeze(m: Any) -> None:
    m.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)


def tie(m: Any) -> None:
    m.other.weight = m.linear.weight
    m.alias = m.other


ROWS = (8, WIDTH)
Row = tuple[str, Callable[..., Any], Callable[[], Inputs], Prepare]
ROWS_OF_THE_TABLE: list[Row] = [
    ("dict, None and plain outputs", a_dict, lambda: Inputs((batch(*ROWS),), {"extra": None}), id),
    ("dataclass", a_dataclass, lambda: Inputs((batch(*ROWS),), {}), id),
    ("named tuple", a_named_tuple, lambda: Inputs((batch(*ROWS),), {}), id),
    ("keywords", a_keyword, lambda: Inputs((), {"x": batch(*ROWS), "mask": batch(*ROWS) > 0, "scale": 0.5}), id),
    ("None given", a_keyword, lambda: Inputs((batch(*ROWS),), {"mask": None}), id),
    ("dict given", a_batch_of_dicts, lambda: Inputs(({"x": batch(*ROWS), "weight": None},), {}), id),
    ("0-dim", zero_dim, lambda: Inputs((batch(*ROWS), batch()), {}), id),
    ("0-dim alone", scalar_only, lambda: Inputs((batch(),), {}), id),
    ("empty", empty, lambda: Inputs((batch(*ROWS), batch(0, WIDTH)), {}), id),
    ("complex", complex_values, lambda: Inputs((torch.complex(batch(*ROWS), batch(*ROWS, seed=4)),), {}), id),
    ("integer and bool", integers, lambda: Inputs((torch.arange(4), torch.arange(4) > 1), {}), id),
    ("transposed", a_keyword, lambda: Inputs((batch(WIDTH, 8).t(),), {}), id),
    ("strided", a_keyword, lambda: Inputs((batch(16, 2 * WIDTH)[::2, ::2],), {}), id),
    ("expanded", a_keyword, lambda: Inputs((batch(1, WIDTH).expand(8, WIDTH),), {}), id),
    ("input written", written_input, lambda: Inputs((batch(*ROWS),), {}), id),
    ("view written", written_view, lambda: Inputs((batch(*ROWS),), {}), id),
    ("Swish in place", swish_by_hand, lambda: Inputs((batch(*ROWS),), {}), id),
    (
        "draws and updates nobody reads",
        unused_draws,
        lambda: Inputs((batch(*ROWS),), {}),
        lambda m: m.add_module("norm1", nn.BatchNorm1d(WIDTH)),
    ),
    (
        "channels_last",
        images_last,
        lambda: Inputs((batch(4, 3, 8, 8).to(memory_format=torch.channels_last),), {}),
        lambda m: m.to(memory_format=torch.channels_last),
    ),
    ("RReLU last", rrelu_last, lambda: Inputs((batch(*ROWS),), {}), id),
    ("an operator that fails", tried, lambda: Inputs((batch(*ROWS),), {}), id),
    ("no_grad region", no_grad_between, lambda: Inputs((batch(*ROWS),), {}), id),
    ("autocast region", autocast_between, lambda: Inputs((batch(*ROWS),), {}), id),
    ("autocast without cache", autocast_without_cache, lambda: Inputs((batch(*ROWS),), {}), id),
    (
        "one ReLU twice",
        one_relu_twice,
        lambda: Inputs((batch(*ROWS),), {}),
        lambda m: m.add_module("norm2", nn.BatchNorm1d(WIDTH)),
    ),
    ("tied weights, shared module", tied, lambda: Inputs((batch(*ROWS),), {}), tie),
    ("frozen parameters", frozen_in_between, lambda: Inputs((batch(*ROWS),), {}), freeze),
]
STRANGE = {row[0]: row[1:] for row in ROWS_OF_THE_TABLE}


@pytest.mark.parametrize("name", STRANGE)
def test_three_steps_are_those_of_the_original(name: str) -> None:
    function, inputs, prepare = STRANGE[name]
    assert_right(model(function, prepare), lambda k: inputs(), leaves=(True, False))


@pytest.mark.parametrize("wide", [8, 32])
def test_a_forward_that_enters_autocast_around_most_of_its_weights_is_told_of(wide: int) -> None:
    class Within(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(16, wide), nn.Linear(wide, 16)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                x = torch.tanh(self.inner(x))
                x = torch.tanh(self.outer(x)) if wide > 16 else x
            return x if wide > 16 else self.outer(x.float())

    notes = capture(Within(), Inputs((batch(4, 16),), {})).notes
    assert [note.partition(", and")[0] for note in notes] == ["Within enters autocast in its own forward"] * (wide > 16)
