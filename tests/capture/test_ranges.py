"""Sizes that the user names run in one plan from the smallest to the largest, or are refused in a sentence."""

import copy
import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memrewrite
from memrewrite import cli
from memrewrite.artifact.load import load
from memrewrite.artifact.save import save
from memrewrite.equivalence.sizes import smaller_inputs
from memrewrite.optimizing import foresight
from memrewrite.records.errors import CaptureError, UsageError
from memrewrite.records.ranges import Range, parse_ranges
from memrewrite.runtime.promise import BeyondPlanError, BeyondPlanWarning, FallbackWarning
from memrewrite.simulate import run_tracked
from memrewrite.workload.ranges import enlarged
from memrewrite.workload.step import Inputs, Step
from tests.capture.test_lengths import Text, taken, text

SIDES = {"x": {2: (16, 48), 3: (16, 64)}}


class Conv(nn.Module):
    """Takes images of any size."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.inner, self.pool = nn.Conv2d(8, 8, 3, stride=2), nn.AdaptiveAvgPool2d(2)
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.stem(x)))
        return self.head(self.pool(torch.tanh(self.inner(x).sigmoid())).flatten(1))


class Fixed(nn.Module):
    """Takes images of one size, or of one area."""

    def __init__(self, added: bool) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(3, 16, 16)) if added else None
        self.head = nn.Linear(3 * 16 * 16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.places is None else (x + self.places).tanh()
        return self.head(x.reshape(x.shape[0], -1))


class Halves(nn.Module):
    """Takes only lengths that four divides, of numbers with fractions, and a mask of their length."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if x.shape[1] % 4:
            x = x * 2
        x = self.second(functional.gelu(self.first(x)).tanh())
        return x * mask[:, :, None]


def image(batch: int, height: int, width: int) -> Tensor:
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(height * width))


def stepped(module: nn.Module, x: Tensor) -> list[Tensor]:
    """Output, gradients and buffers of a step."""
    x = x.clone().requires_grad_()
    module.zero_grad(set_to_none=True)
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    output = module(x)
    output.square().sum().backward()
    gradients = [p.grad for p in (x, *module.parameters()) if p.grad is not None]
    found = [output.detach(), *gradients, *(buffer.clone() for buffer in module.buffers())]
    for name, buffer in module.named_buffers():
        buffer.copy_(before[name])
    return found


