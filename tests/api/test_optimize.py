"""``memrewrite.optimize`` from model to drop-in: budgets kept to the byte, the same numbers, failures told apart."""

import copy
import functools
import json
import types
from collections import UserDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

import memrewrite
from memrewrite.equivalence import verifying
from memrewrite.equivalence.verifying import verify
from memrewrite.measurement import measuring
from memrewrite.observe.effects import Effects
from memrewrite.passes.composites import Composites
from memrewrite.passes.swish import Swish
from memrewrite.records.errors import BudgetInfeasibleError, CaptureError, NotEquivalentError, UsageError
from memrewrite.records.options import Budget
from memrewrite.records.outcomes import Measured
from memrewrite.records.report import Report
from memrewrite.report import assembly as reporting
from memrewrite.rewriting.contract import Findings, Result
from memrewrite.runtime.dropin import programs
from memrewrite.runtime.promise import FallbackWarning
from memrewrite.search import bench, registry
from memrewrite.simulate import Timeline, run_tracked, simulate
from memrewrite.workload.step import Inputs, Step
from tests.support.dropins import ConvNet, assert_same_bits, conv_net, image, step
from tests.support.models import make


def tracked(module: nn.Module, x: Tensor, optimizer: Any = torch.optim.AdamW, amp: Any = None) -> Timeline:
    """The real course of memory on the CPU, of a copy so that nothing of ``module`` changes."""
    mode: Any = "train" if module.training else "inference"
    return run_tracked(copy.deepcopy(module), Inputs((x,), {}), Step(mode, optimizer, None, amp))


def state(model: nn.Module) -> dict[str, Any]:
    """All that optimizing must leave alone, by value and by identity."""
    values: dict[str, Any] = {name: value.clone() for name, value in model.state_dict().items()}
    values |= {f"{name} itself": id(p) for name, p in [*model.named_parameters(), *model.named_buffers()]}
    values |= {f"{name}.grad": p.grad for name, p in model.named_parameters()}
    values |= {f"{name}.trains": p.requires_grad for name, p in model.named_parameters()}
    for path, module in model.named_modules():
        values[f"{path} attributes"] = sorted(vars(module))
        values[f"{path} class"] = type(module)
        values[f"{path} mode"] = module.training
        values[f"{path} names"] = [list(d) if isinstance(d, dict | set) else None for d in vars(module).values()]
    return values | {"random": torch.get_rng_state()}


def assert_untouched(before: dict[str, Any], model: nn.Module) -> None:
    after = state(model)
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert value.equal(after[name]) if isinstance(value, Tensor) else value == after[name], name


class Tabulated(nn.Module):
    """Layers that make a table when they are first called and keep it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(32.0).sin()
        for layer in self.layers:
            x = torch.tanh(layer(x) * self.table)
        return x


def test_the_default_device_may_be_any() -> None:
    """As after ``torch.set_default_device("cuda")`` with a model that lies elsewhere."""
    net, x = conv_net(), image()
    expected = memrewrite.optimize(copy.deepcopy(net), (x,), budget="min", optimizer="sgd").report
    with torch.device("meta"):
        found = memrewrite.optimize(net, (x,), budget="min", optimizer="sgd").report
    assert (found.verdict, found.measured_after) == (expected.verdict, expected.measured_after)


def test_a_table_that_forward_makes_once_is_there_after_one_call() -> None:
    model, x = Tabulated(), torch.randn(64, 32)
    with pytest.raises(CaptureError, match=r"new tensor to self\.table .* call the model first"):
        memrewrite.optimize(model, x)
    model(x)
    result = memrewrite.optimize(model, x, budget="min")
    assert result.report.equivalent
    assert result.report.segments
    assert result.report.config["regions"] == [""]


class SwishStack(nn.Module):
    """Linear layers with a composite Swish each."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(x)
            x = h * torch.sigmoid(h)
        return x


