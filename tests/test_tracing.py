"""What a model does only while it is traced, and what a trace asserts, must not reach the drop-in."""

from typing import Any

import torch
from torch import Tensor

from memrewrite.capture import capture
from memrewrite.step import Inputs, autocast
from tests.layers import model, x
from tests.test_capture import drop_in, front_ends


def bound(self: Any, x: Tensor) -> Any:
    """Other numbers while it is traced."""
    hidden = self.linear(x)
    return hidden if torch.compiler.is_compiling() or torch.compiler.is_exporting() else hidden * 2


def mapped(self: Any, x: Tensor) -> Any:
    """The same numbers either way; what it does otherwise no graph can hold."""
    return self.linear(x) if torch.compiler.is_compiling() else torch.vmap(self.linear)(x)


def test_a_model_that_asks_whether_it_is_traced_is_captured_as_it_always_runs() -> None:
    module = model(bound)
    captured = capture(module, Inputs((x(),), {}))
    assert captured.front_end == "export"
    assert captured.notes == ()
    assert torch.equal(drop_in(module, captured)(x()), module(x()))


@front_ends
def test_what_can_be_captured_only_of_a_model_that_is_told_is_told_to_the_user(front_end: str) -> None:
    module = model(mapped)
    captured = capture(module, Inputs((x(),), {}), front_end)
    assert "asks whether it is being traced (in tests.test_tracing)" in captured.notes[0]
    torch.testing.assert_close(drop_in(module, captured)(x()), module(x()))


def test_casts_inside_a_region_without_autocast_bear_autocast_around_it() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        hidden = self.linear(x)
        with torch.autocast("cpu", enabled=False):
            wide = hidden.to(torch.float64).sin()
        return self.other(wide.float())

    module = model(forward)
    optimized = drop_in(module, capture(module, Inputs((x(),), {}), "export"))
    with autocast(torch.bfloat16, "cpu"):
        assert torch.equal(optimized(x()), module(x()))


def test_whether_something_is_traced_is_asked_as_before_afterwards() -> None:
    capture(model(bound), Inputs((x(),), {}))
    assert not torch.compiler.is_compiling()
    assert torch.compile(torch.compiler.is_compiling, backend="eager", fullgraph=True)()
    assert torch.equal(torch.export.export(model(bound), (x(),)).module()(x()), model(bound)(x()) / 2)
