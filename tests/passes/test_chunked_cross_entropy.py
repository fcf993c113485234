"""Every spelling of cross-entropy is rewritten bit for bit; what the chunked form is not for is refused."""

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import memrewrite
from memrewrite.passes.chunked_cross_entropy import ChunkedCrossEntropy, Found
from memrewrite.records.errors import BudgetInfeasibleError, NotEquivalentError
from memrewrite.runtime.cross_entropy import chunked_cross_entropy, rows_of, too_few
from memrewrite.search import registry
from memrewrite.simulate.memory.tracker import Tracker
from memrewrite.targets.cuda_kernels import as_cuda
from memrewrite.torch_internals.fake_tensors import FakeTensorMode
from tests.passes.helpers import (
    FRONT_ENDS,
    WIDTH,
    Around,
    assert_same_bits,
    example,
    functional,
    numbers,
    rewrite,
    saved_storages,
    targets,
)

Function = Callable[[Any, Tensor], Any]
ROWS = 20
PASS = ChunkedCrossEntropy(elements=2 * WIDTH)  # 8 rows at a time


def classes(h: Tensor) -> Tensor:
    return torch.arange(h.shape[0]) % WIDTH


def language_model(m: Any, h: Tensor) -> Any:
    """As transformers computes it: half-precision logits of sequences are returned beside the loss."""
    logits = h.bfloat16().view(4, -1, WIDTH)
    labels = F.pad(classes(h).view(4, -1), (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(logits.float().view(-1, WIDTH), labels.view(-1), ignore_index=-100), logits


def overwritten(m: Any, h: Tensor) -> Any:
    half = h.bfloat16()
    wide = half.float()
    half.mul_(2)
    return F.cross_entropy(wide, classes(h)), half


SPELLINGS: dict[str, Function] = {
    "functional": lambda m, h: F.cross_entropy(h, classes(h)),
    "named": lambda m, h: F.cross_entropy(input=h, target=classes(h), ignore_index=2),
    "sum": lambda m, h: F.cross_entropy(h, classes(h), reduction="sum"),
    "no reduction": lambda m, h: F.cross_entropy(h, classes(h), reduction="none", ignore_index=0),
    "module": lambda m, h: nn.CrossEntropyLoss(ignore_index=1)(h, classes(h)),
    "logits returned": lambda m, h: (F.cross_entropy(h, classes(h)), h),
    "half": lambda m, h: F.cross_entropy(h.half(), classes(h)),
    "language model": language_model,
}
CASTS: dict[str, Function] = {  # which become part of it
    "float": lambda m, h: F.cross_entropy(h.bfloat16().float(), classes(h)),
    "to": lambda m, h: F.cross_entropy(h.half().to(torch.float32).reshape(-1, WIDTH), classes(h)),
    "language model": language_model,
}
TRAPS: dict[str, tuple[Function, str]] = {
    "weights": (lambda m, h: F.cross_entropy(h, classes(h), m.betas.detach()), "It has class weights"),
    "smoothing": (lambda m, h: F.cross_entropy(h, classes(h), label_smoothing=0.1), "It has label smoothing"),
    "probabilities": (lambda m, h: F.cross_entropy(h, h.detach().softmax(1)), "not one class index"),
    "images": (lambda m, h: F.cross_entropy(h.view(2, WIDTH, -1), torch.zeros(2, 10).long()), "not one class index"),
    "few": (lambda m, h: F.cross_entropy(h[:3], classes(h)[:3]), "Its 18 logits are too few"),
}


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_keeps_every_bit(spelling: str, front_end: str) -> None:
    model, x = Around(SPELLINGS[spelling]), example(ROWS)
    graph_module, result = functional(model, x, PASS, front_end)
    assert len(result.applied) == 1
    assert "chunked_cross_entropy" in targets(graph_module)
    assert_same_bits(numbers(graph_module, x, model), numbers(model, x, model))


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("spelling", CASTS)
def test_a_cast_of_the_logits_is_made_in_chunks(spelling: str, front_end: str) -> None:
    model, x = Around(CASTS[spelling]), example(ROWS)
    graph_module, _ = functional(model, x, PASS, front_end)
    (call,) = (node for node in graph_module.graph.nodes if node.target is chunked_cross_entropy)
    assert call.args[2] == torch.float32
    kept = sum(saved_storages(graph_module, x, model))
    assert kept == ROWS * (WIDTH + 3) + 1  # the logits; per row what was chosen, of which class, whether; their number
    assert "chunked_cross_entropy" not in targets(functional(model, x, ChunkedCrossEntropy(), front_end)[0])


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("trap", TRAPS)
def test_refused(trap: str, front_end: str) -> None:
    function, reason = TRAPS[trap]
    graph_module, result = functional(Around(function), example(ROWS), PASS, front_end)
    assert chunked_cross_entropy not in [node.target for node in graph_module.graph.nodes]
    assert [reason in refused.reason for refused in result.refused] == [True]


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_logits_that_are_overwritten_before_the_loss_keep_their_cast(front_end: str) -> None:
    _, result = rewrite(Around(overwritten), example(ROWS), [PASS], front_end)
    assert ["writes a tensor of the pattern" in refused.reason for refused in result.refused] == [True]


DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("ignore_index", [-100, 3, 0])
def test_the_bits_of_cross_entropy(dtype: torch.dtype, reduction: str, ignore_index: int) -> None:
    number = ("none", "mean", "sum").index(reduction)
    torch.manual_seed(0)
    for rows, width, wide in itertools.product((0, 1, 7, 37, 500), (1, 5, 97, 1025), (None, torch.float32)):
        target = torch.randint(width, (rows,))
        target[torch.rand(rows) < 0.3] = ignore_index
        plain = (3 * torch.randn(rows, width)).to(dtype).requires_grad_()
        chunked = plain.detach().clone().requires_grad_()
        expected = F.cross_entropy(plain.to(wide), target, ignore_index=ignore_index, reduction=reduction)
        found = chunked_cross_entropy(chunked, target, wide, number, ignore_index, 8)
        slope = torch.randn_like(expected)
        expected.backward(slope)
        found.backward(slope)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(chunked.grad, plain.grad, rtol=0, atol=0, equal_nan=True)


DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("amp", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_autocast_does_to_it_what_it_does_to_cross_entropy(
    reduction: str, dtype: torch.dtype, amp: torch.dtype | None, device: str
) -> None:
    """CUDA's does not cast the logits of cross-entropy, the CPU's does; backward runs outside of it."""
    number = ("none", "mean", "sum").index(reduction)
    torch.manual_seed(0)
    for rows, width in ((20, 9), (500, 1025), (100, 50257)):
        target = torch.randint(width, (rows,), device=device)
        target[::7] = -100
        plain = (3 * torch.randn(rows, width, device=device)).to(dtype).requires_grad_()
        chunked = plain.detach().clone().requires_grad_()
        with torch.autocast(device, amp, enabled=amp is not None):
            expected = F.cross_entropy(plain, target, reduction=reduction)
            found = chunked_cross_entropy(chunked, target, None, number, -100, 16)
        slope = torch.randn_like(expected)
        expected.backward(slope)
        with torch.autocast(device, torch.bfloat16):
            found.backward(slope)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        torch.testing.assert_close(chunked.grad, plain.grad, rtol=0, atol=0)


class Logarithms(Tracker):
    """Notes the types in which softmax is made."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func is torch.ops.aten._log_softmax.default:
            self.begin(str(result.dtype), "")
        return result

    @property
    def dtype(self) -> str:
        """The last of them."""
        return self._label


@pytest.mark.parametrize(("cuda", "dtype"), [(True, "torch.bfloat16"), (False, "torch.float32")], ids=["cuda", "cpu"])
def test_a_step_planned_for_cuda_takes_the_logarithms_in_half_precision(cuda: bool, dtype: str) -> None:
    logits, target = torch.empty(64, 32, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.int64)
    with FakeTensorMode() as mode, as_cuda() if cuda else nullcontext(), Logarithms("cpu") as seen:
        fake = mode.from_tensor(logits).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            loss = chunked_cross_entropy(fake, mode.from_tensor(target), None, 1, -100, 8)
        assert (loss.dtype, seen.dtype) == (torch.float32, dtype)
        seen.begin("none", "")
        loss.backward()
        assert seen.dtype == dtype


def test_differentiable_twice() -> None:
    target = torch.tensor([0, 2, 1, -100])
    logits = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)

    def loss(values: Tensor) -> Tensor:
        return chunked_cross_entropy(values, target, None, 1, -100, 8)

    assert torch.autograd.gradcheck(loss, (logits,))
    assert torch.autograd.gradgradcheck(loss, (logits,))


def test_a_class_that_is_none_is_an_error() -> None:
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        chunked_cross_entropy(torch.randn(2, 3), torch.tensor([0, 3]), None, 1, -100, 8)


def test_compiles_to_the_plain_form() -> None:
    torch.compiler.reset()
    logits, target = torch.randn(20, 9), torch.arange(20) % 9
    compiled = torch.compile(chunked_cross_entropy, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(logits, target, None, 1, -100, 8), F.cross_entropy(logits, target))


def test_memory_beside_the_logits_and_their_gradient_is_that_of_some_rows() -> None:
    rows, width = 512, 1024
    logits = torch.randn(rows, width).requires_grad_()
    with Tracker("cpu") as tracker:
        chunked_cross_entropy(logits, torch.zeros(rows, dtype=torch.int64), None, 1, -100, 8).backward()
    assert tracker.peak < logits.nbytes * 2.1  # themselves, the gradient and little else; the plain form takes four


@pytest.mark.parametrize(("logits", "parts"), [(2**21, 1), (2**22, 4), (2**24, 16), (2**28, 16), (2**30, 64)])
def test_logits_are_made_in_sixteen_parts_unless_these_are_small_or_large(logits: int, parts: int) -> None:
    assert (1 if too_few(logits) else logits / rows_of(logits, 1)) == parts


class Speaker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(200, 16), nn.Linear(16, 200)

    def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.embed(tokens))
        return F.cross_entropy(logits.view(-1, 200), labels.view(-1)), logits


def test_optimize_uses_it_where_the_step_would_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.SLOWER, PASS.name, lambda: ChunkedCrossEntropy(elements=2**10))
    torch.manual_seed(0)
    model, tokens = Speaker(), torch.randint(200, (32, 16))
    arguments: dict[str, Any] = {"example_kwargs": {"labels": tokens}, "loss_fn": lambda output: output[0]}

    def rewrites(**options: Any) -> list[str]:
        found = memrewrite.optimize(model, tokens, **arguments, **options).report
        assert found.verdict.startswith("bit-equal")
        return [name for name, _, _ in found.rewrites]

    assert PASS.name in rewrites(budget="70%", exact=True)
    assert PASS.name not in [name for name, _, _ in memrewrite.optimize(model, tokens, **arguments).report.rewrites]
    with pytest.raises(BudgetInfeasibleError):
        rewrites(budget="70%", passes=("checkpoint_segments",))


@dataclass(frozen=True)
class Off(ChunkedCrossEntropy):
    """It says that it is exact, and is off by a unit in the last place."""

    def rewrite(self, found: Found) -> None:
        graph = found.root.graph
        with graph.inserting_after(found.root):
            off = graph.call_function(torch.ops.aten.mul.Tensor, (found.root, 1 + 2**-23))
        off.meta = dict(found.root.meta)
        found.root.replace_all_uses_with(off, delete_user_cb=lambda user: user is not off)
        super().rewrite(found)


def test_what_turns_out_not_to_be_exact_is_judged_against_float64(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(registry.SLOWER, PASS.name, lambda: Off(elements=2**10))
    torch.manual_seed(0)
    model, tokens = Speaker(), torch.randint(200, (32, 16))
    arguments: dict[str, Any] = {"example_kwargs": {"labels": tokens}, "loss_fn": lambda output: output[0].float()}
    report = memrewrite.optimize(model, tokens, **arguments, budget="75%").report
    assert PASS.name in [name for name, _, _ in report.rewrites]
    assert report.verdict.startswith("equivalent: worst")
    assert not all(check.bit_equal == check.count for check in report.checks)
    with pytest.raises(NotEquivalentError):
        memrewrite.optimize(model, tokens, **arguments, budget="75%", exact=True)
