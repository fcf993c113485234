"""Layers see what modes see, and what is recalled is what the fake mode gives."""

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from torch import Tensor, nn
from torch._dynamo.utils import counters

from memrewrite.runtime.fused import at_once
from memrewrite.torch_internals.dispatch_modes import Layer, Recall
from memrewrite.torch_internals.fake_tensors import FakeTensor, FakeTensorMode, TorchDispatchMode


class Seen(Layer):
    """Notes the operators that pass, with its name."""

    def __init__(self, name: str, seen: list[str]) -> None:
        super().__init__()
        self.name, self.seen = name, seen

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.seen.append(f"{self.name} {func.overloadpacket.__name__}")
        return self.below(func, types, args, kwargs or {})


class Between(TorchDispatchMode):
    """A mode that is no layer."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def test_layers_pass_operators_down_in_the_order_they_were_opened() -> None:
    seen: list[str] = []
    x = torch.ones(2)
    with Seen("low", seen), Seen("high", seen):
        x.exp()
    assert seen == ["high exp", "low exp"]


def test_a_layer_is_back_when_the_one_on_it_is_closed() -> None:
    seen: list[str] = []
    x = torch.ones(2)
    with Seen("low", seen):
        with contextlib.suppress(ZeroDivisionError), Seen("high", seen):
            x.exp()
            raise ZeroDivisionError
        x.sin()
    x.cos()
    assert seen == ["high exp", "low exp", "low sin"]


def test_modes_between_layers_and_on_them_still_run() -> None:
    seen: list[str] = []
    with Seen("low", seen), Between(), Seen("high", seen), Between():  # type: ignore[no-untyped-call]
        torch.ones(2).exp()
    assert seen == ["high ones", "low ones", "high exp", "low exp"]


def test_layers_see_backward() -> None:
    seen: list[str] = []
    x = torch.ones(2, requires_grad=True)
    with Seen("low", seen), Seen("high", seen):
        x.exp().sum().backward()
    assert [name for name in seen if name.startswith("low")] == [f"low{n[4:]}" for n in seen if n.startswith("high")]
    assert "low expand" in seen
    assert x.grad is not None


def test_compiled_code_inside_is_run_as_it_is() -> None:
    seen: list[str] = []
    compiled = torch.compile(lambda x: x.exp() + 1, backend="eager")
    with Seen("high", seen):
        result = compiled(torch.zeros(2))
    assert result.tolist() == [2, 2]
    assert seen == ["high zeros", "high exp", "high add"]


def test_nothing_is_compiled_of_what_layers_do() -> None:
    counters.clear()
    compiled = torch.compile(lambda x: x.exp() + 1, backend="eager")
    with Seen("low", []), Seen("high", []):
        compiled(torch.zeros(2))
    assert not counters["frames"]
    compiled(torch.zeros(2))
    assert counters["frames"]["total"] == 1


def several(x: Tensor) -> Any:
    """Of an operator that is not PyTorch's, whose results autocast changes."""
    results = at_once("several", lambda y: ((y.mean(-1) / 3).to(torch.float64), y.bfloat16().pow(2)), [x])
    with torch.autocast("cpu", torch.bfloat16):
        return [*results, *at_once("several", lambda *_: None, [x])]


def norm(x: Tensor) -> Any:
    return torch.ops.aten.native_batch_norm(x, torch.ones(3), torch.zeros(3), None, None, True, 0.1, 1e-5)


def attention(x: Tensor) -> Any:
    """Numbers beside tensors: how long texts are."""
    half = x[None].half()
    return torch.ops.aten._scaled_dot_product_flash_attention(half, half, half)


def units(x: Tensor) -> Any:
    """What ``fully_shard`` does around its collectives."""
    with torch.profiler.record_function("gathered"):
        gathered = torch.ops.fsdp.all_gather_copy_in([x[0], x[1]], x.new_empty(48), [6, 6], 12, 1)
        whole = torch.ops.fsdp.split_with_sizes_copy(gathered[1], [40, 8], 0, out=[x.new_empty(40), x.new_empty(8)])
        reduced = x.new_empty(2, 16)
        joined = torch.ops.fsdp.chunk_cat([x, x[0]], 0, 2, out=reduced)
        in_place = torch.ops.fsdp.all_gather_copy_in([x[0], x[1]], x.view(24), [6, 6], 12, 0)
    return *gathered, whole, joined, reduced, *in_place, gathered[0].untyped_storage() is gathered[1].untyped_storage()


def updated(many: list[Tensor]) -> list[Tensor]:
    """As optimizers do it."""
    torch._foreach_addcdiv_(many, many, [each * 2 for each in many], [0.5, 2])
    torch._foreach_lerp_(many, [each.exp() for each in many], 0.5)
    torch._foreach_mul_(many, 2)
    return many