class FixedBatch(nn.Module):
    """Its graph holds for batches of eight alone."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).view(8, 2)


def rows(batch: int = 64) -> Tensor:
    return torch.randn(batch, 16, generator=torch.Generator().manual_seed(2))


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build()


def test_without_a_budget_and_with_nothing_to_rewrite_the_model_itself_comes_back() -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(16, 16)))
    attributes = set(vars(model))
    result = memrewrite.optimize(model, rows())
    assert result is model
    assert not result.report.changed
    assert (result.report.rewrites, result.report.segments, result.report.equivalent) == ((), (), None)
    assert result.report.predicted_before == result.report.predicted_after
    assert set(vars(model)) - attributes == {"report", "_memrewrite_report"}
    again = memrewrite.optimize(model, rows(), budget="1GB")
    assert again.report.config["budget"] != result.report.config["budget"] if again is not model else True


@pytest.mark.parametrize("budget", ["1GB", "100%", 10**12, Budget(bytes=10**9)], ids=str)
def test_a_budget_that_holds_already_makes_no_segments(budget: Any) -> None:
    result = memrewrite.optimize(conv_net(), image(), budget=budget)
    assert result.report.segments == ()
    assert result.report.predicted_after.peak <= result.report.predicted_before.peak


STEPS: dict[str, tuple[Any, Any]] = {
    "sgd": (torch.optim.SGD, None),
    "adamw": ("adamw", None),
    "adamw bf16": ("adamw", torch.bfloat16),
    "no optimizer": (None, None),
}
SHAPES: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "conv": (lambda: ConvNet(dropout=0.1), image(8)),
    "swish": (SwishStack, rows(256)),
    "residual": (lambda: make("residual")[0], torch.randn(4, 3, 12, 12)),
    "transformer": (lambda: make("transformer")[0], torch.randint(40, (4, 8))),
    "tied": (lambda: make("tied")[0], torch.randint(40, (16, 8))),
}


@pytest.mark.parametrize(
    ("shape", "step_name"),
    [
        *(("conv", name) for name in STEPS),
        ("swish", "adamw"),
        ("residual", "no optimizer"),
        ("transformer", "adamw bf16"),
        ("tied", "sgd"),
    ],
)
def test_the_promised_peak_is_the_real_one_to_the_byte(shape: str, step_name: str) -> None:
    (build, x), (optimizer, amp) = SHAPES[shape], STEPS[step_name]
    model = seeded(build)
    result = memrewrite.optimize(model, x, budget="min", optimizer=optimizer, amp=amp, verify=False)
    factory = torch.optim.AdamW if optimizer == "adamw" else optimizer
    for module, promise in ((model, result.report.predicted_before), (result, result.report.predicted_after)):
        real = tracked(module, x, factory, amp)
        assert (promise.peak, promise.peak_step1) == (real.peak, real.peak_step1)
        assert promise.phases == real.phases
    assert result.report.predicted_after.peak <= result.report.predicted_before.peak


@pytest.mark.parametrize("share", [0, 0.5])
@pytest.mark.parametrize(("build", "x"), [SHAPES["conv"], SHAPES["swish"], SHAPES["residual"]], ids=list(SHAPES)[:3])
def test_any_budget_between_lowest_and_original_is_kept_and_proved(
    build: Callable[[], nn.Module], x: Tensor, share: float
) -> None:
    model = seeded(build)
    lowest = memrewrite.optimize(model, x, budget="min", optimizer="sgd", verify=False).report
    low, high = lowest.predicted_after.peak, lowest.predicted_before.peak
    budget = int(low + share * (high - low))
    before = state(model)
    result = memrewrite.optimize(model, x, budget=budget, optimizer="sgd")
    assert_untouched(before, model)
    report = result.report
    assert report.budget == budget
    assert report.equivalent or not report.changed
    assert report.predicted_after.peak <= budget
    assert tracked(result, x, torch.optim.SGD).peak == report.predicted_after.peak


@pytest.mark.parametrize(
    ("shape", "budget"), [("conv", "1B"), ("conv", 600), ("transformer", "20%")], ids=["byte", "parameters", "a fifth"]
)
def test_the_lowest_peak_told_when_nothing_fits_can_be_asked_for(shape: str, budget: Any) -> None:
    build, x = SHAPES[shape]
    model = seeded(build)
    before = state(model)
    with pytest.raises(BudgetInfeasibleError, match=r"No plan fits .*lowest reachable peak is .*What else") as caught:
        memrewrite.optimize(model, x, budget=budget, verify=False)
    assert_untouched(before, model)
    assert all(line in str(caught.value) for line in caught.value.advice)
    result = memrewrite.optimize(model, x, budget=caught.value.lowest, verify=False)
    assert result.report.predicted_after.peak <= caught.value.lowest


def test_advice_is_simulated_and_holds() -> None:
    model, x = seeded(lambda: SwishStack(6)), rows(512)
    lowest = memrewrite.optimize(model, x, budget="min", verify=False).report.predicted_after.peak
    with pytest.raises(BudgetInfeasibleError) as caught:
        memrewrite.optimize(model, x, budget=int(0.8 * lowest), verify=False)
    (batches, *_) = caught.value.advice
    assert "2 micro-batches of 256" in batches
    smaller = memrewrite.optimize(model, x[:256], budget=int(0.8 * lowest), verify=False)
    assert smaller.report.predicted_after.peak <= 0.8 * lowest


def test_advice_leaves_out_batches_the_graph_does_not_hold_for() -> None:
    model, x = seeded(FixedBatch), torch.randn(8, 16)
    with pytest.raises(BudgetInfeasibleError) as caught:
        memrewrite.optimize(model, x, budget=60_000, verify=False)
    assert not any("micro-batches" in line for line in caught.value.advice)
    assert any("SGD" in line for line in caught.value.advice)


@pytest.mark.parametrize(
    ("passes", "marks", "segments"),
    [
        ((), False, False),
        (("swish",), True, False),
        ("swish", True, False),
        (["checkpoint_segments"], False, True),
        (iter(["swish", "checkpoint_segments"]), True, True),
    ],
    ids=["none", "swish", "swish as text", "segments", "both, once"],
)
def test_only_the_passes_asked_for_run(passes: Any, marks: bool, segments: bool) -> None:
    report = memrewrite.optimize(seeded(SwishStack), rows(256), budget="min", passes=passes).report
    assert any(name == "swish" for name, _, _ in report.rewrites) == marks
    assert bool(report.segments) == segments
    assert {name for name, _, _ in report.rewrites} <= {"swish", "checkpoint_segments"}


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "pass": ({"passes": ["swich"]}, "There is no pass 'swich'; the passes are swish"),
    "budget": ({"budget": "8"}, "Budget '8' has no known unit"),
    "optimizer": ({"optimizer": "adamx"}, "Optimizer 'adamx' is unknown"),
    "amp": ({"amp": "fp8"}, "Precision 'fp8' is unknown"),
    "regions as text": ({"regions": "layers.*"}, "regions='layers.*' is no list of patterns"),
    "no regions": ({"regions": []}, "is no list of patterns"),
    "seed": ({"seed": 1.0}, r"^Seed 1\.0 is no int; give a whole number from"),
    "no passes": ({"passes": 3}, "passes=3 is no list of names"),
    "no ranges": ({"dynamic": 3}, "dynamic=3 names no sizes"),
    "mode": ({"mode": "inference"}, r"The model is in train mode; call model.eval\(\) first"),
}


@pytest.mark.parametrize(("options", "sentence"), WRONG.values(), ids=WRONG)
def test_wrong_use_is_told_before_anything_runs(options: dict[str, Any], sentence: str) -> None:
    model = conv_net()
    before = state(model)
    with pytest.raises(UsageError, match=sentence):
        memrewrite.optimize(model, image(), **options, progress=lambda stage: pytest.fail(f"{stage} ran"))
    assert_untouched(before, model)


@pytest.mark.parametrize("call", [memrewrite.optimize, memrewrite.estimate, memrewrite.measure])
def test_what_is_no_model_is_told_as_that(call: Any) -> None:
    with pytest.raises(UsageError, match="The class ConvNet is no model; give an object"):
        call(ConvNet, image())
    with pytest.raises(UsageError, match="A function is no model"):
        call(conv_net, image())


@pytest.mark.parametrize("call", [memrewrite.optimize, memrewrite.estimate])
def test_a_compiled_model_is_refused(call: Any) -> None:
    with pytest.raises(UsageError, match="The model is compiled; give the one inside"):
        call(torch.compile(conv_net()), image())


def _in_place(part: nn.Module) -> nn.Module:
    part.compile(backend="eager")
    return part


@pytest.mark.parametrize("compiled", [_in_place, lambda part: torch.compile(part, backend="eager")])
@pytest.mark.parametrize("call", [memrewrite.optimize, memrewrite.estimate])
def test_a_compiled_part_is_refused(call: Any, compiled: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), compiled(nn.Linear(4, 4)))
    with pytest.raises(UsageError, match=r"1 \(Linear\) is compiled; optimize the model before parts of it are"):
        call(model, torch.randn(2, 4))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_models_that_cannot_be_meant() -> None:
    with pytest.raises(UsageError, match=r"The model is in inference mode; call model.train\(\) first"):
        memrewrite.optimize(conv_net().eval(), image(), mode="train")
    with pytest.raises(UsageError, match="No parameter requires a gradient"):
        memrewrite.optimize(conv_net().requires_grad_(False), image())
    model, wrong = conv_net(), torch.randn(2, 5, 8, 8)
    before = state(model)
    with pytest.raises(CaptureError, match="ConvNet fails on the example inputs"):
        memrewrite.optimize(model, wrong)
    assert_untouched(before, model)


@pytest.mark.parametrize(
    ("loss_fn", "sentence"),
    [
        (lambda output: output.mean(-1), r"The loss has the shape \(2,\), and backward starts from one number"),
        (lambda output: [output.mean()], "The loss is list; loss_fn is to return a tensor of one number"),
    ],
    ids=["per sample", "a list"],
)
def test_a_loss_that_backward_cannot_start_from(loss_fn: Callable[[Tensor], Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        memrewrite.optimize(conv_net(), image(), loss_fn=loss_fn)


@pytest.mark.parametrize(
    "call",
    [
        lambda model, x: memrewrite.optimize(model, x, budget="min", optimizer=None).report.notes,
        lambda model, x: memrewrite.estimate(model, x, optimizer=None),
        lambda model, x: memrewrite.measure(model, x, optimizer=None),
        lambda model, x: memrewrite.verify(model, model, x, optimizer=None),
    ],
    ids=["optimize", "estimate", "measure", "verify"],
)
def test_an_optimizer_that_steps_in_backward_takes_no_step_of_ours(call: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8))
    optimizers = {id(p): torch.optim.AdamW([p], lr=0.1) for p in model.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[id(parameter)].step()
        optimizers[id(parameter)].zero_grad()

    seen: list[Tensor] = []
    for parameter in model.parameters():
        parameter.register_hook(seen.append)
        parameter.register_post_accumulate_grad_hook(step)
    found = call(model, torch.randn(64, 8))
    assert not any(optimizer.state for optimizer in optimizers.values())
    assert not seen
    if isinstance(found, tuple):
        assert any(note.startswith("What hooks do with the gradient of 0.weight") for note in found)
    model(torch.randn(64, 8)).sum().backward()
    assert all(optimizer.state for optimizer in optimizers.values())
    assert len(seen) == 4


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"loss_fn": "mse"}, "loss_fn is of type str; give a function of the output"),
        ({"loss_fn": nn.MSELoss}, "loss_fn is the class MSELoss; give a function of the output"),
        ({"optimizer": 3}, "optimizer is of type int; give a name, an optimizer, a list of several, a class"),
        ({"amp": torch.int8}, "amp=torch.int8 is no type that autocast computes in"),
        ({"micro_batches": 2.5}, "micro_batches=2.5 is no whole number"),
        ({"mode": "eval"}, "mode='eval' is unknown; give 'train' or 'inference'"),
        ({"example_kwargs": [1]}, "example_kwargs is of type list; give a dictionary"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("call", [memrewrite.optimize, memrewrite.estimate, memrewrite.measure])
def test_what_is_of_another_type_is_told_as_that(call: Any, asked: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        call(conv_net(), image(), **asked)


class Parts(torch.optim.Optimizer):
    """Steps what is sparse and what is not, each by an optimizer for it."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {})
        table, *others = self.param_groups[0]["params"]
        self.parts: tuple[Any, ...] = torch.optim.SparseAdam([table]), torch.optim.Adam(others)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()


