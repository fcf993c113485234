"""A segment may write what it makes itself: each model writes activations in place and trains alike, bit for bit."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.support.dropins import assert_same_bits, segmented, step

Function = Callable[[Tensor], Tensor]


class Between(nn.Module):
    """A function between two linear layers, the second with dropout behind it."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.dropout(self.last(self.function(torch.tanh(self.first(x)))), 0.3, True)


def scattered(x: Tensor) -> Tensor:
    result = torch.zeros_like(x)
    result[:, ::2] = x[:, ::2].exp()
    result[:, 1::2] = x[:, 1::2].sin() * 2
    return result.sigmoid() * x


def scan(x: Tensor) -> Tensor:
    """A recurrence that writes its states one by one and reads them as it goes."""
    states = x.new_zeros(x.shape)
    for i in range(x.shape[1]):
        before = states[:, i - 1].clone() if i else x[:, 0]
        states[:, i] = torch.tanh(before * 0.5 + x[:, i])
    return states.exp()


def masked(x: Tensor) -> Tensor:
    mask = torch.ones(x.shape[1], x.shape[1])
    mask[2:].fill_(0.25)
    mask.view(-1)[3:4].fill_(2)
    return torch.softmax(x @ mask, -1) * x


def permuted(x: Tensor) -> Tensor:
    y = (x * 2).view(-1, 2, 3).transpose(1, 2)
    y.div_(1.7)
    return y.transpose(1, 2).reshape(x.shape).tanh()


def random_filling(x: Tensor) -> Tensor:
    noise = torch.empty_like(x).bernoulli_(0.5)
    return (x * noise).exp() * noise


def read_before_and_after(x: Tensor) -> Tensor:
    table = torch.zeros_like(x)
    early = torch.tanh(x + table)
    table[:, 0] = early[:, 0].detach() + 1
    late = torch.tanh(x + table)
    table[:, 1].fill_(3)
    return torch.sigmoid(early * late) * table


def written_after_use_elsewhere(x: Tensor) -> Tensor:
    y = torch.tanh(x).sin()
    z = torch.sigmoid(y * 1.5)
    y[:, :2].mul_(3)
    return torch.sigmoid(z * 2) + y.exp()


def added_up(x: Tensor) -> Tensor:
    total = torch.zeros_like(x)
    for k in range(3):
        rows = torch.arange(k, x.shape[0], 3)
        total.index_add_(0, rows, torch.tanh(x[rows] * k).exp())
    return total.sigmoid()


def detached(x: Tensor) -> Tensor:
    y = (x * 1.1).sin()
    with torch.no_grad():
        scale = y.abs().clone()
        scale[:, 0].add_(1)
    return torch.tanh(y / scale)


MODELS = [
    scattered,
    scan,
    masked,
    permuted,
    random_filling,
    read_before_and_after,
    written_after_use_elsewhere,
    added_up,
    detached,
]


def rows() -> Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("size", [1, 2, 3, 5, 9, 100])
@pytest.mark.parametrize("function", MODELS, ids=lambda function: function.__name__)
def test_every_number_is_the_same(function: Function, size: int) -> None:
    torch.manual_seed(0)
    model = Between(function)
    found = segmented(model, rows(), size=size)
    assert found.count > 0
    assert_same_bits(step(found.module, rows()), step(model, rows()))


@pytest.mark.parametrize("function", MODELS, ids=lambda function: function.__name__)
def test_a_segment_over_everything_holds_the_writes(function: Function) -> None:
    found = segmented(Between(function), rows(), size=100)
    assert found.count == 1
    assert len(found.inside()) == len(found.nodes)


def test_what_was_written_before_may_be_read_and_what_is_written_later_may_not() -> None:
    found = segmented(Between(read_before_and_after), rows())
    names = [str(node.target) for node in found.nodes]
    made = next(i for i, name in enumerate(names) if "zeros" in name)
    writes = [i for i, name in enumerate(names) if "copy_" in name or "fill_" in name]
    ends = found.barrier
    assert ends[made] == len(names)
    assert all(ends[i] < len(names) for i in range(made + 1, writes[-1] + 1))
    assert all(end == len(names) for end in ends[writes[-1] + 1 :])
