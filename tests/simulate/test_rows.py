"""Values along sizes that vary are known where they follow for every size; where they do not, capture knows that."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from memrewrite.capture import capture, exported
from memrewrite.simulate.fake.constant_values import known_values
from memrewrite.workload.step import Inputs
from tests.capture.test_capture import drop_in
from tests.simulate.test_constant_values import changed, packed

BATCH, LENGTH = 3, 7


def count(given: Tensor) -> Tensor:
    return torch.arange(given.shape[1])


def ones(given: Tensor) -> Tensor:
    return torch.ones(given.shape[1], dtype=torch.int64)


def head(given: Tensor) -> Tensor:
    return torch.tensor([-2, -1])


KNOWN: dict[str, Callable[[Tensor], Tensor]] = {
    "counted": count,
    "by threes": lambda given: torch.arange(4, 4 + 3 * given.shape[1], 3),
    "of 32 bits": lambda given: count(given).to(torch.int32) + 5,
    "in rows": lambda given: count(given).unsqueeze(0).expand(given.shape[0], -1),
    "repeated": lambda given: count(given)[:, None].repeat(given.shape[0], 1, 2),
    "in columns": lambda given: count(given)[:, None].expand(-1, given.shape[0]).transpose(0, 1),
    "multiplied": lambda given: 3 - 2 * count(given),
    "the first": lambda given: count(given)[:1],
    "the fourth": lambda given: count(given)[4] * count(given)[3:5],
    "but the first": lambda given: count(given)[2:],
    "every second": lambda given: count(given)[1::2],
    "the last of equal ones": lambda given: ones(given)[-1],
    "the last three equal ones": lambda given: ones(given)[-3:],
    "going on": lambda given: torch.cat([head(given), count(given)]),
    "equal ones before and after": lambda given: torch.cat([ones(given), torch.ones(2, dtype=torch.int64)]),
    "summed": lambda given: ones(given).cumsum(0),
    "equal everywhere": lambda given: (ones(given) == 1).all(),
    "in order": lambda given: count(given)[1:] - count(given)[:-1] > 0,
    "differences": lambda given: torch.diff(count(given)) == 1,
    "packed": lambda given: packed(count(given).unsqueeze(0).expand(given.shape[0], -1))[:, -1] == 0,
    "as a view": lambda given: changed(ones(given), lambda t: t[:1].clone().fill_(9)),
}
UNKNOWN: dict[str, Callable[[Tensor], Tensor]] = {
    "the last": lambda given: count(given)[-1],
    "the last three": lambda given: count(given)[-3:],
    "squared": lambda given: count(given) * count(given),
    "compared": lambda given: count(given) < 5,
    "remainders": lambda given: count(given) % 4,
    "of 8 bits": lambda given: count(given).to(torch.uint8),
    "truth": lambda given: count(given).to(torch.bool),
    "summed": lambda given: count(given).cumsum(0),
    "reduced": lambda given: (count(given) >= 0).sum(),
    "not going on": lambda given: torch.cat([torch.tensor([5]), count(given)]),
    "ended": lambda given: torch.cat([count(given), head(given)]),
    "one after the other": lambda given: torch.cat([count(given), count(given)]),
    "repeated": lambda given: count(given).repeat(2),
    "from the length": lambda given: torch.arange(given.shape[1], 2 * given.shape[1]),
    "full of the length": lambda given: torch.full((3,), given.shape[1]),
    "flipped": lambda given: count(given).flip(0),
    "written": lambda given: changed(count(given), lambda t: t.add_(1)),
    "written at one place": lambda given: changed(ones(given), lambda t: t[3].fill_(9)),
    "written at the end": lambda given: changed(ones(given), lambda t: t[-1:].fill_(9)),
}


class Asks(nn.Module):
    """Does something else where ``make`` gives no tensor that has values, as transformers does."""

    def __init__(self, make: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.make, self.embedding = make, nn.Embedding(20, 4)

    def forward(self, given: Tensor) -> Tensor:
        real = not isinstance(self.make(given), torch._subclasses.FakeTensor)
        embedded: Tensor = self.embedding(given)
        return embedded * 2 if real else embedded * 3


def tokens(batch: int = BATCH, length: int = LENGTH) -> Tensor:
    return torch.arange(batch * length).remainder(20).view(batch, length)


@pytest.mark.parametrize("make", KNOWN.values(), ids=KNOWN)
def test_what_follows_for_every_length_is_known(make: Callable[[Tensor], Tensor]) -> None:
    found: list[tuple[torch.Size, Tensor | None]] = []

    def noted(given: Tensor) -> Tensor:
        tensor = make(given)
        found.append((tensor.shape, values.value(tensor)))
        return tensor

    with known_values() as values:
        sizes = {0: Dim.AUTO, 1: Dim.AUTO}
        torch.export.export(Asks(noted), (tokens(),), dynamic_shapes=(sizes,), strict=False)
    assert not values.asked
    assert found
    for shape, value in found:
        assert value is not None
        first = tuple(slice(2) if isinstance(size, torch.SymInt) else slice(None) for size in shape)
        assert torch.equal(value, make(tokens())[first])
        assert torch.equal(value, make(tokens(5, 11))[first])


@pytest.mark.parametrize("make", KNOWN.values(), ids=KNOWN)
def test_lengths_vary_where_answers_follow_for_every_length(make: Callable[[Tensor], Tensor]) -> None:
    module = Asks(make)
    optimized = drop_in(module, capture(module, Inputs((tokens(),), {})))
    for sizes in ((BATCH, LENGTH), (2, 5), (4, 12)):
        assert torch.equal(optimized(tokens(*sizes)), module(tokens(*sizes)))


@pytest.mark.parametrize("make", UNKNOWN.values(), ids=UNKNOWN)
def test_what_hangs_on_the_length_is_not_known_and_the_way_of_the_example_is_taken(
    make: Callable[[Tensor], Tensor],
) -> None:
    module = Asks(make)
    captured = capture(module, Inputs((tokens(),), {}))
    assert captured.inputs.leaves[0].shape[1] == LENGTH
    assert torch.equal(drop_in(module, captured)(tokens()), module(tokens()))


def test_export_ends_where_a_value_is_asked_for_that_the_length_decides() -> None:
    asked, through = list[bool](), list[bool]()

    def noted(given: Tensor) -> Tensor:
        asked.append(True)
        return UNKNOWN["the last"](given)

    module = Asks(noted)
    module.embedding.register_forward_hook(lambda *called: through.append(True))
    captured = exported.capture(module, Inputs((tokens(),), {}))
    assert captured.inputs.leaves[0].shape[1] == LENGTH
    assert len(asked) > len(through) == 1


def test_questions_that_inputs_decide_leave_lengths_free() -> None:
    def make(given: Tensor) -> Tensor:
        return given + count(given)

    captured = capture(Asks(make), Inputs((tokens(),), {}))
    assert all(isinstance(size, str) for size in captured.inputs.leaves[0].shape)
