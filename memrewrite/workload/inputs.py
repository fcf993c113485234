"""Example inputs: parsed from ``--input``, brought into one form, resized to a batch size, or suggested.

``--input`` reads ``[NAME=]SIZExSIZE...[:dtype[:BELOW]]``: ``32x3x224x224``, ``x=8x16:bfloat16``,
``ids=8x128:int64:50257``. Without NAME the inputs are positional, in order; with NAME they are keyword arguments of
``forward``. Floating-point values are drawn from a normal distribution, integers from ``[0, BELOW)`` (BELOW is 2
unless given), all from a fixed seed.
"""

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memrewrite.records.errors import DoesNotFitError, TargetError, UsageError, first_line
from memrewrite.workload.input_text import InputText, did_you_mean
from memrewrite.workload.step import Inputs

INPUT_SEED = 0
_INTEGER_NAMES = re.compile(r"ids?$|tokens?|labels?|targets?|mask|index|indices|position")

_SPATIAL = {nn.Conv1d: "x1024", nn.Conv2d: "x224x224", nn.Conv3d: "x16x64x64"}


@dataclass(frozen=True)
class RandomInput:
    """One ``--input``: a tensor to draw. ``below`` is the exclusive upper bound of integers, None for other dtypes."""

    name: str | None
    sizes: tuple[int, ...]
    dtype: torch.dtype
    below: int | None

    @classmethod
    def parse(cls, text: str) -> "RandomInput":
        """Read one ``--input``; raises ``UsageError`` that says what is wrong and shows the form."""
        read = InputText.parse(text)
        return cls(read.name, read.sizes, getattr(torch, read.dtype), read.below)

    def draw(self, generator: torch.Generator) -> Tensor:
        """The tensor, on the CPU. Raises ``UsageError`` when there is no memory for it."""
        try:
            if self.below is not None:
                return torch.randint(self.below, self.sizes, generator=generator, dtype=self.dtype, device="cpu")
            if self.dtype == torch.bool:
                return torch.randint(2, self.sizes, generator=generator, device="cpu").bool()
            return torch.randn(self.sizes, generator=generator, dtype=self.dtype, device="cpu")
        except RuntimeError as error:
            sizes = "x".join(map(str, self.sizes))
            raise UsageError(
                f"An input of {sizes} cannot be made here: {first_line(error)}; give smaller sizes."
            ) from error


def from_texts(texts: tuple[str, ...], module: nn.Module) -> Inputs:
    """Draw the inputs that ``--input`` options describe; raises ``UsageError`` for names that ``forward`` lacks."""
    generator = torch.Generator().manual_seed(INPUT_SEED)
    args: list[Tensor] = []
    kwargs: dict[str, Tensor] = {}
    for wanted in map(RandomInput.parse, texts):
        if wanted.name is None:
            args.append(wanted.draw(generator))
            continue
        _check_name(wanted.name, module)
        if wanted.name in kwargs:
            raise UsageError(f"Input {wanted.name!r} is given twice; give each name once.")
        kwargs[wanted.name] = wanted.draw(generator)
    return Inputs(tuple(args), kwargs)


def normalise(value: Any, where: str) -> Inputs:
    """Bring example inputs into one form.

    A tensor is the one positional argument; a tuple or list holds the positional arguments; a mapping with text keys
    holds keyword arguments; a pair of a tuple (or list) and a mapping is both: ``((x,), {"mask": m})``.
    So a model called with a pair of a tuple and a dict is written ``((pair, dict), {})``.
    Raises ``TargetError``, naming ``where`` they come from, for anything else and for inputs without a tensor.
    """
    if isinstance(value, Tensor):
        inputs = Inputs((value,), {})
    elif _is_kwargs(value):
        inputs = Inputs((), dict(value))
    elif isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], tuple | list) and _is_kwargs(value[1]):
        inputs = Inputs(tuple(value[0]), dict(value[1]))
    elif isinstance(value, tuple | list):
        inputs = Inputs(tuple(value), {})
    else:
        raise TargetError(
            f"{where} gives an object of type {type(value).__name__}; give a tensor, a tuple, a dict of arguments, or "
            "(tuple, dict)."
        )
    if not inputs.tensors():
        raise TargetError(f"{where} gives no tensor; a step needs at least one.")
    return inputs


def with_batch_size(inputs: Inputs, batch_size: int) -> Inputs:
    """Repeat or cut every tensor along dimension 0 whose size there is the inputs' batch size.

    Raises ``UsageError`` when the size is not positive or no tensor has a dimension, ``DoesNotFitError`` when there is
    no memory for it.
    """
    common = inputs.batch_size
    if batch_size < 1 or not common:
        raise UsageError(
            f"Batch size {batch_size} cannot be set: it must be at least 1 and some input must have a batch."
        )

    def resize(leaf: Tensor) -> Tensor:
        copies = -(-batch_size // common)
        leaf.new_empty((copies * common, *leaf.shape[1:]))  # fails at once, where a list of as many would fill memory
        # The clone gives the result a storage of its own size: a slice would keep the longer one alive.
        resized = torch.cat([leaf.detach()] * copies)[:batch_size].clone()
        return resized.requires_grad_(leaf.requires_grad)

    try:
        return inputs.changed_in_batch(resize)
    except (RuntimeError, MemoryError, TypeError) as error:  # TypeError: the size is above 64 bits
        raise DoesNotFitError(
            f"Inputs of batch size {batch_size} cannot be made here: {first_line(error)}; give a smaller one."
        ) from error


def to_device(inputs: Inputs, device: torch.device) -> Inputs:
    """The same inputs with every tensor on ``device``."""
    return inputs.changed(lambda leaf: leaf.detach().to(device).requires_grad_(leaf.requires_grad))


def suggestion(module: nn.Module) -> str:
    """Ready-to-paste ``--input`` options, guessed from ``forward``'s signature and the first layer."""
    parameters = list(inspect.signature(module.forward).parameters.values())
    plain = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    names = [p.name for p in plain if p.default is p.empty] or [p.name for p in plain[:1]]
    if len(names) < 2:
        return f"--input {_guess(names[0] if names else '', module, first=True)}"
    return " ".join(f"--input {name}={_guess(name, module, first=i == 0)}" for i, name in enumerate(names))


def _guess(name: str, module: nn.Module, *, first: bool) -> str:
    layer = next((layer for layer in module.modules() if isinstance(layer, (nn.Linear, nn.Embedding, *_SPATIAL))), None)
    if first and isinstance(layer, nn.Embedding):
        return f"8x128:int64:{layer.num_embeddings}"
    if _INTEGER_NAMES.search(name):
        return "8x128:int64"
    if isinstance(layer, nn.Linear):
        return f"8x{layer.in_features}"
    for kind, sizes in _SPATIAL.items():
        if isinstance(layer, kind):
            return f"8x{layer.in_channels}{sizes}"
    return "8x3x224x224"


def _check_name(name: str, module: nn.Module) -> None:
    parameters = inspect.signature(module.forward).parameters
    if name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    raise UsageError(
        f"{type(module).__name__}.forward has no parameter {name!r}; {did_you_mean(name, list(parameters))}"
    )


def _is_kwargs(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value) and all(isinstance(key, str) for key in value)