class Pyramid(nn.Module):
    """Works on images of half the size, whose sizes are told by fractions."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mode = mode
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        half = functional.interpolate(torch.tanh(self.first(x).sigmoid()), scale_factor=0.5, mode=self.mode)
        return torch.tanh(self.second(half).sigmoid())


@pytest.fixture(scope="module")
def pair() -> tuple[Conv, Any]:
    model = Conv()
    result = memrewrite.optimize(model, image(4, 32, 32), budget="min", exact=True, dynamic=SIDES)
    return model, result


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("mode", ["nearest", "bilinear", "area"])
def test_sizes_that_are_told_by_fractions(mode: str) -> None:
    model = Pyramid(mode)
    result = memrewrite.optimize(
        model, image(4, 16, 16), budget="min", exact=True, dynamic={"x": {2: (8, 24), 3: (8, 24)}}
    )
    assert result.report.verdict.endswith(", also at smaller sizes")
    for height, width in ((24, 24), (8, 8), (23, 9)):
        x = image(4, height, width)
        assert all(map(torch.equal, stepped(result, x), stepped(model, x)))


@pytest.mark.filterwarnings("error")
def test_images_of_all_sizes_in_the_ranges_run_in_one_program_within_the_budget(pair: tuple[Conv, Any]) -> None:
    model, result = pair
    assert result.report.segments
    assert result.report.verdict.startswith("bit-equal")
    assert result.report.verdict.endswith(", also at smaller sizes")
    assert result.report.notes == ()
    step = Step("train", torch.optim.AdamW)
    peaks = []
    for batch, height, width in ((4, 48, 64), (4, 16, 16), (4, 48, 16), (3, 33, 47), (2, 17, 64)):
        x = image(batch, height, width)
        assert all(map(torch.equal, stepped(result, x), stepped(model, x)))
        peaks.append(run_tracked(result, Inputs((x,), {}), step).peak)
    assert peaks[0] == max(peaks) == result.report.predicted_after.peak


def test_smaller_ones_run_the_original_and_larger_ones_are_told(pair: tuple[Conv, Any]) -> None:
    model, result = pair
    x = image(4, 15, 32)
    told = r"ran its original forward: size 2 of x is 15, and the range that was asked for is 16 to 48\. A step"
    with pytest.warns(FallbackWarning, match=told):
        found = stepped(result, x)
    assert all(map(torch.equal, found, stepped(model, x)))
    x = image(4, 49, 64)
    with pytest.warns(BeyondPlanWarning, match="takes inputs of size 49, planned for 48"):
        found = stepped(result, x)
    assert all(map(torch.equal, found, stepped(model, x)))


def test_verified_are_the_smallest_and_one_in_between(pair: tuple[Conv, Any]) -> None:
    smallest, between = smaller_inputs(pair[1], Inputs((image(4, 48, 64),), {}))
    assert tuple(smallest[0].args[0].shape) == (2, 3, 16, 16)
    assert tuple(between[0].args[0].shape) == (2, 3, 32, 40)


def test_the_report_names_the_ranges(pair: tuple[Conv, Any], tmp_path: Path) -> None:
    report = pair[1].report
    assert report.config["dynamic"] == ["x:2=16..48", "x:3=16..64"]
    assert report.config["input_bytes"] == 4 * 3 * 48 * 64 * 4
    assert "x:2=16..48, x:3=16..64" in report.to_html()


def test_an_artifact_has_the_ranges(pair: tuple[Conv, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, result = pair
    save(result, tmp_path / "out")
    loaded = load(tmp_path / "out", model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x in (image(4, 48, 64), image(2, 16, 21)):
            assert all(map(torch.equal, stepped(loaded, x), stepped(model, x)))
    with pytest.warns(UserWarning, match="size 3 of x is 15, and the range that was asked for is 16 to 64"):
        loaded(image(4, 48, 15))
    assert cli.run(["show", str(tmp_path / "out")]) == 0
    assert "Sizes that vary: x:2=16..48, x:3=16..64" in capsys.readouterr().out


@pytest.mark.filterwarnings("error::memrewrite.runtime.promise.FallbackWarning")
def test_a_text_model_is_planned_for_longer_texts_than_the_example() -> None:
    model = Text()
    options: dict[str, Any] = {"budget": "min", "loss_fn": lambda loss: loss, "dynamic": {"ids": {1: (4, 40)}}}
    result = memrewrite.optimize(model, text(8, 16), **options)
    assert result.report.config["dynamic"] == ["ids:1=4..40"]
    assert result.report.verdict.endswith(", also at smaller sizes")
    step = Step("train", torch.optim.AdamW, loss_fn=lambda loss: loss)
    for length in (40, 39, 16, 4):
        inputs = text(8, length)
        assert all(map(torch.equal, taken(result, inputs), taken(model, inputs)))
        assert run_tracked(result, Inputs(inputs, {}), step).peak <= result.report.predicted_after.peak
    with pytest.raises(FallbackWarning, match="size 1 of ids is 3, and the range that was asked for is 4 to 40"):
        taken(result, text(8, 3))


def test_a_condition_on_sizes_is_told_and_kept_to() -> None:
    model, x = Halves(), torch.randn(4, 8, 8)
    mask = torch.ones(4, 8, dtype=torch.bool)
    result = memrewrite.optimize(model, (x, mask), budget="min", exact=True, dynamic=["x:1=6..64"])
    assert result.report.notes == ("x must have a size 1 with size % 4 == 0; others run the original forward.",)
    assert result.report.verdict.endswith(", also at smaller sizes")
    smallest, between = smaller_inputs(result, Inputs((torch.randn(4, 64, 8), torch.ones(4, 64, dtype=torch.bool)), {}))
    assert smallest[0].args[0].shape[1] == 8
    assert between[0].args[0].shape[1] == 36
    with pytest.warns(FallbackWarning, match="forward takes another path than at capture"):
        result(torch.randn(4, 34, 8), torch.ones(4, 34, dtype=torch.bool))


class Placed(nn.Module):
    """Makes a grid by a function that export has take a number of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.linspace(-1, 1, x.shape[2])[:, None].expand(x.shape[0], 1, -1, x.shape[3])
        return self.inner(torch.cat([x, rows], 1)).sigmoid()


def test_a_line_that_fixes_a_size_as_a_number_is_told() -> None:
    with pytest.raises(
        memrewrite.CaptureError, match=r"takes no other size 2 of x than 16, as test_ranges\.py:\d+ has it"
    ):
        memrewrite.optimize(Placed(), image(4, 16, 16), budget="min", dynamic={"x": {2: (8, 16)}})


