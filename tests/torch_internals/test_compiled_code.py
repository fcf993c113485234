"""Buffers of compiled code are what the fake mode would make, and so are the arguments that it is run with."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce
from torch.testing._internal.distributed.fake_pg import FakeStore

from memrewrite.torch_internals.compiled_code import Buffers, CompiledCode, Written, compiled_codes
from memrewrite.torch_internals.dispatch_modes import Recall
from memrewrite.torch_internals.fake_tensors import FakeTensor, FakeTensorMode, real_tensors
from tests.torch_internals.test_dispatch_modes import kinds

SIZE, STRIDE = (3, 4, 2), (8, 1, 4)


def test_buffers_are_what_the_mode_makes() -> None:
    told: list[Tensor] = []
    with FakeTensorMode() as mode:
        usual = torch.empty_strided(SIZE, STRIDE, dtype=torch.bfloat16)
        part = torch.as_strided(usual[1:], (2, 3), (4, 1), usual[1:].storage_offset() + 2)
        buffers = Buffers(Recall(mode), told.append)
        made = buffers.empty("cpu", SIZE, STRIDE, torch.bfloat16)
        view = buffers.reinterpret(made[1:], (2, 3), (4, 1), 2)
        assert kinds(made, made) == kinds(usual, usual)
        assert kinds_but_for_autograd(view, made) == kinds_but_for_autograd(part, usual)
        assert (view + made[0, :3, 0]).shape == (2, 3)
    assert [each is made for each in told] == [True]


def kinds_but_for_autograd(view: Tensor, given: Tensor) -> list[Any]:
    """Without whether it is a view to autograd and how often it was written, which matters to nothing in such code."""
    found = [*kinds(view, given)]
    assert found[7:9] == [view._is_view(), view._version]
    return found[:7] + found[9:]


def test_views_of_what_is_not_fake_are_left_to_the_mode() -> None:
    with FakeTensorMode() as mode:
        with real_tensors():
            constant = torch.ones(4)
        with pytest.raises(AssertionError, match="convert all Tensors to FakeTensors"):
            Buffers(Recall(mode), list[Tensor]().append).reinterpret(constant, (2,), (1,))


def test_buffers_lie_on_the_device_that_code_runs_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with FakeTensorMode() as mode:
        buffers = Buffers(Recall(mode), list[Tensor]().append)
        for index in (1, 0, 1):
            monkeypatch.setattr(torch.cuda, "current_device", lambda now=index: now)
            made = buffers.empty("cuda", SIZE, STRIDE, torch.float32)
            assert made.device == buffers.reinterpret(made, (2,), (1,)).device == torch.device("cuda", index)


def test_what_is_told_where_to_write_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    with FakeTensorMode() as mode, Written():
        x = torch.empty(3, 3)
        monkeypatch.setattr(mode, "dispatch", lambda func, *rest: asked.append(func))
        into = torch.mm(x, x, out=x)
    assert into is x
    assert type(x) is FakeTensor
    assert asked == []


class Attention(nn.Module):
    """Backward gets what attention kept, of which several tensors lie in one storage."""

    def __init__(self) -> None:
        super().__init__()
        self.whole, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.whole(x).unflatten(2, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(2)).square().sum()


def test_arguments_are_made_where_sizes_vary() -> None:
    torch._dynamo.reset()
    x = torch.randn(4, 24, 32)
    with compiled_codes() as codes:
        torch.compile(Attention(), dynamic=True)(x).backward()
    forward, backward = codes
    with FakeTensorMode():
        assert (4, 24, 32) in shapes(forward)
        assert shapes(backward).count((4, 2, 24, 16)) == 4  # query, key and value in one storage, and their result


def test_code_with_collectives_is_known() -> None:
    torch._dynamo.reset()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with compiled_codes() as codes:
            torch.compile(lambda x: all_reduce(x.exp(), "sum", [0, 1]))(torch.ones(8))
            torch.compile(lambda x: x.exp().sum())(torch.ones(8))
    finally:
        dist.destroy_process_group()
    assert [code.communicates for code in codes] == [True, False]


def shapes(code: CompiledCode) -> list[tuple[int, ...]]:
    return [tuple(each.shape) for each in code.named_arguments().values() if isinstance(each, Tensor)]
