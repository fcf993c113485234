"""What a captured graph would silently lose is refused in a sentence that names the hazard and its place."""

import random
import time
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (its customary name)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.checkpoint import checkpoint

from memrewrite.capture import capture
from memrewrite.codegen.writer import generate
from memrewrite.records.errors import CaptureError
from memrewrite.state.attributes import Attributes
from memrewrite.workload.step import Inputs
from tests.support.layers import WIDTH, Prepare, model, nameless, x

HERE = r"test_hazards\.py:\d+"
FRONT_ENDS = ("export", "dynamo", None)
Register = Callable[[Callable[..., Any]], Callable[..., Any]]
HAZARDS: dict[str, tuple[Callable[..., Any], Prepare, str]] = {}


def hazard(sentence: str, prepare: Prepare = lambda m: None) -> Register:
    """Put a forward into the table with the sentence it is refused by (a regular expression)."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        HAZARDS[function.__name__] = (function, prepare, sentence)
        return function

    return register


StraightThrough = nameless("StraightThrough")
straight_through: Callable[[Tensor], Tensor] = StraightThrough.apply


class Box:
    count = 0


def plain(self: Any, x: Tensor) -> Tensor:
    return self.linear(x)


@hazard(r"uses the custom autograd\.Function StraightThrough, whose backward")
def custom_function(self: Any, x: Tensor) -> Tensor:
    return straight_through(self.linear(x))


@hazard(r"uses the custom autograd\.Function StraightThrough")
def custom_function_on_an_input(self: Any, x: Tensor) -> Tensor:
    return self.linear(StraightThrough.apply(x))


for kind in ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"):
    words = kind.replace("full_", "").replace("_", " ")

    def register_hook(m: Any, register: str = f"register_{kind}") -> None:
        getattr(m.linear, register)(lambda *args: None)

    HAZARDS[kind] = (plain, register_hook, rf"^linear \(Linear\) has {words}s, which would fire while tracing")


@hazard(rf"registers tensor hooks in forward \(at {HERE}\)")
def tensor_hook(self: Any, x: Tensor) -> Tensor:
    hidden = self.linear(x)
    hidden.register_hook(lambda gradient: gradient * 2)
    return hidden


@hazard("draws from Python's or NumPy's random in forward")
def layer_drop(self: Any, x: Tensor) -> Tensor:
    return self.linear(x) if random.random() < 2 else x  # noqa: S311  (any draw)


@hazard("draws from Python's or NumPy's random in forward")
def numpy_random(self: Any, x: Tensor) -> Tensor:
    return self.linear(x) * float(np.random.rand())


DICE = random.Random(0)  # noqa: S311  (any generator)


@hazard(r"assigns a new value to self\.dice in forward", lambda m: setattr(m, "dice", DICE))
def generator_of_its_own(self: Any, x: Tensor) -> Tensor:
    return self.linear(x) * self.dice.random()


@hazard(r"assigns a new value to self\.dice in forward", lambda m: setattr(m, "dice", np.random.default_rng(0)))
def numpy_generator_of_its_own(self: Any, x: Tensor) -> Tensor:
    return self.linear(x) * float(self.dice.random())


NOISE = torch.Generator().manual_seed(0)


@hazard("draws from a torch.Generator of its own", lambda m: setattr(m, "noise", torch.Generator()))
def torch_generator_of_its_own(self: Any, x: Tensor) -> Tensor:
    return self.linear(x) + torch.randn(x.shape, generator=self.noise)


@hazard("draws from a torch.Generator of its own")
def generator_of_the_module(self: Any, x: Tensor) -> Tensor:
    return self.linear(x).normal_(generator=NOISE)


@hazard("or seeds a generator there")
def seeding(self: Any, x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return self.dropout(self.linear(x))


@hazard(rf"seeds PyTorch's generator in forward \(at {HERE}\)")
def seeding_in_a_fork(self: Any, x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        noise = torch.rand_like(x)
    return self.linear(x) * noise


@hazard(r"assigns a new value to self\.steps in forward", lambda m: setattr(m, "steps", 0))
def step_counter(self: Any, x: Tensor) -> Tensor:
    self.steps += 1
    return self.linear(x) * self.steps


@hazard(r"assigns a new value to self\.linear\._steps in forward", lambda m: setattr(m.linear, "_steps", 0))
def private_step_counter(self: Any, x: Tensor) -> Tensor:
    self.linear._steps += 1
    return self.linear(x) * self.linear._steps


@hazard(r"assigns a new value to self\.box\.count in forward", lambda m: setattr(m, "box", Box()))
def counter_in_an_object(self: Any, x: Tensor) -> Tensor:
    self.box.count += 1
    return self.linear(x)


STEPS = [0]


@hazard(rf"does something else each time forward runs \(at {HERE}\)")
def global_counter(self: Any, x: Tensor) -> Tensor:
    STEPS[0] += 1
    return self.linear(x) * STEPS[0]


@hazard(rf"does something else each time forward runs \(at {HERE}\)")
def clock(self: Any, x: Tensor) -> Tensor:
    return self.linear(x) * time.perf_counter()


@hazard(r"assigns a new tensor to self\.counter in forward.*Update a buffer in place \(copy_\)")
def buffer_reassigned(self: Any, x: Tensor) -> Tensor:
    self.counter = self.counter + 1
    return self.linear(x) * self.counter


@hazard(r"assigns a new tensor to self\.history\.0 in forward", lambda m: setattr(m, "history", []))
def appended_list(self: Any, x: Tensor) -> Tensor:
    self.history.append(self.linear(x))
    return self.history[-1]


class Run:
    """What a tracker of experiments keeps of a run."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.steps = 0