@pytest.mark.parametrize(
    ("added", "said"),
    [
        (True, "Fixed cannot take x:2=8..16: its forward takes no other size 2 of x than 16, as test_ranges.py:"),
        (
            False,
            "Fixed cannot take x:2=8..16: its forward takes no other size 2 of x in it than 16, as it needs (3*x.size",
        ),
    ],
)
def test_a_forward_that_fixes_a_size_is_refused(added: bool, said: str) -> None:
    with pytest.raises(CaptureError, match=re.escape(said)):
        memrewrite.optimize(Fixed(added), image(4, 16, 16), dynamic={"x": {2: (8, 16), 3: (8, 16)}})


def test_a_range_of_one_size_is_one_for_every_forward() -> None:
    given = memrewrite.optimize(Fixed(True), image(4, 8, 8), verify=False, dynamic=["x:2=16..16", "x:3=16..16"])
    assert given.report.config["input_bytes"] == 4 * 3 * 16 * 16 * 4


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if x.sum() > 0 else self.inner(-x)


def test_parts_of_a_model_take_no_ranges() -> None:
    with pytest.raises(CaptureError, match="lets the values of a tensor decide"):
        memrewrite.optimize(Branching(), torch.ones(4, 4, 8), dynamic=["x:1=2..8"])
    with pytest.raises(UsageError, match="dynamic is for inputs of the whole model"):
        memrewrite.optimize(Branching(), torch.ones(4, 4, 8), dynamic=["x:1=2..8"], regions=["inner"])


WRONG: dict[str, tuple[Any, str]] = {
    "name": ({"y": {2: (1, 8)}}, "Range y:2=1..8 names no tensor that forward of Conv is called with; it has x."),
    "dimension": ({"x": {4: (1, 8)}}, "Range x:4=1..8 has no place: x has 4 dimensions, counted from 0."),
    "negative": ({"x": {-1: (1, 8)}}, "Range x:-1=1..8 has a negative dimension; count dimensions from 0."),
    "order": ({"x": {2: (9, 8)}}, "Range x:2=9..8 ends before it begins; give the smaller size first."),
    "zero": ({"x": {2: (0, 8)}}, "Range x:2=0..8 begins below 1; the smallest size is 1."),
    "one": ({"x": {2: (1, 1)}}, "Range x:2=1..1 ends at 1; a size that varies has to reach 2."),
    "fraction": ({"x": {2: (1, 8.0)}}, "Range x:2=1..8.0 is not made of a name and whole numbers; write NAME:DIM="),
    "number": ({"x": {2: 8}}, "The range of 'x' at dimension 2 is 8; give two sizes, as in (64, 256)."),
    "list": ({"x": [2, 8]}, "The ranges of 'x' are [2, 8]; give sizes by dimension, as in {2: (64, 256)}."),
    "text": ("x:2=8", "Range 'x:2=8' is not of a form that is known; write NAME:DIM=MIN..MAX, as in x:2=64..256."),
    "twice": (["x:2=1..8", "x:2=1..9"], "There are several ranges for size 2 of x; give one."),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_one_sentence(name: str) -> None:
    given, sentence = WRONG[name]
    with pytest.raises(UsageError, match=re.escape(sentence)) as told:
        memrewrite.optimize(Conv(), image(4, 16, 16), dynamic=given)
    assert str(told.value).count(". ") == 0


def test_an_empty_size_has_nothing_to_repeat() -> None:
    with pytest.raises(UsageError, match="has nothing to begin with: size 2 of x is 0 in the example"):
        memrewrite.optimize(Conv(), torch.ones(4, 3, 0, 8), dynamic={"x": {2: (1, 8)}})


def test_texts_and_mappings_say_the_same() -> None:
    assert parse_ranges(SIDES) == parse_ranges(["x:2=16..48", " x:3=16..64 "])
    assert [str(each) for each in parse_ranges(SIDES)] == ["x:2=16..48", "x:3=16..64"]
    assert parse_ranges(None) == ()


class Called(nn.Module):
    def forward(
        self, ids: Tensor, mask: Tensor, x: Tensor, count: Tensor, scale: float = 1.0, **more: Tensor
    ) -> Tensor:
        raise NotImplementedError


def test_what_is_alike_grows_together() -> None:
    ids = torch.arange(12).reshape(3, 4)
    x = torch.randn(3, 2, 2, 4).to(memory_format=torch.channels_last).requires_grad_()
    inputs = Inputs((ids, ids > 3, x), {"count": torch.arange(3), "labels": ids, "others": torch.ones(3, 5)})
    found, ranges = enlarged(Called(), inputs, parse_ranges({"labels": {1: (2, 6)}, "x": {3: (2, 3)}}))
    assert found.args[0] is found.kwargs["labels"]
    assert found.args[0].tolist()[0] == [0, 1, 2, 3, 0, 1]
    assert [tuple(t.shape) for t in found.tensors()] == [(3, 6), (3, 6), (3, 2, 2, 3), (3,), (3, 6), (3, 5)]
    assert found.args[2].is_contiguous(memory_format=torch.channels_last)
    assert found.args[2].requires_grad
    assert found.args[2].is_leaf
    assert [(str(each), each.implied) for each in ranges[2:]] == [("ids:1=2..6", True), ("mask:1=2..6", True)]
    batch, _ = enlarged(Called(), inputs, [Range("ids", 0, 2, 5)])
    assert [len(t) for t in batch.tensors()] == [5] * 6
    again, _ = enlarged(Called(), batch, [Range("ids", 0, 2, 5)])
    assert all(mine is theirs for mine, theirs in zip(again.tensors(), batch.tensors(), strict=True))


def test_a_smaller_size_that_takes_more_is_not_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    true = foresight.Foresight.__call__

    def more_in_between(self: foresight.Foresight, call: Any, original: bool = False) -> int | None:
        return 10**9 if call[1][0].shape[2] == 32 else true(self, call, original)

    monkeypatch.setattr(foresight.Foresight, "__call__", more_in_between)
    model = Conv()
    options: dict[str, Any] = {"budget": "min", "verify": False, "strict": True, "dynamic": SIDES}
    result = memrewrite.optimize(model, image(4, 32, 32), **options)
    (note,) = result.report.notes
    assert note.startswith(
        "Inputs of (4, 3, 32, 40), smaller than what was planned for, take 1.00 GB, above the budget"
    )
    result = copy.deepcopy(result)  # which knows of no other size what it takes
    result(image(4, 16, 16))
    with pytest.raises(BeyondPlanError, match="takes inputs of size 32, planned for 16"):
        result(image(4, 32, 40))


CONV = """
import torch
from torch import nn

class SizedNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)

    def forward(self, x):
        x = self.first(x)
        return self.second(x * torch.sigmoid(x)).mean((2, 3))

def get_inputs():
    return torch.randn(4, 3, 16, 16)
"""


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "sized_net.py").write_text(CONV)
    monkeypatch.chdir(tmp_path)
    return "sized_net.py"


