"""The property every model has: what ``optimize`` returns trains alike, within the budget, as predicted.

Nothing here uses ``memrewrite.verify``: the two models run from equal copies, and every number is compared again.
"""

import copy
import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from memrewrite import optimize
from memrewrite.measurement.measuring import predict
from memrewrite.records.errors import BudgetInfeasibleError, CaptureError, NotEquivalentError, UsageError
from memrewrite.runtime.dropin import fallen_back
from memrewrite.runtime.promise import FallbackWarning
from memrewrite.simulate import run_tracked
from memrewrite.targets.compiled import CompiledTarget
from memrewrite.targets.eager import EAGER
from memrewrite.torch_internals.pytrees import tree_leaves, tree_map
from memrewrite.workload.step import Inputs, Step, autocast, default_loss
from memrewrite.workload.stepspec import optimizer_factory

EXACT = ("checkpoint_segments", "inplace_activation")
TOLERANCE = 1e-4  # relative to the largest value of a tensor's kind, where a pattern rewrite changed the arithmetic
HALF_TOLERANCE = 3e-2  # the same where values pass through bfloat16, whose last place is 4e-3
ROUNDING = 1e-6
STEPS = 3
PARTS = 16  # of a run at scale, so that pytest-xdist can share them out
RATE = 0.05
Numbers = dict[str, Tensor]


@dataclass(frozen=True)
class Ask:
    """How ``optimize`` is called; a number as ``share`` puts the budget between floor (0) and original peak (1).

    With ``lengths`` a size of the input has a range, and takes these shares of it afterwards.
    """

    share: float | Literal["min"] | None = 0.5
    passes: tuple[str, ...] | None = None
    optimizer: str = "none"
    amp: torch.dtype | None = None
    exact: bool = False
    compiled: bool = False
    lengths: tuple[float, ...] = ()


def check(
    model: nn.Module, inputs: Inputs, ask: Ask, half: bool = False, varies: bool = False, dim: int | None = None
) -> str:
    """Optimize and compare; returns how it ended, raises ``AssertionError`` where a promise is broken.

    ``half`` says that the model computes in half precision even without autocast, ``varies`` that what a step takes
    depends on values, so that no number of bytes can be promised. Of the input, size ``dim`` may have a range.
    """
    step = Step("train" if model.training else "inference", optimizer_factory(ask.optimizer), None, ask.amp)
    try:
        real = run_tracked(copy.deepcopy(model), private(inputs), step).peak
    except (RuntimeError, ValueError, UsageError):  # the last where no output has a gradient
        return "the original fails"
    try:
        before = predict(model, inputs, step)
    except CaptureError as error:
        return type(error).__name__
    share = ask.share
    budget = before.floor + int(share * (before.peak - before.floor)) if isinstance(share, float) else share
    twin, given = copy.deepcopy(model), private(inputs)
    options = {name: value for name, value in vars(ask).items() if name not in ("share", "lengths")}
    if ask.lengths and dim is not None:
        options["dynamic"] = {"x": {dim: (2, inputs.args[0].shape[dim])}}
    try:
        result = optimize(model, inputs.args, budget=budget, **options)
    except (BudgetInfeasibleError, CaptureError, UsageError) as error:
        compare(_state(twin), _state(model), 0.0)
        if isinstance(error, BudgetInfeasibleError):
            _check_infeasible(error, budget)
        return type(error).__name__
    except NotEquivalentError:
        if _loss_cancels(twin, inputs, step):
            return "a loss of rounding errors"
        if ask.exact or not (half or ask.amp is not None):
            raise
        # One rounding to bfloat16 can turn a ReLU or a sum that cancels. That is refused aloud, with this advice.
        return check(twin, inputs, replace(ask, exact=True), half, varies, dim)
    compare(_tensors("input", given.args) | _state(twin), _tensors("input", inputs.args) | _state(model), 0.0)
    rewrites = {name for name, _, _ in result.report.rewrites}
    exact = rewrites <= {*EXACT, "functionalize"}
    if not exact and _loss_cancels(twin, inputs, step):
        return "a loss of rounding errors"
    loose = HALF_TOLERANCE if half or ask.amp is not None else TOLERANCE
    _compare_training(twin, copy.deepcopy(result), inputs, step, 0.0 if exact else loose)
    _compare_at(twin, copy.deepcopy(result), _fewer(inputs), step, 0.0 if exact else loose)
    if dim is not None:
        promised = None if varies or ask.compiled else result.report.predicted_after.peak
        for given in _shorter(inputs, dim, ask.lengths):
            _compare_at(twin, copy.deepcopy(result), given, step, 0.0 if exact else loose, promised)
    step = replace(step, target=CompiledTarget() if ask.compiled and result is not model else EAGER)
    tracked = run_tracked(copy.deepcopy(result), private(inputs), step).peak
    if varies:
        return "exact" if exact else "close"
    if real == before.peak:  # not so where PyTorch's shape rules miss already the original (RReLU, transposed)
        assert tracked == result.report.predicted_after.peak, f"{tracked} B tracked, not as predicted"
    allowed = budget if isinstance(budget, int) else max(before.peak, tracked if budget is None else 0)
    assert tracked <= allowed, f"{tracked} B tracked, {allowed} B allowed"
    return "exact" if exact else "close"


