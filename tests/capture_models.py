"""Tiny models that ask something unusual of a capture, each with the inputs of one call; a table that tests share."""

import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (its customary name)
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from memrewrite.step import Inputs

WIDTH = 6


class Pair(NamedTuple):
    first: Tensor
    second: Any


@dataclasses.dataclass
class Result:
    logits: Tensor
    hidden: tuple[Tensor, ...] | None = None


torch.export.register_dataclass(Result, serialized_type_name="tests.Result")


class Model(nn.Module):
    """``function(self, *args, **kwargs)`` with a few layers at hand; its signature is the function's."""

    counter: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.conv, self.norm = nn.Conv2d(3, WIDTH, 3, bias=False), nn.BatchNorm2d(WIDTH)
        self.dropout, self.relu = nn.Dropout(0.3), nn.ReLU(inplace=True)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("counter", torch.zeros(()))


def model(function: Callable[..., Any], prepare: Callable[[Any], Any] = lambda m: None) -> nn.Module:
    """A ``Model`` of its own class whose forward is ``function``, after ``prepare`` has seen it."""
    made: nn.Module = type("Model", (Model,), {"forward": function})()
    prepare(made)
    return made
