"""Batch normalizations in segments keep their statistics and apply them again: bit for bit what they gave before."""

import copy
import functools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import memrewrite
from memrewrite.costs import ROOFLINES, Costs
from memrewrite.costs.normalizations import again_ms, found
from memrewrite.costs.profile import Profile
from memrewrite.costs.table import Table
from memrewrite.runtime import batch_norm as runtime
from memrewrite.targets.allocator import GRANULE
from tests.support.dropins import assert_same_bits, image, peak, segmented, step
from tests.support.timing import Recorded, node_named, observed, opened

CUDA = ROOFLINES["cuda"]
on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
SIZES: tuple[int | tuple[int, ...], ...] = (3, 5, 100, (6, 3), (100, 7), (100, 12, 5, 2))  # the last three nested


class Chain(nn.Module):
    """Batch normalizations with whatever may follow them: ReLU, something in place, a residual, nothing."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3 if i == 0 else width, width, 3, padding=1) for i in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width, track_running_stats=i != 2) for i in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu_(self.norms[0](self.convs[0](x)))
        y = nn.functional.leaky_relu_(self.norms[1](self.convs[1](x)), 0.1)
        y = torch.relu_(self.norms[2](self.convs[2](y)) + x)
        return self.norms[3](self.convs[3](y))


def chain() -> Chain:
    torch.manual_seed(0)
    return Chain()


@functools.cache
def of_chain(size: int | tuple[int, ...], side: int = 8, statistics: bool = True) -> nn.Module:
    """Segments of ``chain`` for images of that side, which a step leaves as they are."""
    return segmented(chain(), torch.randn(2, 3, side, side), size=size, statistics=statistics).module


def applied(
    x: Tensor, statistics: Sequence[Tensor], weight: Tensor, bias: Tensor, formula: int, rectified: bool
) -> Tensor:
    """What the kernel gives, on a CPU: with the same statistics, the operator itself gives the same bits."""
    assert len(statistics) >= 2
    result = torch.batch_norm(x, weight, bias, None, None, True, 0.0, 1e-5, False)
    return result.relu() if rectified else result


@pytest.fixture(params=["formula", "no formula"])
def formula(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether there is a formula, for tensors on the CPU as well."""
    there = request.param == "formula"
    monkeypatch.setattr(runtime, "_formula", lambda *args: 0 if there else None)
    monkeypatch.setattr(runtime, "apply_statistics", applied)
    return there


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("special", [None, torch.inf, torch.nan], ids=["finite", "inf", "nan"])
def test_every_bit_is_the_same(size: int | tuple[int, ...], special: float | None, formula: bool) -> None:
    model, x = chain(), image()
    if special is not None:
        x[0, 0, 0, 0] = special
    module = of_chain(size)
    ours, theirs = step(module, x), step(model, x)
    assert_same_bits(ours, theirs)
    assert ours["norms.0.num_batches_tracked"] == 1


def rerun(module: nn.Module, x: Tensor) -> Counter[str]:
    """The operators that run in backward, by name."""
    loss = module(x).sum()
    with Names() as names:
        loss.backward()
    return names.counter


class Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counter: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counter[func.__name__.partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def test_the_relu_is_applied_with_the_statistics(formula: bool) -> None:
    names = rerun(segmented(Chain(), image(), size=100, statistics=True).module, image())
    assert names["relu_"] == (1 if formula else 2)
    assert names["leaky_relu_"] == 1


def test_it_takes_no_more_memory(formula: bool) -> None:
    x = torch.randn(4, 3, 64, 64)
    for size in SIZES:
        usual, ours = (peak(copy.deepcopy(of_chain(size, 64, statistics=on)), x) for on in (False, True))
        assert ours <= usual + 4 * 2 * GRANULE, size  # four times the means and the deviations


def test_compiled_it_is_the_operator_itself(formula: bool) -> None:
    torch.manual_seed(0)
    model = Chain()
    ours = torch.compile(
        segmented(model, image(), size=100, statistics=True).module, backend="aot_eager", fullgraph=True
    )
    assert_same_bits(step(model, image(), lambda _, x: ours(x)), step(model, image()))


def test_what_runs_again_costs_what_applying_costs() -> None:
    effects = observed(Chain(), torch.randn(4, 3, 64, 64))
    normalizations = found(effects)
    relu = node_named(effects, "relu_")
    assert [after for after in normalizations.values() if after] == [relu]
    first, *_ = normalizations
    measure = Recorded()
    profile = Profile(Table("here", None), opened(measure))
    times = {**again_ms(normalizations, CUDA), **profile.again(normalizations)}
    assert len(measure.calls) == 2  # with the ReLU and without it
    costs = Costs(CUDA, again=times)
    assert (costs.again_ms(first, effects.of[first]), costs.rerun_ms(first, effects.of[first])) == (2.0, 0.0)
    assert costs.segment([first, relu], effects) == 2.0
    assert costs.segment([first], effects) == 0.0
    untimed = again_ms(normalizations, CUDA)
    assert untimed[first] == CUDA.node_ms + 2 * first.meta["val"].nbytes / CUDA.bytes_per_ms


@pytest.mark.parametrize("on", ["cuda", "cuda, compiled", "cpu"])
def test_they_are_kept_where_there_is_a_kernel(on: str) -> None:
    torch.manual_seed(0)
    device, compiled = on.partition(",")[0], "compiled" in on
    place = device if torch.cuda.is_available() else "cpu"
    model, x = Chain().to(place), torch.randn(8, 3, 64, 64, device=place)
    result = memrewrite.optimize(model, x, budget="min", device=device, compiled=compiled)
    assert result.report.segments
    assert result.report.verdict.startswith("bit-equal")
    source: str = vars(type(result))["_memrewrite"].source
    assert ("normalize(recomputing" in source) == (device == "cuda")


def rounded_once(
    x: Tensor, statistics: Sequence[Tensor], weight: Tensor, bias: Tensor, formula: int, rectified: bool
) -> Tensor:
    """What the kernel's formulas give, by way of float64."""
    mean, invstd, weight, bias = (value.view(-1, *[1] * (x.dim() - 2)) for value in (*statistics, weight, bias))
    scale = invstd * weight
    factor, other, added = (
        ((x - mean) * weight, invstd, bias),
        (x, scale, bias - mean * scale),
        (x - mean, scale, bias),
    )[formula]
    return (factor.double() * other.double() + added.double()).to(x.dtype)


@pytest.fixture
def some(monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, list[Tensor], Tensor, Tensor]:
    """An input of batch normalization, its statistics, weight and bias, as if there were a kernel for the CPU."""
    monkeypatch.setattr(runtime, "apply_statistics", rounded_once)
    monkeypatch.setattr(runtime, "kernel_runs_on", lambda device: True)
    monkeypatch.setattr(runtime, "_POSSIBLE", {})
    torch.manual_seed(0)
    return torch.randn(9, 16, 40, 30), [torch.randn(16), torch.rand(16) + 0.5], torch.rand(16) + 0.5, torch.randn(16)


@pytest.mark.parametrize("formula", range(3))
def test_the_formula_is_told_by_what_it_gave(formula: int, some: tuple[Tensor, list[Tensor], Tensor, Tensor]) -> None:
    x, statistics, weight, bias = some
    zero = torch.zeros(16)
    nothing = rounded_once(x, statistics, zero, bias, formula, False)
    assert runtime._formula(nothing, x, statistics, zero, bias) is None  # all formulas give that
    result = rounded_once(x, statistics, weight, bias, formula, False)
    assert runtime._formula(torch.full_like(x, torch.nan), x, statistics, weight, bias) is None
    assert runtime._formula(result, x, statistics, weight, bias) == formula
    assert runtime._formula(nothing, x, statistics, zero, bias) == formula  # as it is known now


def test_another_formula_is_none_of_them(some: tuple[Tensor, list[Tensor], Tensor, Tensor]) -> None:
    x, statistics, weight, bias = some
    assert runtime._formula(x, x, statistics, weight, bias) is None
    right = rounded_once(x, statistics, weight, bias, 0, False)
    assert runtime._formula(right, x, statistics, weight, bias) is None  # libraries choose by shape, which was seen


LAYOUTS = {
    "images": ((6, 16, 40, 40), torch.contiguous_format),
    "channels last": ((6, 16, 40, 40), torch.channels_last),
    "few positions": ((30, 200, 7, 7), torch.contiguous_format),
    "many positions": ((2, 16, 200, 200), torch.contiguous_format),
    "many images": ((300, 16, 28, 28), torch.contiguous_format),
    "odd": ((31, 17, 19, 23), torch.contiguous_format),
    "rows": ((64, 300), torch.contiguous_format),
    "sequences": ((16, 32, 100), torch.contiguous_format),
    "volumes": ((4, 8, 10, 12, 14), torch.channels_last_3d),
}


@pytest.mark.parametrize("window", [2**8, 2**13, 2**20])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_to_compare_are_small_and_laid_out_like_the_whole(
    layout: str, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, form = LAYOUTS[layout]
    monkeypatch.setattr(runtime, "_WINDOW", window)
    x = torch.arange(math.prod(shape), dtype=torch.float32).view(shape).contiguous(memory_format=form)
    parts = list(runtime._windows(x))
    assert torch.equal(torch.cat([part.flatten() for part in parts]).sort()[0], x.flatten().sort()[0])
    assert max(part.numel() for part in parts) <= max(window, shape[1])
    matrices = {(runtime.as_matrix(part) or ())[1:] for part in parts}
    if x[0].numel() <= window:  # so that the kernel is compiled once for both
        assert matrices == {(runtime.as_matrix(x) or ())[1:]}
    assert () not in matrices


@on_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_kernel_gives_the_bits_of_cudnn(layout: str, dtype: torch.dtype) -> None:
    shape, form = LAYOUTS[layout]
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(shape, generator=generator, device="cuda").mul_(3).add_(1).to(dtype).contiguous(memory_format=form)
    weight, bias = torch.randn((2, shape[1]), generator=generator, device="cuda").unbind()
    weight[0] = 0.0
    bias[0] = -0.0
    y, mean, invstd, *_ = torch.ops.aten._batch_norm_impl_index(x, weight, bias, None, None, True, 0.1, 1e-5, True)
    number = runtime._formula(y, x, [mean, invstd], weight, bias)
    assert number is not None or dtype != torch.float32, runtime._POSSIBLE  # 16 bits tell less
    number = runtime._POSSIBLE[x.shape, x.stride(), dtype, x.device][0] if number is None else number
    again = runtime.apply_statistics(x, [mean, invstd], weight, bias, number, False)
    assert again.stride() == y.stride()
    assert torch.equal(_bits(again), _bits(y))
    again = runtime.apply_statistics(x, [mean, invstd], weight, bias, number, True)
    assert torch.equal(_bits(again), _bits(y.relu()))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


@on_cuda
def test_weights_of_zero_tell_no_formula() -> None:
    x, zero = torch.randn(4, 16, 33, 34, device="cuda"), torch.zeros(16, device="cuda")
    for weight, known in ((zero, False), (zero + 1, True)):
        y, *statistics = torch.ops.aten._batch_norm_impl_index(x, weight, zero, None, None, True, 0.1, 1e-5, True)[:3]
        assert (runtime._formula(y, x, statistics, weight, zero) is not None) == known