def test_the_command_plans_saves_and_measures_at_the_largest(net: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["optimize", net, "--dynamic", "x:2=8..24", "--dynamic", "x:3=8..32", "--device", "cpu", "-q"]
    assert cli.run([*arguments, "--budget", "80%", "-o", "out", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["command"]["dynamic"] == found["config"]["dynamic"] == ["x:2=8..24", "x:3=8..32"]
    assert found["config"]["input_bytes"] == 4 * 3 * 24 * 32 * 4
    assert found["measured_after"]["peak"] == found["predicted_after"]["peak"] <= found["budget"]
    assert cli.run([*arguments, "--budget", "80%", "--check", "--json", "-"]) == 1
    assert json.loads(capsys.readouterr().out)["predicted_peak"] == found["predicted_before"]["peak"]
    assert cli.run(["verify", "out", net, "--input", "3x3x8x20", "--device", "cpu", "-q"]) == 0


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("x:2=24..8", 2, "Range x:2=24..8 ends before it begins"),
        ("x=8..24", 2, "Range 'x=8..24' is not of a form that is known"),
        ("y:2=8..24", 2, "Range y:2=8..24 names no tensor that forward of SizedNet is called with; it has x."),
        ("x:1=3..8", 3, "SizedNet fails on the example inputs"),
    ],
)
def test_the_command_refuses(text: str, code: int, said: str, net: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["optimize", net, "--dynamic", text, "--device", "cpu", "-q"]) == code
    assert said in capsys.readouterr().err


def test_a_project_may_set_them(net: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("pyproject.toml").write_text('[tool.memrewrite]\ndynamic = ["x:2=8..24"]\n')
    assert cli.run(["optimize", net, "--no-measure", "--no-verify", "--device", "cpu", "-q"]) == 0
    assert "Sizes that vary: x:2=8..24" in capsys.readouterr().out
