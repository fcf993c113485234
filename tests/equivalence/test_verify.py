"""Verification passes what is the same, fails what is not, and leaves no trace.

Every wrong model below shares its parameters and buffers with the right one, as a drop-in does.
"""

import copy
import itertools
import random
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from memrewrite.api import optimize
from memrewrite.equivalence import case as cases
from memrewrite.equivalence import judging
from memrewrite.equivalence.compare import Comparison
from memrewrite.equivalence.reference import Recorder, Replay, double_copy, double_step, in_double
from memrewrite.equivalence.trial import take_step
from memrewrite.equivalence.verdict import Verdict, concluded
from memrewrite.equivalence.verifying import verify
from memrewrite.measurement.snapshot import State
from memrewrite.records.errors import MeasurementError, UsageError
from memrewrite.runtime.fused import at_once
from memrewrite.runtime.promise import FallbackWarning
from memrewrite.workload.step import Inputs, Step
from tests.support.verification import rewrite, steps_taken

ADAM = Step(optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-2))


class Net(nn.Module):
    """A convolution whose bias has a gradient of mathematically zero, a hand-written swish, dropout, a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.mix = nn.Conv2d(8, 8, 1)
        self.head = nn.Linear(8, 5)
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)
        self.seen = nn.Buffer(torch.zeros(()))

    def swish(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)

    def residual(self, x: Tensor) -> Tensor:
        return x + functional.relu(x - 0.1)

    def drop(self, x: Tensor) -> Tensor:
        return functional.dropout(x, 0.25, self.training)

    def finish(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1)
        x = self.swish(self.norm(self.conv(x)))
        x = self.residual(self.mix(self.drop(x))).mean((2, 3))
        return self.finish(self.head(x) * self.frozen)


class WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 1.001


class Ulp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.nextafter(x, torch.full_like(x, torch.inf))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


wrong_backward: Callable[[Tensor], Tensor] = WrongBackward.apply
ulp: Callable[[Tensor], Tensor] = Ulp.apply


def checkpointed(self: Any, x: Tensor) -> Tensor:
    self.seen += 1
    x = checkpoint(lambda x: self.drop(self.swish(self.norm(self.conv(x)))), x, use_reentrant=False)
    return self.head(self.residual(self.mix(x)).mean((2, 3))) * self.frozen


def advanced(self: Any, x: Tensor) -> Tensor:
    torch.rand(1)
    return x


def other_mask(self: Any, x: Tensor) -> Tensor:
    if not self.training:
        return x
    state = torch.get_rng_state()
    torch.rand(3)
    mask = torch.rand_like(x) > 0.25
    torch.set_rng_state(state)
    functional.dropout(x, 0.25)
    return x * mask / 0.75


def early_write(self: Any, x: Tensor) -> Tensor:
    y = x * 1.0
    return y.relu_() + functional.relu(y - 0.1)


def counted_twice(self: Any, x: Tensor) -> Tensor:
    self.norm.num_batches_tracked += 1
    return x


def frozen_head(self: Any, x: Tensor) -> Tensor:
    x = self.swish(self.norm(self.conv(x)))
    self.seen += 1
    x = self.residual(self.mix(self.drop(x))).mean((2, 3))
    return functional.linear(x, self.head.weight, self.head.bias.detach()) * self.frozen


def switched_off(self: Any, x: Tensor) -> Tensor:
    self.norm.training = False
    return x


WRONG: dict[str, tuple[dict[str, Callable[..., Any]], str]] = {
    "gradient": ({"finish": lambda self, x: wrong_backward(x)}, "gradient"),
    "input gradient": (
        {"forward": lambda self, x: Net.forward(self, wrong_backward(x))},
        "input gradient input 0",
    ),
    "statistics twice": ({"forward": checkpointed}, "buffer norm."),
    "batches tracked": ({"finish": counted_twice}, "buffer norm.num_batches_tracked"),
    "frozen gradient": ({"forward": frozen_head}, "gradient head.bias"),
    "random state": ({"finish": advanced}, "random state cpu"),
    "python random state": ({"finish": lambda self, x: x + 0 * random.random()}, "random state python"),  # noqa: S311
    "in place on a residual": ({"residual": early_write}, "output output"),
    "dropout mask": ({"drop": other_mask}, "output output"),
    "output": ({"finish": lambda self, x: x + 1e-3}, "output"),
    "output type": ({"finish": lambda self, x: x.double()}, "output"),
    "output structure": ({"finish": lambda self, x: (x,)}, "output structure"),
    "output strides": ({"finish": lambda self, x: x.t().contiguous().t()}, "layout output"),
    "detached output": ({"forward": lambda self, x: Net.forward(self, x).detach().requires_grad_()}, "gradient"),
    "not a number": ({"finish": lambda self, x: x / 0 * 0}, "output output"),
    "training flag": ({"finish": switched_off}, "training flag norm"),
    "raises": ({"finish": lambda self, x: x @ x}, "the rewritten model raised RuntimeError"),
}


@pytest.fixture
def model() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def inputs() -> Inputs:
    return Inputs((torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(1)),), {})


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "changed"])
@pytest.mark.parametrize(("methods", "named"), WRONG.values(), ids=WRONG)
def test_wrong_models_fail(
    model: Net, inputs: Inputs, methods: dict[str, Callable[..., Any]], named: str, exact: bool
) -> None:
    before = fingerprint(model, inputs)
    verdict = verify(model, rewrite(model, **methods), inputs, ADAM, exact=exact)
    assert not verdict.equivalent
    assert not verdict.exact
    assert verdict.summary.startswith("not equivalent: ")
    described = [verdict.summary, *(f"{t.kind} {t.name}" for t in verdict.tensors if not t.passed)]
    assert any(named in text for text in described), described
    assert fingerprint(model, inputs) == before


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "changed"])
def test_the_same_arithmetic_is_bit_equal(model: Net, inputs: Inputs, exact: bool) -> None:
    before = fingerprint(model, inputs)
    verdict = verify(model, rewrite(model), inputs, ADAM, exact=exact)
    assert verdict.summary == "bit-equal: 3 steps, 9 gradients, 4 buffers, random state"
    assert (verdict.equivalent, verdict.exact, verdict.batch) == (True, True, 4)
    assert {t.kind for t in verdict.tensors} >= {"output", "loss", "gradient", "input gradient", "buffer", "layout"}
    assert fingerprint(model, inputs) == before


@pytest.mark.parametrize(("exact", "copies"), [(True, 1), (False, 3)], ids=["exact", "changed"])
def test_parameters_are_copied_at_the_start_and_between_steps_alone(
    model: Net, inputs: Inputs, exact: bool, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model of a billion parameters each copy takes seconds."""
    made = []

    def counted(*args: Any, **kwargs: Any) -> State:
        made.append(State(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(cases, "State", counted)
    assert verify(model, rewrite(model), inputs, ADAM, exact=exact).exact
    assert len(made) == copies


CHANGED: dict[str, dict[str, Callable[..., Any]]] = {
    "swish": {"swish": lambda self, x: functional.silu(x)},
    "one ulp": {"finish": lambda self, x: ulp(x)},
}


@pytest.mark.parametrize("methods", CHANGED.values(), ids=CHANGED)
@pytest.mark.parametrize("seed", range(4))
def test_changed_arithmetic_passes_unless_exact(
    model: Net, inputs: Inputs, methods: dict[str, Callable[..., Any]], seed: int
) -> None:
    before = fingerprint(model, inputs)
    rewritten = rewrite(model, **methods)
    verdict = verify(model, rewritten, inputs, ADAM, exact=False, seed=seed)
    assert (verdict.equivalent, verdict.exact) == (True, False), verdict.summary
    assert verdict.summary.startswith("equivalent: worst ")
    assert not verify(model, rewritten, inputs, ADAM, exact=True, seed=seed).equivalent
    assert fingerprint(model, inputs) == before


def test_changed_arithmetic_passes_under_autocast(model: Net, inputs: Inputs) -> None:
    step = Step(optimizer=torch.optim.SGD, amp=torch.bfloat16)
    rewritten = rewrite(model, swish=lambda self, x: functional.silu(x))
    verdict = verify(model, rewritten, inputs, step, exact=False)
    assert verdict.equivalent, verdict.summary
    wrong = rewrite(model, swish=lambda self, x: functional.silu(x) * 1.1)
    assert not verify(model, wrong, inputs, step, exact=False).equivalent


def test_a_missing_buffer_and_a_missing_parameter_fail(model: Net, inputs: Inputs) -> None:
    rewritten = rewrite(model, forward=lambda self, x: Net.forward(model, x))
    del rewritten.seen, rewritten.frozen
    verdict = verify(model, rewritten, inputs, ADAM, exact=True)
    assert {(t.kind, t.name) for t in verdict.tensors if not t.passed} == {
        ("buffer", "seen"), ("gradient", "frozen"), ("parameter", "frozen"),
    }  # fmt: skip


def test_another_optimizer_path_fails(model: Net, inputs: Inputs) -> None:
    """Gradients are equal, but the rewritten model hides a parameter from the optimizer."""
    hidden = rewrite(model, parameters=lambda self, recurse=True: iter([model.head.weight]))
    verdict = verify(model, hidden, inputs, ADAM, exact=True)
    assert {t.kind for t in verdict.tensors if not t.passed} >= {"parameter"}


def test_models_that_share_nothing_are_compared_too(model: Net, inputs: Inputs) -> None:
    twin = double_copy(model).float()
    assert isinstance(twin, Net)
    assert verify(model, twin, inputs, ADAM, exact=True).exact
    verdict = verify(model, rewrite(twin, swish=lambda self, x: functional.silu(x)), inputs, ADAM, exact=False)
    assert verdict.equivalent, verdict.summary


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo asks inputs for it
@pytest.mark.parametrize("share", [True, False])
def test_what_is_compiled_is_compared_by_the_names_it_had(model: Net, inputs: Inputs, share: bool) -> None:
    twin = model if share else copy.deepcopy(model)
    compiled: Any = torch.compile(twin, backend="eager")
    verdict = verify(model, compiled, inputs, ADAM, exact=True)
    assert verdict.equivalent, verdict.summary
    assert verdict.exact


def test_inference_compares_outputs_and_buffers(model: Net, inputs: Inputs) -> None:
    step = Step(mode="inference")
    verdict = verify(model.eval(), rewrite(model), inputs, step, exact=True)
    assert verdict.exact
    assert not {t.kind for t in verdict.tensors} & {"loss", "gradient", "input gradient", "parameter"}
    assert not verify(model, rewrite(model, finish=lambda self, x: x + 1), inputs, step, exact=False).equivalent
    assert not model.training


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "changed"])
def test_an_original_that_raises_raises_and_leaves_no_trace(model: Net, inputs: Inputs, exact: bool) -> None:
    def fail(self: Any, x: Tensor) -> Tensor:
        self.seen.fill_(7)
        self.attribute = 1
        self.eval()
        raise ValueError("the user's own")

    original = rewrite(model, finish=fail)
    before = fingerprint(original, inputs)
    with pytest.raises(ValueError, match="the user's own"):
        verify(original, model, inputs, ADAM, exact=exact)
    assert fingerprint(original, inputs) == before
    assert not hasattr(original, "attribute")