CALLS: dict[str, Callable[[Tensor], Any]] = {
    "elementwise": lambda x: x.exp(),
    "integer": lambda x: x.to(torch.int64) + 1,
    "float": lambda x: x.to(torch.int64) + 1.0,
    "flag": lambda x: x.to(torch.int64) + True,
    "view": lambda x: x.view(4, 6),
    "slice": lambda x: x[1:, ::2],
    "slices": lambda x: [x[a:b, :, 1:][:, c::2] for a in (-3, 1, 9) for b in (-1, 3, 99) for c in (0, 2, -2)],
    "slice without bounds": lambda x: (torch.ops.aten.slice.Tensor(x), torch.ops.aten.slice.Tensor(x[2:], -1)),
    "detached": lambda x: x[2:].transpose(0, 1).detach(),
    "updates": lambda x: updated([x, x.clone()]),
    "updates of one kind by another": lambda x: torch._foreach_add_([x.clone()], [x.half()]),
    "transposed": lambda x: x.transpose(0, 1).exp(),
    "expanded": lambda x: x[:, :1].expand(4, 5, 2),
    "strided": lambda x: torch.as_strided(x[1:], (2, 2), (1, 1)),
    "in place": lambda x: x.mul_(2),
    "three results": norm,
    "list": lambda x: x.split(1),
    "new list": lambda x: torch._foreach_add([x, x.transpose(0, 1)], 2.0),
    "its own in a list": lambda x: torch._foreach_add([x.clone()], 2.0)[0].split(4),
    "other operator": several,
    "other list": lambda x: [*x.unbind(1), *x.transpose(0, 1).split([1, 2])],
    "product": lambda x: x @ x[0].t(),
    "numbers beside": attention,
    "factory": lambda x: torch.zeros(3, dtype=torch.float16),
    "like": lambda x: torch.empty_like(x, dtype=torch.bfloat16),
    "joined": lambda x: torch.cat([x, x]),
    "moved": lambda x: x.to("meta"),
    "units": units,
    "complex": lambda x: torch.complex(x, x).conj() * 2,
    "negative": lambda x: torch.complex(x, x).conj().imag,
    "with gradient": lambda x: (x.detach().requires_grad_() * 2).sum(),
    "asked": lambda x: (x.device, x.is_contiguous()),
    "resized": lambda x: x.clone().resize_(7),
    "parameter": lambda x: nn.Parameter(x) @ nn.Parameter(x).transpose(1, 2),
}


def kinds(result: Any, given: Tensor) -> Any:
    """All that can be told of a result."""
    if not isinstance(result, Tensor):
        return [kinds(each, given) for each in result] if isinstance(result, list | tuple) else result
    storage = result.untyped_storage()
    place = result.storage_offset(), storage.nbytes(), storage is given.untyped_storage()
    keys = str(torch._C._dispatch_keys(result))
    fake = sorted(vars(result)) if isinstance(result, FakeTensor) else None
    form = type(result), result.dtype, result.shape, result.stride(), result.device, result.requires_grad
    return *form, result is given, result._is_view(), result._version, keys, fake, *place


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_recalled_is_what_the_mode_gives(call: Callable[[Tensor], Any]) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        mode.allow_meta = True
        given = [mode.from_tensor(torch.ones(4, 3, 2)) for _ in range(8)]
        plain = kinds(call(given[0]), given[0])
        for same in given[1:4]:
            assert kinds(call(same), same) == plain
        with Recall(mode):
            for same in given[4:]:
                assert kinds(call(same), same) == plain


def test_recalled_is_without_the_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    with FakeTensorMode() as mode, Recall(mode):
        x = mode.from_tensor(torch.ones(5, 7))
        for _ in range(2):  # the first time it is learned
            norm(x[None].transpose(1, 2)[:, :3])
            several(x)
            attention(x[None].transpose(1, 2))
        monkeypatch.setattr(mode, "dispatch", lambda func, *rest: asked.append(func))
        result = norm(x[None].transpose(1, 2)[:, :3])
        several(x)
        attention(x[None].transpose(1, 2))
    assert asked == []
    assert [type(each) for each in result] == [FakeTensor] * 3


def summed(part: Tensor) -> list[Tensor]:
    """What is written is what is given."""
    return [torch.zeros(7, 7, device=part.device).addmm_(part.t(), part), part.copy_(part @ part.t() @ part)]