class Tracker:
    """Has a run, for a model that holds it."""

    def __init__(self) -> None:
        self.run = Run()


def with_history(module: Any) -> None:
    module.tracker = Tracker()


@hazard(r"assigns a new tensor to self\.tracker\.run\.losses\.0 in forward", with_history)
def loss_kept_by_an_object_of_an_object(self: Any, x: Tensor) -> Tensor:
    y = self.linear(x)
    self.tracker.run.losses.append(y.detach().mean())
    return y


@hazard(r"assigns a new value to self\.tracker\.run\.steps in forward", with_history)
def counted_by_an_object_of_an_object(self: Any, x: Tensor) -> Tensor:
    self.tracker.run.steps += 1
    return self.linear(x)


@hazard(r"assigns a new value to self\.ready in forward", lambda m: setattr(m, "ready", False))
def set_up_by_the_first_batch(self: Any, x: Tensor) -> Tensor:
    if not self.ready:
        with torch.no_grad():
            self.scale.copy_(1 / x.std())
        self.ready = True
    return self.linear(x) * self.scale


@hazard(r"assigns a new tensor to self\.table in forward", lambda m: setattr(m, "table", None))
def table_made_once(self: Any, x: Tensor) -> Tensor:
    if self.table is None:
        self.table = torch.arange(WIDTH)
    return self.linear(x) + self.table


@hazard(r"assigns a new tensor to self\.named\.k", lambda m: setattr(m, "named", {"k": torch.ones(WIDTH)}))
def item_of_a_dict(self: Any, x: Tensor) -> Tensor:
    self.named["k"] = self.linear(x)
    return self.named["k"]


@hazard(r"assigns a new value to self\.dropout\.training in forward")
def mode_switched(self: Any, x: Tensor) -> Tensor:
    return self.dropout.eval()(self.linear(x))


@hazard(r"assigns a new value to self\.linear\.weight\.requires_grad in forward")
def layer_frozen_in_forward(self: Any, x: Tensor) -> Tensor:
    self.linear.weight.requires_grad_(False)
    return self.linear(x)


@hazard(r"assigns a new value to self\.linear\._forward_hooks\.\d+ in forward")
def hook_registered_in_forward(self: Any, x: Tensor) -> Tensor:
    self.linear.register_forward_hook(lambda *args: None)
    return self.linear(x)


@hazard(rf"assigns to \.data in forward \(at {HERE}\)")
def data_assigned(self: Any, x: Tensor) -> Tensor:
    self.counter.data = self.counter + 2
    return self.linear(x) * self.counter


@hazard(rf"lets the values of a tensor decide what Python does at {HERE}")
def branch_on_data(self: Any, x: Tensor) -> Tensor:
    return self.linear(x) if x.sum() > 0 else x


@hazard(rf"lets the values of a tensor decide what Python does at {HERE}")
def layer_drop_by_torch(self: Any, x: Tensor) -> Tensor:
    return self.linear(x) if torch.rand(1).item() < 0.5 else x


@hazard(rf"lets the values of a tensor decide what Python does at {HERE}.*nonzero")
def shape_from_data(self: Any, x: Tensor) -> Tensor:
    return self.linear(x)[x > 0]


@hazard("lets the values of a tensor decide", lambda m: m.add_module("mean", nn.BatchNorm1d(WIDTH, momentum=None)))
def cumulative_batch_norm(self: Any, x: Tensor) -> Tensor:
    return self.mean(self.linear(x))


@hazard(rf"enters torch\.inference_mode in forward \(at {HERE}\)")
def inference_mode(self: Any, x: Tensor) -> Tensor:
    with torch.inference_mode():
        hidden = self.linear(x)
    return hidden.clone() + self.other(x)


