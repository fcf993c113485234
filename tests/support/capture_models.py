"""Tiny models that ask something unusual of a capture, each with the inputs of one call: a table that tests share."""

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (its customary name)
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from memrewrite.workload.step import Inputs
from tests.support.layers import WIDTH, Prepare, images, model, x

Register = Callable[[Callable[..., Any]], Callable[..., Any]]


class Pair(NamedTuple):
    first: Tensor
    second: Any


TORCH = tuple(map(int, torch.__version__.split(".")[:2]))  # Dynamo names and takes other things as it grows


@dataclasses.dataclass
class Result:
    logits: Tensor
    hidden: tuple[Tensor, ...] | None = None


torch.export.register_dataclass(Result, serialized_type_name="tests.Result")


@dataclasses.dataclass(frozen=True)
class Case:
    """``refused`` maps a front end to words of the sentence with which it declines."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    refused: dict[str, str]


CASES: dict[str, Case] = {}


def case(*args: Any, prepare: Prepare = lambda m: None, dynamo: str = "", export: str = "", **kwargs: Any) -> Register:
    """Put a forward into the table. Arguments are inputs, callables standing for what they return.

    ``dynamo`` and ``export`` are words of the refusal where that front end declines.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        def inputs() -> Inputs:
            return Inputs(tuple(fresh(a) for a in args), {k: fresh(v) for k, v in kwargs.items()})

        refused = {name: words for name, words in (("dynamo", dynamo), ("export", export)) if words}
        CASES[function.__name__] = Case(lambda: model(function, prepare), inputs, refused)
        return function

    return register


def fresh(value: Any) -> Any:
    return value() if callable(value) else value


# What goes in and comes out.


@case(x, mask=None, scale=3.0)
def keywords_and_none(self: Any, x: Tensor, mask: Any = None, *, scale: float = 2.0, flag: bool = True) -> Any:
    hidden = self.linear(x) * scale
    return hidden if mask is None else hidden + mask


@case(lambda: {"rest": (x(), x() + 1), "a": x()}, lambda: [x(), None, 3])
def nested_inputs_and_outputs(self: Any, batch: Any, extra: Any) -> Any:
    a, (b, c) = batch["a"], batch["rest"]
    return {"y": self.linear(a) + b, "z": [c * extra[2], extra[0]], 0: (), "none": extra[1]}


@case(x, 2, True, text="b")
def plain_inputs(self: Any, x: Tensor, n: int, flag: bool, text: str = "a") -> Any:
    for _ in range(n):
        x = self.linear(x)
    return x if flag and text == "b" else -x


@case(x, x, k=x, j=x)
def variable_arguments(self: Any, *xs: Tensor, **named: Tensor) -> Any:
    return sum(self.linear(t) for t in xs) + named["k"] * named["j"]


@case(x, x, k=x, b=x)
def mixed_arguments(self: Any, a: Tensor, *xs: Tensor, b: Tensor, **named: Tensor) -> Any:
    return self.linear(a) + xs[0] * b + named["k"]


@case(x, x)
def positional_only(self: Any, x: Tensor, /, y: Tensor) -> Any:
    return self.linear(x) + y


@case()
def no_inputs(self: Any) -> Any:
    return self.scale * 2


@case(lambda: Pair(x(), x()))
def namedtuple(self: Any, p: Pair) -> Any:
    return Pair(self.linear(p.first), {"h": p.second, "n": None})


@case(lambda: Result(x()))
def dataclass(self: Any, r: Result) -> Any:
    return Result(self.linear(r.logits), (r.logits * 1,))


@case(x)
def dataclass_without_hidden(self: Any, x: Tensor) -> Any:
    return OrderedDict(result=Result(self.linear(x)), x=x)


@case(x)
def torch_return_types(self: Any, x: Tensor) -> Any:
    return torch.topk(self.linear(x), 2), torch.max(x, 1), [torch.sort(x)]


@case(x, x)
def inputs_and_constants_as_outputs(self: Any, x: Tensor, y: Tensor) -> Any:
    return x, self.linear(x), None, y, 3, "text", 1.5, True


@case(x)
def parameters_and_buffers_as_outputs(self: Any, x: Tensor) -> Any:
    self.counter.add_(1)
    return self.linear(x), self.linear.weight, self.counter, self.scale


@case(x)
def one_output_twice(self: Any, x: Tensor) -> Any:
    hidden = self.linear(x)
    return hidden, hidden, hidden.view(-1), (hidden,)


@case(x, labels=lambda: torch.tensor([0, 1, 2, 5]))
def loss_in_a_dict(self: Any, x: Tensor, labels: Any = None) -> Any:
    logits = self.linear(x)
    return {"logits": logits, **({} if labels is None else {"loss": F.cross_entropy(logits, labels)})}


# Tensors of every make.


@case(x, lambda: torch.tensor(2.0), lambda: x(0, WIDTH))
def zero_dim_and_empty(self: Any, x: Tensor, t: Tensor, e: Tensor) -> Any:
    return self.linear(x) * t + e.sum(), self.linear(e)