@pytest.mark.parametrize("call", [several, summed])
def test_what_is_done_with_other_rows_of_a_storage_is_recalled(
    call: Callable[[Tensor], list[Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeTensorMode() as mode, Recall(mode):
        x = mode.from_tensor(torch.ones(9, 7))
        parts = x.split(3)
        for part in parts:
            part.t()  # of views each is learned
        expected = call(parts[0])
        monkeypatch.setattr(mode, "dispatch", lambda func, *rest: pytest.fail(f"{func} was asked of the mode"))
        found = call(parts[1])
        assert [kinds(each, x)[:6] for each in found] == [kinds(each, x)[:6] for each in expected]
        assert [each is parts[1] for each in found] == [each is parts[0] for each in expected]


def layouts(shape: Sequence[int]) -> dict[str, Tensor]:
    """Images of one shape that lie otherwise in memory."""
    batch, channels, *image = shape
    wider = torch.ones(batch, channels + 3, *image)
    return {
        "plain": torch.ones(*shape),
        "channels last": torch.ones(*shape).to(memory_format=torch.channels_last),
        "with gaps": wider[:, 1:-2],
        "channels last, with gaps": wider.to(memory_format=torch.channels_last)[:, 1:-2],
        "transposed": torch.ones(shape[3], batch, *shape[1:3]).permute(1, 2, 3, 0),
        "expanded": torch.ones(1, *shape[1:]).expand(*shape),
    }


def convolution_backward(x: Tensor, y: Tensor, weight: Tensor) -> Any:
    """What is to be known of a convolution of ``x``, where ``y`` is the gradient of what it gives."""
    how = [1, 1], [0, 0], [1, 1], False, [0, 0], 1
    return torch.ops.aten.convolution_backward(y, x, weight, [weight.shape[0]], *how, [True, True, True])


_aten = torch.ops.aten
PASSING: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "sum": lambda x, y, per: x + y,
    "broadcast": lambda x, y, per: x[:, :1] * per[:, None, None] - y,
    "mask": lambda x, y, per: torch.where(y > 0, x, 2.0),
    "backward": lambda x, y, per: _aten.threshold_backward(x, y, 0),
    "in place": lambda x, y, per: y.clone().relu_(),
    "batch norm": lambda x, y, per: _aten.native_batch_norm(x, per, per, per, per, True, 0.1, 1e-5),
    "known statistics": lambda x, y, per: _aten.native_batch_norm(x, per, None, per, per, False, 0.1, 1e-5),
    "batch norm's slopes": lambda x, y, per: _aten.native_batch_norm_backward(
        x, y, per, per, per, per, per, True, 1e-5, [True, False, True]
    ),
    "convolution's slopes": lambda x, y, per: convolution_backward(x, y, x.new_ones(y.shape[1], x.shape[1], 1, 1)),
    "layer norm": lambda x, y, per: _aten.native_layer_norm(x, [x.shape[3]], None, None, 1e-5),
    "product": lambda x, y, per: _aten.addmm(per, y[:, :, 0, 0], x[0, :, 0, 0].expand(x.shape[1], x.shape[1]).t()),
    "products": lambda x, y, per: _aten.bmm(x[0].transpose(1, 2), y[0]),
}
SHAPES = [(6, 5, 4, 3), (7, 8, 4, 3), (4, 4, 4, 4), (1, 5, 4, 3), (6, 5, 1, 1)]


@pytest.mark.parametrize("call", PASSING.values(), ids=PASSING)
def test_other_sizes_are_told_as_the_mode_gives_them(call: Callable[[Tensor, Tensor, Tensor], Any]) -> None:
    with FakeTensorMode() as mode:
        for shape in SHAPES:
            per = mode.from_tensor(torch.ones(shape[1]))
            ways = layouts(shape)
            for one, other in (*itertools.product(ways, ["plain"]), *((way, way) for way in ways)):
                x, y = mode.from_tensor(ways[one]), mode.from_tensor(ways[other])
                plain = kinds(call(x, y, per), x)
                with Recall(mode):
                    assert kinds(call(x, y, per), x) == plain, (shape, one, other)


def test_other_sizes_are_told_without_the_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeTensorMode() as mode, Recall(mode):
        sizes = [(11, 13, 6, 6), (17, 19, 3, 3), (23, 29, 31, 31)]
        given = [(mode.from_tensor(torch.ones(size)), mode.from_tensor(torch.ones(size[1]))) for size in sizes]
        for call in ("sum", "batch norm", "batch norm's slopes"):
            PASSING[call](given[0][0], *given[0])
        monkeypatch.setattr(mode, "dispatch", lambda func, *rest: pytest.fail(f"{func} was asked of the mode"))
        for x, per in given[1:]:
            result, mean, _ = PASSING["batch norm"](x, x, per)
            assert (result.shape, mean.shape) == (x.shape, per.shape)
            assert PASSING["sum"](x, x, per).stride() == x.stride()
            assert PASSING["batch norm's slopes"](x, x, per)[0].shape == x.shape


def test_what_is_known_before_it_runs_is_told_without_the_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeTensorMode() as mode, Recall(mode):
        x, y = (mode.from_tensor(torch.ones(41, 43, size, size)) for size in (5, 6))
        weights = [each.new_ones(43, 43, 1, 1) for each in (x, y)]
        convolution_backward(x, x, weights[0])
        monkeypatch.setattr(mode, "dispatch", lambda func, *rest: pytest.fail(f"{func} was asked of the mode"))
        slopes = convolution_backward(y, y, weights[1])
        assert x[3:, ::2].detach().shape == (38, 22, 5, 5)
        torch._foreach_lerp_([x, weights[0]], [x, weights[1]], 0.5)
    assert [each.shape for each in slopes] == [y.shape, weights[1].shape, (43,)]


def test_tensors_of_another_mode_are_left_to_the_mode() -> None:
    other = FakeTensorMode()
    stranger = other.from_tensor(torch.ones(2))
    for _ in range(3):
        with FakeTensorMode() as mode, Recall(mode), pytest.raises(AssertionError, match="ixing fake modes"):
            stranger.exp()
