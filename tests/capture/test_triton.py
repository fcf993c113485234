"""Triton's kernels stay calls: in a Function, in an operator of ``torch.library``, launched by a part of a model."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memrewrite
from memrewrite.records.errors import CaptureError
from memrewrite.runtime.promise import FallbackWarning

WIDTH = 256
triton: Any = pytest.importorskip("triton")
tl: Any = pytest.importorskip("triton.language")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(x, out, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + places, mask=places < count)
    tl.store(out + places, 1 / (1 + tl.exp(-values)), mask=places < count)


def launched(x: Tensor, kernel: Any = _kernel) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    kernel[(triton.cdiv(x.numel(), 1024),)](x, out, x.numel(), BLOCK=1024)
    return out


class Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = launched(x)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return _slope(ctx, *gradients)


def _slope(ctx: Any, gradient: Tensor) -> Tensor:
    (out,) = ctx.saved_tensors
    slope: Tensor = gradient * out * (1 - out)
    return slope


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)


@torch.library.custom_op("memrewrite_tests::gate", mutates_args=())
def gate(x: Tensor) -> Tensor:
    return launched(x)


@torch.library.triton_op("memrewrite_tests::traced_gate", mutates_args={})
def traced_gate(x: Tensor) -> Tensor:
    return launched(x, torch.library.wrap_triton(_kernel))


gate.register_fake(torch.empty_like)
for operator in (gate, traced_gate):
    operator.register_autograd(_slope, setup_context=_keep)


def bare(x: Tensor) -> Tensor:
    with torch.no_grad():
        found = launched(x.detach())
    return x * found


class Part(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return bare(x)


class Net(nn.Module):
    """Layers with kernels between them, by ``name``."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.parts = nn.ModuleList(Part() for _ in range(6 if name == "a part" else 0))
        self.function = {"a Function": Gate.apply, "custom_op": gate, "triton_op": traced_gate}.get(name, bare)

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            hidden = torch.tanh(layer(x))
            x = x + (self.parts[i](hidden) if len(self.parts) else self.function(hidden))
        return x


def taken(module: nn.Module, x: Tensor) -> list[Tensor]:
    module.zero_grad(set_to_none=True)
    out = module(x)
    out.square().mean().backward()
    return [out.detach(), *(p.grad for p in module.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", ["a Function", "custom_op", "triton_op", "a part"])
def test_kernels_are_called_in_one_plan(name: str) -> None:
    model, x = Net(name).cuda(), torch.randn(4096, WIDTH, device="cuda")
    result: Any = memrewrite.optimize(model, (x,), budget="min")
    assert result.report.verdict.startswith("bit-equal")
    assert result.report.segments
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        for rows in (x, x[:1000], x[:77]):
            assert all(map(torch.equal, taken(result, rows), taken(model, rows)))


def test_one_that_the_model_itself_launches_is_refused_by_name() -> None:
    with pytest.raises(CaptureError, match=r"hands the memory of a tensor to code .*custom autograd\.Function"):
        memrewrite.optimize(Net("").cuda(), (torch.randn(64, WIDTH, device="cuda"),))