@case(lambda: x(1, WIDTH))
def batch_of_one(self: Any, x: Tensor) -> Any:
    return self.linear(x)


@case(x, lambda: torch.complex(x(), x() + 1))
def complex_numbers(self: Any, x: Tensor, z: Tensor) -> Any:
    return torch.view_as_real(torch.fft.fft(self.linear(x)) * z), (z * 1j).abs(), x * complex(1.0, -0.0)


@case(lambda: x(8, 2 * WIDTH)[::2, ::2], lambda: x(WIDTH, 4).t())
def strided_inputs(self: Any, x: Tensor, y: Tensor) -> Any:
    return self.linear(x), y + 1, y * x


def channels_last(m: Any) -> None:
    m.to(memory_format=torch.channels_last)


@case(lambda: images().to(memory_format=torch.channels_last), prepare=channels_last)
def channels_last_model(self: Any, x: Tensor) -> Any:
    hidden = self.norm(self.conv(x))
    return hidden, hidden.contiguous(), hidden.contiguous(memory_format=torch.channels_last), hidden.clone()


@case(lambda: torch.tensor([1, 2, 3]), lambda: torch.tensor([True, False]))
def integers_and_booleans(self: Any, i: Tensor, b: Tensor) -> Any:
    return F.embedding(i, self.linear.weight), b & True, i % 3, i // 2, i << 1, ~b


@case(x)
def dtype_changes(self: Any, x: Tensor) -> Any:
    hidden = self.linear(x)
    return hidden.half().float(), x.long(), x > 0, hidden.double(), x.to(torch.int8) * 1.5, x.type_as(hidden)


@case(x)
def views(self: Any, x: Tensor) -> Any:
    hidden = self.linear(x)
    view = hidden.view(-1, 2, 3).transpose(1, 2)
    a, b = hidden.chunk(2, 1)
    many = hidden.unbind(1)[0], torch.split(hidden, [2, 4], 1), hidden.expand(2, -1, -1), hidden[hidden.shape[0] - 1]
    return view, view[..., None, 1:, ::2], a * b, hidden[:, [0, 2]], hidden[None, ..., 1], many


@case(x)
def in_place(self: Any, x: Tensor) -> Any:
    hidden = self.linear(x) * 1
    hidden.mul_(2).add_(1)
    hidden[0] = 0.0
    hidden.select(1, 2).fill_(3.0)
    hidden += 1
    return F.relu(hidden * 1, inplace=True), F.dropout(hidden * 1, 0.5, True, True), self.relu(hidden - 1)


# Parameters, buffers and attributes.


@case(x, prepare=lambda m: setattr(m, "alias", m.linear))
def shared_module(self: Any, x: Tensor) -> Any:
    return self.alias(self.relu(self.linear(x)))


@case(x, prepare=lambda m: parametrizations.weight_norm(m.linear))
def weight_norm(self: Any, x: Tensor) -> Any:
    return self.linear(x)


@case(x, prepare=lambda m: parametrizations.spectral_norm(m.linear))
def spectral_norm(self: Any, x: Tensor) -> Any:
    return self.linear(x)


@case(x)
def buffers_in_place(self: Any, x: Tensor) -> Any:
    self.counter.add_(1)
    self.counter += 1
    self.counter.lerp_(x.detach().mean(), 0.1)
    return self.linear(x) * self.counter


@case(x)
def several_written_out(self: Any, x: Tensor) -> Any:
    both = torch.cat([self.counter.view(1), self.counter.view(1)], out=torch.empty(2))
    return self.linear(x) * both.sum(), self.counter + 1


@case(x)
def parameter_in_place(self: Any, x: Tensor) -> Any:
    with torch.no_grad():
        self.scale.clamp_(max=1.0)
    return self.linear(x) * self.scale


def plain_tensors(m: Any) -> None:
    m.shift, m.shifts, m.named = torch.ones(WIDTH), [torch.ones(WIDTH)], {"k": torch.full((WIDTH,), 2.0)}


@case(x, prepare=plain_tensors)
def tensors_in_attributes(self: Any, x: Tensor) -> Any:
    return self.linear(x) + self.shift + self.shifts[0] * self.named["k"], self.shift


@case(x, prepare=plain_tensors, export="loses writes to self.shift")
def attribute_in_place(self: Any, x: Tensor) -> Any:
    self.shift.add_(1)
    return self.linear(x) + self.shift


@case(x, prepare=plain_tensors, export="loses writes to self.shifts.0")
def listed_in_place(self: Any, x: Tensor) -> Any:
    self.shifts[0].add_(1)
    return self.linear(x) + self.shifts[0]


@case(x)
def constants(self: Any, x: Tensor) -> Any:
    made = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) + torch.arange(WIDTH, device=x.device) + torch.tensor(2.0)
    mask = torch.full((x.shape[0], x.shape[0]), float("-inf")).triu(1)
    return mask.softmax(-1) @ self.linear(x) * made + x.new_zeros(x.shape[0], 1) + torch.eye(WIDTH)[0]


