"""Numbers that forward is given vary from call to call in one program, wherever it does the same for all of them."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from memrewrite.capture import capture
from memrewrite.codegen.writer import generate
from memrewrite.runtime.dropin import build, program_from
from memrewrite.runtime.promise import FallbackWarning
from memrewrite.torch_internals.pytrees import tree_leaves
from memrewrite.workload.step import Inputs
from tests.support.layers import model, x

Forward = Callable[..., Any]


def unused(self: Any, x: Tensor, longest: int) -> Tensor:
    return self.linear(x)


def computed(self: Any, x: Tensor, step: int, temperature: float) -> Tensor:
    return self.linear(x * step) / temperature + (1 - temperature) * step


def nested(self: Any, x: Tensor, settings: dict[str, Any]) -> Any:
    return self.linear(x) * settings["scale"], settings["steps"][1]


def any_keyword(self: Any, x: Tensor, **settings: float) -> Tensor:
    return self.linear(x) + settings["plus"]


class Reversed(torch.autograd.Function):
    """As the nets of domain adaptation have it: backward turns the gradient around."""

    @staticmethod
    def forward(context: Any, x: Tensor, scale: float) -> Tensor:
        context.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return -context.scale * gradients[0], None


def reverses(self: Any, x: Tensor, scale: float) -> Tensor:
    result: Tensor = Reversed.apply(self.linear(x), scale)  # type: ignore[no-untyped-call]
    return result


def every_other(self: Any, x: Tensor, step: int) -> Tensor:
    return self.linear(x) * step if step % 2 else self.linear(x)


def asks_for_the_type(self: Any, x: Tensor, step: float) -> Tensor:
    return self.linear(x) * (step if isinstance(step, float) else 0)


def chooses_layers(self: Any, x: Tensor, depth: int) -> Tensor:
    for _ in range(depth):
        x = self.linear(x)
    return x


def decides_sizes(self: Any, x: Tensor, count: int) -> Tensor:
    return self.linear(x).sum() + torch.ones(count).sum()


def keeps_it(self: Any, x: Tensor, step: int) -> Tensor:
    self.last = step
    return self.linear(x) * step


def gives_an_operator(self: Any, x: Tensor, rate: float) -> Tensor:
    return functional.dropout(self.linear(x), rate)


ONE_PROGRAM: dict[str, tuple[Forward, dict[str, Any], list[dict[str, Any]]]] = {
    "unused": (unused, {"longest": 7}, [{"longest": n} for n in (0, 1, -3, 10**12)]),
    "computed": (
        computed,
        {"step": 3, "temperature": 0.5},
        [{"step": n, "temperature": t} for n, t in ((0, 0.1), (1, 1.0), (-5, 3e20), (2, float("inf")))],
    ),
    "nested": (nested, {"settings": {"scale": 2.0, "steps": [1, 5]}}, [{"settings": {"scale": 0.3, "steps": [4, 0]}}]),
    "any keyword": (any_keyword, {"plus": 2.0}, [{"plus": 0.1}]),
    "own Function": (reverses, {"scale": 0.2}, [{"scale": 0.9}]),
    "odd": (every_other, {"step": 3}, [{"step": 5}]),
}
ANOTHER_WAY: dict[str, tuple[Forward, dict[str, Any], dict[str, Any], str]] = {
    "a condition": (every_other, {"step": 3}, {"step": 4}, "for inputs of .*, step=4 forward takes another path"),
    "another type": (unused, {"longest": 3}, {"longest": 3.0}, "longest is 3.0, captured for another int"),
    "its type is asked for": (asks_for_the_type, {"step": 2.0}, {"step": 3.0}, "step is 3.0, captured as 2.0"),
    "layers": (chooses_layers, {"depth": 2}, {"depth": 1}, "depth is 1, captured as 2"),
    "sizes": (decides_sizes, {"count": 5}, {"count": 6}, "count is 6, captured as 5"),
    "kept": (keeps_it, {"step": 3}, {"step": 4}, "step is 4, captured as 3"),
    "an operator's own": (gives_an_operator, {"rate": 0.1}, {"rate": 0.2}, "rate is 0.2, captured as 0.1"),
}


def same(ours: nn.Module, theirs: nn.Module, rows: int, given: dict[str, Any]) -> bool:
    """Whether two modules give the same results and gradients, bit for bit."""
    found = []
    for module in (theirs, ours):
        torch.manual_seed(3)
        first, *others = tree_leaves(module(x(rows, 6), **given))
        found.append([first, *torch.autograd.grad(first.sum(), list(module.parameters()), allow_unused=True), *others])
    pairs = zip(*found, strict=True)
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


def drop_in(module: nn.Module, given: dict[str, Any]) -> nn.Module:
    source, constants = generate(capture(module, Inputs((x(4, 6),), given), "export"))
    return build(module, program_from(source), constants)


@pytest.mark.parametrize("name", list(ONE_PROGRAM))
def test_a_program_is_for_all_numbers_that_change_nothing_else(name: str) -> None:
    forward, example, others = ONE_PROGRAM[name]
    module = model(forward)
    optimized = drop_in(module, example)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        for given in (example, *others):
            assert all(same(optimized, module, rows, given) for rows in (4, 7))


@pytest.mark.parametrize("name", list(ANOTHER_WAY))
def test_numbers_that_make_it_another_graph_run_the_original_forward(name: str) -> None:
    forward, example, given, said = ANOTHER_WAY[name]
    module = model(forward)
    module(x(4, 6), **example)
    optimized = drop_in(module, example)
    with pytest.warns(FallbackWarning, match=said):
        assert same(optimized, module, 4, given)
    assert vars(optimized).get("last") == vars(module).get("last")


def test_a_number_may_be_a_size_of_an_input() -> None:
    def forward(self: Any, x: Tensor, lengths: Tensor, longest: int) -> Tensor:
        result: Tensor = self.linear(x) * (torch.arange(longest) < lengths[:, None])[..., None]
        return result

    module = model(forward)
    lengths = torch.tensor([3, 5])
    given = Inputs((torch.randn(2, 5, 6), lengths, 5), {})
    elsewhere = Inputs((torch.randn(2, 7, 6), lengths, 5), {})
    source, constants = generate(capture(module, given, "export", elsewhere=elsewhere))
    optimized = build(module, program_from(source), constants)
    longer = torch.randn(2, 9, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        assert torch.equal(optimized(longer, lengths, 9), module(longer, lengths, 9))


def test_a_submodule_that_stays_a_call_is_given_one_number() -> None:
    import memrewrite

    class First(nn.Module):
        def forward(self, x: Tensor, count: int) -> Tensor:
            return x[:count] if x.sum().item() < 1e9 else x

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.layers = First(), nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))

        def forward(self, x: Tensor, count: int) -> Tensor:
            result: Tensor = self.layers(self.first(self.layers(x), count))
            return result

    net, rows = Net(), torch.randn(64, 8)
    optimized = memrewrite.optimize(net, (rows, 20), budget="min", verify=False)
    with pytest.warns(FallbackWarning, match="count is 30, captured as 20"):
        assert torch.equal(optimized(rows, 30), net(rows, 30))