def test_gradients_the_user_has_come_back(model: Net, inputs: Inputs) -> None:
    grad = model.head.weight.grad = torch.ones_like(model.head.weight)
    inputs.args[0].requires_grad_()
    assert verify(model, rewrite(model), inputs, ADAM, exact=True).exact
    assert model.head.weight.grad is grad
    assert bool((grad == 1).all())
    assert inputs.args[0].grad is None


class Careful(nn.Module):
    """Keeps a graph of its inputs across steps, which only works while they need no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.average = nn.Buffer(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.average.mul_(0.9).add_(x.mean(0))
        return x.relu_() * self.weight + self.average


def test_inputs_that_must_not_need_gradients_do_not(inputs: Inputs) -> None:
    model, x = Careful(), torch.randn(4, 3)
    copy = x.clone()
    verdict = verify(model, rewrite(model), Inputs((x,), {}), ADAM, exact=True)
    assert verdict.exact
    assert torch.equal(x, copy)
    assert not model.average.requires_grad
    assert bool((model.average == 0).all())


class Dropping(nn.Module):
    """Attends without a mask of zeros, which masks nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(16, 16)

    def kept(self, mask: Tensor) -> Tensor | None:
        return mask if mask.any() else None

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        heads = self.mix(x).unflatten(-1, (4, 4)).transpose(1, 2)
        return functional.scaled_dot_product_attention(heads, heads, heads, self.kept(mask))