def test_several_optimizers_are_parts_of_one() -> None:
    model = nn.Sequential(nn.EmbeddingBag(500, 16, sparse=True), nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
    ids = torch.randint(500, (32, 6))
    report = memrewrite.optimize(model, ids, optimizer=Parts).report
    assert memrewrite.measure(model, ids, optimizer=Parts, steps=1).peak == report.predicted_before.peak

    def made(parameters: Iterable[nn.Parameter]) -> Any:
        table, *others = parameters
        return [torch.optim.SparseAdam([table]), torch.optim.Adam(others)]

    for several in (made, made(model.parameters())):
        assert memrewrite.estimate(model, ids, optimizer=several).peak.bytes == report.predicted_before.peak


@pytest.mark.parametrize(
    ("several", "sentence"),
    [
        (lambda model: [], "optimizer is of type list; give a name, an optimizer, a list of several, a class or"),
        (lambda model: [torch.optim.SGD], "optimizer is of type list; give a name"),
        (
            lambda model: [torch.optim.SGD(conv_net().parameters())],
            "None of the optimizers steps a parameter of ConvNet",
        ),
        (lambda model: [torch.optim.SGD(model.parameters()) for _ in range(2)], "Two of the 2 optimizers step"),
    ],
    ids=["none", "a class", "of another model", "one twice"],
)
def test_optimizers_that_are_none_together(several: Callable[[Any], Any], sentence: str) -> None:
    model = conv_net()
    with pytest.raises(UsageError, match=sentence):
        memrewrite.estimate(model, image(), optimizer=several(model))


@dataclass
class Batch:
    """Images and where they lie."""

    images: Tensor


@pytest.mark.parametrize("call", [memrewrite.optimize, memrewrite.estimate, memrewrite.measure])
@pytest.mark.parametrize("kind", [Batch, lambda x: types.SimpleNamespace(images=x), lambda x: UserDict(images=x)])
def test_inputs_that_are_not_looked_into_are_refused(call: Any, kind: Any) -> None:
    given = kind(image())
    with pytest.raises(UsageError, match=r"input is of type \w+, whose tensors would not be counted; give a") as told:
        call(conv_net(), given)
    assert ("arguments by name are example_kwargs" in str(told.value)) == isinstance(given, UserDict)


def test_packed_sequences_are_told_of() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells, self.head = nn.GRU(4, 8), nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 2))

        def forward(self, packed: Any) -> Any:
            return self.head(self.cells(packed)[0].data)

    packed = nn.utils.rnn.pack_sequence([torch.randn(n, 4) for n in (40, 30, 20)])
    notes = memrewrite.optimize(Packed(), (packed,), budget="100%", optimizer="sgd").report.notes
    assert any("called with what no program can take apart (PackedSequence)" in note for note in notes)


