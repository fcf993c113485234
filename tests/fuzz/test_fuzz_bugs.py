"""What random models found, each as the smallest model that shows it."""

import pytest
import torch
from torch import Tensor, nn

import memrewrite
from memrewrite.records.errors import CaptureError
from memrewrite.workload.step import Inputs
from tests.fuzz.check import EXACT, Ask, check
from tests.fuzz.strategies import Do, Part, Recipe, make

CASES = {
    "an in-place activation on the model's input": (
        Recipe("rows", (Part("hardswish"),), (Do("part"),)),
        Ask(None),
    ),
    "an in-place ELU whose input needs a gradient only when the caller asks": (
        Recipe("rows", (Part("elu"),), (Do("write_part"), Do("part"))),
        Ask(None, EXACT),
    ),
    "an inference peak that out-of-place spelling would raise, budget min": (
        Recipe(
            "rows",
            (Part("relu6", eval=True),),
            (Do("attend", 1), Do("part"), Do("swish_timm")),
            double=True,
            input_gradient=True,
            training=False,
        ),
        Ask("min", EXACT),
    ),
    "a pattern whose input the caller lets be written later": (
        Recipe("image", (Part("dropout_inplace"),), (Do("erf_gelu"), Do("part", 1)), output="all", double=True),
        Ask(None, optimizer="none"),
    ),
    "a pattern that reads a value after it was written in place": (
        Recipe(
            "image",
            (Part("silu_inplace"),),
            (Do("part", 0, 2, 6), Do("part", 0, 2, 6), Do("swish_quick", 1, 4, 2), Do("swish_method", 0, 5, 2)),
            output="head",
            training=False,
        ),
        Ask(None),
    ),
    "a pattern in the place of what the model then writes over": (
        Recipe(
            "image",
            (Part("relu_inplace"),),
            (Do("swish_learned", 0, 0, 0), Do("part", 1, 0, 0)),
            output="dict",
        ),
        Ask(None),
    ),
    "a pattern whose value is read after it is written through a view": (
        Recipe(
            "tokens",
            (Part("silu_inplace"),),
            (Do("swish", 1, 0, 6), Do("write_through_view", 0, 3, 2), Do("bernoulli", 1, 2, 2), Do("part", 3, 3, 5)),
            output="last",
            double=True,
        ),
        Ask(None, optimizer="sgd", amp=torch.bfloat16),
    ),
    "a region without gradients in an inference step": (
        Recipe(
            "image",
            (Part("relu_inplace"),),
            (Do("no_grad", 0, 0, 0), Do("part", 1, 0, 0)),
            output="all",
            input_gradient=True,
            training=False,
        ),
        Ask(None),
    ),
    "a program that fits where the model does not, with nothing to rewrite": (
        Recipe("image", (Part("relu"),), (Do("part", 0, 0, 0), Do("part", 0, 0, 0)), output="head"),
        Ask(0.875),
    ),
    "an activation in place whose result is written through a view": (
        Recipe(
            "image",
            (Part("leaky_relu"), Part("mix"), Part("dropout"), Part("mix")),
            (Do("part", 0, 0, 2), Do("part", 0, 0, 0), Do("part", 0, 0, 2), Do("write_through_view", 1, 0, 0)),
            output="all",
        ),
        Ask(None),
    ),
    "an inference step that writes what a training step would keep": (
        Recipe(
            "image",
            (Part("mix"),),
            (Do("part"), Do("part"), Do("mul_", 2)),
            output="all",
            training=False,
        ),
        Ask(None),
    ),
    "a first BatchNorm whose input needs no gradient": (
        Recipe(
            "rows",
            (Part("batch_norm"), Part("mix"), Part("hardswish"), Part("mix"), Part("mix")),
            (Do("part", 0, 0, 7), Do("part", 0, 0, 0), Do("part", 0, 0, 7), Do("part", 3, 0, 0)),
            output="head",
        ),
        Ask(None),
    ),
    "a program that fits where the model does not, budget the original peak": (
        Recipe("rows", (Part("relu6", eval=True),), (Do("attend", 1), Do("part"), Do("swish_timm")), training=False),
        Ask(1.0, EXACT),
    ),
}