def test_a_mask_that_the_original_drops_is_asked_for_no_gradient() -> None:
    model, masked = Dropping(), Inputs((torch.randn(2, 8, 16), torch.zeros(2, 1, 8, 8)), {})
    with_mask = rewrite(model, kept=lambda self, mask: mask)
    assert verify(model, with_mask, masked, Step(), exact=True).equivalent
    masked.args[1].requires_grad_()
    assert not verify(model, with_mask, masked, Step(), exact=True).equivalent


class Hungry(nn.Module):
    """Runs out of memory above a batch of 2, below it not at all unless ``least`` says so."""

    def __init__(self, most: int = 2, least: int = 0) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.most, self.least = most, least

    def forward(self, x: Tensor, scale: Tensor, mask: Tensor) -> Tensor:
        if x.shape[0] > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        if x.shape[0] < self.least:
            raise ValueError("batch too small")
        return self.linear(x) * scale * mask


HUNGRY = Inputs((torch.randn(8, 3), torch.tensor(2.0)), {"mask": torch.ones(8, 2)})


def test_out_of_memory_halves_the_batch() -> None:
    model = Hungry()
    verdict = verify(model, rewrite(model), HUNGRY, ADAM, exact=False)
    assert (verdict.exact, verdict.batch) == (True, 2)
    assert verdict.summary.endswith("; verified at batch 2, as 8 does not fit in memory")


def short_of_memory(function: Callable[..., Any], calls: list[bool], limit: Callable[[bool, Inputs], bool]) -> Any:
    """``function``, which runs out of memory where ``limit`` says so of results that stay near, and of its inputs."""

    def run(module: nn.Module, inputs: Inputs, *args: Any) -> Any:
        calls.append(args[-1].near)
        if limit(args[-1].near, inputs):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return function(module, inputs, *args)

    return run


def test_results_are_brought_to_the_cpu_where_they_leave_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[bool] = []
    brought: list[State] = []
    monkeypatch.setattr(cases, "take_step", short_of_memory(take_step, steps, lambda near, _: near))
    monkeypatch.setattr(State, "bring_to_cpu", lambda state: brought.append(state))
    model = Hungry(most=8)
    verdict = verify(model, rewrite(model), HUNGRY, ADAM, exact=False)
    assert (verdict.exact, verdict.batch) == (True, 8)
    assert steps == [True] + [False] * 6
    assert len(brought) == 1


class Held(dict[Any, Any]):
    """A record that is seen to die."""


