"""The Swish runtime: the written-out form's numbers, one saved tensor, a backward without full-size temporaries."""

import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from memrewrite.runtime.swish import Swish, exact_swish, swish
from memrewrite.torch_internals.fake_tensors import TorchDispatchMode
from memrewrite.torch_internals.pytrees import tree_leaves

EDGES = torch.tensor([math.nan, math.inf, -math.inf, -1000.0, 1000.0, 89.0, -89.0, -0.0, 0.0, 1e-40, -1e-40])
BETAS: dict[str, float | Tensor] = {
    "1": 1.0,
    "1.702": 1.702,
    "negative": -0.5,
    "zero": 0.0,
    "scalar": torch.tensor(1.3),
    "per channel": torch.rand(7, generator=torch.Generator().manual_seed(0)) + 0.5,
}
beta_cases = pytest.mark.parametrize("beta", BETAS.values(), ids=BETAS)
functions = pytest.mark.parametrize("function", [swish, exact_swish])


def written_out(x: Tensor, beta: float | Tensor) -> Tensor:
    return x * torch.sigmoid(beta * x)


def sample(rows: int = 64) -> Tensor:
    return 4 * torch.randn(rows, 7, generator=torch.Generator().manual_seed(1))


def leaves(beta: float | Tensor) -> tuple[Tensor, Any]:
    x = sample().requires_grad_()
    return x, beta.clone().requires_grad_() if isinstance(beta, Tensor) else beta


def gradients(function: Callable[..., Tensor], x: Tensor, beta: Any) -> tuple[Tensor, ...]:
    wanted = (x, beta) if isinstance(beta, Tensor) else (x,)
    result = function(x, beta)
    return torch.autograd.grad(result, wanted, torch.linspace(-1, 2, result.numel(), dtype=x.dtype).view_as(result))


@beta_cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_the_exact_forward_is_the_written_out_one_bit_for_bit(beta: float | Tensor, dtype: torch.dtype) -> None:
    x = torch.cat([sample(), sample(1).clone().fill_(-0.0)]).to(dtype)
    cast = beta.to(dtype) if isinstance(beta, Tensor) else beta
    assert torch.equal(exact_swish(x, cast), written_out(x, cast))


@functions
@pytest.mark.parametrize("beta", [1.0, 1.702, -0.5])
def test_edge_values_agree(function: Callable[..., Tensor], beta: float) -> None:
    ours, theirs = function(EDGES, beta), written_out(EDGES, beta)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(ours.nan_to_num().signbit(), theirs.nan_to_num().signbit())


def test_silu_is_nearer_to_float64_than_the_written_out_form() -> None:
    x = sample(4096)
    exact = written_out(x.double(), 1.0)
    assert (swish(x).double() - exact).square().mean() <= (written_out(x, 1.0).double() - exact).square().mean()


@functions
@beta_cases
def test_gradients_are_as_good_as_the_written_out_ones(function: Callable[..., Tensor], beta: float | Tensor) -> None:
    x, b = leaves(beta)
    ours, theirs = gradients(function, x, b), gradients(written_out, x, b)
    exact = gradients(
        written_out,
        x.detach().double().requires_grad_(),
        b.detach().double().requires_grad_() if isinstance(b, Tensor) else b,
    )
    for mine, original, reference in zip(ours, theirs, exact, strict=True):
        assert mine.shape == original.shape
        assert mine.dtype == original.dtype
        errors = [(g.double() - reference).square().mean().sqrt() for g in (mine, original)]
        assert errors[0] <= 2 * errors[1] + 1e-7


