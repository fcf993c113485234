"""``returns="loss"`` and ``"lazy"``: a step gives its loss alone, or the rest as it is read, wherever the loss is."""

import copy
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node
from torch.utils.checkpoint import checkpoint

import memrewrite
from memrewrite.artifact.save import save
from memrewrite.capture import capture, returned
from memrewrite.passes.linear_cross_entropy import Found, LinearCrossEntropy
from memrewrite.records.errors import UsageError
from memrewrite.records.graph_calls import LazyCall
from memrewrite.runtime.lazy_output import made_when_used
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


class Past:
    """A cache that puts together what it is made of, as that of transformers does."""

    def __init__(self, states: Tensor | None) -> None:
        self.states = states if states is None else torch.cat([states[..., :0], states], dim=-1)


register_pytree_node(
    Past,
    lambda past: ([past.states], None),
    lambda states, _: Past(*states),
    serialized_type_name="tests.capture.test_returned.Past",
)


def with_past(loss: Tensor, logits: Tensor) -> Any:
    return {"past": Past(logits), "loss": loss}


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
    given: dict[str, Any] = {
        "example_kwargs": {"labels": tokens()},
        "loss_fn": WAYS[way][1],
        "returns": "loss",
        **options,
    }
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
def test_logits_that_are_made_when_they_are_read_are_the_same(way: str) -> None:
    result = planned(way, returns="lazy")
    report = memrewrite.report_of(result)
    assert report.verdict.startswith("bit-equal")
    assert "Of what it returns, (32, 16, 400) is made when it is read; until then what it is made of is kept." in (
        report.notes
    )
    given: dict[str, Any] = {"example_kwargs": {"labels": tokens()}, "loss_fn": WAYS[way][1]}
    assert memrewrite.measure(result, tokens(), steps=1, **given).peak == report.predicted_after.peak
    for rows in (32, 7):
        output, found = step(result, way, rows)
        theirs, expected = step(speaker(way), way, rows)
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        logits = WAYS[way][2](output)
        assert made_when_used(type(logits))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", memrewrite.LazyOutputWarning)
            assert torch.equal(logits, WAYS[way][2](theirs))


@ways
@pytest.mark.parametrize("returns", ["loss", "lazy"])
def test_it_lets_the_logits_never_exist(way: str, returns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.LOWER, LinearCrossEntropy.name, lambda *_: LinearCrossEntropy(elements=2**12))
    result = planned(way, budget="min", returns=returns)
    report = memrewrite.report_of(result)
    assert report.equivalent
    given: dict[str, Any] = {"example_kwargs": {"labels": tokens()}, "loss_fn": WAYS[way][1]}
    assert memrewrite.measure(result, tokens(), steps=1, **given).peak == report.predicted_after.peak
    assert {name for name, _, _ in report.rewrites} >= {LinearCrossEntropy.name}
    logits = 32 * 16 * WORDS * 4
    with_them = memrewrite.report_of(planned(way, budget="min", returns="all"))
    assert report.predicted_after.peak < with_them.predicted_after.peak - logits
    assert any("returns='loss' leaves them out" in reason for _, _, reason in with_them.refusals)


def test_a_cache_beside_the_loss_is_left_out() -> None:
    model, given = Speaker(with_past), {"labels": tokens()}
    result = memrewrite.optimize(copy.deepcopy(model), tokens(), example_kwargs=given, returns="loss")
    output = result(tokens(), **given)
    assert output["past"].states is None
    assert torch.equal(output["loss"], model(tokens(), **given)["loss"])


def test_another_way_through_forward_returns_everything() -> None:
    result = planned("dict")
    assert result.eval()(tokens(), labels=tokens())["logits"].shape == (32, 16, WORDS)
    result.train()
    with pytest.warns(FallbackWarning):
        assert result(tokens().int(), labels=tokens())["logits"] is not None


@pytest.mark.parametrize("returns", ["loss", "lazy"])
def test_it_travels(returns: str, tmp_path: Path) -> None:
    result = planned("dict", returns=returns)
    save(result, tmp_path / "out")
    _, expected = step(result, "dict")
    for arrived in (copy.deepcopy(result), memrewrite.load(tmp_path / "out", speaker("dict"))):
        output, found = step(arrived, "dict")
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        if returns == "loss":
            assert output["logits"] is None
            continue
        assert made_when_used(type(output["logits"]))
        given: dict[str, Any] = {"example_kwargs": {"labels": tokens()}}
        peak = memrewrite.measure(arrived, tokens(), steps=1, **given).peak
        assert peak == memrewrite.report_of(result).predicted_after.peak
        assert memrewrite.verify(speaker("dict"), arrived, tokens(), **given).equivalent


def test_a_wrong_rewrite_is_still_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    class Off(LinearCrossEntropy):
        def rewrite(self, found: Found, early: bool) -> None:
            super().rewrite(Found(**{**vars(found), "label_smoothing": 0.01}), early)

    monkeypatch.setitem(registry.LOWER, LinearCrossEntropy.name, lambda *_: Off(elements=2**12))
    with pytest.raises(memrewrite.NotEquivalentError):
        planned("dict", budget="min")