@hazard(rf"takes gradients in forward \(at {HERE}\)")
def gradients_in_forward(self: Any, x: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(self.linear(x).sum(), self.linear.weight)
    return self.linear(x) * gradient.mean()


@hazard(rf"takes gradients in forward \(at {HERE}\) by operations .* unless they are by its inputs")
def gradients_of_what_saves_its_result(self: Any, x: Tensor) -> Tensor:
    hidden = self.linear(x)
    (slope,) = torch.autograd.grad(hidden.tanh().sum(), hidden, create_graph=True)
    return self.other(slope)


@hazard(rf"lets an input or output require a gradient in forward \(at {HERE}\)")
def an_input_that_is_to_require_a_gradient(self: Any, x: Tensor) -> Tensor:
    x.requires_grad = True
    return self.linear(x)


@hazard(rf"lets an input or output require a gradient in forward \(at {HERE}\)")
def a_leaf_that_is_returned(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    hidden = self.linear(x).detach().requires_grad_()
    return self.other(hidden), hidden


@hazard(rf"lets an input or output require a gradient in forward \(at {HERE}\)")
def a_leaf_that_is_made(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    shift = torch.zeros(WIDTH, requires_grad=True)
    return self.linear(x + shift), shift


@hazard(rf"freezes a parameter or an input in forward \(at {HERE}\)")
def parameters_that_are_frozen_for_one_term(self: Any, x: Tensor) -> Tensor:
    hidden = self.other(self.linear(x))
    self.other.requires_grad_(False)
    judged = self.other(self.linear(x))
    self.other.requires_grad_(True)
    return hidden - judged.sigmoid()


@hazard(rf"does at {HERE}.*; give its distributions validate_args=False, so that")
def a_distribution_that_looks_at_its_parameters(self: Any, x: Tensor) -> Tensor:
    return torch.distributions.Normal(self.linear(x), 1.0, validate_args=True).rsample()


@hazard(
    rf"updates buffers under its own torch\.utils\.checkpoint \(at {HERE}\)",
    lambda m: m.add_module("features", nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))),
)
def batch_norm_in_a_checkpoint(self: Any, x: Tensor) -> Tensor:
    return self.linear(checkpoint(self.features, x, use_reentrant=False))


@hazard(r"does so once more in backward; switch the model's checkpointing off")
def counter_in_a_reentrant_checkpoint(self: Any, x: Tensor) -> Tensor:
    def body(x: Tensor) -> Tensor:
        self.counter += 1
        return self.other(x)

    return checkpoint(body, self.linear(x), use_reentrant=True)


@hazard(r"torch\.func transforms")
def vmap(self: Any, x: Tensor) -> Tensor:
    return torch.func.vmap(self.linear)(x)


@hazard("^linear is compiled; optimize first", lambda m: m.linear.compile(backend="eager"))
def compiled_submodule(self: Any, x: Tensor) -> Tensor:
    return self.linear(x)


@hazard(
    r"^rooms\.class\.weight goes through the name 'class'",
    lambda m: m.add_module("rooms", nn.ModuleDict({"class": nn.Linear(WIDTH, WIDTH)})),
)
def keyword_as_a_name(self: Any, x: Tensor) -> Tensor:
    return self.rooms["class"](x)


@hazard(r"^code goes through the name 'code', which every graph", lambda m: m.register_buffer("code", torch.ones(1)))
def buffer_with_a_name_of_graphs(self: Any, x: Tensor) -> Tensor:
    return self.other(self.linear(x) * self.code)


@hazard(r"^graph\.weight goes through the name 'graph'", lambda m: m.add_module("graph", nn.Linear(WIDTH, WIDTH)))
def module_with_a_name_of_graphs(self: Any, x: Tensor) -> Tensor:
    found: Tensor = self.graph(x)
    return found


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("name", HAZARDS)
def test_a_hazard_is_refused_by_name(name: str, front_end: str | None) -> None:
    function, prepare, sentence = HAZARDS[name]
    module = model(function, prepare)
    states = random.getstate(), str(np.random.get_state(legacy=False)), torch.get_rng_state().tolist()
    attributes = Attributes(module)
    values = {key: value.clone() for key, value in module.state_dict().items()}
    with pytest.raises(CaptureError, match=sentence):
        capture(module, Inputs((x(),), {}), front_end)
    assert list(attributes.changed()) == []
    assert all(torch.equal(values[key], value) for key, value in module.state_dict().items())
    assert states == (random.getstate(), str(np.random.get_state(legacy=False)), torch.get_rng_state().tolist())


def seeding_python(self: Any, x: Tensor) -> Tensor:
    random.seed(3)
    return self.linear(x)


def seeding_numpy(self: Any, x: Tensor) -> Tensor:
    np.random.seed(3)
    return self.linear(x)


@pytest.mark.parametrize("function", [seeding, seeding_in_a_fork, seeding_python, seeding_numpy])
def test_a_seed_is_seen_in_forward_where_it_is_the_one_that_was_set_before(function: Callable[..., Any]) -> None:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    with pytest.raises(CaptureError, match="seeds"):
        capture(model(function), Inputs((x(),), {}))


def attention_kernels(self: Any, x: Tensor) -> Tensor:
    q = self.linear(x).view(1, 1, -1, WIDTH)
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, q, q)


