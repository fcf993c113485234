"""Storages know the submodule that made them: in any forward, in backward and recomputation, and in generated code."""

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memrewrite
from memrewrite.simulate import Timeline, run_tracked, simulate
from memrewrite.torch_internals.autograd_nodes import has_global_module_hooks
from memrewrite.workload.step import Inputs, Step
from tests.support.models import MODELS, ResidualNet, images, make

ADAMW = Step(optimizer=torch.optim.AdamW)


def operators(timeline: Timeline, phase: str) -> dict[str, list[str | None]]:
    """The submodules of each operator in a phase of step 2, in the order they ran."""
    found: dict[str, list[str | None]] = {}
    for (_, label), module in zip(timeline.events, timeline.modules, strict=True):
        if label.startswith(f"step 2 {phase}: aten."):
            found.setdefault(label.split(".")[1], []).append(module)
    return found


def assert_explained(timeline: Timeline) -> None:
    """What lived at each event is what was in use there."""
    series = timeline.split()
    assert [sum(sizes) for sizes in zip(*series.values(), strict=True)] == [size for size, _ in timeline.events]
    assert min(size for sizes in series.values() for size in sizes) >= 0
    peak = {category: sizes[timeline.peak_event] for category, sizes in series.items()}
    assert {c: size for c, size in peak.items() if size} == {c: size for c, size in timeline.categories.items() if size}
    assert timeline.events[timeline.peak_event][0] == timeline.peak


@pytest.mark.parametrize("amp", [None, torch.bfloat16], ids=["float32", "bf16"])
@pytest.mark.parametrize("model", MODELS)
def test_every_byte_is_explained_and_none_is_added(model: str, amp: torch.dtype | None) -> None:
    module, inputs = make(model)
    step = Step(optimizer=torch.optim.AdamW, amp=amp)
    plain, timeline = simulate(module, inputs, step), simulate(module, inputs, step, attribute=True)
    assert timeline == run_tracked(copy.deepcopy(module), inputs, step, attribute=True)
    assert (timeline.events, timeline.categories, timeline.peak_event) == (
        plain.events,
        plain.categories,
        plain.peak_event,
    )
    assert (plain.lives, plain.modules) == ((), ())
    assert_explained(timeline)
    assert {life.module for life in timeline.lives} <= {None, *dict(module.named_modules())}


def test_workspaces_are_part_of_every_event() -> None:
    timeline = simulate(*make("swish"), ADAMW, workspace_bytes=4096, attribute=True)
    assert set(timeline.split()["library workspaces"]) == {4096}
    assert_explained(timeline)


def test_forward_and_backward_of_a_model_as_it_is() -> None:
    timeline = simulate(*make("residual"), ADAMW, attribute=True)
    convolutions = ["stem", "blocks.0.conv", "blocks.1.conv", "blocks.2.conv"]
    forward, backward = operators(timeline, "forward"), operators(timeline, "backward")
    assert forward["convolution"] == convolutions
    assert forward["add"] == ["blocks.0", "blocks.1", "blocks.2"]
    assert forward["mean"] == [""]
    assert backward["convolution_backward"] == convolutions[::-1]
    assert backward["threshold_backward"] == ["blocks.2.act", "blocks.1.act", "blocks.0.act"]
    assert set(operators(timeline, "loss")["mean"]) == {None}


def test_what_belongs_to_a_parameter_lies_with_its_owner() -> None:
    module, inputs = make("residual")
    timeline = simulate(module, inputs, ADAMW, attribute=True)
    last_gradients = [life for life in timeline.lives if life.category == "gradients" and "step 2" in life.operator]
    for category, copies, lives in (
        ("parameters", 1, timeline.lives),
        ("gradients", 1, last_gradients),
        ("optimizer state", 3, timeline.lives),
    ):
        owners = [life.module for life in lives if life.category == category]
        expected = [name.rpartition(".")[0] for name, _ in module.named_parameters()]
        assert sorted(map(str, owners)) == sorted(expected * copies), category
    kept = {life.module for life in timeline.lives if life.category == "inputs"}
    assert kept == {None}


def test_what_a_model_recomputes_itself() -> None:
    timeline = simulate(*make("checkpointed"), ADAMW, attribute=True)
    again = operators(timeline, "backward")
    assert again["convolution"] == ["blocks.2.conv", "blocks.1.conv", "blocks.0.conv"]
    assert again["convolution_backward"] == [*again["convolution"], "stem"]


@pytest.mark.parametrize("regions", [None, ["blocks.*"]], ids=["whole", "regions"])
def test_generated_code_calls_no_submodules_and_names_them_all_the_same(regions: list[str] | None) -> None:
    module, inputs = make("residual")
    before = simulate(module, inputs, ADAMW, attribute=True)
    optimized = memrewrite.optimize(module, inputs.args, budget="min", regions=regions, verify=False)
    after = simulate(optimized, inputs, ADAMW, attribute=True)
    assert after.peak < before.peak
    assert_explained(after)
    assert "convolution" in operators(after, "backward")  # some of it is recomputed
    for phase, operator in (("forward", "convolution"), ("forward", "mean"), ("backward", "convolution_backward")):
        assert operators(after, phase)[operator] == operators(before, phase)[operator]
    for timeline in (before, after):
        for life in timeline.lives:
            if "native_batch_norm" in life.operator:
                assert str(life.module).endswith(".bn")


class OddNames(nn.Module):
    def __init__(self, names: Iterable[str]) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        for child in self.children():
            x = torch.relu(child(x))
        return x


def test_names_that_are_no_identifiers() -> None:
    names = ["a  # b", "it's", "b-c", "é", "\u2028", "0"]
    module, inputs = OddNames(names), Inputs((torch.ones(2, 4),), {})
    optimized = memrewrite.optimize(module, inputs.args, budget="min", verify=False)
    assert optimized.report.changed
    timeline = simulate(optimized, inputs, ADAMW, attribute=True)
    assert operators(timeline, "forward")["addmm"] == names


def test_hooks_go_when_it_is_done_and_when_it_fails() -> None:
    class Failing(ResidualNet):
        def forward(self, x: Tensor) -> Tensor:
            self.stem(x)
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        simulate(Failing(), images(), Step(), attribute=True)
    assert not has_global_module_hooks()
    simulate(ResidualNet(), images(), Step(), attribute=True)
    assert not has_global_module_hooks()


def test_other_modules_are_nobodys_place() -> None:
    helper = nn.Linear(8, 8).requires_grad_(False)  # no submodule of the model

    class Helped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Any:
            return helper(self.inner(x))

    timeline = simulate(Helped(), Inputs((torch.ones(4, 8),), {}), Step(), attribute=True)
    assert operators(timeline, "forward")["addmm"] == ["inner", ""]
