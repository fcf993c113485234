"""``returns="loss"``: a training step gives its loss alone, wherever that is among what the model returns."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import memrewrite
from memrewrite.artifact.save import save
from memrewrite.passes.linear_cross_entropy import Found, LinearCrossEntropy
from memrewrite.records.errors import UsageError
from memrewrite.runtime.promise import FallbackWarning
from memrewrite.search import registry

WORDS, WIDTH = 400, 16
Output = Callable[[Tensor, Tensor], Any]


class Speaker(nn.Module):
    """A language model that returns its loss and its logits in some way."""

    def __init__(self, output: Output) -> None:
        super().__init__()
        self.output = output
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(1)))

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        logits = self.head(self.body(self.embed(tokens)))
        return self.output(F.cross_entropy(logits.view(-1, WORDS), labels.view(-1)), logits)


class Spoken(NamedTuple):
    """An output with names."""

    loss: Tensor
    logits: Tensor | None = None


def as_dict(loss: Tensor, logits: Tensor) -> Any:
    return {"logits": logits, "loss": loss, "past": None}


def as_tuple(loss: Tensor, logits: Tensor) -> Any:
    return logits, loss


def as_named(loss: Tensor, logits: Tensor) -> Any:
    return Spoken(loss, logits)


def second(output: Any) -> Tensor:
    found: Tensor = output[1]
    return found


WAYS: dict[str, tuple[Output, Callable[[Any], Tensor] | None, Callable[[Any], Any]]] = {
    "dict": (as_dict, None, lambda output: output["logits"]),
    "tuple": (as_tuple, second, lambda output: output[0]),
    "named": (as_named, None, lambda output: output.logits),
}
ways = pytest.mark.parametrize("way", WAYS)


def speaker(way: str) -> Speaker:
    torch.manual_seed(0)
    return Speaker(WAYS[way][0])


def tokens(rows: int = 32) -> Tensor:
    return torch.randint(WORDS, (rows, 16), generator=torch.Generator().manual_seed(0))


def planned(way: str, **options: Any) -> Any:
    given = {"example_kwargs": {"labels": tokens()}, "loss_fn": WAYS[way][1], "returns": "loss", **options}
    return memrewrite.optimize(speaker(way), tokens(), **given)


def step(model: nn.Module, way: str, rows: int = 32) -> tuple[Any, dict[str, Tensor]]:
    model.zero_grad()
    output = model(tokens(rows), labels=tokens(rows))
    loss = (WAYS[way][1] or (lambda o: o["loss"] if isinstance(o, dict) else o.loss))(output)
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return output, {"loss": loss.detach(), **gradients}


@ways
def test_the_loss_and_its_gradients_are_the_same(way: str) -> None:
    result = planned(way)
    report = memrewrite.report_of(result)
    assert report.verdict.startswith("bit-equal")
    assert "Returns its loss alone; None is in the place of 1 more ((32, 16, 400))." in report.notes
    assert report.predicted_after.peak < report.predicted_before.peak
    for rows in (32, 7):
        output, found = step(result, way, rows)
        _, expected = step(speaker(way), way, rows)
        assert WAYS[way][2](output) is None
        assert all(torch.equal(found[name], value) for name, value in expected.items())


@ways
def test_it_lets_the_logits_never_exist(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.LOWER, LinearCrossEntropy.name, lambda *_: LinearCrossEntropy(elements=2**12))
    report = memrewrite.report_of(planned(way, budget="min"))
    assert report.equivalent
    assert {name for name, _, _ in report.rewrites} >= {LinearCrossEntropy.name}
    logits = 32 * 16 * WORDS * 4
    with_them = memrewrite.report_of(planned(way, budget="min", returns="all"))
    assert report.predicted_after.peak < with_them.predicted_after.peak - logits
    assert any("returns='loss' leaves them out" in reason for _, _, reason in with_them.refusals)


def test_another_way_through_forward_returns_everything() -> None:
    result = planned("dict")
    assert result.eval()(tokens(), labels=tokens())["logits"].shape == (32, 16, WORDS)
    result.train()
    with pytest.warns(FallbackWarning):
        assert result(tokens().int(), labels=tokens())["logits"] is not None


def test_it_travels(tmp_path: Path) -> None:
    result = planned("dict")
    save(result, tmp_path / "out")
    _, expected = step(result, "dict")
    for arrived in (copy.deepcopy(result), memrewrite.load(tmp_path / "out", speaker("dict"))):
        output, found = step(arrived, "dict")
        assert output["logits"] is None
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_wrong_rewrite_is_still_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    class Off(LinearCrossEntropy):
        def rewrite(self, found: Found, early: bool) -> None:
            super().rewrite(Found(**{**vars(found), "label_smoothing": 0.01}), early)

    monkeypatch.setitem(registry.LOWER, LinearCrossEntropy.name, lambda *_: Off(elements=2**12))
    with pytest.raises(memrewrite.NotEquivalentError):
        planned("dict", budget="min")


def test_a_loss_that_is_computed_outside_is_refused() -> None:
    with pytest.raises(UsageError, match="returns='loss' is for models that return their loss"):
        planned("tuple", loss_fn=lambda output: output[0].square().mean())


def test_an_unknown_value_is_refused() -> None:
    with pytest.raises(UsageError, match="returns='logits' is unknown"):
        planned("dict", returns="logits")


@pytest.mark.parametrize("options", [{"regions": ["body"]}, {"mode": "inference"}], ids=["parts", "inference"])
def test_in_parts_and_in_inference_it_says_that_it_has_no_effect(options: dict[str, Any]) -> None:
    model = speaker("dict").train("mode" not in options)
    given = {"example_kwargs": {"labels": tokens()}, "returns": "loss", **options}
    note = "returns='loss' has no effect but on the training step of a model that is captured whole."
    assert note in memrewrite.report_of(memrewrite.optimize(model, tokens(), **given)).notes