@functions
@beta_cases
def test_first_and_second_derivatives_are_right(function: Callable[..., Tensor], beta: float | Tensor) -> None:
    x = sample(3).double().requires_grad_()
    b = beta.double().requires_grad_() if isinstance(beta, Tensor) else None
    arguments = (x,) if b is None else (x, b)
    call = (lambda x: function(x, beta)) if b is None else function
    assert torch.autograd.gradcheck(call, arguments, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(call, arguments)


@functions
@beta_cases
def test_autograd_keeps_the_input_alone(function: Callable[..., Tensor], beta: float | Tensor) -> None:
    x, b = leaves(beta)
    kept: set[int] = set()
    with saved_tensors_hooks(lambda t: kept.add(t.data_ptr()), lambda token: torch.empty(0)):
        function(x, b)
    assert kept == {t.data_ptr() for t in (x, b) if isinstance(t, Tensor)}


class FullSize(TorchDispatchMode):
    """Counts the storages of at least ``size`` bytes that were born under it and still live."""

    def __init__(self, size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.size, self.now, self.peak = size, 0, 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(t.untyped_storage()) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            storage = tensor.untyped_storage() if isinstance(tensor, Tensor) else None
            if storage is not None and id(storage) not in given | self.seen and storage.nbytes() >= self.size:
                self.seen.add(id(storage))
                self.now += 1
                weakref.finalize(storage, self.died, id(storage))
        self.peak = max(self.peak, self.now)
        return result

    def died(self, key: int) -> None:
        self.seen.discard(key)
        self.now -= 1


@functions
@beta_cases
def test_forward_makes_its_result_only_and_backward_one_temporary(
    function: Callable[..., Tensor], beta: float | Tensor
) -> None:
    x, b = leaves(beta)
    cotangent = torch.ones_like(x)
    with FullSize(x.nbytes) as forward:
        result = function(x, b)
    with FullSize(x.nbytes) as backward:
        torch.autograd.grad(result, (x, b) if isinstance(b, Tensor) else (x,), cotangent)
    assert forward.peak == 1
    assert backward.peak <= 2


@functions
@pytest.mark.parametrize("dtype", [torch.int32, torch.bool], ids=str)
def test_integers_promote_as_they_do_written_out(function: Callable[..., Tensor], dtype: torch.dtype) -> None:
    x = torch.tensor([0, 1, 1]).to(dtype)
    assert torch.equal(function(x, 1.0), x * torch.sigmoid(x))


@functions
def test_complex_numbers_keep_their_own_derivative(function: Callable[..., Tensor]) -> None:
    x = torch.tensor([1 + 2j, -0.5j], requires_grad=True)
    (ours,) = torch.autograd.grad(function(x, 1.0).real.sum(), x)
    (theirs,) = torch.autograd.grad((x * torch.sigmoid(x)).real.sum(), x)
    assert torch.equal(ours, theirs)


@functions
@beta_cases
def test_dtype_under_autocast_follows_the_written_out_form(
    function: Callable[..., Tensor], beta: float | Tensor
) -> None:
    layer = nn.Linear(7, 7)
    with torch.autocast("cpu", torch.bfloat16):
        h = layer(sample())
        result = function(h, beta)
        assert result.dtype == written_out(h, beta).dtype
    result.float().sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32


@functions
@pytest.mark.parametrize(
    "x",
    [
        torch.tensor(1.5),
        torch.empty(0, 7),
        sample().t(),
        sample(8).view(2, 4, 7, 1).to(memory_format=torch.channels_last),
    ],
    ids=["scalar", "empty", "transposed", "channels last"],
)
def test_shape_and_strides_stay(function: Callable[..., Tensor], x: Tensor) -> None:
    leaf = x.clone().requires_grad_()
    result, plain = function(leaf, 1.702), written_out(leaf, 1.702)
    assert torch.equal(result, plain)
    assert result.stride() == plain.stride()
    assert torch.autograd.grad(result.sum(), leaf)[0].shape == x.shape


@functions
@beta_cases
def test_function_transforms(function: Callable[..., Tensor], beta: float | Tensor) -> None:
    x = sample(5)

    def total(call: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda row: call(row, beta).sum()

    ours, theirs = (torch.func.vmap(torch.func.grad(total(call)))(x) for call in (function, written_out))
    torch.testing.assert_close(ours, theirs)
    ours, theirs = (torch.func.jacrev(torch.func.jacrev(total(call)))(x[0]) for call in (function, written_out))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # PyTorch's own, on its first jvp
def test_forward_mode_is_right_or_raises() -> None:
    x = sample(2)
    tangent = torch.func.jvp(swish, (x,), (torch.ones_like(x),))[1]
    expected = torch.func.jvp(lambda x: written_out(x, 1.0), (x,), (torch.ones_like(x),))[1]
    torch.testing.assert_close(tangent, expected)
    with pytest.raises(RuntimeError, match="jvp"):
        torch.func.jvp(lambda x: swish(x, 1.5), (x,), (torch.ones_like(x),))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@beta_cases
def test_compiles_without_a_graph_break(beta: float | Tensor, backend: str) -> None:
    torch.compiler.reset()
    compiled = torch.compile(lambda x, b: swish(x, b) + exact_swish(x, b), backend=backend, fullgraph=True)
    x, b = leaves(beta)
    ours, theirs = gradients(compiled, x, b), gradients(lambda x, b: swish(x, b) + exact_swish(x, b), x, b)
    for mine, eager in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, eager)


@pytest.mark.parametrize(
    ("module", "state", "text"),
    [
        (Swish(), [], "Swish(beta=1.0)"),
        (Swish(1.702), [], "Swish(beta=1.702)"),
        (Swish(1.5, learnable=True), ["beta"], "Swish()"),
        (Swish(torch.ones(7)), ["beta"], "Swish()"),
    ],
    ids=["silu", "constant", "learnable", "buffer"],
)
def test_the_module(module: Swish, state: list[str], text: str) -> None:
    assert list(module.state_dict()) == state
    assert repr(module) == text
    x = sample()
    torch.testing.assert_close(module(x), written_out(x, module.beta))
    assert [name for name, _ in module.named_parameters()] == (
        ["beta"] if isinstance(module.beta, nn.Parameter) else []
    )