@pytest.mark.parametrize("own", [False, True])
def test_each_step_is_compared_before_the_next_where_there_is_no_room_for_all(
    own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not where the parameters are the rewritten model's ``own``: what an optimizer makes of them is compared."""
    alive: list[weakref.ref[Held]] = []
    steps: list[bool] = []

    def run(module: nn.Module, given: Inputs, *args: Any) -> Any:
        steps.append(args[-1].near)
        if args[-1].near and sum(each() is not None for each in alive) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        record = Held(take_step(module, given, *args))
        alive.append(weakref.ref(record))
        return record

    monkeypatch.setattr(cases, "take_step", run)
    model = Hungry(most=8)
    verdict = verify(model, copy.deepcopy(model) if own else rewrite(model), HUNGRY, ADAM, exact=True)
    assert verdict.summary.startswith("bit-equal: 3 steps, ")
    assert verdict.batch == 8
    assert steps == [True] * 3 + [not own] * 6


def test_parameters_are_kept_on_the_cpu_where_they_do_not_fit_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(*args: Any, near: bool) -> State:
        if near:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return State(*args, near=near)

    steps: list[bool] = []
    monkeypatch.setattr(cases, "State", made)
    monkeypatch.setattr(cases, "take_step", short_of_memory(take_step, steps, lambda near, _: near))
    model = Hungry(most=8)
    assert verify(model, rewrite(model), HUNGRY, ADAM, exact=False).exact
    assert steps == [False] * 6


def test_results_leave_their_room_to_the_reference(model: Net, inputs: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    references: list[bool] = []
    moved: list[str] = []
    model.get_parameter("conv.bias").requires_grad_(False)  # whose gradient is noise
    monkeypatch.setattr(judging, "double_step", short_of_memory(double_step, references, lambda near, _: near))
    for name in ("bring_to_cpu", "bring_back"):
        monkeypatch.setattr(State, name, lambda state, name=name: moved.append(name))
    verdict = verify(model, rewrite(model, **CHANGED["swish"]), inputs, ADAM, exact=False)
    assert verdict.equivalent
    assert not verdict.exact
    assert verdict.batch == len(inputs.args[0])
    assert references == [True, False]
    assert moved == ["bring_to_cpu", "bring_back"]


def test_a_reference_that_never_fits_halves_the_batch(
    model: Net, inputs: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    references: list[bool] = []
    model.get_parameter("conv.bias").requires_grad_(False)  # whose gradient is noise
    size = len(inputs.args[0]) // 2
    limited = short_of_memory(double_step, references, lambda _, given: len(given.args[0]) > size)
    monkeypatch.setattr(judging, "double_step", limited)
    verdict = verify(model, rewrite(model, **CHANGED["swish"]), inputs, ADAM, exact=False)
    assert verdict.equivalent
    assert verdict.batch == size
    assert references == [True, False, True]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Hungry(most=0), "does not fit in memory even at batch 1, so it could not be verified"),
        (Hungry(least=3), r"does not run at batch 2 \(batch too small\), so it could not be verified"),
    ],
    ids=["nothing fits", "small batches do not run"],
)
def test_what_cannot_be_verified_is_an_error(model: nn.Module, message: str) -> None:
    with pytest.raises(MeasurementError, match=message):
        verify(model, rewrite(model), HUNGRY, ADAM, exact=False)


def test_a_fallback_to_the_original_forward_is_no_success() -> None:
    def fall_back(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        warnings.warn("ran its original forward", FallbackWarning, stacklevel=2)
        return model(*args, **kwargs)

    model = Hungry(most=8)
    verdict = verify(model, rewrite(model, forward=fall_back), HUNGRY, ADAM, exact=True)
    assert verdict.summary.startswith("not equivalent: the rewritten model raised FallbackWarning")
    model = Hungry(most=2)
    with pytest.raises(MeasurementError, match="ran its original forward"):
        verify(model, rewrite(model, forward=fall_back), HUNGRY, ADAM, exact=True)


class Noisy(nn.Module):
    """Differs from itself from call to call, as atomics on CUDA do; ``noise`` is the size, ``offset`` is on top."""

    offset = 0.0
    calls = itertools.count()  # of the class: state restored with the module would be no noise

    def __init__(self, noise: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.noise = noise
        type(self).calls = itertools.count()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.noise * (0, 1, -1)[next(self.calls) % 3] + self.offset


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "changed"])
@pytest.mark.parametrize(("offset", "passes"), [(0.0, True), (0.02, True), (0.1, False)])
def test_the_noise_of_the_original_is_allowed(exact: bool, offset: float, passes: bool) -> None:
    model = Noisy(0.01)
    rewritten: Any = rewrite(model)
    rewritten.offset = offset
    verdict = verify(model, rewritten, Inputs((torch.randn(2, 3),), {}), Step(), exact=exact, steps=1)
    assert verdict.equivalent == passes, verdict.summary
    assert not verdict.exact


