"""The product with a head and its cross-entropy become one wherever the logits go nowhere else, as exact as before."""

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import memrewrite
from memrewrite.artifact.save import save
from memrewrite.equivalence.trial import deterministic
from memrewrite.passes.linear_cross_entropy import Found, LinearCrossEntropy
from memrewrite.records.errors import NotEquivalentError
from memrewrite.runtime import fused
from memrewrite.runtime.linear_cross_entropy import linear_cross_entropy
from memrewrite.search import registry
from memrewrite.search.candidate import Candidate
from memrewrite.simulate.memory.tracker import Tracker
from tests.passes.helpers import (
    FRONT_ENDS,
    WIDTH,
    Around,
    assert_as_good,
    assert_same_bits,
    example,
    functional,
    language_step,
    rewrites,
    saved_storages,
    targets,
)
from tests.support.compiled import compiled_bytes, counted_inductor

Function = Callable[[Any, Tensor], Any]
ROWS = 20
PASS = LinearCrossEntropy(elements=2 * WIDTH)  # 8 rows at a time


def classes(h: Tensor) -> Tensor:
    return torch.arange(h.shape[0]) % WIDTH


def texts(h: Tensor) -> Tensor:
    return h.view(4, 5, WIDTH)


def shifted(m: Any, h: Tensor) -> Tensor:
    """As language models predict the next token, with the logits in half precision and a soft cap."""
    logits = h.view(4, -1, WIDTH).float()
    logits = 30.0 * torch.tanh(logits / 30.0)
    labels = classes(h).view(4, -1)
    return F.cross_entropy(logits[..., :-1, :].contiguous().view(-1, WIDTH), labels[..., 1:].contiguous().view(-1))


SPELLINGS: dict[str, Function] = {
    "functional": lambda m, h: F.cross_entropy(h, classes(h)),
    "named": lambda m, h: F.cross_entropy(input=h, target=classes(h), ignore_index=2),
    "sum": lambda m, h: F.cross_entropy(h, classes(h), reduction="sum"),
    "no reduction": lambda m, h: F.cross_entropy(h, classes(h), reduction="none", ignore_index=0),
    "module": lambda m, h: nn.CrossEntropyLoss(ignore_index=1)(h, classes(h)),
    "class weights": lambda m, h: F.cross_entropy(h, classes(h), m.betas.detach(), ignore_index=3),
    "summed class weights": lambda m, h: F.cross_entropy(h, classes(h), m.betas.detach(), reduction="sum"),
    "smoothing": lambda m, h: F.cross_entropy(h, classes(h), label_smoothing=0.1, ignore_index=4),
    "smoothing and weights": lambda m, h: F.cross_entropy(h, classes(h), m.betas.detach(), label_smoothing=0.1),
    "temperature": lambda m, h: F.cross_entropy(h / 0.7, classes(h)),
    "cast": lambda m, h: F.cross_entropy(h.double(), classes(h)),
    "view": lambda m, h: F.cross_entropy(h.view(4, 5, WIDTH).reshape(-1, WIDTH), classes(h)),
    "flatten": lambda m, h: F.cross_entropy(h.view(4, 5, WIDTH).flatten(0, 1), classes(h)),
    "classes second": lambda m, h: F.cross_entropy(texts(h).transpose(1, 2), classes(h).view(4, 5), ignore_index=1),
    "classes second, scaled": lambda m, h: F.cross_entropy((texts(h) / 0.7).transpose(-1, 1), classes(h).view(4, 5)),
    "classes second, copied": lambda m, h: F.cross_entropy(
        texts(h).transpose(1, 2).contiguous(), classes(h).view(4, 5), reduction="sum"
    ),
    "classes permuted": lambda m, h: F.cross_entropy(
        h.view(2, 2, 5, WIDTH).permute(0, 3, 1, 2), classes(h).view(2, 2, 5), m.betas.detach(), reduction="none"
    ),
    "likelihood": lambda m, h: F.nll_loss(F.log_softmax(h, dim=-1), classes(h), ignore_index=2),
    "likelihood in double": lambda m, h: F.nll_loss(h.log_softmax(1, dtype=torch.float64), classes(h)),
    "likelihood, a view": lambda m, h: F.nll_loss(
        texts(h).log_softmax(-1).view(-1, WIDTH), classes(h), reduction="sum"
    ),
    "likelihood of classes second": lambda m, h: F.nll_loss(
        texts(h).log_softmax(-1).transpose(1, 2), classes(h).view(4, 5), m.betas.detach()
    ),
    "classes second, their likelihood": lambda m, h: F.nll_loss(
        texts(h).transpose(1, 2).log_softmax(1), classes(h).view(4, 5)
    ),
    "logarithms": lambda m, h: texts(h).log_softmax(-1).gather(-1, classes(h).view(4, 5, 1)).squeeze(-1),
    "logarithms of rows": lambda m, h: torch.gather(torch.log_softmax(h * 2, 1), 1, classes(h)[:, None]),
}
TRAPS: dict[str, tuple[Function, str]] = {
    "logits returned": (lambda m, h: (F.cross_entropy(h, classes(h)), h), "returns='loss' leaves them out"),
    "probabilities": (lambda m, h: F.cross_entropy(h, h.detach().softmax(1)), "not one class index"),
    "images": (lambda m, h: F.cross_entropy(h.view(2, WIDTH, -1), torch.zeros(2, 10).long()), "not one class index"),
    "few": (lambda m, h: F.cross_entropy(h[:3], classes(h)[:3]), "Its 18 logits are too few"),
    "normalized": (lambda m, h: F.cross_entropy(h.softmax(-1), classes(h)), "through softmax, which is not done row"),
    "padded vocabulary": (lambda m, h: F.cross_entropy(h[:, :5], classes(h) % 5), "through slice, which is not done"),
    "logarithms over rows": (lambda m, h: F.nll_loss(F.log_softmax(h, 0), classes(h)), "through log_softmax"),
    "logarithms of logarithms": (lambda m, h: F.cross_entropy(h.log_softmax(1), classes(h)), "through log_softmax"),
    "scaled logarithms": (lambda m, h: F.nll_loss(h.log_softmax(1) * 2, classes(h)), "through mul, which is not done"),
    "several of a row": (
        lambda m, h: h.log_softmax(-1).gather(-1, classes(h)[:, None].expand(-1, 2).contiguous()),
        "not one class index",
    ),
    "some of a column": (lambda m, h: h.log_softmax(-1).gather(0, classes(h)[:1, None]), "not one class index"),
    "moved another way": (
        lambda m, h: F.cross_entropy(texts(h).permute(1, 2, 0), classes(h).view(5, 4)),
        "not one class",
    ),
    "learned temperature": (lambda m, h: F.cross_entropy(h * m.beta, classes(h)), "through mul, which is not done"),
}


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_is_as_good(spelling: str, front_end: str) -> None:
    model, x = Around(SPELLINGS[spelling]), example(ROWS)
    graph_module, result = functional(model, x, PASS, front_end)
    assert len(result.applied) == 1
    assert "linear_cross_entropy" in targets(graph_module)
    assert "linear" not in " ".join(targets(graph_module)).replace("linear_cross_entropy", "")
    assert_as_good(graph_module, model, x)


