"""Every private seam of PyTorch does what it is used for, on the version at hand."""

import contextlib
import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from memrewrite.simulate.memory.tracker import Tracker
from memrewrite.torch_internals.autograd_nodes import gives_gradient_of_leaf
from memrewrite.torch_internals.fake_tensors import (
    FAKE_TENSOR_ERRORS,
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    asks_for_memory,
    asks_for_numbers,
    real_tensors,
)
from memrewrite.torch_internals.foreach import foreach_on_fake_tensors
from memrewrite.torch_internals.pytrees import (
    TreeSpec,
    tensors_in,
    tree_flatten,
    tree_iter,
    tree_leaves,
    tree_map,
    tree_unflatten,
)
from memrewrite.torch_internals.scaler import Scaler
from memrewrite.torch_internals.tracing import code_when_run


class Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_tensors_are_found_where_leaves_are() -> None:
    a, b, c = torch.ones(3).unbind()
    pair = torch.return_types.max((a, b))
    tree = ([a, (1, None, {"k": c, "a": b})], OrderedDict(x=b), pair, torch.Size([2]), "text", torch.float32)
    assert [*map(id, tensors_in(tree))] == [id(leaf) for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    assert len(tensors_in(tree)) == 6


def test_code_is_made_of_a_traced_graph_when_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    recompile = fx.GraphModule.recompile

    def noted(graph_module: fx.GraphModule) -> Any:
        made.append(str(graph_module.graph))
        return recompile(graph_module)

    monkeypatch.setattr(fx.GraphModule, "recompile", noted)
    with code_when_run():
        traced = make_fx(torch.sin)(torch.ones(3))
        traced.recompile()
    assert made == []
    assert torch.equal(traced(torch.zeros(3)), torch.zeros(3))
    assert len(made) == 1
    make_fx(torch.sin)(torch.ones(3))
    assert len(made) == 2


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_lets_the_optimizer_step_on_fake_tensors_too(fused: bool) -> None:
    with FakeTensorMode():
        scaler = Scaler("cpu")
        assert scaler.tensors == []
        weight = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.AdamW([weight], fused=fused)
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert len(scaler.tensors) == 2
    assert optimizer.state[weight]["exp_avg"].shape == (3,)


def test_a_scaler_leaves_gradients_as_they_are_and_steps_where_one_overflows() -> None:
    weight = nn.Parameter(torch.tensor([2.0, torch.inf]))
    scaler, optimizer = Scaler("cpu"), torch.optim.SGD([weight], lr=1.0)
    scaler.scale(weight.square().sum()).backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [4.0, torch.inf]
    scaler.step(optimizer)
    assert weight[0] == -2.0


def test_dispatch_mode_sees_operators_of_forward_and_backward() -> None:
    x = torch.ones(2, requires_grad=True)
    with Ops() as ops:
        (x * x).sum().backward()
    assert ops.names[:2] == ["aten.mul.Tensor", "aten.sum.default"]
    assert len(ops.names) > 2


def test_what_gives_a_leaf_its_gradient_is_told_from_what_else_backward_runs() -> None:
    leaf = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    found: list[tuple[str, bool]] = []

    class Asked(Ops):
        def __torch_dispatch__(self, func: Any, *rest: Any) -> Any:
            found.append((str(func), gives_gradient_of_leaf()))
            return super().__torch_dispatch__(func, *rest)

    def again(token: None) -> torch.Tensor:
        with torch.enable_grad():
            return leaf.float().sin()

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, again), Asked():
        (leaf.float().sin() * leaf).sum().backward()
    casts = [told for name, told in found if name == "aten._to_copy.default"]
    assert casts.count(True) == 2  # of the product's and of the cast's leaf
    assert not any(told for name, told in found if name in ("aten.sin.default", "aten.cos.default"))
    assert not gives_gradient_of_leaf()


def test_dispatch_mode_sees_operators_on_fake_tensors() -> None:
    with FakeTensorMode(), Ops() as ops:
        result = torch.ones(2) + 1
    assert isinstance(result, FakeTensor)
    assert "aten.add.Tensor" in ops.names


def test_real_tensors_can_be_made_inside_a_fake_mode() -> None:
    with FakeTensorMode():
        with real_tensors():
            assert type(torch.ones(2)) is torch.Tensor
        assert isinstance(torch.ones(2), FakeTensor)


def test_fake_views_of_one_storage_share_one() -> None:
    mode = FakeTensorMode()
    whole = torch.zeros(10)
    first, second = mode.from_tensor(whole[:5]), mode.from_tensor(whole[5:])
    assert first.untyped_storage() is second.untyped_storage()
    assert second.storage_offset() == 5