@pytest.mark.parametrize(
    ("theirs", "passes"),
    [([0.5] * 3 + [0.0] * 9, True), ([0.5] * 3 + [1e-6] * 9, True), ([0.5] * 9, False)],
    ids=["now and then", "bits of another run", "always"],
)
def test_what_the_rewritten_does_not_repeat_is_noise_where_its_other_runs_have_the_originals_bits(
    theirs: list[float], passes: bool
) -> None:
    mine = itertools.cycle([0.0, 1e-6])
    others = iter(theirs)
    inputs = Inputs((torch.ones(2, 3),), {})

    class Rare(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + next(mine)

    model = Rare(3, 3)
    rewritten = rewrite(model, forward=lambda self, x: nn.Linear.forward(self, x) + next(others))
    assert verify(model, rewritten, inputs, Step(), exact=True, steps=1).equivalent == passes


def steady(model: Net) -> nn.Module:
    """The net without random numbers."""
    return rewrite(model, drop=lambda self, x: x)


def counted(monkeypatch: pytest.MonkeyPatch, names: dict[int, str]) -> list[str]:
    """Which steps are taken from now on: one letter for each, by the identity of the model, D in float64."""
    return steps_taken(monkeypatch, lambda module: names[id(module)], "D")


@pytest.mark.parametrize(
    ("random", "swish", "exact", "plain", "steps"),
    [
        (True, False, True, False, "OOORRR"),
        (True, False, False, False, "OR" * 3),
        (True, True, False, False, "OROD" + "OR" * 2),
        (False, True, False, False, "ORD" + "OR" * 2),
        (False, True, False, True, "ORDP" + "ORP" * 2),
        (False, True, True, False, "OOOR" + "OOO" * 3),
    ],
    ids=["exact", "bit-equal", "recorded", "changed", "changed, plain", "wrong"],
)
def test_steps_are_taken_once(
    model: Net, inputs: Inputs, random: bool, swish: bool, exact: bool, plain: bool, steps: str, monkeypatch: Any
) -> None:
    model.get_parameter("conv.bias").requires_grad_(False)  # whose gradient is noise
    original = model if random else steady(model)
    rewritten, other = (rewrite(original, **CHANGED["swish"] if swish else {}) for _ in range(2))
    taken = counted(monkeypatch, {id(original): "O", id(rewritten): "R", id(other): "P"})
    verdict = verify(original, rewritten, inputs, ADAM, exact=exact, plain=other if plain else None)
    assert "".join(taken) == steps
    assert verdict.equivalent == (steps != "OOOR" + "OOO" * 3)


@pytest.mark.parametrize(
    ("steps", "noise", "taken"),
    [
        (1, [0, 1, 2], "ORO"),
        (3, [0, 0, 0, 1, 2, *[0, 1] * 3], "OOOR" + "O" + "OR" * 3),
        (1, [0, 1, 0, 0, 1], "OROOO"),
    ],
    ids=["one step", "three steps", "rare"],
)
def test_noise_is_looked_for_until_it_shows(
    steps: int, noise: list[int], taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter(noise)

    class Trembling(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (1 + 1e-5 * next(now))

    model = Trembling(3, 3)
    rewritten = rewrite(model)
    seen = counted(monkeypatch, {id(model): "O", id(rewritten): "R"})
    verdict = verify(model, rewritten, Inputs((torch.randn(5, 3),), {}), ADAM, exact=True, steps=steps)
    assert verdict.equivalent, verdict.summary
    assert "".join(seen) == taken


@pytest.mark.parametrize(
    ("noise", "taken", "passes"),
    [
        ([0, 1, 2, *[0, 1] * 2], "ORDPP" + "ORP" * 2, True),
        ([1, *[0] * 4, 2, *[0, 0] * 2], "ORDP" + "PPPP" + "ORP" * 2, True),
        ([1, *[0] * 10, *[0, 0] * 2], "ORDP" + "P" * 9 + "ORP" * 2, False),
    ],
    ids=["once", "rare", "none"],
)
def test_noise_of_the_plain_model_is_looked_for_until_it_shows(
    noise: list[int], taken: str, passes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter(noise)

    def trembling(self: Any, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x * 3, self.weight.t() / 3) * (1 + 1e-7 * next(now))

    model = nn.Linear(30, 30)
    rewritten, plain = rewrite(model, forward=trembling), rewrite(model, forward=trembling)
    seen = counted(monkeypatch, {id(model): "O", id(rewritten): "R", id(plain): "P"})
    verdict = verify(model, rewritten, Inputs((torch.randn(5, 30),), {}), ADAM, exact=False, plain=plain)
    assert verdict.equivalent == passes, verdict.summary
    assert "".join(seen) == taken


def test_the_bits_are_to_be_those_of_the_plain_model(model: Net, inputs: Inputs) -> None:
    """Even where float64 allows others."""
    before = fingerprint(model, inputs)
    rewritten, plain = rewrite(model, **CHANGED["swish"]), rewrite(model)
    assert verify(model, rewritten, inputs, ADAM, exact=False).equivalent
    verdict = verify(model, rewritten, inputs, ADAM, exact=False, plain=plain)
    assert verdict.summary.startswith("not equivalent: ")
    assert verify(model, rewritten, inputs, ADAM, exact=False, plain=rewrite(model, **CHANGED["swish"])).equivalent
    assert fingerprint(model, inputs) == before


def test_a_plain_model_that_does_not_run_raises(model: Net, inputs: Inputs) -> None:
    broken = rewrite(model, finish=lambda self, x: x @ x)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        verify(model, rewrite(model), inputs, ADAM, exact=False, plain=broken)


def test_noise_excuses_no_other_optimizer_path() -> None:
    """Gradients happen to be the same, and the parameters are not."""
    shaken = itertools.chain([0.0] * 6, itertools.cycle([0.0, 1e-5]))

    class Late(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + next(shaken)

    model = Late(3, 3)
    hidden = rewrite(model, parameters=lambda self, recurse=True: iter([model.weight]))
    verdict = verify(model, hidden, Inputs((torch.randn(2, 3),), {}), ADAM, exact=True)
    assert {(t.kind, t.name) for t in verdict.tensors if not t.passed} == {("parameter", "bias")}


def test_numbers_from_a_generator_of_the_models_own_are_recorded_too(inputs: Inputs) -> None:
    class Own(Net):
        def drop(self, x: Tensor) -> Tensor:
            return x * torch.empty_like(x).bernoulli_(0.75, generator=torch.Generator().manual_seed(3))

    torch.manual_seed(0)
    model = Own()
    verdict = verify(model, rewrite(model, **CHANGED["swish"]), inputs, ADAM, exact=False)
    assert verdict.equivalent
    assert not verdict.exact


class Never(Exception):  # noqa: N818
    """What must not run has run."""


def test_what_float64_left_is_enough_for_another_look(model: Net, inputs: Inputs, monkeypatch: Any) -> None:
    rewritten = rewrite(model, **CHANGED["swish"])
    first = verify(model, rewritten, inputs, ADAM, exact=False)
    judged = {(t.kind, t.name) for t in first.tensors if t.kind not in ("layout", "random state", "training flag")}
    assert {*first.room} <= judged
    assert all(0 < room < 1e-3 for room in first.room.values())

    def never(*args: Any) -> Any:
        raise Never

    monkeypatch.setattr(judging, "double_step", never)
    again = verify(model, rewritten, inputs, ADAM, exact=False, steps=1, known=first.room)
    assert again.summary.startswith("equivalent: worst ")
    assert not again.exact
    assert not again.room
    far = {key: room / 1e6 for key, room in first.room.items()}
    with pytest.raises(Never):
        verify(model, rewritten, inputs, ADAM, exact=False, steps=1, known=far)
    monkeypatch.undo()
    assert verify(model, rewritten, inputs, ADAM, exact=False, steps=1, known=far).room
    for name, (methods, named) in WRONG.items():
        wrong = verify(model, rewrite(model, **methods), inputs, ADAM, exact=False, steps=1, known=first.room)
        described = [wrong.summary, *(f"{t.kind} {t.name}" for t in wrong.tensors if not t.passed)]
        assert not wrong.equivalent, name
        assert any(named in text for text in described), name


@pytest.mark.parametrize(
    ("off", "taken", "equivalent"),
    [(1e-6, "ORD" + "OR" * 2, True), (1.2e-5, "ORDORDOR", True), (1e-3, "ORD" + "ORDOOO" * 2 + "OR", False)],
    ids=["little", "within float64", "wrong"],
)
def test_a_step_that_is_further_off_than_those_before_is_judged_by_float64(
    off: float, taken: str, equivalent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three steps the second is off; a hundred-thousandth is allowed, by then or over both that are judged."""
    factors = iter([1 + 1e-6, 1 + off, 1 + 1e-6])

    def another(self: Any, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias) * next(factors)

    torch.manual_seed(0)
    model = nn.Linear(30, 30)
    nn.init.ones_(model.bias)  # and the loss is about one in each step
    rewritten = rewrite(model, forward=another)
    seen = counted(monkeypatch, {id(model): "O", id(rewritten): "R"})
    verdict = verify(model, rewritten, Inputs((torch.randn(5, 30),), {}), ADAM, exact=False)
    assert "".join(seen) == taken
    assert verdict.equivalent == equivalent, verdict.summary


def test_of_a_known_value_no_more_is_allowed_than_of_one_that_is_judged() -> None:
    """The distance and the original's error together are what float64 allows."""
    key, exact = ("gradient", "weight"), torch.linspace(1, 2, 50, dtype=torch.float64)
    original = exact.float() * (1 + 1e-4)
    comparison = Comparison(half=False)
    comparison.add_step({key: original}, {key: original + 1e-6})
    comparison.add_reference({key: original}, {key: original + 1e-6}, {key: exact})
    (verdict,) = comparison.verdicts()
    room = comparison.room()
    for share, passes in ((0.99, True), (1.01, False)):
        again = Comparison(half=False)
        far = original + share * (verdict.allowed - verdict.reference_error)
        again.add_step({key: original}, {key: far})
        again.add_distance({key: original}, {key: far}, room)
        assert again.passed() == passes


@pytest.mark.parametrize(("offset", "passes"), [(0.03, True), (0.05, False)])
def test_noise_that_is_rare_counts_in_every_step(offset: float, passes: bool) -> None:
    key = ("gradient", "weight")
    comparison = Comparison(half=False)
    for noise in (0.01, 0.0):
        comparison.add_step({key: torch.ones(2)}, {key: torch.ones(2) + offset})
        comparison.add_noise(len(comparison.noise) - 1, {key: torch.ones(2)}, {key: torch.ones(2) + noise})
    assert [verdict.passed for verdict in comparison.verdicts()] == [passes]


@pytest.mark.parametrize(("error", "words"), [(0.015, "the original's own"), (0.035, "between two runs")])
def test_figures_of_changed_arithmetic_are_those_against_float64_where_they_suffice(error: float, words: str) -> None:
    key = ("gradient", "weight")
    exact, original, again = torch.ones(2, dtype=torch.float64), torch.ones(2) + 0.01, torch.ones(2) + 0.02
    comparison = Comparison(half=False)
    comparison.add_step({key: original}, {key: torch.ones(2) + error})
    comparison.add_noise(0, {key: original}, {key: again})
    comparison.add_reference({key: original}, {key: torch.ones(2) + error}, {key: exact})
    (verdict,) = comparison.verdicts()
    assert verdict.passed
    assert verdict.error == pytest.approx(error - 0.01 if verdict.by_noise else error, rel=1e-4)
    assert words in concluded(comparison, steps=1, batch=None).summary


@dataclass
class Answer:
    logits: Tensor
    extra: dict[str, Any]


class Odd(nn.Module):
    """Returns a dataclass with complex, empty, integer, infinite and non-tensor parts, from tied float64 weights."""

    note = "a"

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, dtype=torch.float64)
        self.second = nn.Linear(3, 3, dtype=torch.float64)
        self.second.weight = self.first.weight
        self.embedding = nn.Embedding(4, 3, sparse=True, dtype=torch.float64)
        self.register_buffer("wide", torch.zeros(1).expand(3))

    def forward(self, x: Tensor, index: Tensor) -> Answer:
        logits = self.second(self.first(x + self.embedding(index)))
        parts = [torch.fft.fft(logits), logits[:0], logits.argmax(-1), torch.tensor([torch.nan, -torch.inf]), None]
        return Answer(logits, {"parts": parts, "note": self.note, "nan": float("nan")})


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "changed"])
def test_odd_outputs_are_compared_part_by_part(exact: bool) -> None:
    model, x = Odd(), torch.randn(2, 3, dtype=torch.float64)
    step = Step(
        optimizer=torch.optim.SGD, loss_fn=lambda answer: answer.logits.sum() + answer.extra["parts"][0].abs().sum()
    )
    inputs = Inputs((x, torch.tensor([1, 3])), {})
    assert verify(model, rewrite(model), inputs, step, exact=exact).exact
    other: Any = rewrite(model)
    other.note = "b"
    assert [t.kind for t in verify(model, other, inputs, step, exact=exact).tensors if not t.passed] == ["output"]


TABLE = torch.randn(3, 3, generator=torch.Generator().manual_seed(2))
RANDOM: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: functional.dropout(x, 0.5),
    "dropout in place": lambda x: functional.dropout(x * 1, 0.5, inplace=True),
    "alpha dropout": lambda x: functional.alpha_dropout(x, 0.5, True),
    "native dropout": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "all dropped": lambda x: torch.native_dropout(x, 1.0, True)[0],
    "rand": lambda x: x * torch.rand(4, 3),
    "randn like": lambda x: x + torch.randn_like(x),
    "uniform": lambda x: x + torch.empty_like(x).uniform_(-1, 1),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
    "randperm": lambda x: x[torch.randperm(4)] * torch.arange(4.0)[:, None],
    "normal": lambda x: x + torch.normal(torch.zeros(4, 3), torch.ones(4, 3)),
    "gumbel": lambda x: functional.gumbel_softmax(x, hard=False),
    "rrelu": lambda x: functional.rrelu(x, training=True),
    "rrelu in place": lambda x: functional.rrelu(x * 1, training=True, inplace=True),
    "attention": lambda x: functional.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5),
    "explicit casts": lambda x: (
        functional.dropout(x.float().softmax(-1, dtype=torch.float32), 0.5) * torch.zeros(3).add(1.0)
    ),
    "a float32 table": lambda x: x @ TABLE,
}


@pytest.mark.parametrize("function", RANDOM.values(), ids=RANDOM)
def test_the_reference_sees_the_same_draws_in_double(function: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(3)
    x = torch.randn(4, 3)
    wide = x.double().requires_grad_()
    x.requires_grad_()
    with Recorder() as recorder:
        narrow_result = function(x)
        torch.autograd.backward(narrow_result.pow(2).sum())
    state = torch.get_rng_state()
    with Replay(recorder.draws):
        result = function(wide)
        torch.autograd.backward(result.pow(2).sum())
    assert result.dtype == torch.float64
    assert torch.equal(state, torch.get_rng_state())
    torch.testing.assert_close(result.float(), narrow_result)
    assert wide.grad is not None
    torch.testing.assert_close(wide.grad.float(), x.grad)


def _of_a_head(x: Tensor) -> list[Tensor]:
    how: Any = (["float32"], [0.0], -100, 0.0, 1, 4, None, [True, True, False])
    loss: list[Tensor] = torch.ops.memrewrite.linear_loss(x, x, None, torch.arange(len(x)), None, *how)
    return loss


@pytest.mark.parametrize(
    "run", [_of_a_head, lambda x: at_once("narrow", lambda y: y.float().exp(), [x])], ids=["loss", "chain"]
)
def test_our_operators_are_in_double_as_a_whole(run: Callable[[Tensor], list[Tensor]]) -> None:
    """They cast to float32 themselves: none of the values is one of float32."""
    x = torch.linspace(0, 1, 64, dtype=torch.float64).view(8, 8)
    with in_double([]):
        found = run(x)
    assert all(each.dtype == torch.float64 and not torch.equal(each, each.float().double()) for each in found)


def test_a_model_that_draws_differently_in_double_cannot_be_judged() -> None:
    class Fickle(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.rand_like(x) + x if x.dtype == torch.float64 else functional.dropout(x, 0.5))

    model = Fickle(3, 3)
    rewritten = rewrite(model, forward=lambda self, x: Fickle.forward(model, x) * 1.0001)
    with pytest.raises(MeasurementError, match=r"drew aten::rand_like.* verify with exact=True"):
        verify(model, rewritten, Inputs((torch.randn(2, 3),), {}), ADAM, exact=False)


def test_refuses_saved_tensor_hooks_and_no_steps(model: Net, inputs: Inputs) -> None:
    with saved_tensors_hooks(lambda t: t, lambda t: t), pytest.raises(UsageError, match="leave their context"):
        verify(model, model, inputs, ADAM, exact=True)
    with pytest.raises(UsageError, match="at least 1"):
        verify(model, model, inputs, ADAM, exact=True, steps=0)


def fingerprint(model: nn.Module, inputs: Inputs) -> tuple[Any, ...]:
    """Everything verification must leave as it was."""
    tensors = [*model.parameters(), *model.buffers(), *inputs.tensors()]
    return (
        [(id(t), t.requires_grad, t.grad, t.detach().reshape(-1).view(torch.uint8).tolist()) for t in tensors],
        [(name, child.training) for name, child in model.named_modules()],
        torch.get_rng_state().tolist(),
        random.getstate(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
        torch.backends.cudnn.benchmark,
    )


def test_verdicts_name_figures(model: Net, inputs: Inputs) -> None:
    wrong = rewrite(model, finish=lambda self, x: wrong_backward(x))
    verdict: Verdict = verify(model, wrong, inputs, ADAM, exact=False)
    worst = [t for t in verdict.tensors if not t.passed]
    assert all(t.error > t.allowed > t.reference_error for t in worst)
    assert f"{len(worst)} of {len(verdict.tensors)} values differ" in verdict.summary
    assert "times the original's own" in verdict.summary


def test_checks_sum_up_each_group(model: Net, inputs: Inputs) -> None:
    equal = verify(model, rewrite(model), inputs, ADAM, exact=True).checks
    assert sum(check.count for check in equal) == sum(check.bit_equal for check in equal) > 20
    assert all((check.worst, check.error, check.own_error, check.allowed) == ("", None, None, None) for check in equal)
    verdict = verify(model, rewrite(model, finish=lambda self, x: ulp(x)), inputs, ADAM, exact=False)
    (output,) = (check for check in verdict.checks if check.group == "output")
    (tensor,) = (t for t in verdict.tensors if t.kind == "output" and not t.bit_equal)
    assert (output.count, output.bit_equal, output.passed, output.worst) == (2, 1, True, tensor.name)
    assert (output.error, output.own_error, output.allowed) == (tensor.error, tensor.reference_error, tensor.allowed)
    missing = verify(model, rewrite(model, finish=lambda self, x: x[:2]), inputs, ADAM, exact=True).checks
    assert next((check.group, check.error) for check in missing if not check.passed) == ("output", None)


class Frozen(dict[str, Any]):
    """A dictionary that refuses to be written, as the configurations of diffusers do."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("frozen")


def test_a_dictionary_that_cannot_be_written_needs_no_restoring() -> None:
    net = Net()
    vars(net)["config"] = config = Frozen(width=6)
    assert verify(net, net, Inputs((torch.randn(4, 3, 8, 8),), {}), ADAM, exact=True).equivalent
    assert config == {"width": 6}


def test_out_of_memory_shortens_what_is_not_the_batch() -> None:
    """No program takes a batch of one, where its example had more."""
    model = nn.Sequential(nn.Embedding(10, 4), nn.Sigmoid())
    inputs = Inputs((torch.arange(2 * 16).reshape(2, 16) % 10,), {})
    result = optimize(model, inputs.args, verify=False)

    def hungry(module: nn.Module, given: tuple[Tensor]) -> None:
        if given[0].numel() > 20:
            raise torch.OutOfMemoryError("CUDA out of memory")

    model.register_forward_pre_hook(hungry)
    verdict = verify(model, result, inputs, ADAM, exact=False)
    assert verdict.equivalent
    assert "; verified at inputs of (2, 8), as (2, 16) does not fit in memory" in verdict.summary