@pytest.mark.parametrize("spelling", ["classes second", "likelihood", "logarithms", "no reduction"])
def test_types_are_those_of_autocast(spelling: str) -> None:
    """Of logarithms autocast on the CPU makes 16 bits, and 32 of losses."""
    model, x = Around(SPELLINGS[spelling]), example(ROWS)
    with torch.autocast("cpu", torch.bfloat16):
        graph_module, result = functional(model, x, PASS, "export")
        (found,), expected = graph_module(x), model(x)
    assert len(result.applied) == 1
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_rows_that_are_shifted_and_capped() -> None:
    model, x = Around(shifted), example(ROWS)
    graph_module, result = functional(model, x, PASS, "export")
    assert len(result.applied) == 1
    assert_as_good(graph_module, model, x)


def test_what_the_head_is_given_is_kept_and_no_logits() -> None:
    model, x = Around(SPELLINGS["functional"]), example(ROWS) + 0
    graph_module, _ = functional(model, x, PASS, "export")
    kept = sum(saved_storages(graph_module, x, model))
    assert kept == ROWS  # the targets


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("trap", TRAPS)
def test_refused(trap: str, front_end: str) -> None:
    function, reason = TRAPS[trap]
    if trap == "padded vocabulary" and front_end == "dynamo":
        reason = "through getitem"
    graph_module, result = functional(Around(function), example(ROWS), PASS, front_end)
    assert linear_cross_entropy not in [node.target for node in graph_module.graph.nodes]
    assert [reason in refused.reason for refused in result.refused] == [True], result.refused


REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


