"""Inputs that are one tensor in the example and others in later calls: ``model(ids, labels=ids)``, ``mix(x, x, x)``."""

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memrewrite
from memrewrite.capture import FRONT_ENDS, capture
from memrewrite.runtime.promise import FallbackWarning
from memrewrite.workload.step import Inputs

WORDS = 20


class Labelled(nn.Module):
    """A loss inside of forward, as transformers' models have it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(WORDS, 16), nn.Linear(16, WORDS)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        hidden = torch.sin(torch.exp(torch.sin(self.words(ids))))
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


class Attention(nn.Module):
    """PyTorch's own attention, which asks whether query, key and value are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attend, self.out = nn.MultiheadAttention(16, 2, batch_first=True), nn.Linear(16, 16)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mixed, _ = self.attend(query, key, value, need_weights=False)
        return torch.sin(torch.exp(torch.sin(self.out(mixed))))


def tokens(seed: int) -> Tensor:
    return torch.randint(WORDS, (8, 40), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("named", [False, True])
def test_labels_that_were_the_ids_can_be_others(named: bool) -> None:
    model, ids = Labelled(), tokens(1)
    args, kwargs = ((ids,), {"labels": ids}) if named else ((ids, ids), {})
    result = memrewrite.optimize(
        model, args, example_kwargs=kwargs, budget="90%", optimizer="sgd", loop="drop-output", loss_fn=lambda out: out
    )
    assert result.report.segments
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for labels in (ids, tokens(2), torch.where(ids < 10, -100, ids)):
            losses = [each(ids, labels=labels) if named else each(ids, labels) for each in (model, result)]
            assert torch.equal(*losses)
        assert not torch.equal(result(ids, labels=tokens(2)), result(ids, labels=ids))


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_each_front_end_reads_both(front_end: str) -> None:
    ids = tokens(1)
    captured = capture(Labelled(), Inputs((ids, ids), {}), front_end)
    assert captured.inputs.shared is None
    assert all(node.users for node in captured.graph_module.graph.nodes if node.op == "placeholder")


def test_a_buffer_given_as_input_can_be_another_tensor() -> None:
    model = Labelled()
    model.register_buffer("ids", tokens(1))
    captured = capture(model, Inputs((model.ids, tokens(3)), {}))
    graph, other = captured.graph_module, tokens(4)
    assert torch.equal(graph(other, tokens(3))[0], model(other, tokens(3)))


@pytest.mark.parametrize("others", [False, True], ids=["three", "two"])
def test_one_that_was_given_others_gets_only_such(others: bool) -> None:
    model, x, y, z = Attention(), *torch.randn(3, 8, 32, 16)
    given = (x, y, y) if others else (x, y, z)
    result = memrewrite.optimize(model, given, budget="98%", optimizer="sgd", loop="drop-output")
    assert torch.equal(model(*given), result(*given))
    with pytest.warns(FallbackWarning, match="it asks whether inputs are one tensor"):
        assert torch.equal(model(x, x, x), result(x, x, x))


def test_a_forward_that_asks_whether_they_are_one_gets_only_such() -> None:
    model, x, y = Attention(), torch.randn(8, 32, 16), torch.randn(8, 32, 16)
    result = memrewrite.optimize(model, (x, x, x), budget="98%", optimizer="sgd", loop="drop-output")
    assert result.report.segments
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(model(y, y, y), result(y, y, y))
    with pytest.warns(FallbackWarning, match="it asks whether inputs are one tensor"):
        assert torch.equal(model(x, y, y), result(x, y, y))