def test_no_steps_have_no_time() -> None:
    with pytest.raises(UsageError, match="No time can be measured over 0 steps"):
        memrewrite.measure(conv_net(), image(), steps=0)


@pytest.mark.parametrize(
    "call", [memrewrite.optimize, memrewrite.measure, functools.partial(memrewrite.verify, conv_net())]
)
def test_what_holds_no_numbers_is_refused(call: Any) -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(UsageError, match=r"weight lies on the meta device .* or use memrewrite.estimate"):
        call(model, torch.randn(2, 2))
    with pytest.raises(UsageError, match="An input lies on the meta device"):
        call(nn.Linear(2, 2), torch.randn(2, 2, device="meta"))


def test_a_model_that_fails_on_values_alone() -> None:
    """As DeBERTa does under autocast; fake tensors have no values that could overflow."""

    class Overflowing(SwishStack):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = super().forward(x)
            return y.bfloat16().masked_fill(y > 0, torch.finfo(torch.float32).min)

    model = seeded(Overflowing)
    before = state(model)
    with pytest.raises(CaptureError, match="Overflowing fails on the example inputs with RuntimeError: value"):
        memrewrite.optimize(model, rows(256), budget="min")
    assert_untouched(before, model)


def test_exact_keeps_every_bit_of_the_forward() -> None:
    model = seeded(SwishStack)
    result = memrewrite.optimize(model, rows(256), budget="min", exact=True)
    assert any(name == "swish" for name, _, _ in result.report.rewrites)
    assert result(rows()).equal(model(rows()))
    assert registry.patterns(None, True, False)
    fast = memrewrite.optimize(model, rows(256), budget="min")
    torch.testing.assert_close(fast(rows()), model(rows()))