def plain(hidden: Tensor, head: Tensor, bias: Tensor | None, target: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(F.linear(hidden, head, bias), target, **options)


@pytest.mark.parametrize(
    ("reduction", "early"), [*itertools.product(REDUCTIONS, [False]), ("mean", True), ("sum", True)]
)
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_values_in_double_precision(reduction: str, early: bool, weighted: bool, smoothing: float) -> None:
    torch.manual_seed(0)
    for rows, width, count in itertools.product((0, 1, 7, 37, 200), (1, 5), (1, 97)):
        target = torch.randint(count, (rows,))
        target[torch.rand(rows) < 0.3] = -100
        given = [torch.randn(size, dtype=torch.float64) for size in ((rows, width), (count, width), (count,))]
        weight = torch.rand(count, dtype=torch.float64) if weighted else None
        ours, theirs = ([t.clone().requires_grad_() for t in given] for _ in range(2))
        found = linear_cross_entropy(
            *(ours[0], ours[1], ours[2], target, weight, (), REDUCTIONS[reduction], -100, smoothing, 8, early)
        )
        options: dict[str, Any] = {"reduction": reduction, "weight": weight, "label_smoothing": smoothing}
        expected = plain(theirs[0], theirs[1], theirs[2], target, **options)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12, equal_nan=True)
        slope = torch.randn_like(expected)
        found.backward(slope)
        expected.backward(slope)
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-11, atol=1e-11, equal_nan=True)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("kind", ["half", "autocast"])
def test_errors_in_half_precision_are_those_of_the_plain_form(kind: str, early: bool) -> None:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if kind == "half" else torch.float32
    given = [torch.randn(400, 32).to(dtype), (torch.randn(1000, 32) / 6).to(dtype)]
    target = torch.randint(1000, (400,))

    def error(function: Callable[[Tensor, Tensor], Tensor]) -> list[float]:
        leaves, exact = [t.clone().requires_grad_() for t in given], [t.double().requires_grad_() for t in given]
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
            loss = function(leaves[0], leaves[1])
        loss.backward()
        plain(exact[0], exact[1], None, target).backward()
        assert [t.grad.dtype for t in leaves if t.grad is not None] == [dtype, dtype]
        pairs = zip(leaves, exact, strict=True)
        return [float((a.grad - b.grad).norm()) for a, b in pairs if a.grad is not None and b.grad is not None]

    steps = (("to", torch.float32),)
    ours = error(lambda h, w: linear_cross_entropy(h, w, None, target, None, steps, 1, -100, 0.0, 64, early))
    theirs = error(lambda h, w: F.cross_entropy(F.linear(h, w).float(), target))
    assert ours[0] <= 1.01 * theirs[0]
    assert ours[1] <= 2 * theirs[1]  # a sum of seven chunks, each rounded


@pytest.mark.parametrize("early", [False, True])
def test_differentiable_twice(early: bool) -> None:
    target = torch.tensor([0, 2, 1, -100])
    given = [torch.randn(size, dtype=torch.float64, requires_grad=True) for size in ((4, 2), (3, 2), (3,))]

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        steps = (("mul", 2.0), ("tanh",))
        return linear_cross_entropy(hidden, weight, bias, target, None, steps, 1, -100, 0.1, 2, early)

    assert torch.autograd.gradcheck(loss, given)
    assert torch.autograd.gradgradcheck(loss, given)