@pytest.mark.filterwarnings("ignore::memrewrite.LazyOutputWarning")
def test_a_loss_that_reads_the_logits_is_counted_with_them() -> None:
    def reading(output: Any) -> Tensor:
        assert output["logits"].signbit().shape == output["logits"].shape
        found: Tensor = output["loss"]
        return found

    given: dict[str, Any] = {"example_kwargs": {"labels": tokens()}, "loss_fn": reading}
    result = memrewrite.optimize(Made(HEADS["cast"]), tokens(), returns="lazy", **given)
    peak = memrewrite.report_of(result).predicted_after.peak
    assert memrewrite.measure(result, tokens(), steps=1, **given).peak == peak
    unread = memrewrite.optimize(Made(HEADS["cast"]), tokens(), example_kwargs={"labels": tokens()}, returns="lazy")
    assert memrewrite.report_of(unread).predicted_after.peak < peak


def test_a_lazy_output_that_would_be_another_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def another(graph_module: Any, source: Any, leaf: Any, *rest: Any) -> LazyCall:
        found = of(graph_module, source, leaf, *rest)
        (made,) = found.graph.graph.find_nodes(op="output")[0].all_input_nodes
        made.args = made.args[:2]
        return found

    of = returned._call
    monkeypatch.setattr(returned, "_call", another)
    with pytest.raises(memrewrite.NotEquivalentError, match="output"):
        memrewrite.optimize(Made(HEADS["bias"]), tokens(), example_kwargs={"labels": tokens()}, returns="lazy")


def test_a_step_that_would_take_more_so_stays_as_it_is() -> None:
    class Squares(Made):
        def forward(self, tokens: Tensor, labels: Tensor) -> Any:
            logits = self.made(self, torch.tanh(self.embed(tokens)))
            return {"loss": logits.square().mean() * labels.float().mean(), "logits": logits}

    model: nn.Module = Squares(HEADS["tied"])
    result: nn.Module = memrewrite.optimize(model, tokens(), example_kwargs={"labels": tokens()}, returns="lazy")
    assert result is model
    note = "returns='lazy' has no effect: the step would take more so, and the model is returned as it is."
    assert memrewrite.report_of(result).notes == (note,)


Head = Callable[[Any, Tensor], Tensor]
HEADS: dict[str, Head] = {
    "bias": lambda m, h: F.linear(h, m.head.weight, m.bias),
    "scale": lambda m, h: m.head(h) * 0.125,
    "soft cap": lambda m, h: 30 * torch.tanh(m.head(h) / 30),
    "cast": lambda m, h: m.head(h).double(),
    "weights first": lambda m, h: F.linear(h, m.head.weight * 2) + m.bias.double().float(),
    "transposed": lambda m, h: h @ m.head.weight.t(),
    "slice": lambda m, h: m.head(h[:, :-1]),
    "last": lambda m, h: m.head(h[:, -1]),
    "flat": lambda m, h: m.head(h.reshape(-1, WIDTH)),
    "table": lambda m, h: m.head(h) + m.table,
    "tied": lambda m, h: F.linear(h, m.embed.weight),
    "constant": lambda m, h: m.head(h) * torch.tensor([0.125]),
}
KEPT: dict[str, Head] = {
    "random": lambda m, h: F.dropout(m.head(h), 0.5),
    "written": lambda m, h: m.head(h).mul_(2),
    "written later": lambda m, h: m.head(h).clone().add_(m.bias) * 1,
    "of two": lambda m, h: m.head(h) * h.sum(-1, keepdim=True),
    "small": lambda m, h: m.head(h).sum(-1),
    "another shape": lambda m, h: m.head(h).view(h.shape[0], -1),
    "view of what is smaller": lambda m, h: h[:, :, :1].expand(-1, -1, 3),
}


class Made(nn.Module):
    """Returns a loss and logits that are made in some way."""

    def __init__(self, head: Head) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.made = head
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.bias = nn.Parameter(torch.randn(WORDS))
        self.register_buffer("table", torch.randn(WORDS))

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        logits = self.made(self, torch.tanh(self.embed(tokens)))
        return {"loss": -logits.float().log_softmax(-1)[..., 0].mean() * labels.float().mean(), "logits": logits}


@pytest.mark.filterwarnings("ignore::memrewrite.LazyOutputWarning")
@pytest.mark.parametrize("amp", [None, "bf16"], ids=str)
@pytest.mark.parametrize("head", HEADS)
def test_whatever_makes_logits_of_a_smaller_value_and_weights_makes_them_later(head: str, amp: str | None) -> None:
    model = Made(HEADS[head])
    given: dict[str, Any] = {"example_kwargs": {"labels": tokens()}, "amp": amp}
    result = memrewrite.optimize(model, tokens(), returns="lazy", **given)
    report = memrewrite.report_of(result)
    assert report.verdict.startswith("bit-equal")
    assert memrewrite.measure(result, tokens(), steps=1, **given).peak == report.predicted_after.peak
    for rows, dtype in ((32, None), (5, torch.bfloat16), (32, torch.float16)):
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            found, expected = (each(tokens(rows), labels=tokens(rows))["logits"] for each in (result, model))
        assert made_when_used(type(found))
        assert (found.shape, found.dtype, found.requires_grad) == (expected.shape, expected.dtype, True)
        assert torch.equal(found, expected)