class Spoil:
    """A pass that multiplies by something else than it says."""

    name = "swish"
    exact = False

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, graph_module: fx.GraphModule, effects: Effects) -> Result:
        findings = Findings()
        for node in graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor):
            with graph_module.graph.inserting_after(node):
                new = graph_module.graph.call_function(torch.ops.aten.mul.Tensor, (node, self.factor))
            node.replace_all_uses_with(new, delete_user_cb=lambda user, new=new: user is not new)
            findings.apply(node, "spoiled")
        graph_module.recompile()
        return findings.result()


@pytest.mark.parametrize("factor", [1.001, 0.0, float("nan")])
def test_a_pass_that_does_harm_is_caught_and_named(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.PATTERNS, "swish", lambda exact: Spoil(factor))
    model = seeded(SwishStack)
    before = state(model)
    with pytest.raises(NotEquivalentError, match=r"not equivalent \(swish.*: .*(error|missing|not finite)"):
        memrewrite.optimize(model, rows(), budget="min")
    assert_untouched(before, model)
    result = memrewrite.optimize(model, rows(), verify=False)
    assert (result.report.equivalent, result.report.verdict) == (None, "not verified")


def test_segments_that_do_harm_are_caught_behind_changed_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    """The float64 rule forgives a last bit; segments are forgiven none, so they are compared bit for bit besides."""
    seen: list[tuple[bool, bool]] = []
    spoiled = False

    def note(original: nn.Module, rewritten: nn.Module, *args: Any, **kwargs: Any) -> Any:
        plain = kwargs["plain"]
        seen.append((kwargs["exact"], plain is not None))
        if plain is not None:
            (with_segments,), (without,) = (programs(each).values() for each in (rewritten, plain))
            assert ("segment" in with_segments.source, "segment" in without.source) == (True, False)
        if spoiled:
            kind: Any = type(plain)
            plain.__class__ = type("Off", (kind,), {"forward": lambda self, x: kind.forward(self, x) * (1 + 2**-23)})
        return verify(original, rewritten, *args, **kwargs)

    monkeypatch.setattr(verifying, "verify", note)
    assert memrewrite.optimize(seeded(SwishStack), rows(256), budget="min").report.segments
    assert seen == [(False, True)]
    spoiled = True
    with pytest.raises(NotEquivalentError):
        memrewrite.optimize(seeded(SwishStack), rows(256), budget="min")
    seen.clear()
    spoiled = False
    assert memrewrite.optimize(conv_net(), image(8), budget="min").report.segments
    assert seen == [(True, False)]