def small(early: bool = True, fused: bool = False, class_weight: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
    """A loss of twenty rows, and the leaves that it is made of."""
    torch.manual_seed(0)
    hidden, weight, target = torch.randn(20, 4).requires_grad_(), torch.randn(9, 4).requires_grad_(), torch.arange(20)
    steps = ("to", torch.float32), ("mul", 3.0), ("tanh",)
    given = hidden, weight, None, target % 9, class_weight
    return linear_cross_entropy(*given, steps, 1, 2, 0.0, 8, early, fused), [hidden, weight]


def test_gradients_scale_with_that_of_the_loss_in_every_backward() -> None:
    loss, leaves = small()
    first = torch.autograd.grad(loss, leaves, torch.tensor(0.5), retain_graph=True)
    second = torch.autograd.grad(loss, leaves, torch.tensor(2.0))
    for once, again, mine in zip(first, second, torch.autograd.grad(*small(early=False)), strict=True):
        torch.testing.assert_close(once, 0.5 * mine)
        torch.testing.assert_close(again, 2.0 * mine)


def test_no_gradients_are_made_where_nobody_asks() -> None:
    with torch.no_grad(), Tracker("cpu") as tracker:
        small()
    before = tracker.peak
    with Tracker("cpu") as tracker:
        small()
    assert tracker.peak > before


def test_half_precision_that_is_scaled_later_does_not_vanish() -> None:
    """As a gradient of a mean over many rows would in float16."""
    hidden, weight = torch.full((4096, 1), 1e-3).half().requires_grad_(), torch.ones(2, 1).half().requires_grad_()
    target = torch.zeros(4096, dtype=torch.int64)
    given = hidden, weight, None, target, None, (("to", torch.float32),), 1, -100, 0.0, 512
    losses = [linear_cross_entropy(*given, early) for early in (True, False)]
    early, late = (torch.autograd.grad(loss * 2.0**14, weight)[0] for loss in losses)
    assert late.abs().max() > 0
    assert torch.equal(early, late)


@pytest.mark.parametrize("weighted", [False, True])
def test_compiled_in_pieces_it_computes_the_same(weighted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is on CUDA."""
    counter = counted_inductor(monkeypatch)
    fused._forward_of.cache_clear()
    monkeypatch.setattr(fused, "_compiles", lambda tensor: True)
    class_weight = torch.rand(9) if weighted else None
    ours, theirs = small(True, True, class_weight), small(False, False, class_weight)
    torch.testing.assert_close(ours[0], theirs[0])
    assert counter.frame_count == 2  # eight rows, then any number
    for mine, other in zip(torch.autograd.grad(*ours), torch.autograd.grad(*theirs), strict=True):
        torch.testing.assert_close(mine, other)
    with deterministic():
        small(True, True, class_weight)
    assert counter.frame_count == 2
    fused._forward_of.cache_clear()


def test_compiles_to_the_plain_form() -> None:
    torch.compiler.reset()
    hidden, weight, target = torch.randn(20, 4), torch.randn(9, 4), torch.arange(20) % 9
    compiled = torch.compile(linear_cross_entropy, backend="eager", fullgraph=True)
    found = compiled(hidden, weight, None, target, None, (), 1, -100, 0.0, 8)
    torch.testing.assert_close(found, plain(hidden, weight, None, target))


@pytest.mark.parametrize("amp", [None, torch.bfloat16], ids=["float32", "autocast"])
@pytest.mark.parametrize("trained", ["hidden weight bias", "hidden", "weight"])
@pytest.mark.parametrize("steps", [(("to", torch.float32), ("mul", 3.0), ("tanh",)), ()], ids=["capped", "plain"])
def test_compilers_have_it_as_one_operator_with_its_gradients(
    trained: str, amp: torch.dtype | None, steps: tuple[tuple[Any, ...], ...]
) -> None:
    """Bit for bit as it is without a compiler."""
    torch.manual_seed(0)
    target, class_weight = torch.arange(20) % 9, torch.rand(9)
    given = {name: torch.randn(size) for name, size in {"hidden": (20, 4), "weight": (9, 4), "bias": (9,)}.items()}
    leaves = [given[name].requires_grad_() for name in trained.split()]

    def loss() -> Tensor:
        head = given["hidden"], given["weight"], given["bias"]
        return 2.0 * linear_cross_entropy(*head, target, class_weight, steps, 1, 2, 0.1, 8, True)

    torch.compiler.reset()
    with torch.autocast("cpu", amp, enabled=amp is not None):
        ours, theirs = torch.compile(loss, backend="aot_eager", fullgraph=True)(), loss()
    assert torch.equal(ours, theirs)
    for mine, other in zip(torch.autograd.grad(ours, leaves), torch.autograd.grad(theirs, leaves), strict=True):
        assert torch.equal(mine, other)


def test_compiled_there_are_no_logits() -> None:
    rows, width, count = 512, 16, 4096

    class Head(nn.Linear):
        def forward(self, hidden: Tensor) -> Tensor:
            return linear_cross_entropy(
                *(hidden, self.weight, None, torch.arange(rows), None), (("to", torch.float32),), 1, -100, 0.0, 8, True
            )

    hidden = torch.randn(rows, width)
    assert compiled_bytes(Head(width, count), lambda head: head(hidden)).peak < rows * count * 4 / 2


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_memory_is_that_of_some_rows(frozen: bool) -> None:
    rows, width, count = 512, 16, 4096
    hidden, weight = torch.randn(rows, width).requires_grad_(), torch.randn(count, width).requires_grad_(not frozen)
    target = torch.zeros(rows, dtype=torch.int64)
    with Tracker("cpu") as tracker:
        linear_cross_entropy(hidden, weight, None, target, None, (), 1, -100, 0.0, 8).backward()
    logits = rows * count * 4
    assert tracker.peak < hidden.nbytes + (0 if frozen else 2 * weight.nbytes) + logits / 8


class Speaker(nn.Module):
    """A language model that gives its loss alone, with one weight for both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(400, 16), nn.Linear(16, 400, bias=False)
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)) for _ in range(1)))
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.body(self.embed(tokens))).float()
        return F.cross_entropy(logits.view(-1, 400), labels.view(-1))