@pytest.mark.parametrize(("recipe", "ask"), CASES.values(), ids=CASES)
def test_a_random_model_that_failed(recipe: Recipe, ask: Ask) -> None:
    model, inputs = make(recipe)
    assert check(model, inputs, ask) in ("exact", "close")


class Averaged(nn.Module):
    """Writes a frozen parameter in place, as PyTorch allows where it needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.level = nn.Parameter(torch.ones(64), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x).relu()
        self.level.mul_(0.9)
        return (hidden * self.level).sigmoid() * 2


def test_what_only_its_own_checkpoint_allows_once_the_input_needs_a_gradient_is_refused_by_name() -> None:
    recipe = Recipe("rows", (Part("softmax"),), (Do("checkpoint"), Do("write_through_view")))
    model, inputs = make(recipe)  # the input needs none, but whoever calls the result may ask for it
    with pytest.raises(CaptureError, match="what autograd would keep without the model's own checkpoint"):
        memrewrite.optimize(model, inputs.args, budget="min")


class HalfWritten(nn.Module):
    """Writes one of several views of what it made of its input, as PyTorch allows where that needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        left, right = x.clone().chunk(2, -1)
        left.mul_(2)
        return self.head(self.layer(torch.cat([left, right], -1)).relu()) * 2


def test_a_model_that_takes_no_input_with_a_gradient() -> None:
    torch.manual_seed(0)
    model, inputs = HalfWritten(), Inputs((torch.randn(64, 64),), {})
    assert check(model, inputs, Ask("min")) == "exact"
    report = memrewrite.optimize(model, inputs.args, budget="min").report
    (reason,) = (reason for name, _, reason in report.refusals if name == "inplace_activation")
    assert "HalfWritten does not run where all its inputs and parameters need gradients" in reason


def test_a_type_that_is_asked_for_is_that_under_autocast() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.SiLU()) for _ in range(4)))

        def forward(self, x: Tensor) -> Tensor:
            hidden: Tensor = self.body(x)
            return hidden.to(torch.bfloat16).to(hidden.dtype)

    result = memrewrite.optimize(Half(), torch.randn(512, 32), budget="min", amp="bf16")
    assert result.report.config["regions"] == [""]
    assert result.report.verdict.startswith("bit-equal")


def test_values_of_one_element_with_any_stride_are_compared() -> None:
    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return (torch.sigmoid(x) * x * self.scale).sum((0, 1)).as_strided((1, 1), (0, 46))

    assert memrewrite.optimize(One(), torch.randn(4, 5, 1), budget="min").report.equivalent


def test_a_frozen_parameter_written_in_place() -> None:
    torch.manual_seed(0)
    assert check(Averaged(), Inputs((torch.randn(64, 64),), {}), Ask(None)) == "exact"


def test_rewrites_that_raise_the_peak_are_dropped_and_said() -> None:
    recipe, _ = CASES["an inference peak that out-of-place spelling would raise, budget min"]
    model, inputs = make(recipe)
    result = memrewrite.optimize(model, inputs.args, budget="min", optimizer="none", passes=EXACT)
    assert id(result) == id(model)
    assert result.report.rewrites == ()
    assert any("above that of the model as it is" in reason for _, _, reason in result.report.refusals)


def test_a_view_written_to_without_gradients_is_not_asked_for_its_history() -> None:
    parts = (Part("relu6"), Part("feature_dropout"), Part("group_norm"))
    steps = (
        Do("part", 2, 4, 1),
        Do("relu_", 2),
        Do("write_through_view", k=5),
        Do("relu_"),
        Do("write_through_view", 1),
    )
    recipe = Recipe("rows", parts, steps, "tuple", double=True, input_gradient=True, training=False)
    model, inputs = make(recipe)
    assert check(model, inputs, Ask("min", optimizer="adamw")) == "exact"