def test_inference_writes_in_place_and_never_recomputes() -> None:
    torch.manual_seed(0)
    layers = [layer for _ in range(2) for layer in (nn.Conv2d(4, 4, 3, padding=1), nn.ReLU())]
    model, x = nn.Sequential(*layers).eval(), torch.randn(8, 4, 16, 16)
    result = memrewrite.optimize(model, x, mode="inference")
    report = result.report
    assert (report.mode, report.segments, report.equivalent) == ("inference", (), True)
    assert {name for name, _, _ in report.rewrites} >= {"inplace_activation"}
    assert tracked(model, x).peak == report.predicted_before.peak
    assert tracked(result, x).peak == report.predicted_after.peak
    assert report.predicted_after.peak <= report.predicted_before.peak
    with torch.no_grad():
        assert result(x).equal(model(x))


class Doubling(nn.Module):
    """A forward pass whose peak is an activation beside its input."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.fc(x)).sum(1)


def test_a_budget_in_inference_counts_on_writes_in_place() -> None:
    model, x = seeded(Doubling).eval(), rows(512)
    report = memrewrite.optimize(model, x, budget="min").report
    low, high = report.predicted_after.peak, report.predicted_before.peak
    assert low < high
    result = memrewrite.optimize(model, x, budget=low)
    assert tracked(result, x).peak == low
    with pytest.raises(BudgetInfeasibleError) as caught:
        memrewrite.optimize(model, x, budget=low - 1)
    assert caught.value.lowest == low


def test_training_counts_on_writes_in_place_before_it_gives_up() -> None:
    model, x = seeded(Doubling), rows(512)
    low = memrewrite.optimize(model, x, budget="min", optimizer="sgd").report.predicted_after.peak
    assert memrewrite.optimize(model, x, budget=low, optimizer="sgd").report.predicted_after.peak <= low


def measured(peak: int) -> Measured:
    return Measured(peak, peak, 1.0, (), "cuda")


def stand_in(monkeypatch: pytest.MonkeyPatch, on_device: Callable[..., Measured]) -> None:
    """Let the CPU pass for a GPU on which ``on_device`` measures."""
    for module in (reporting, bench):
        monkeypatch.setattr(module, "device_type", lambda *args: "cuda")
    monkeypatch.setattr(measuring, "measure", on_device)
    monkeypatch.setattr(reporting, "_segments", lambda line: ())


def test_a_device_that_takes_more_than_simulated_gets_another_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    offsets = iter([3000, 3000, 3000, 3000, 3000, 3000])
    peaks: list[int] = []

    def on_device(module: nn.Module, inputs: Inputs, step: Step, steps: int) -> Measured:
        assert not step.target.compiles
        peaks.append(simulate(module, inputs, step).peak + next(offsets))
        return measured(peaks[-1])

    model, x = seeded(lambda: SwishStack(8)), rows(256)
    report = memrewrite.optimize(model, x, budget="min", verify=False).report
    low, high = report.predicted_after.peak, report.predicted_before.peak
    stand_in(monkeypatch, on_device)
    budget = (low + high) // 2
    result = memrewrite.optimize(model, x, budget=budget, verify=False)
    assert result.report.measured_after == measured(peaks[-1])
    assert peaks[-1] <= budget * 0.998  # in another process the allocator may count some bytes more
    with pytest.raises(BudgetInfeasibleError) as caught:
        memrewrite.optimize(model, x, budget=low + 1000, verify=False)
    assert caught.value.lowest > low + 1000


def test_a_budget_for_the_compiler_is_held_by_the_compiled_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which here takes 2000 bytes less than the uncompiled one that is planned for."""

    def on_device(module: nn.Module, inputs: Inputs, step: Step, steps: int) -> Measured:
        return measured(simulate(module, inputs, step).peak - 2000 * step.target.compiles)

    model, x = seeded(lambda: SwishStack(8)), rows(256)
    low = memrewrite.optimize(model, x, budget="min", verify=False, compiled=True).report.predicted_after.peak
    stand_in(monkeypatch, on_device)
    report = memrewrite.optimize(model, x, budget=low - 1000, verify=False, compiled=True).report
    assert report.predicted_after.peak == low
    assert report.measured_after == measured(low - 2000)
    assert report.notes[-1].startswith(
        "Peaks are predicted for the model as it is, and measured for what torch.compile"
    )
    with pytest.raises(BudgetInfeasibleError) as caught:
        memrewrite.optimize(model, x, budget=low - 3000, verify=False, compiled=True)
    assert caught.value.lowest == low - 2000


