"""Gradients of weights that are both embedding and head: one tensor, to which rows are added."""

import uuid
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memrewrite
from memrewrite.backends import entry, rows
from memrewrite.runtime.tied_embedding import ADD, ADDED

WORDS, WIDTH = 4096, 32


class Speaker(nn.Module):
    """An embedding and a head of one weight."""

    def __init__(self, twice: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.inner, self.twice = nn.Embedding(WORDS, WIDTH, padding_idx=3), nn.Linear(WIDTH, WIDTH), twice

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.inner(self.words(tokens)).tanh()
        logits = functional.linear(hidden, self.words.weight)
        if self.twice:
            logits = logits + functional.linear(hidden.sin(), self.words.weight)
        return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def step(model: Any, tokens: Tensor) -> list[Tensor]:
    loss = model(tokens)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


@pytest.fixture(params=[False, True], ids=["one head", "two heads"])
def speaker(request: pytest.FixtureRequest) -> Speaker:
    return Speaker(request.param)


@pytest.mark.parametrize("budget", ["100%", "min"])
def test_the_sum_is_one_tensor_with_the_bits_of_two(
    speaker: Speaker, budget: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, found = torch.randint(WORDS, (4, 4)), []
    seen: list[Any] = []
    write = rows.written

    def written(backward: Any) -> Any:
        seen.append([node.target for node in write(backward).graph.nodes])
        return backward

    monkeypatch.setattr(entry, "identity", lambda partition: str(uuid.uuid4()))  # nothing comes from caches
    for in_place in (True, False):
        monkeypatch.setattr("memrewrite.backends.partition.written", written)
        if not in_place:
            monkeypatch.setattr("memrewrite.backends.partition.sum_in_place", lambda joint: None)
        torch._dynamo.reset()
        speaker.zero_grad()
        options: Any = {"budget": budget, "optimizer": "none"}
        compiled = torch.compile(speaker, backend=entry.memrewrite, options=options)
        found.append(step(compiled, tokens))
        peak = memrewrite.report_of(compiled).peak
        assert peak is not None
        found[-1].append(torch.tensor(peak))
    assert (ADD in seen[0], ADD in seen[1]) == (True, False)
    assert ADDED not in seen[0]
    *ours, with_one = found[0]
    *theirs, with_two = found[1]
    assert all(map(torch.equal, ours, theirs))
    # Where there are two heads, both their gradients are there at a time in any case.
    assert with_one <= with_two - (0 if speaker.twice else 0.9 * WORDS * WIDTH * 4)
