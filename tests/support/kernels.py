"""Kernels in Triton, and functions that launch them: on CUDA, or anywhere under ``TRITON_INTERPRET=1``.

``import`` of this file takes ``triton``, which is not a requirement.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# ruff: noqa: N803
import os
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
WIDTH = 64 if INTERPRETED else 256
BLOCK = 1024
RUNS: list[bool] = []
"""For each time that ``unsteady`` was launched, whether on real tensors."""


def _timed(run: Callable[[], Any], quantiles: Any) -> list[float]:
    """In place of Triton's benchmark, which needs a GPU: all ways to run take one time."""
    run()
    return [1.0, 1.0, 1.0]


def _seed(args: dict[str, Any]) -> int:
    """Another number each time."""
    RUNS.append(type(args["x"]) is Tensor)
    return len(RUNS)


@triton.jit
def half(x):
    return x * 0.5


@triton.jit
def sigmoid(x, out, count, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + places, mask=places < count)
    tl.store(out + places, 1 / (1 + tl.exp(-values)), mask=places < count)


@triton.jit
def doubled(x, count, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + places, tl.load(x + places, mask=places < count) * 2, mask=places < count)


@triton.jit
def counted(x, out, width, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    values = tl.load(x + tl.program_id(0) * width + places, mask=places < width)
    tl.atomic_add(out + places, (values > 0).to(tl.int32), mask=places < width)


@triton.jit
def scaled(x, out, none, scale, count, BLOCK: tl.constexpr, KIND: tl.constexpr, TYPE: tl.constexpr, ACT: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + places, mask=places < count)
    if none is not None:
        values += tl.load(none)
    if KIND == "abs":
        values = tl.abs(values)
    tl.store(out + places, ACT(values * scale).to(TYPE), mask=places < count)


@triton.autotune([triton.Config({"BLOCK": each}) for each in (256, 512)], key=["count"], do_bench=_timed)
@triton.jit
def tuned(x, out, count, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + places, mask=places < count)
    tl.store(out + places, 1 / (1 + tl.exp(-values)), mask=places < count)


@triton.heuristics({"BLOCK": lambda args: 512, "EVEN": lambda args: args["count"] % 1024 == 0})
@triton.jit
def chosen(x, out, count, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + places, mask=places < count)
    if EVEN:
        values = values * 3
    tl.store(out + places, values, mask=places < count)


@triton.heuristics({"SEED": _seed})
@triton.jit
def unsteady(x, out, count, BLOCK: tl.constexpr, SEED: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + places, tl.load(x + places, mask=places < count) * SEED, mask=places < count)


def blocks(x: Tensor, size: int = BLOCK) -> tuple[int]:
    return (triton.cdiv(x.numel(), size),)


def launched(x: Tensor, kernel: Any = sigmoid) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    kernel[blocks(x)](x, out, x.numel(), BLOCK=BLOCK)
    return out


def _without_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        found = launched(x.detach())
    return x * found


def _launch_alone_without_grad(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    with torch.no_grad():
        sigmoid[blocks(x)](x, out, x.numel(), BLOCK=BLOCK)
    return x * out


def _by_what_it_is_given(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    sigmoid[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, out=out, count=x.numel(), BLOCK=512)
    return x * out


def _in_place(x: Tensor) -> Tensor:
    y = x + 1
    doubled[blocks(y)](y, y.numel(), BLOCK=BLOCK)
    return y.sin()


def _written_after(x: Tensor) -> Tensor:
    return x * launched(x).mul_(2)


def _counts(x: Tensor) -> Tensor:
    counts = torch.zeros(WIDTH, dtype=torch.int32, device=x.device)
    counted[(x.shape[0],)](x, counts, WIDTH, BLOCK=WIDTH)
    return x * counts / x.shape[0]


def _constants(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    scaled[blocks(x)](
        x, out, None, 1 / x.shape[0], x.numel(), BLOCK, KIND="abs", TYPE=tl.float32, ACT=half, num_warps=4
    )
    return x * out


def _tuned(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    tuned[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, out, x.numel())
    return x * out


def _chosen(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    chosen[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, out, x.numel())
    return x * out


LAUNCHES: dict[str, Callable[[Tensor], Tensor]] = {
    "launched": lambda x: x * launched(x),
    "under no_grad": _without_grad,
    "the launch alone under no_grad": _launch_alone_without_grad,
    "a grid by what it is given": _by_what_it_is_given,
    "in place": _in_place,
    "written after": _written_after,
    "counts": _counts,
    "constants": _constants,
    "tuned": _tuned,
    "chosen": _chosen,
    "wrapped": lambda x: x * launched(x, torch.library.wrap_triton(sigmoid)),
}


def wraps() -> bool:
    """Whether this PyTorch wraps kernels that are interpreted, if these are."""
    try:
        return bool(torch.library.wrap_triton(sigmoid))
    except RuntimeError:
        return False


def _over_what_is_kept(x: Tensor) -> Tensor:
    """Backward computes with what is written: nobody tells autograd."""
    y = torch.sigmoid(x)
    doubled[blocks(y)](y, y.numel(), BLOCK=BLOCK)
    return y.sin()


def _unsteady(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    unsteady[blocks(x)](x, out, x.numel(), BLOCK=BLOCK)
    return x * out + x.sin().exp().cos()


OTHERS: dict[str, Callable[[Tensor], Tensor]] = {"over what is kept": _over_what_is_kept, "unsteady": _unsteady}