@pytest.mark.parametrize(("wrong", "in_turn"), [(1, [False, False]), (2, [False, False, True])])
def test_compiled_code_fuses_less_only_where_less_room_is_not_enough(
    monkeypatch: pytest.MonkeyPatch, wrong: int, in_turn: list[bool]
) -> None:
    seen: list[bool] = []

    def on_device(module: nn.Module, inputs: Inputs, step: Step, steps: int) -> Measured:
        seen.append("in_turn(" in cast(Any, module)._memrewrite.source)
        return measured(int(1.02 * budget) if len(seen) <= wrong else simulate(module, inputs, step).peak)

    torch.manual_seed(0)
    branch = [nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)]
    model, x = nn.Sequential(*(layer for _ in range(4) for layer in copy.deepcopy(branch))), torch.randn(256, 16)
    budget = int(0.7 * simulate(model, Inputs((x,), {}), Step()).peak)
    stand_in(monkeypatch, on_device)
    memrewrite.optimize(model, x, budget=budget, optimizer="none", verify=False, compiled=True)
    assert seen == in_turn


@pytest.mark.parametrize("more", [80_000, 300_000], ids=["within reach", "out of reach"])
@pytest.mark.parametrize("minimum", [True, False], ids=["min", "a budget"])
def test_compiled_passes_that_take_more_are_planned_below_the_optimizer(
    monkeypatch: pytest.MonkeyPatch, minimum: bool, more: int
) -> None:
    """The lowest plan is the first to take no more than the optimizer, until the device is seen to take more."""
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(96, 96), nn.Tanh(), nn.Sigmoid())]
    model, x = nn.Sequential(*layers), torch.randn(128, 96)
    arguments: Any = {"optimizer": functools.partial(torch.optim.AdamW, foreach=True), "compiled": True}
    lowest = memrewrite.optimize(model, x, budget="min", **arguments).report.predicted_after.peak
    taken: list[int] = []

    def compiled_peak(module: nn.Module, inputs: Inputs, step: Step) -> int:
        timeline = simulate(module, inputs, step)
        assert timeline.peak_of_optimizer == lowest
        return max(timeline.peak_of_passes + more, lowest)

    def on_device(module: nn.Module, inputs: Inputs, step: Step, steps: int) -> Measured:
        taken.append(compiled_peak(module, inputs, step))
        return measured(taken[-1])

    stand_in(monkeypatch, on_device)
    budget = "min" if minimum else lowest
    if more > 200_000 and not minimum:
        with pytest.raises(BudgetInfeasibleError) as caught:
            memrewrite.optimize(model, x, budget=budget, **arguments)
        assert caught.value.lowest == min(taken) < taken[0]
        return
    result: Any = memrewrite.optimize(model, x, budget=budget, **arguments)
    assert result.report.measured_after == measured(min(taken))
    assert compiled_peak(result, Inputs((x,), {}), Step(optimizer=arguments["optimizer"])) == min(taken) < taken[0]
    assert (min(taken) == lowest) == (more < 200_000)


@pytest.mark.parametrize("saved", [1000, -1000], ids=["less", "more"])
@pytest.mark.parametrize("minimum", [True, False], ids=["min", "a budget below"])
def test_inputs_are_cast_before_their_segments_where_the_compiled_step_takes_less_so(
    monkeypatch: pytest.MonkeyPatch, minimum: bool, saved: int
) -> None:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.GELU())]
    arguments: Any = {"optimizer": "none", "amp": "bf16", "compiled": True}
    model, x = nn.Sequential(*layers), torch.randn(256, 32)
    lowest = memrewrite.optimize(model, x, budget="min", **arguments).report.predicted_after.peak

    def on_device(module: nn.Module, inputs: Inputs, step: Step, steps: int) -> Measured:
        return measured(lowest - saved * ("as_autocast(" in cast(Any, module)._memrewrite.source))

    stand_in(monkeypatch, on_device)
    budget = "min" if minimum else lowest - 500
    if saved < 0 and not minimum:
        with pytest.raises(BudgetInfeasibleError) as caught:
            memrewrite.optimize(model, x, budget=budget, **arguments)
        assert caught.value.lowest == lowest
        return
    result: Any = memrewrite.optimize(model, x, budget=budget, **arguments)
    assert result.report.measured_after == measured(lowest - max(saved, 0))
    assert result.report.equivalent
    assert ("as_autocast(" in result._memrewrite.source) == (saved > 0)


@pytest.mark.parametrize("budget", [None, "min"], ids=["no budget", "min"])
def test_the_report_is_plain_json(budget: str | None) -> None:
    report = memrewrite.optimize(seeded(SwishStack), rows(256), budget=budget).report
    data = json.loads(json.dumps(report.to_json()))
    assert isinstance(report, Report)
    assert data["schema_version"] == 1
    assert data["predicted_after"]["peak"] == report.predicted_after.peak
    assert data["changed"] is report.changed is True
    assert sum(data["predicted_after"]["categories"].values()) == report.predicted_after.peak
    assert json.loads(json.dumps(data)) == data


@pytest.mark.parametrize("name", ["conv", "swish", "transformer"])
def test_the_same_call_gives_the_same_source(name: str) -> None:
    build, x = SHAPES[name]
    model = seeded(build)
    sources = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        result: Any = memrewrite.optimize(model, x, budget="min", verify=False)
        sources.append(type(result)._memrewrite.source)
    assert sources[0] == sources[1]