def _loss_cancels(model: nn.Module, inputs: Inputs, step: Step) -> bool:
    """Whether the loss is zero but for rounding (the mean of what was normalized), and so are its gradients then."""
    numbers = take_step(copy.deepcopy(model), inputs, step, 0)
    largest = max(float(value.abs().max()) for name, value in numbers.items() if name.startswith("output"))
    return "loss" in numbers and abs(float(numbers["loss"])) <= ROUNDING * largest


def _check_infeasible(error: BudgetInfeasibleError, budget: Any) -> None:
    assert isinstance(budget, int)
    assert error.lowest > budget


def _compare_training(original: nn.Module, rewritten: nn.Module, inputs: Inputs, step: Step, loose: float) -> None:
    """Both train freely; where arithmetic changed, every step of the rewritten begins where the original's does."""
    for number in range(STEPS):
        if loose:
            rewritten.load_state_dict(original.state_dict())
        expected = take_step(original, inputs, step, number)
        compare(expected, take_step(rewritten, inputs, step, number), loose)


def _fewer(inputs: Inputs) -> Inputs:
    """The inputs with fewer rows."""
    (x,) = inputs.args
    return Inputs((x.detach()[: len(x) - len(x) // 4].requires_grad_(x.requires_grad),), inputs.kwargs)


def _shorter(inputs: Inputs, dim: int, shares: tuple[float, ...]) -> Iterator[Inputs]:
    """The inputs with so much of a size, at least with 2 of it."""
    (x,) = inputs.args
    for share in shares:
        part = x.detach().narrow(dim, 0, 2 + int(share * (x.shape[dim] - 2)))
        yield Inputs((part.contiguous().requires_grad_(x.requires_grad),), inputs.kwargs)


def _compare_at(
    original: nn.Module, rewritten: nn.Module, inputs: Inputs, step: Step, loose: float, promised: int | None = None
) -> None:
    """A step on other sizes, if the original takes them; the rewritten may run its original forward for it.

    Where it does not, the step takes no more than is ``promised``.
    """
    rewritten.load_state_dict(original.state_dict())
    try:
        expected = take_step(copy.deepcopy(original), inputs, step, STEPS)
    except (RuntimeError, ValueError):
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        found = take_step(rewritten, inputs, step, STEPS)
        if not (loose and _loss_cancels(original, inputs, step)):
            compare(expected, found, loose)
        if promised is not None and not fallen_back(rewritten):
            tracked = run_tracked(rewritten, private(inputs), step).peak
            assert tracked <= promised, f"{tracked} B tracked at another size, {promised} B promised"


def take_step(model: nn.Module, inputs: Inputs, step: Step, seed: int) -> Numbers:
    """One step of gradient descent; everything it computed, strides of the outputs and random state included."""
    torch.manual_seed(seed)
    random.seed(seed)
    leaves = private(inputs)
    numbers: Numbers = {}
    train = step.mode == "train"
    with torch.set_grad_enabled(train), autocast(step.amp, "cpu"):
        # a leaf that requires a gradient cannot be written in place; its clone can
        output = model(*tree_map(lambda t: t.clone() if t.requires_grad else t, leaves.args))
        numbers |= _tensors("output", output)
        strides = [torch.tensor(t.stride()) for t in tree_leaves(output) if isinstance(t, Tensor)]
        numbers |= {f"strides {i}": stride for i, stride in enumerate(strides)}
        loss = default_loss(output) if train else None
    if loss is not None:
        loss.backward()
        numbers["loss"] = loss.detach().clone()
        owners = [*model.named_parameters(), *((f"input {i}", leaf) for i, leaf in enumerate(leaves.tensors()))]
        numbers |= {f"gradient {name}": t.grad.clone() for name, t in owners if t.grad is not None}
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(RATE * parameter.grad)
                parameter.grad = None
    numbers |= _tensors("input", leaves.args) | _state(model)
    numbers["random state"] = torch.get_rng_state()
    numbers["random draw"] = torch.tensor(random.random())  # noqa: S311
    return numbers


def compare(expected: Numbers, found: Numbers, loose: float) -> None:
    assert list(expected) == list(found)
    largest: dict[str, float] = {}
    for name, value in expected.items():
        assert (value.shape, value.dtype) == (found[name].shape, found[name].dtype), name
        finite = value[value.isfinite()].abs() if value.is_floating_point() else torch.zeros(0)
        kind = name.split(" ", 1)[0]
        largest[kind] = max(largest.get(kind, 0.0), float(finite.max()) if finite.numel() else 0.0)
    largest["loss"] = max(largest.get(kind, 0.0) for kind in ("loss", "output"))  # it is a mean of the outputs
    for name, value in expected.items():
        allowed = loose * largest[name.split(" ", 1)[0]] if value.is_floating_point() else 0.0
        same = torch.allclose(value, found[name], 0.0, allowed, equal_nan=True)
        assert same, f"{name} differs by {_distance(value, found[name])}, allowed {allowed}"


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max())


def _state(model: nn.Module) -> Numbers:
    """Parameters and buffers, flags as tensors."""
    named = [*model.named_parameters(), *model.named_buffers()]
    flags = torch.tensor([m.training for m in model.modules()] + [p.requires_grad for p in model.parameters()])
    return {f"state {name}": t.detach().clone() for name, t in named} | {"flags": flags}


def _tensors(kind: str, tree: Any) -> Numbers:
    leaves = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    return {f"{kind} {i}": t.detach().clone() for i, t in enumerate(leaves)}


def private(inputs: Inputs) -> Inputs:
    args = tree_map(lambda t: t.detach().clone().requires_grad_(t.requires_grad), inputs.args)
    return Inputs(args, inputs.kwargs)