def test_the_choice_of_attention_kernels_is_never_lost() -> None:
    with pytest.raises(CaptureError, match=f"export: it loses the choice of attention kernels at {HERE}"):
        capture(model(attention_kernels), Inputs((x(),), {}), "export")
    with pytest.raises(CaptureError, match="cannot be"):
        generate(capture(model(attention_kernels), Inputs((x(),), {})))


def test_hooks_for_all_modules_are_refused() -> None:
    handle = register_module_forward_hook(lambda *args: None)
    try:
        with pytest.raises(CaptureError, match="Hooks for all modules are registered"):
            capture(model(plain), Inputs((x(),), {}))
    finally:
        handle.remove()
    capture(model(plain), Inputs((x(),), {}))


def test_a_compiled_model_is_refused() -> None:
    with pytest.raises(CaptureError, match="OptimizedModule is compiled; optimize first"):
        capture(cast(nn.Module, torch.compile(model(plain), backend="eager")), Inputs((x(),), {}))


def first_step(self: Any, x: Tensor) -> Tensor:
    if not WARM:
        WARM.append(x.new_ones(1).shape)
    return self.linear(x)


WARM: list[Any] = []


def noted(self: Any, x: Tensor) -> Tensor:
    self._noted, self.width, self.box.count = True, x.shape[1], 1
    if not self._forward_pre_hooks:
        self.linear.register_state_dict_pre_hook(lambda *args: None)
        self.register_forward_pre_hook(lambda *args: None)
    self.box.count = 0
    return self.linear(x)


def fine(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        signs = StraightThrough.apply(x)
    x = x[:1]
    x.requires_grad = True  # as convolutions over sound do for checkpoints
    hidden = self.linear(x).requires_grad_()
    (slope,) = torch.autograd.grad(hidden.square().sum(), hidden, create_graph=True)
    return hidden * signs * slope.mean()


@pytest.mark.parametrize("function", [first_step, fine, noted], ids=lambda f: f.__name__)
def test_what_only_looks_like_a_hazard_is_taken(function: Callable[..., Any]) -> None:
    module = model(function, lambda m: setattr(m, "box", Box()))
    before = Attributes(module)
    capture(module, Inputs((x(),), {}))
    assert list(before.changed()) == []


def test_a_tensor_hook_on_a_parameter_is_not_the_models_business() -> None:
    module = model(plain)
    module.linear.weight.register_hook(lambda gradient: gradient * 2)
    capture(module, Inputs((x(),), {}))


# What the check looks at.


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.BatchNorm1d(2)
        self.box, self.items, self.table = Box(), [1, [2]], {"k": torch.ones(2), "pair": (1, torch.zeros(1))}
        self.seen, self.dice = {3}, DICE


CHANGES: dict[str, tuple[Callable[[Any], Any], list[str]]] = {
    "nothing": (lambda m: m.inner(torch.ones(3, 2)), []),
    "equal value": (lambda m: setattr(m, "items", [1, [2]]), []),
    "attribute": (lambda m: setattr(m, "fresh", 1), ["fresh"]),
    "deleted": (lambda m: delattr(m, "box"), ["box"]),
    "object": (lambda m: setattr(m.box, "count", 2), ["box.count"]),
    "nested list": (lambda m: m.items[1].append(3), ["items.1.1"]),
    "set": (lambda m: m.seen.add(4), ["seen.4"]),
    "tuple": (lambda m: m.table.update(pair=(1, torch.zeros(1))), ["table.pair"]),
    "buffer": (lambda m: setattr(m.inner, "running_mean", torch.zeros(2)), ["inner.running_mean"]),
    "draw": (lambda m: m.dice.random(), ["dice"]),
    "frozen": (lambda m: m.inner.weight.requires_grad_(False), ["inner.weight.requires_grad"]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_seen_and_taken_back(name: str) -> None:
    change, paths = CHANGES[name]
    module = Holder()
    attributes = Attributes(module)
    change(module)
    found = [path for path, _ in attributes.changed()]
    assert set(paths) <= set(found)
    assert {path.split(".")[0] for path in found} == {path.split(".")[0] for path in paths}
    attributes.restore()
    assert list(attributes.changed()) == []


def test_writes_to_tensors_outside_buffers_are_seen() -> None:
    module = Holder()
    attributes = Attributes(module)
    module.inner(torch.ones(3, 2))
    assert list(attributes.written()) == []
    cast(Tensor, module.table["k"]).add_(1)
    assert list(attributes.written()) == ["table.k"]