def test_stages_are_told_in_order() -> None:
    stages: list[str] = []
    memrewrite.optimize(conv_net(), image(8), budget="min", progress=stages.append)
    assert stages == ["simulate", "capture", "rewrite", "plan", "verify", "report"]


def test_keyword_inputs() -> None:
    model = seeded(lambda: ConvNet(dropout=0.1))
    result = memrewrite.optimize(model, (), example_kwargs={"image": image(8)}, budget="min")
    assert_same_bits(step(result, image()), step(model, image()))


def test_nothing_but_arithmetic_passes_change_arithmetic() -> None:
    assert (Swish.exact, Composites.exact) == (False, False)
    with pytest.raises(FallbackWarning):
        memrewrite.optimize(conv_net(), image(8), budget="min")(image(1))


class RandomNet(nn.Module):
    """A stack that a list of words describes; shared modules, residuals, concatenations and spellings of Swish."""

    def __init__(self, words: list[str]) -> None:
        super().__init__()
        self.words = words
        width = 4
        self.stem, self.shared = nn.Conv2d(width, width, 1), nn.Conv2d(width, width, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.parts = nn.ModuleDict()
        for i, word in enumerate(words):
            if word == "conv":
                self.parts[str(i)] = nn.Conv2d(width, width, 3, padding=1, bias=False)
            elif word == "norm":
                self.parts[str(i)] = nn.BatchNorm2d(width)
            elif word == "dropout":
                self.parts[str(i)] = nn.Dropout(0.3)
            elif word == "concat":
                self.parts[str(i)] = nn.Conv2d(2 * width, width, 1)
            elif word == "frozen":
                self.parts[str(i)] = nn.Conv2d(width, width, 1).requires_grad_(False)
            elif word == "linear":
                self.parts[str(i)] = nn.Linear(6, 6)
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        before = x = self.stem(x)
        for i, word in enumerate(self.words):
            kept = x
            if word == "concat":
                x = self.parts[str(i)](torch.cat((x, before), 1))
            elif word in SPELLINGS:
                x = SPELLINGS[word](self, x, before)
            else:
                x = self.parts[str(i)](x)
            before = kept
        return self.head(x.mean((2, 3)))


SPELLINGS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "swish": lambda net, x, before: x * torch.sigmoid(x),
    "swish method": lambda net, x, before: x.sigmoid() * x,
    "swish in place": lambda net, x, before: (x + 0).mul_(torch.sigmoid(x)),
    "quick gelu": lambda net, x, before: x * torch.sigmoid(1.702 * x),
    "hard swish": lambda net, x, before: x * F.relu6(x + 3) / 6,
    "residual": lambda net, x, before: x + before,
    "relu": lambda net, x, before: net.relu(x + 1),
    "shared": lambda net, x, before: net.shared(net.shared(x)),
    "tanh": lambda net, x, before: torch.tanh(x),
}
WORDS = ["conv", "norm", "dropout", "concat", "frozen", "linear", *SPELLINGS]


@pytest.mark.parametrize("examples", [2, 15])
def test_random_nets_at_random_budgets(examples: int) -> None:
    nets = st.lists(st.sampled_from(WORDS), min_size=2, max_size=7)
    some = settings(max_examples=examples, deadline=None, derandomize=True)
    some(given(nets, st.integers(60, 100), st.booleans())(within_a_random_budget))()


def within_a_random_budget(words: list[str], percent: int, exact: bool) -> None:
    model, x = seeded(lambda: RandomNet(words)), torch.randn(3, 4, 6, 6, generator=torch.Generator().manual_seed(0))
    before = state(model)
    try:
        result = memrewrite.optimize(model, x, budget=f"{percent}%", optimizer="sgd", exact=exact)
    except BudgetInfeasibleError as error:
        result = memrewrite.optimize(model, x, budget=error.lowest, optimizer="sgd", exact=exact)
    report = result.report
    assert report.equivalent or not report.changed
    assert report.predicted_after.peak <= (report.budget or 0)
    if result is not model:
        assert_untouched(before, model)
    assert tracked(result, x, torch.optim.SGD).peak == report.predicted_after.peak


def test_a_model_that_was_returned_as_it_is_leaves_no_report_to_a_later_result() -> None:
    model: nn.Module = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)))
    x = torch.randn(64, 64)
    first = memrewrite.optimize(model, x, budget="1GB", optimizer="adamw", verify=False)
    assert first is model
    later = memrewrite.optimize(model, x, budget="min", optimizer="none", verify=False)
    assert later is not model
    assert later.report is memrewrite.report_of(later)
    assert first.report is memrewrite.report_of(model) is not later.report
