"""What the code of a model or of a loss leaves outside of the model: it is as it was once that ran here."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
import torch
from torch import Tensor, nn

import memrewrite
from memrewrite.records.errors import CaptureError

LOSSES: list[Any] = []
SEEN: dict[str, Any] = {"first": torch.zeros(()), "steps": 0}
LAST: Any = None


@dataclass(slots=True)
class Slotted:
    last: Any = None
    all: list[Any] = field(default_factory=list)


class Ended:
    """An object that does something when it is gone, so that nobody copies it."""

    def __init__(self) -> None:
        self.all: list[Any] = []

    def __del__(self) -> None:
        self.all.clear()


class Recorder:
    """Keeps what it is given in a class, and in an object of an object."""

    everything: ClassVar[list[Any]] = []
    newest: ClassVar[Any] = None

    def __init__(self) -> None:
        self.run = SimpleNamespace(history=deque[Any](maxlen=3), at={"step": 0})


SLOTTED, ENDED, RECORDER = Slotted(), Ended(), Recorder()


def in_a_list(value: Tensor) -> None:
    LOSSES.append(value)


def in_a_dictionary(value: Tensor) -> None:
    SEEN["first"] = SEEN["first"] + value
    SEEN["steps"] += 1


def in_a_global(value: Tensor) -> None:
    global LAST
    LAST = value


def in_slots(value: Tensor) -> None:
    SLOTTED.last = value
    SLOTTED.all.append(value)


def in_an_object(value: Tensor) -> None:
    ENDED.all.append(value)


def deep(value: Tensor) -> None:
    RECORDER.run.history.append(value)
    RECORDER.run.at["step"] += 1


def in_a_class(value: Tensor) -> None:
    Recorder.everything.append(value)
    Recorder.newest = value


def in_a_default(value: Tensor, kept: list[Any] = []) -> None:  # noqa: B006  (as people do, and that is the point)
    kept.append(value)


def in_a_closure() -> Callable[[Tensor], None]:
    kept: list[Any] = []
    newest = None

    def keep(value: Tensor) -> None:
        nonlocal newest
        kept.append(value)
        newest = value

    return keep


IN_A_CLOSURE = in_a_closure()
KEEPERS = [
    in_a_list,
    in_a_dictionary,
    in_a_global,
    in_slots,
    in_an_object,
    deep,
    in_a_class,
    in_a_default,
    IN_A_CLOSURE,
]


def left() -> list[Any]:
    """All that these may have left."""
    closure = [cell.cell_contents for cell in IN_A_CLOSURE.__closure__ or ()]
    run = RECORDER.run
    lists = [LOSSES, SLOTTED.all, ENDED.all, run.history, Recorder.everything, in_a_default.__defaults__, *closure]
    return [*map(repr, lists), SEEN["first"].item(), SEEN["steps"], LAST, SLOTTED.last, Recorder.newest, repr(run.at)]


@pytest.fixture(params=KEEPERS, ids=lambda keep: keep.__qualname__)
def keep(request: pytest.FixtureRequest) -> Any:
    before = left()
    yield request.param
    assert left() == before


class Keeping(nn.Module):
    """A model whose forward keeps something; its parts have parts of their own where it is ``divided``."""

    def __init__(self, keep: Callable[[Tensor], None], divided: bool) -> None:
        super().__init__()
        layer = nn.Linear(8, 8)
        self.layers = nn.Sequential(layer, nn.SiLU(), nn.Linear(8, 8)) if divided else layer
        self.keep = keep

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        self.keep(y.detach().mean())
        return y * y.sigmoid()


def test_what_a_loss_function_keeps_is_taken_back(keep: Callable[[Tensor], None]) -> None:
    model, x = nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, 8)), torch.randn(16, 8)

    def loss_fn(output: Tensor) -> Tensor:
        loss = output.square().mean()
        keep(loss.detach())
        return loss

    peak = memrewrite.estimate(model, x, loss_fn=loss_fn).peak.bytes
    assert memrewrite.measure(model, x, loss_fn=loss_fn).peak >= peak  # by what is kept of ten steps
    result = memrewrite.optimize(model, x, loss_fn=loss_fn, budget="min")
    assert result.report.equivalent


def test_what_hooks_keep_is_taken_back(keep: Callable[[Tensor], None]) -> None:
    model, x = nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, 8)), torch.randn(16, 8, requires_grad=True)
    model[1].register_forward_hook(lambda module, given, output: keep(output.detach().mean()))
    model[0].register_full_backward_hook(lambda module, given, gradients: keep(cast(Any, gradients)[0].mean()))
    memrewrite.estimate(model, x)
    memrewrite.measure(model, x)
    assert memrewrite.optimize(model, x, budget="min").report.equivalent is not False
    assert memrewrite.verify(model, model, x).equivalent


def test_a_forward_that_keeps_what_it_computes_is_refused(keep: Callable[[Tensor], None]) -> None:
    model, x = Keeping(keep, divided=False), torch.randn(16, 8)
    memrewrite.estimate(model, x)
    with pytest.raises(CaptureError, match=r"leaves a new tensor in [\w.<>]+ each time forward runs.*return it"):
        memrewrite.optimize(model, x, budget="min")


def test_a_forward_that_is_not_captured_keeps_what_it_did() -> None:
    kept: list[Tensor] = []
    model, x = Keeping(kept.append, divided=True), torch.randn(16, 8)
    result = memrewrite.optimize(model, x, budget="min")
    assert result.report.segments
    assert not kept
    result(x)
    assert len(kept) == 1


def test_numbers_that_a_loss_function_keeps_are_taken_back() -> None:
    model, x = nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, 8)), torch.randn(16, 8)
    kept = [0.5]

    def loss_fn(output: Tensor) -> Tensor:
        loss = output.square().mean()
        kept.append(loss.item())
        return loss

    memrewrite.optimize(model, x, loss_fn=loss_fn, budget="min")
    assert kept == [0.5]


NOISE = torch.Generator()


class Noisy(nn.Module):
    """A layer that draws from a generator of its own, and, if it is told to, from one that all of them share."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.linear, self.shared, self.noise = nn.Linear(8, 8), shared, torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        drawn = torch.randn(x.shape, generator=NOISE if self.shared else self.noise)
        result: Tensor = self.linear(x) + drawn
        return result


def drawn_from(generator: torch.Generator) -> list[int]:
    state: list[int] = generator.get_state().tolist()
    return state


@pytest.mark.parametrize("shared", [False, True], ids=["the layer's", "a global"])
def test_generators_of_parts_and_losses_draw_on_where_they_were(shared: bool) -> None:
    layer, own = Noisy(shared), torch.Generator()
    model = nn.Sequential(layer, *[nn.Sequential(nn.Linear(8, 64), nn.SiLU(), nn.Linear(64, 8)) for _ in range(3)])
    for generator in (layer.noise, NOISE, own):
        generator.manual_seed(0)
    before = drawn_from(own)

    def loss_fn(output: Tensor) -> Tensor:
        return (output - torch.randn(output.shape, generator=own)).square().mean()

    optimized = memrewrite.optimize(model, torch.randn(64, 8), loss_fn=loss_fn, budget="min")
    assert memrewrite.report_of(optimized).verdict.startswith("bit-equal")
    for generator in (layer.noise, NOISE, own):
        assert drawn_from(generator) == before
