"""Results lie in simulations as kernels for the CPU lay them out, whatever the arguments and gradients lie like."""

import functools
import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from memrewrite.simulate import run_tracked, simulate
from memrewrite.simulate.fake import layouts
from memrewrite.simulate.fake.true_results import TrueResults
from memrewrite.torch_internals.fake_tensors import FakeTensorMode
from memrewrite.workload.step import Inputs, Step

OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "log_sigmoid": F.logsigmoid,
    "relu6": F.relu6,
    "elu": F.elu,
    "softplus": F.softplus,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "leaky_relu": F.leaky_relu,
    "rrelu": functools.partial(F.rrelu, training=True),
    "prelu": lambda x: F.prelu(x, torch.ones(x.shape[1], requires_grad=True)),
    "dropout": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "log_softmax": functools.partial(F.log_softmax, dim=1),
    "glu": functools.partial(F.glu, dim=1),
    "roll": lambda x: x.roll(1, -1),
    "copysign": lambda x: torch.copysign(x, x.detach().contiguous()),
    "logit": lambda x: x.sigmoid().logit(),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:], torch.ones(x.shape[-1], requires_grad=True)),
    "binary_cross_entropy": lambda x: F.binary_cross_entropy(x.sigmoid(), torch.rand(x.shape), reduction="none"),
    "channel_shuffle": functools.partial(F.channel_shuffle, groups=4),
    "reflection_pad": lambda x: F.pad(x, (1, 1) * (x.dim() - 2), "reflect"),
    "replication_pad": lambda x: F.pad(x, (1, 1) * (x.dim() - 2), "replicate"),
    "unfold": functools.partial(F.unfold, kernel_size=3, padding=1),
}
SHAPES = [(3, 8, 6), (2, 8, 4, 4), (2, 4, 4, 4, 4)]


def layouts_of(x: Tensor) -> Iterator[Tensor]:
    yield x
    yield x.transpose(-1, -2).contiguous().transpose(-1, -2)
    yield x.transpose(0, 1).contiguous().transpose(0, 1)
    yield x.movedim(1, -1).contiguous().movedim(-1, 1)
    yield x[:1].expand_as(x)
    yield x.repeat_interleave(2, -1)[..., ::2]
    yield torch.cat([x, x], 1)[:, : x.shape[1]]


class Compared(TrueResults):
    """Runs operators on real tensors, and on fake ones like them, and compares sizes, strides and storages."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs, mode = kwargs or {}, FakeTensorMode(allow_non_fake_inputs=True)
        given = [mode.from_tensor(arg.detach()) if isinstance(arg, Tensor) else arg for arg in args]
        real = func(*args, **kwargs)
        with mode:
            fake = super().__torch_dispatch__(func, types, tuple(given), kwargs)
        views = any(result.alias_info for result in func._schema.returns)
        for one, other in zip(*map(_each, (real, fake)), strict=True):
            if isinstance(one, Tensor) and not views:
                assert _place(one) == _place(other), func
        return real


def _each(results: object) -> tuple[object, ...]:
    return tuple(results) if isinstance(results, list | tuple) else (results,)


def _place(tensor: Tensor) -> tuple[object, ...]:
    strides = [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
    return tensor.shape, strides if tensor.numel() else [], tensor.dtype, tensor.untyped_storage().nbytes()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("operator", OPERATORS)
def test_results_lie_as_kernels_lay_them_out(operator: str, shape: tuple[int, ...]) -> None:
    run, tried = OPERATORS[operator], 0
    for given in layouts_of(torch.randn(shape)):
        x = given.detach().requires_grad_()
        try:
            result = run(x)
        except (RuntimeError, NotImplementedError):
            continue  # the operator does not take as many dimensions
        with Compared():
            result = run(x)
            gradients = layouts_of(torch.randn(result.shape))
            for gradient in itertools.islice(gradients, 5 if result.dim() > 2 else 1):
                result.backward(gradient, retain_graph=True)
        tried += 1
    assert tried or len(shape) != 4


@pytest.mark.parametrize("ends", [True, False], ids=["last offset", "offsets"])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_what_bags_of_embeddings_are_counted_by(mode: str, ends: bool) -> None:
    with Compared():
        table, offsets = torch.randn(8, 5, requires_grad=True), torch.tensor([0, 2, 6])
        F.embedding_bag(torch.arange(6), table, offsets, mode=mode, include_last_offset=ends)


class Folded(nn.Module):
    """What patches that lie over each other add up to, as outlook attention (VOLO) has it."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.project = nn.Linear(36, 36), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.project(F.fold(self.mix(x).mT, 8, 3, padding=1))
        return result


class Logged(nn.Module):
    """A log-sigmoid of what comes turned around."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.mix(F.logsigmoid(self.mix(x).mT).mT)
        return result


class Turning(nn.Module):
    """Pairs of numbers as complex ones, times one."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(torch.view_as_complex(self.mix(x).unflatten(-1, (8, 2))) * 1j)


STEPS = {"fold": (Folded(), (16, 64, 36)), "log": (Logged(), (8, 32, 16)), "number": (Turning(), (16, 16))}


@pytest.mark.parametrize(("module", "size"), STEPS.values(), ids=STEPS)
def test_what_a_step_takes_with_them_is_counted(module: nn.Module, size: tuple[int, ...]) -> None:
    inputs = Inputs((torch.randn(size),), {})
    assert simulate(module, inputs, Step()) == run_tracked(module, inputs, Step())


def test_a_kernel_is_asked_once_for_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "_ORDERS", {})
    state = torch.get_rng_state()
    with FakeTensorMode(), TrueResults():
        for size in (8, 12):
            x = torch.randn(4, size, 6, device="cpu").transpose(1, 2)
            assert torch.ops.aten.rrelu_with_noise(x, x.contiguous(), 0.1, 0.3, True).is_contiguous()
    assert len([call for call in layouts._ORDERS if "rrelu" in call[0].name()]) == 1
    assert torch.equal(state, torch.get_rng_state())