class Spelled(Speaker):
    """The same by PyTorch's own function, which makes logits whole unless it is given another ``chunk``."""

    chunk: int | None = None

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        hidden = self.body(self.embed(tokens)).view(-1, 16)
        options = None if self.chunk is None else torch.nn.LinearCrossEntropyOptions(batch_chunk_size=self.chunk)
        loss: Tensor = F.linear_cross_entropy(hidden, self.head.weight, labels.view(-1), options=options)
        return loss


class InChunks(Spelled):
    chunk = 16


def planned(model: Callable[[], nn.Module] = Speaker, **options: Any) -> Any:
    torch.manual_seed(0)
    tokens = torch.randint(400, (32, 16))
    return memrewrite.optimize(model(), tokens, example_kwargs={"labels": tokens}, **options)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.LOWER, PASS.name, lambda *_: LinearCrossEntropy(elements=2**12))


@pytest.fixture(scope="module")
def lowest() -> int:
    """The lowest peak without it."""
    found: int = planned(budget="min", exact=True, verify=False).report.predicted_after.peak
    return found


@pytest.mark.parametrize("options", [{}, {"amp": "bf16"}, {"micro_batches": 2}], ids=["float32", "bf16", "batches"])
def test_a_budget_that_only_it_meets(options: dict[str, Any], lowest: int) -> None:
    report = planned(budget=lowest // 2, **options).report
    assert PASS.name in rewrites(report)
    assert report.equivalent
    assert report.predicted_after.peak <= lowest // 2


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="PyTorch has its own from 2.13 on")
def test_pytorchs_own_is_rewritten_or_kept(lowest: int) -> None:
    report = planned(Spelled, budget=lowest // 2).report
    assert PASS.name in rewrites(report)
    assert report.equivalent
    report = memrewrite.report_of(planned(InChunks, budget="min"))
    assert PASS.name not in rewrites(report)
    assert "_linear_cross_entropy_batch_chunked" in report.notes[0]
    assert report.predicted_after.peak < lowest


def test_it_is_for_what_nothing_else_reaches(lowest: int) -> None:
    assert PASS.name not in rewrites(planned(budget=lowest, verify=False).report)
    with pytest.raises(memrewrite.BudgetInfeasibleError):
        planned(budget=lowest // 2, exact=True)


def test_compiled_it_is_there_where_nothing_else_fits(lowest: int) -> None:
    assert PASS.name in rewrites(planned(budget=lowest // 2, compiled=True, verify=False).report)
    assert PASS.name not in rewrites(planned(budget=lowest, compiled=True, verify=False).report)


def test_without_a_budget_it_is_made_where_it_is_named() -> None:
    assert rewrites(planned(passes=[PASS.name], verify=False).report) == {PASS.name}
    for passes in (None, "all", ["checkpoint_segments"]):
        assert PASS.name not in rewrites(planned(passes=passes, verify=False).report)


@pytest.mark.parametrize(("with_it", "used"), [(5.0, True), (20.0, False)])
def test_it_is_for_what_takes_longer_without_it(
    with_it: float, used: bool, lowest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where segments are needed, and times are known."""

    def times(candidate: Candidate) -> tuple[float, float]:
        results = candidate.results
        return (with_it if PASS.name in results and results[PASS.name].applied else 10.0), 1.0

    monkeypatch.setattr(Candidate, "times", times)
    report = planned(budget=lowest, verify=False).report
    assert (PASS.name in rewrites(report)) == used
    assert report.predicted_after.peak <= lowest


@dataclass(frozen=True)
class Scaled(LinearCrossEntropy):
    """Adds the losses up where their mean was asked for, as accumulation that is counted twice would."""

    def rewrite(self, found: Found, early: bool) -> None:
        super().rewrite(replace(found, reduction=2), early)


def test_a_loss_that_is_scaled_wrongly_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.LOWER, PASS.name, lambda *_: Scaled(elements=2**12))
    with pytest.raises(NotEquivalentError):
        planned(budget="min")


def test_artifact_and_copies_have_it(tmp_path: Any) -> None:
    result = planned(budget="min")
    save(result, tmp_path / "out")
    torch.manual_seed(0)
    tokens = torch.randint(400, (32, 16))
    arrived = memrewrite.load(tmp_path / "out", Speaker())
    for other in (arrived, copy.deepcopy(result)):
        assert_same_bits(language_step(result, tokens), language_step(other, tokens))
