"""What a model gives besides its loss has a gradient of zeros, where it is compiled."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from memrewrite.simulate import Timeline, simulate
from memrewrite.targets.compiled import CompiledTarget
from memrewrite.targets.eager import EAGER
from memrewrite.torch_internals.fake_tensors import TorchDispatchMode
from memrewrite.workload.step import Inputs, Step

WORDS, SHAPE = 97, (4, 64)


class LanguageModel(nn.Module):
    """Gives its loss and its logits, or logits alone."""

    def __init__(self, losses: bool = True) -> None:
        super().__init__()
        self.embedding, self.head, self.losses = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS), losses

    def forward(self, words: Tensor) -> Any:
        logits = self.head(self.embedding(words))
        if not self.losses:
            return logits
        return {"loss": F.cross_entropy(logits.flatten(0, 1), words.flatten()), "logits": logits}


class _Zeros(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.zeros.default:
            self.made.append(tuple(result.shape))
        return result


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_autograd_makes_no_zeros_and_compiled_code_does(backend: str | None) -> None:
    torch.compiler.reset()
    model: Any = LanguageModel()
    model = model if backend is None else torch.compile(model, backend=backend)
    loss = model(torch.randint(WORDS, SHAPE))["loss"]
    with _Zeros() as zeros:
        loss.backward()
    assert zeros.made.count((*SHAPE, WORDS)) == (backend is not None)


def timelines(model: nn.Module) -> list[Timeline]:
    """Of a step that is not compiled, and of one that is."""
    step, inputs = Step(optimizer=None), Inputs((torch.randint(WORDS, SHAPE),), {})
    return [simulate(model, inputs, replace(step, target=target)) for target in (EAGER, CompiledTarget())]


def test_they_count_from_the_beginning_of_backward_until_the_gradient_of_the_logits_is_there() -> None:
    plain, compiled = timelines(LanguageModel())
    logits = SHAPE[0] * SHAPE[1] * WORDS * 4
    assert compiled.peak == plain.peak + logits
    assert compiled.phases == plain.phases
    others = [event for event in compiled.events if not event[1].endswith("backward: aten.zeros.default")]
    assert len(others) == len(compiled.events) - 2 == len(plain.events)
    more = {label: size - was for (size, label), (was, _) in zip(others, plain.events, strict=True) if size != was}
    held = ("nll_loss_backward", "_log_softmax_backward_data")
    assert more == {f"step {n} backward: aten.{name}.default": logits for n in (1, 2) for name in held}


def test_a_loss_from_outside_gives_gradients_to_all() -> None:
    plain, compiled = timelines(LanguageModel(losses=False))
    assert compiled == plain