def test_fake_tensor_knows_its_device() -> None:
    fake = FakeTensorMode().from_tensor(torch.zeros(2))
    assert fake.fake_device == torch.device("cpu")


@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
def test_storage_object_lives_as_long_as_its_memory(fake: bool) -> None:
    mode = FakeTensorMode()
    tensor = mode.from_tensor(torch.zeros(8)) if fake else torch.zeros(8)
    died = weakref.ref(tensor.untyped_storage())
    view = tensor[1:]
    del tensor
    gc.collect()
    assert died() is view.untyped_storage()
    del view
    assert died() is None


def test_reading_a_fake_value_raises_a_listed_error() -> None:
    fake = FakeTensorMode().from_tensor(torch.zeros(()))
    with pytest.raises(FAKE_TENSOR_ERRORS):
        fake.item()


def test_fake_tensors_have_no_address() -> None:
    with FakeTensorMode() as mode:
        made = torch.empty(3)
    for fake in (made, made.view(1, 3), mode.from_tensor(torch.ones(2))):
        for ask in (fake.data_ptr, fake.numpy, fake.untyped_storage().data_ptr):
            with pytest.raises(RuntimeError) as caught:
                ask()
            assert asks_for_memory(caught.value)
    assert not asks_for_memory(RuntimeError("anything else"))


def test_fake_numbers_in_a_tuple_are_no_index() -> None:
    with FakeTensorMode():
        table, rows = torch.zeros(4, 4), torch.zeros(3, dtype=torch.long)
        with pytest.raises(RuntimeError) as caught:
            table[tuple(rows), tuple(rows)]
    assert asks_for_numbers(caught.value)
    assert not asks_for_numbers(RuntimeError("anything else"))


def test_optimizers_choose_foreach_for_fake_cuda_parameters_and_not_for_cpu() -> None:
    chosen = {}
    for device in ("cpu", "cuda:0"):
        with FakeTensorMode(), foreach_on_fake_tensors(), Ops() as ops:
            parameter = nn.Parameter(torch.zeros(4, device=device))
            parameter.grad = torch.zeros(4, device=device)
            torch.optim.AdamW([parameter]).step()
        chosen[device] = any("_foreach" in name for name in ops.names)
    assert chosen == {"cpu": False, "cuda:0": True}


def test_trees_come_back() -> None:
    value = {"a": (1, [2]), "b": None}
    leaves, spec = tree_flatten(value)
    assert tree_unflatten(leaves, spec) == value
    assert tree_leaves(value) == list(tree_iter(value))
    assert tree_map(lambda leaf: leaf, value) == value
    assert isinstance(spec, TreeSpec)


class Own(torch.autograd.Function):
    """Makes the gradient of its input itself, and holds it where it is to be ``kept``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: bool) -> Tensor:
        ctx.kept = kept
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        result = grad * 2.0
        ctx.held = result if ctx.kept else None
        return result, None


own: Any = Own.apply
SUMS: dict[str, Callable[[Tensor], Any]] = {
    "two formulas": lambda y: y.exp().sum() + y.cos().sum(),
    "a Function first": lambda y: y.exp().sum() + own(y, False).sum(),
    "a Function that holds it": lambda y: y.exp().sum() + own(y, True).sum(),
    "a view first": lambda y: y.exp().sum() + F.linear(torch.ones(2, 2), y).sum(),
    "a residual": lambda y: (y + y.relu()).exp().sum(),
    "a view of a residual": lambda y: (y + y.relu()).t().exp().sum(),
    "an expanded one first": lambda y: y.exp().sum() + y.sum(),
}
IN_PLACE = {"two formulas", "a Function first", "a residual"}


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
def test_sums_of_gradients_take_what_they_take_without_a_mode(
    name: str, fake: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    function: Any = SUMS[name]

    def loss() -> Tensor:
        result: Tensor = function(torch.ones(2, 2, requires_grad=True) * 2.0)
        return result

    once = loss()
    with torch.profiler.profile(acc_events=True) as profile:
        once.backward()
    (operator,) = (event.name for event in profile.events() if event.name in ("aten::add", "aten::add_"))
    told: list[bool] = []
    asked = Tracker._added_to

    def added_to(tracker: Tracker, args: tuple[Any, ...]) -> Any:
        first = asked(tracker, args)
        told.append(first is not None)
        return first

    monkeypatch.setattr(Tracker, "_added_to", added_to)
    with FakeTensorMode() if fake else contextlib.nullcontext(), Tracker("cpu"):
        once = loss()
        told.clear()
        once.backward()
    assert (operator == "aten::add_", told) == (name in IN_PLACE, [name in IN_PLACE])