@case(x, dynamo="cannot be")
def numpy_scalars(self: Any, x: Tensor) -> Any:
    return (
        self.linear(x) / np.sqrt(8),
        x * float(np.float32(2)),
        x * np.float64(2),
        x.view(int(np.int64(-1)), 2),
        x + np.pi,
    )


def odd_names(m: Any) -> None:
    names = ["a-b", "x y", "q'", "é", "0", "self", "aten", "torch"]
    m.odd = nn.Sequential(OrderedDict((name, nn.Linear(WIDTH, WIDTH)) for name in names))
    m.table = nn.ParameterDict({"x-y": nn.Parameter(torch.ones(WIDTH))})


@case(x, prepare=odd_names)
def odd_module_names(self: Any, x: Tensor) -> Any:
    return self.odd(x) + self.table["x-y"]


# Modes and modules.


@case(images, prepare=lambda m: m.eval())
def eval_mode(self: Any, x: Tensor) -> Any:
    return self.relu(self.norm(self.dropout(self.conv(x))))


@case(images, prepare=lambda m: m.norm.requires_grad_(False).eval())
def frozen_batch_norm(self: Any, x: Tensor) -> Any:
    return self.relu(self.norm(self.dropout(self.conv(x))))


@case(x)
def no_grad_region(self: Any, x: Tensor) -> Any:
    with torch.no_grad():
        a = self.linear(x)
        with torch.enable_grad():
            b = self.linear(x) * 2
        c = self.linear(a)
    return self.other(x) * a + b + c


@case(x)
def autocast_regions(self: Any, x: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        a = self.linear(x)
        with torch.autocast("cpu", enabled=False):
            b = self.linear(x)
    return self.other(a.float()) + b, a


@case(x, export="no_grad inside of autocast at capture_models.py")
def nested_regions(self: Any, x: Tensor) -> Any:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        a = torch.relu(self.linear(x))
    with torch.autocast("cpu", torch.bfloat16):
        b = self.linear(x)
        with torch.no_grad():
            c = self.other(x)
    return a * b, c


@case(x)
def checkpoints(self: Any, x: Tensor) -> Any:
    first = checkpoint(self.linear, x, use_reentrant=False)
    return first + checkpoint(lambda t: self.dropout(self.other(t)).tanh(), x, use_reentrant=False)


@case(x, export="loses the gradients of checkpoint(use_reentrant=True)")
def reentrant_checkpoint(self: Any, x: Tensor) -> Any:
    return checkpoint(lambda t: self.other(t).tanh(), self.linear(x), use_reentrant=True)


@case(x)
def random_numbers(self: Any, x: Tensor) -> Any:
    hidden = self.dropout(self.linear(x)) + torch.rand_like(x) + torch.randn(x.shape[0], 1)
    return F.rrelu(hidden, training=True), F.gumbel_softmax(hidden)


@case(
    lambda: x(2, 5, WIDTH),
    prepare=lambda m: m.add_module("rnn", nn.GRU(WIDTH, 4, 2)),
    dynamo="Unsupported function call" if TORCH >= (2, 15) else "GRU",
)
def recurrent(self: Any, x: Tensor) -> Any:
    return self.rnn(x)


@case(x)
def shapes(self: Any, x: Tensor) -> Any:
    b, c = x.shape
    hidden = self.linear(x).view(b, 2, -1).reshape(b * 2, c // 2)
    sizes = b, max(b, 2), x.numel(), len(x)
    return hidden, F.pad(hidden, (0, b % 3)), hidden.sum() / b * x.size(-1) ** -0.5, x.view(b // 2, -1), sizes


@case(x)
def special_numbers(self: Any, x: Tensor) -> Any:
    hidden = self.linear(x).clamp(-1e30, float("inf")) * -0.0 + 1e-300
    return hidden, x * float("nan"), x.masked_fill(x > 0, float("-inf"))


@case(x, dynamo="" if TORCH >= (2, 14) else "uses a tensor (6, 4)")
def view_of_an_input_as_output(self: Any, x: Tensor) -> Any:
    return self.linear(x), x.T


@case(x)
def many_operators(self: Any, x: Tensor) -> Any:
    hidden = self.linear(x)
    pairs = torch.einsum("bi,ij->bj", x, self.linear.weight), torch.where(x > 0, hidden, 0.0), x.T @ hidden
    return pairs, torch.linalg.norm(hidden), torch.special.expit(x), torch.addcmul(x, x, hidden, value=0.5), 2**x


def odd_parameter_names(
    self: Any, tree_unflatten: Tensor, region_0_wrap: Tensor, segment_0: Tensor, inf: Tensor
) -> Any:
    with torch.no_grad():
        a = self.linear(segment_0)
    return Result(tree_unflatten + region_0_wrap * float("inf") + a), Pair(inf, a)


case(x, x, x, inf=x)(odd_parameter_names)