def test_what_is_returned_by_two_names_stays_one_tensor() -> None:
    class Twice(Made):
        def forward(self, tokens: Tensor, labels: Tensor) -> Any:
            output = super().forward(tokens, labels)
            return {**output, "flat": output["logits"].view(-1, WORDS)}

    given: dict[str, Any] = {"example_kwargs": {"labels": tokens()}, "budget": "min", "returns": "lazy"}
    output = memrewrite.optimize(Twice(HEADS["tied"]), tokens(), **given)(tokens(), labels=tokens())
    assert output["flat"].untyped_storage().data_ptr() == output["logits"].untyped_storage().data_ptr()
    assert not any(made_when_used(type(each)) for each in output.values())


class Checkpointed(Made):
    """Has checkpoints of its own, which are looked at before what is returned is."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        hidden = checkpoint(torch.tanh, self.embed(tokens), use_reentrant=False)
        logits = self.made(self, hidden)
        return {"loss": -logits.log_softmax(-1)[..., 0].mean() * labels.float().mean(), "logits": logits}


@pytest.mark.filterwarnings("ignore::memrewrite.LazyOutputWarning")
@pytest.mark.parametrize(("kind", "front_end"), [(Checkpointed, "export"), (Made, "dynamo")])
def test_however_a_model_is_captured(kind: type[Made], front_end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memrewrite.search.captured.capture", partial(capture, front_end=front_end))
    model = kind(HEADS["tied"])
    result = memrewrite.optimize(model, tokens(), example_kwargs={"labels": tokens()}, returns="lazy")
    found, expected = (each(tokens(), labels=tokens())["logits"] for each in (result, model))
    assert made_when_used(type(found))
    assert found.shape == expected.shape
    assert torch.equal(found, expected)
    if front_end == "export":
        assert result(tokens(7), labels=tokens(7))["logits"].shape == (7, 16, WORDS)


@pytest.mark.parametrize("head", KEPT)
def test_other_outputs_are_returned_as_ever(head: str) -> None:
    model = Made(KEPT[head])
    result = memrewrite.optimize(model, tokens(), example_kwargs={"labels": tokens()}, budget="min", returns="lazy")
    report = memrewrite.report_of(result)
    assert report.equivalent
    assert any("returns='lazy' has no effect: nothing that is returned" in note for note in report.notes)
    assert type(result(tokens(), labels=tokens())["logits"]) is Tensor


def test_a_loss_that_is_computed_outside_is_refused() -> None:
    with pytest.raises(UsageError, match="returns='loss' is for models that return their loss"):
        planned("tuple", loss_fn=lambda output: output[0].square().mean(), returns="loss")


class Alone(Made):
    """Returns its loss and nothing else."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        return super().forward(tokens, labels)["loss"]


@pytest.mark.parametrize("loss_fn", [None, lambda loss: loss / 4], ids=["as it is", "a quarter"])
@pytest.mark.parametrize("returns", ["loss", "lazy"])
def test_of_a_loss_alone_there_is_nothing_to_leave_out(returns: Any, loss_fn: Any) -> None:
    model = Alone(HEADS["tied"])
    given: dict[str, Any] = {"example_kwargs": {"labels": tokens()}, "budget": "min", "returns": returns}
    result = memrewrite.optimize(model, tokens(), loss_fn=loss_fn, **given)
    assert memrewrite.report_of(result).equivalent
    assert torch.equal(result(tokens(), labels=tokens()), model(tokens(), labels=tokens()))


def test_an_unknown_value_is_refused() -> None:
    with pytest.raises(UsageError, match="returns='logits' is unknown"):
        planned("dict", returns="logits")


def test_compiled_code_has_nothing_that_is_made_later() -> None:
    with pytest.raises(UsageError, match="Compiled code makes all that it returns"):
        planned("dict", returns="lazy", compiled=True)


@pytest.mark.parametrize("returns", ["loss", "lazy"])
@pytest.mark.parametrize("options", [{"regions": ["body"]}, {"mode": "inference"}], ids=["parts", "inference"])
def test_in_parts_and_in_inference_it_says_that_it_has_no_effect(options: dict[str, Any], returns: str) -> None:
    model = speaker("dict").train("mode" not in options)
    given = {"example_kwargs": {"labels": tokens()}, "returns": returns, **options}
    note = f"returns='{returns}' has no effect but on the training step of a model that is captured whole."
    assert note in memrewrite.report_of(memrewrite.optimize(model, tokens(), **given)).notes
