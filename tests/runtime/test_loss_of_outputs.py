"""A loop's own cross-entropy of logits that are not there makes some rows of them at a time, to the same gradients."""

import copy
import sys
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import memrewrite
from memrewrite.artifact.save import save
from memrewrite.runtime import cross_entropy, output_rows
from memrewrite.runtime.lazy_output import made_when_used
from memrewrite.runtime.linear_cross_entropy import linear_cross_entropy
from memrewrite.search import planning
from memrewrite.search.registry import NAMES

WORDS, WIDTH, ROWS, LENGTH = 400, 16, 8, 12
Loss = Callable[[Any], Tensor]
LABELS = torch.randint(WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
LABELS[0, :5] = -100
WEIGHTS = torch.linspace(0.5, 2, WORDS)
SPREAD = torch.linspace(0, 1, LENGTH)


def flat(logits: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), LABELS.flatten())


def shifted(logits: Any) -> Tensor:
    before = logits.float()[..., :-1, :].contiguous()
    return F.cross_entropy(before.view(-1, WORDS), LABELS[..., 1:].contiguous().view(-1))


IN_ROWS: dict[str, Loss] = {
    "flat": flat,
    "view": lambda o: F.cross_entropy(o.view(-1, o.size(-1)), LABELS.view(-1)),
    "reshape": lambda o: F.cross_entropy(o[:, :-1].reshape(-1, WORDS), LABELS[:, 1:].reshape(-1)),
    "module": lambda o: nn.CrossEntropyLoss()(torch.flatten(o, 0, 1), LABELS.flatten()),
    "shifted": shifted,
    "transpose": lambda o: F.cross_entropy(o.transpose(1, 2), LABELS),
    "some, moved": lambda o: F.cross_entropy(o[:, 1:].transpose(-1, -2), LABELS[:, :-1]),
    "permute": lambda o: F.cross_entropy(o.permute(0, 2, 1).contiguous(), LABELS, reduction="sum") / 7,
    "double": lambda o: F.cross_entropy(o.view(-1, WORDS).to(torch.float64), LABELS.view(-1)).float(),
    "none": lambda o: (F.cross_entropy(o.transpose(1, 2), LABELS, reduction="none") * SPREAD).mean(),
    "smooth": lambda o: F.cross_entropy(o.view(-1, WORDS), LABELS.view(-1), label_smoothing=0.1),
    "weights": lambda o: F.cross_entropy(o.view(-1, WORDS), LABELS.view(-1), WEIGHTS.to(o.dtype)),
    "ignored": lambda o: F.cross_entropy(o.view(-1, WORDS), LABELS.view(-1).clamp(min=0), ignore_index=3),
    "logarithms, too": lambda o: flat(o) + 1e-3 * torch.logsumexp(o[:, 1:].float(), dim=-1).square().mean(),
    "accuracy, too": lambda o: flat(o) * (o.detach().argmax(-1) != LABELS).float().mean(),
    "places, too": lambda o: (
        flat(o) * (o[:, 1:].detach().argmax(2, keepdim=True) != LABELS[:, 1:, None]).float().mean()
    ),
    "sizes": lambda o: F.cross_entropy(o.view(torch.Size((-1, WORDS))), LABELS.view(-1)),
    "listed": lambda o: F.cross_entropy(o[[1, 2]].permute([0, 2, 1]), LABELS[[1, 2]]),
    "some texts": lambda o: F.cross_entropy(o[[1, 2]].flatten(0, 1), LABELS[[1, 2]].flatten()),
    "last": lambda o: F.cross_entropy(o[:, -2:].reshape(-1, WORDS), LABELS[:, -2:].reshape(-1)),
    "two": lambda o: F.cross_entropy(o[:5].reshape(-1, WORDS), LABELS[:5].reshape(-1)) * 2 + flat(o),
}


def of_words(logs: Any, labels: Tensor) -> Tensor:
    """The logarithms of the probabilities of words, which a policy is trained by."""
    words: Tensor = torch.gather(logs, -1, labels.clamp(min=0)[..., None])
    return words.squeeze(-1)


def by_texts(logits: Any) -> Tensor:
    """As TRL and verl have it, with a temperature."""
    logits = (logits[:, :-1, :] / 0.7)[:, -8:, :]
    logs = of_words(logits, LABELS[:, -8:]) - torch.stack([torch.logsumexp(each, dim=-1) for each in logits])
    return ((logs.detach() - logs).exp() * SPREAD[-8:]).mean()


def by_texts_in_half(logits: Any) -> Tensor:
    texts = zip(logits.bfloat16(), LABELS, strict=True)
    return torch.stack([of_words(F.log_softmax(each, dim=-1), labels) for each, labels in texts]).float().mean()


IN_ROWS |= {
    "words": lambda o: -of_words(o[:, :-1].log_softmax(-1), LABELS[:, 1:]).mean(),
    "two words": lambda o: torch.log_softmax(o, 2).gather(2, LABELS.clamp(min=0)[..., None].expand(-1, -1, 2)).mean(),
    "words alone": lambda o: of_words(2.0 * o, LABELS).square().mean(),
    "by texts": by_texts,
    "by texts, in half": by_texts_in_half,
    "nll": lambda o: F.nll_loss(F.log_softmax(o.view(-1, WORDS), -1, dtype=torch.float32), LABELS.view(-1)),
    "scaled": lambda o: F.cross_entropy((o * 1.5).view(-1, WORDS) / 2, LABELS.view(-1)),
}


TEACHER = torch.randn(ROWS, LENGTH, WORDS, generator=torch.Generator().manual_seed(2))
SOFT, KNOWN = TEACHER.softmax(-1), LABELS >= 0


def in_place(logits: Any) -> Tensor:
    """As TRL's PPO and verl have it: of views of the logits, which are over a temperature from then on."""
    logits.mul_(2)
    logits = logits[:, 3:]
    logits /= 0.7 + 1e-7
    return of_words(logits[:, :-1].log_softmax(-1), LABELS[:, 4:]).square().mean()


def divergence(logits: Any) -> Tensor:
    student, teacher = F.log_softmax(logits / 2, -1), F.softmax(TEACHER.to(logits) / 2, -1)
    return F.kl_div(student, teacher, reduction="batchmean") * 4


def reverse(logits: Any) -> Tensor:
    student, teacher = F.log_softmax(logits, -1), F.log_softmax(TEACHER.to(logits), -1)
    return (student.exp() * (student - teacher)).sum(-1).mean()


def mixed(logits: Any) -> Tensor:
    """The divergence of Jensen and Shannon, as in TRL's GKD."""
    student, teacher = F.log_softmax(logits / 0.9, -1), F.log_softmax(TEACHER.to(logits) / 0.9, -1)
    beta = torch.tensor(0.3, dtype=student.dtype)
    mixture = torch.logsumexp(torch.stack([student + torch.log1p(-beta), teacher + torch.log(beta)]), dim=0)
    of_teacher = F.kl_div(mixture, teacher, reduction="none", log_target=True)
    of_student = F.kl_div(mixture, student, reduction="none", log_target=True)
    both = beta * of_teacher + (1 - beta) * of_student
    total: Tensor = both[KNOWN].sum() / KNOWN.sum()
    return total


def smoothed(logits: Any) -> Tensor:
    """As transformers' Trainer has it."""
    logs, missing = -logits.log_softmax(-1), ~KNOWN[..., None]
    words = logs.gather(-1, LABELS.clamp(min=0)[..., None]).masked_fill(missing, 0)
    every = logs.sum(dim=-1, keepdim=True, dtype=torch.float32).masked_fill(missing, 0)
    return 0.9 * words.mean() + 0.1 * every.mean() / WORDS


def categorical(logits: Any) -> Tensor:
    policy = torch.distributions.Categorical(logits=logits)
    return -(policy.log_prob(LABELS.clamp(min=0)) * SPREAD).mean() - 0.01 * policy.entropy().mean()


def entropy(logits: Any) -> Tensor:
    probabilities = F.softmax(logits, dim=-1)
    found: Tensor = torch.logsumexp(logits, dim=-1) - torch.sum(probabilities * logits, dim=-1)
    return flat(logits) - 0.01 * found.mean()


def best(logits: Any) -> Tensor:
    places = TEACHER.topk(5, -1).indices
    with torch.no_grad():
        shifted = logits - logits.max(-1, keepdim=True).values
        right = (logits[:, 1:].topk(3).indices == LABELS[:, 1:, None]).any(-1).float().mean()
        right += torch.isfinite(shifted).all() + shifted[KNOWN].mean()
    return (logits.softmax(-1).gather(-1, places).sum(-1) * right.to(logits)).mean()


def halves(logits: Any) -> Tensor:
    """As DPO has it."""
    chosen, rejected = (of_words(each.log_softmax(-1), LABELS[:4]).sum(-1) for each in logits.chunk(2))
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


def masked(logits: Any) -> Tensor:
    unused = torch.arange(WORDS) < 7
    logits = torch.where(unused, -1e9, logits).masked_fill(TEACHER > 2, -1e9)
    return (
        F.nll_loss(F.log_softmax(logits.squeeze(), -1).view(-1, WORDS)[:, :], LABELS.flatten(), reduction="sum") / 1e8
    )


IN_ROWS |= {
    "in place": lambda o: flat(o.mul_(0.5)),
    "views in place": in_place,
    "divergence": divergence,
    "reverse": reverse,
    "mixed": mixed,
    "smoothed": smoothed,
    "categorical": categorical,
    "entropy": entropy,
    "best": best,
    "masked": masked,
    "mask": lambda o: F.cross_entropy(o[KNOWN], LABELS[KNOWN]),
    "mask of rows": lambda o: F.cross_entropy(o[KNOWN, :], LABELS[KNOWN]),
    "places": lambda o: F.cross_entropy(o[torch.arange(ROWS), LABELS[:, -1] % LENGTH], LABELS[:, 2]),
    "words by places": lambda o: (
        -o.view(-1, WORDS).log_softmax(-1)[torch.arange(ROWS * LENGTH), LABELS.view(-1)].mean()
    ),
    "probabilities": lambda o: F.cross_entropy(o.view(-1, WORDS), TEACHER.view(-1, WORDS).softmax(-1).to(o)),
    "squares": lambda o: F.mse_loss(o, TEACHER.to(o)) + (o * torch.linspace(0.5, 1, ROWS)[:, None, None]).mean().to(o),
    "halves": halves,
    "in float32": lambda o: of_words(o.bfloat16().log_softmax(-1, torch.float32), LABELS).square().mean(),
    "keywords": lambda o: torch.logsumexp(input=o, dim=-1).mean() + torch.softmax(input=o, dim=-1).square().mean(),
}


def entropies(logits: Any) -> Tensor:
    """As TRL has it: of some rows at a time."""
    found = []
    for some in logits.reshape(-1, WORDS).split(16, dim=0):
        logs = F.log_softmax(some, dim=-1)
        found.append(-(torch.exp(logs) * logs).sum(-1))
    return torch.cat(found).reshape(logits.shape[:-1])


def by_texts_with_entropies(logits: Any) -> Tensor:
    logits = logits[:, :] / 0.7
    with torch.no_grad():
        weights = entropies(logits)
    return (of_words(logits.log_softmax(-1), LABELS) * weights).mean() * -1


class Squares(torch.autograd.Function):
    """Given an output by a call that no torch function sees."""

    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        ctx.save_for_backward(output * 1)
        return output.square().sum() * 1e-3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return ctx.saved_tensors[0] * 2e-3 * grad


def logarithms_before_a_write(logits: Any) -> Tensor:
    logs = logits.log_softmax(-1)
    logits.mul_(0.5)
    return logs.square().mean() + flat(logits)


def a_view_in_place(logits: Any) -> Tensor:
    view, other = logits[:, 1:], logits[:, :-1]
    view.div_(0.3)
    return view[:, 1:].logsumexp(-1).mean() + other.square().mean()


def without_a_gradient_in_place(logits: Any) -> Tensor:
    with torch.no_grad():
        logits.mul_(3)
    return flat(logits)


def written_then_read(logits: Any) -> Tensor:
    shifted = logits - TEACHER.to(logits)
    before, alias = shifted.exp(), shifted.detach()
    shifted.mul_(2)
    return before.mean() + (shifted * alias).mean() + logits.sin().mean()


MADE: dict[str, Loss] = {
    "other order": lambda o: F.cross_entropy(o.transpose(0, 1).reshape(-1, WORDS), LABELS.T.reshape(-1)),
    "other classes": lambda o: F.cross_entropy(o[..., :300].flatten(0, 1), LABELS.flatten().clamp(max=299)),
    "positions as classes": lambda o: F.cross_entropy(o, LABELS[:, :1].clamp(0, 3).expand(ROWS, WORDS)),
    "read, too": lambda o: flat(o) + 1e-3 * o.sin().mean(),
    "of columns": lambda o: o.logsumexp(1).mean() + o.transpose(1, 2).logsumexp(-1).mean() + o.argmax() * 0.0,
    "of a part": lambda o: o[:, 1:].float().square().mean(),
    "words by columns": lambda o: o.gather(1, LABELS.clamp(min=0)[:, :2, None] % LENGTH).sum() / 9,
    "logarithms by columns": lambda o: o.log_softmax(1).square().mean() + F.log_softmax(o, 0)[0].square().mean(),
    "logarithms of logarithms": lambda o: flat(o.log_softmax(-1)) + o.log_softmax(-1).square().mean() * 1e-3,
    "scaled by a tensor": lambda o: flat(o * torch.tensor(0.5)) + flat(torch.div(o, 2, rounding_mode=None)),
    "split by columns": lambda o: flat(torch.cat(o.split([100, 300], dim=-1)[::-1], -1)) + o.split(300, 2)[1].mean(),
    "moved": lambda o: (o.transpose(1, 2) * torch.arange(WORDS)[:, None]).mean(),
    "a view, in place": lambda o: flat(o) + a_view_in_place(o) + o.mean(),
    "without a gradient, in place": without_a_gradient_in_place,
    "unseen, in place": lambda o: Squares.apply(o.mul_(0.5)[:, 1:]),  # type: ignore[no-untyped-call]
    "unseen, of several": lambda o: Squares.apply(o.softmax(-1) - TEACHER.to(o)),  # type: ignore[no-untyped-call]
    "several, of columns": lambda o: torch.stack([o, o]).softmax(2).square().mean() + o.sum((0, 1)).square().mean(),
    "written, then read": written_then_read,
    "unseen, of logarithms": lambda o: Squares.apply(o.log_softmax(-1)),  # type: ignore[no-untyped-call]
    "logarithms before a write": lambda o: logarithms_before_a_write(o),
    "columns by places": lambda o: (
        o[LABELS[:, 5] % ROWS, -1].square().mean() + o[:, LABELS[0] % LENGTH].square().mean()
    ),
    "single numbers": lambda o: o[torch.tensor(1), torch.tensor(2)].square().mean() + o[(*torch.tensor([1, 2, 3]),)],
    "unseen": lambda o: Squares.apply(o[:, :-1].contiguous()),  # type: ignore[no-untyped-call]
}


class Speaker(nn.Module):
    """A language model that returns its logits, with a soft cap; words and head may have one weight."""

    def __init__(self, bias: bool = True, cap: float = 0.0, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.cap = nn.Embedding(WORDS, WIDTH), cap
        self.body: nn.Module = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.body(self.embed(tokens))))
        return torch.tanh(logits / self.cap) * self.cap if self.cap else logits


def tokens(rows: int = ROWS) -> Tensor:
    return torch.randint(WORDS, (rows, LENGTH), generator=torch.Generator().manual_seed(0))


def speaker(**options: Any) -> Speaker:
    torch.manual_seed(0)
    return Speaker(**options)


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "_LEAST_LOGITS", 2**11)


def lazy(model: nn.Module, loss: Loss = flat, **options: Any) -> Any:
    result = memrewrite.optimize(model, tokens(), loss_fn=loss, returns="lazy", **options)
    with torch.autocast("cpu", torch.bfloat16, enabled=options.get("amp") is not None):
        assert made_when_used(type(result(tokens())))
    return result


def gradients(model: nn.Module, loss: Loss) -> list[Tensor]:
    model.zero_grad()
    found = loss(model(tokens()))
    found.backward()
    return [found.detach().double(), *(p.grad.double() for p in model.parameters() if p.grad is not None)]


def assert_as_near(result: nn.Module, original: nn.Module, loss: Loss) -> None:
    """No further from float64 than twice what the original is."""
    exact = gradients(copy.deepcopy(original).double(), loss)
    for ours, theirs, true in zip(gradients(result, loss), gradients(original, loss), exact, strict=True):
        assert (ours - true).norm() <= 2 * (theirs - true).norm() + 1e-7 * true.norm()


@pytest.fixture(scope="module")
def results() -> dict[str, tuple[Any, nn.Module]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cross_entropy, "_LEAST_LOGITS", 2**11)
        heads: dict[str, dict[str, Any]] = {"bias": {}, "cap": {"bias": False, "cap": 5.0}, "tied": {"tied": True}}
        return {name: (lazy(speaker(**options)), speaker(**options)) for name, options in heads.items()}


@pytest.mark.parametrize("head", ["bias", "cap", "tied"])
@pytest.mark.parametrize("loss", IN_ROWS)
def test_the_loss_of_a_loop_makes_some_rows(results: Any, head: str, loss: str) -> None:
    result, original = results[head]
    with warnings.catch_warnings():
        warnings.simplefilter("error", memrewrite.LazyOutputWarning)
        assert_as_near(result, original, IN_ROWS[loss])


@pytest.mark.filterwarnings("ignore::memrewrite.LazyOutputWarning")
@pytest.mark.parametrize("head", ["bias", "tied"])
@pytest.mark.parametrize("loss", MADE)
def test_whatever_else_asks_for_logits_finds_them(results: Any, head: str, loss: str) -> None:
    result, original = results[head]
    assert_as_near(result, original, MADE[loss])


class Sizes(TorchDispatchMode):
    """Notes how many numbers there are in what each operator makes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.of: dict[str, set[int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = {leaf.numel() for leaf in tree_leaves(result) if type(leaf) is Tensor and not leaf.is_meta}
        self.of.setdefault(str(func), set()).update(made)
        return result


def sizes_of(model: nn.Module) -> dict[str, set[int]]:
    with Sizes() as seen:
        flat(model(tokens())).backward()
    return seen.of


@pytest.mark.filterwarnings("ignore::memrewrite.LazyOutputWarning")
def test_entropies_make_some_rows_too(results: Any) -> None:
    result, original = results["bias"]
    assert_as_near(result, original, by_texts_with_entropies)
    with Sizes() as seen:
        by_texts_with_entropies(result(tokens())).backward()
    assert max(set().union(*seen.of.values())) == 16 * WORDS


@pytest.mark.parametrize("loss", ["entropy", "smoothed", "categorical", "in place", "views in place", "halves", "mask"])
def test_nothing_of_the_size_of_logits_is_made(results: Any, loss: str) -> None:
    """Nor of what is made of them, without any tensor of a teacher's beside it; views of a value are as large."""
    with Sizes() as seen:
        IN_ROWS[loss](results["bias"][0](tokens())).backward()
    made = {size for name, sizes in seen.of.items() if "expand" not in name for size in sizes}
    assert max(made) <= ROWS * LENGTH * WORDS // 4


@pytest.mark.filterwarnings("ignore::memrewrite.LazyOutputWarning")
def test_what_is_made_of_an_output_has_its_bits_when_it_is_read(results: Any) -> None:
    def read(model: Any) -> list[Any]:
        output = model(tokens())
        logs = output.log_softmax(-1)
        found = [
            logs * logs.exp(),
            (output / 0.7 - TEACHER).softmax(-1)[:, 1:],
            F.kl_div(logs, SOFT, reduction="none"),
        ]
        found += [output > TEACHER, output[KNOWN], torch.stack([logs, TEACHER]).logsumexp(0), logs.double()]
        return [*found, *output.max(-1), output.topk(3).values]

    for ours, theirs in zip(*map(read, results["bias"]), strict=True):
        assert (ours.dtype, ours.requires_grad) == (theirs.dtype, theirs.requires_grad)
        assert torch.equal(ours + 0, theirs)


def test_nothing_is_made_of_a_tensor_that_was_written_since(results: Any) -> None:
    teacher = TEACHER.softmax(-1)
    product = results["bias"][0](tokens()).log_softmax(-1) * teacher
    teacher.zero_()
    with pytest.raises(RuntimeError, match="cannot be made any more: what was computed with it was written since"):
        product.sum(-1)


def test_nothing_stays_of_what_was_made_of_an_output(results: Any) -> None:
    output = results["bias"][0](tokens())
    output /= 2
    logs = output.log_softmax(-1)
    beside = TEACHER + 0
    kept, product = weakref.ref(beside), logs * beside
    product.detach().sum(-1)
    (product[:, 1:] + logs[:, 1:]).sum().backward()
    del beside, product
    assert kept() is None


def test_a_loss_keeps_nothing_once_backward_is_through(results: Any) -> None:
    output, beside = results["bias"][0](tokens()), TEACHER + 0
    kept, loss = weakref.ref(beside), (output.log_softmax(-1) * beside).sum(-1).mean()
    del output, beside
    assert kept() is not None
    loss.backward()
    assert kept() is None


def test_the_logits_of_a_teacher_are_not_there_either(results: Any) -> None:
    def loss(model: Any) -> Tensor:
        with torch.no_grad():
            teacher = model(tokens().flip(0))
            several = (teacher[1:] - TEACHER[1:]).softmax(-1).sum(-1)
        student, soft = F.log_softmax(model(tokens()) / 2, -1), F.softmax(teacher / 2, -1)
        return F.kl_div(student, soft, reduction="batchmean") + several.mean()

    result, original = results["bias"]
    with Sizes() as seen:
        ours = loss(result)
        ours.backward()
    torch.testing.assert_close(ours, loss(original))
    assert max(set().union(*seen.of.values())) == TEACHER[1:].numel()


def test_no_operator_makes_more_than_a_quarter_of_the_logits(results: Any) -> None:
    assert max(set().union(*sizes_of(results["bias"][0]).values())) == ROWS * LENGTH * WORDS // 4


def test_words_and_a_head_of_one_weight_have_one_gradient(results: Any) -> None:
    one, others = results["tied"][0], [name for name in NAMES if name != "tied_embeddings"]
    two = lazy(speaker(tied=True), passes=others)
    made = [max(sizes_of(model)["aten.embedding_dense_backward.default"]) for model in (one, two)]
    assert made[0] < made[1] == WORDS * WIDTH
    for ours, theirs in zip(gradients(one, flat), gradients(two, flat), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("loss", ["flat", "words", "by texts"])
def test_a_loss_outside_of_autocast_of_logits_that_were_cast(loss: str) -> None:
    """As in the loops of accelerate, which casts what a model gives under autocast."""

    def found(model: nn.Module) -> list[Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(tokens())
        IN_ROWS[loss](logits.float()).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    result, original = lazy(speaker(), amp="bf16"), speaker()
    with warnings.catch_warnings():
        warnings.simplefilter("error", memrewrite.LazyOutputWarning)
        ours = found(result)
    for mine, theirs in zip(ours, found(original), strict=True):
        assert (mine - theirs).norm() <= 0.02 * theirs.norm()


@pytest.mark.filterwarnings("ignore::memrewrite.LazyOutputWarning")
def test_logarithms_that_are_read_outside_of_autocast_have_the_type_that_they_had_there() -> None:
    def read(model: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logs: Any = model(tokens()).log_softmax(-1)
        result: Tensor = logs.exp()
        return result

    ours, theirs = read(lazy(speaker(), amp="bf16")), read(speaker())
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs)


@pytest.mark.filterwarnings("ignore::memrewrite.LazyOutputWarning")
def test_what_is_written_in_place_is_seen_through_views_and_not_in_copies(results: Any) -> None:
    def written(model: Any) -> list[Tensor]:
        output = model(tokens())
        views = output[:, :-1], output.view(-1, WORDS)
        copies = output[:, :-1].contiguous(), output.half(), output[:, 1:].reshape(-1, WORDS)
        with torch.no_grad():
            output.mul_(2)
        return [*views, *copies, F.cross_entropy(views[1], LABELS.flatten())]

    for ours, theirs in zip(written(results["bias"][0]), written(results["bias"][1]), strict=True):
        assert torch.equal(ours.detach() + 0, theirs.detach())


@pytest.mark.filterwarnings("ignore::memrewrite.LazyOutputWarning")
def test_a_gradient_is_where_the_original_has_one(results: Any) -> None:
    def without(model: nn.Module) -> list[Any]:
        output = model(tokens())
        with torch.no_grad():
            unasked, view, part = model(tokens()), output.view(-1, WORDS), output[:, 1:].contiguous()
        view_of_none = unasked.view(-1, WORDS), unasked[:, 1:].detach().argmax(-1)
        losses = [flat(unasked), flat(output.detach()), F.cross_entropy(view, LABELS.flatten()), unasked.logsumexp(-1)]
        losses += [flat(output[:].detach()), F.cross_entropy(part.transpose(1, 2), LABELS[:, 1:]), *view_of_none]
        return [losses, *(loss.requires_grad for loss in losses)]

    ours, theirs = map(without, results["bias"])
    assert ours[1:] == theirs[1:] == [False, False, True, *[False] * 5]
    for mine, other in zip(ours[0], theirs[0], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=0)


def test_no_loss_is_made_of_weights_that_a_step_has_changed(results: Any) -> None:
    model = copy.deepcopy(results["bias"][0])
    output = model(tokens())
    logs = output.log_softmax(-1)
    flat(output).backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    asked: list[Callable[[], Any]] = [lambda: flat(output), lambda: output.max(-1), lambda: (logs * 2).sum()]
    asked += [lambda: F.kl_div(logs, SOFT, reduction="sum"), lambda: logs.sin(), lambda: output[KNOWN].mean()]
    for ask in asked:
        with pytest.raises(RuntimeError, match=r"cannot be made any more: head\.weight was written since"):
            ask()


def test_no_loss_is_made_of_weights_that_were_freed() -> None:
    model = lazy(speaker())
    output = model(tokens())
    model.head.weight.untyped_storage().resize_(0)  # as FSDP does where reshard_after_forward=True
    with pytest.raises(RuntimeError, match=r"cannot be made any more: head\.weight was freed since"):
        flat(output)


def of_logits(ask: Callable[[Any, Tensor], Any], model: nn.Module) -> Any:
    output = model(tokens())
    return ask(output, flat(output.float()))


LATE: dict[str, Callable[[Any, Tensor], Any]] = {
    "grad": lambda output, loss: torch.autograd.grad(loss, output),
    "retain_grad": lambda output, loss: output.retain_grad(),
    "hook": lambda output, loss: output.register_hook(print),
}
EARLIER: dict[str, Callable[[Any], Any]] = {
    "a loss": lambda output: flat(output.float()),
    "probabilities": lambda output: output.softmax(-1),
    "logarithms": lambda output: output.log_softmax(-1) * TEACHER,
    "rows": lambda output: output[KNOWN],
}


@pytest.mark.parametrize("ask", LATE)
def test_gradients_of_logits_that_were_asked_for_too_late(results: Any, ask: str) -> None:
    with pytest.raises(RuntimeError, match=r"was asked for after its loss, .* made some rows at a time: ask"):
        of_logits(LATE[ask], results["bias"][0])
    of_logits(LATE[ask], results["bias"][1])


@pytest.mark.parametrize("made", EARLIER)
def test_gradients_of_logits_are_not_asked_for_once_something_is_made_of_rows(results: Any, made: str) -> None:
    """Which a loss may be made of, that no gradient comes through to them."""
    output = results["bias"][0](tokens())
    kept = EARLIER[made](output)
    with pytest.raises(RuntimeError, match=r"was asked for after its loss, or what leads to that, which is made some"):
        output.retain_grad()
    assert kept.requires_grad


@pytest.mark.filterwarnings("ignore::memrewrite.LazyOutputWarning")
def test_gradients_of_logits_that_were_asked_for_before(results: Any) -> None:
    found = []
    for model in results["bias"]:
        output = model(tokens())
        output.retain_grad()
        flat(output).backward()
        found.append(output.grad)
    assert torch.equal(*found)


@pytest.mark.parametrize("amp", [None, "bf16"])
def test_the_lowest_peak_is_that_without_logits(amp: Any) -> None:
    logits = ROWS * LENGTH * WORDS * 4
    result = lazy(speaker(), shifted, budget="min", amp=amp)
    report = memrewrite.report_of(result)
    assert report.equivalent
    assert "computes row by row makes some rows of it at a time" in report.notes[-1]
    assert report.predicted_after.peak <= report.predicted_before.peak - logits
    measured = memrewrite.measure(result, tokens(), loss_fn=shifted, amp=amp, steps=1)
    assert measured.peak == report.predicted_after.peak


def test_a_loss_of_rows_that_is_wrong_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_rows, "linear_cross_entropy", lambda *given: linear_cross_entropy(*given) * 1.001)
    with pytest.raises(memrewrite.NotEquivalentError):
        lazy(speaker())


@pytest.mark.parametrize(("rows", "length"), [(4, LENGTH), (2, 4), (2, 2)])
def test_fewer_texts_make_rows_too(rows: int, length: int) -> None:
    """Whole, the logits of fewer texts would take more than those of all take by rows."""
    labels = LABELS[-rows:, :length].flatten()
    original: Any = speaker()
    result = lazy(speaker(), budget="min", strict=True)
    given = tokens(rows)[:, :length]
    assert made_when_used(type(result(given)))
    for model in (result, original):
        model.zero_grad()
        logits = model(given)
        best = logits.detach().argmax(-1)
        (F.cross_entropy(logits.flatten(0, 1), labels) * (best.flatten() != labels).float().mean()).backward()
    for mine, theirs in zip(result.parameters(), original.parameters(), strict=True):
        assert (mine.grad - theirs.grad).norm() <= 1e-6 * theirs.grad.norm()


@pytest.mark.filterwarnings("error::memrewrite.LazyOutputWarning")
@pytest.mark.parametrize("strict", [False, True])
def test_a_loss_that_reads_logits_too_is_planned_with_them(strict: bool) -> None:
    """Nothing is to be told of them then, while it is planned and in the loop; they are there until backward alone."""

    def loss(logits: Tensor) -> Tensor:
        with torch.no_grad():
            best = logits.topk(2).indices
        return flat(logits) * (best == LABELS[..., None]).any(-1).float().mean()

    original = speaker()
    original.body = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))
    result = lazy(copy.deepcopy(original), loss, budget="min", strict=strict)
    assert_as_near(result, original, loss)
    assert_as_near(copy.deepcopy(result), original, loss)
    report, measured = memrewrite.report_of(result), memrewrite.measure(result, tokens(), loss_fn=loss, steps=1)
    assert report.predicted_after.peak == measured.peak
    assert measured.peak < report.predicted_before.peak


@pytest.mark.parametrize("options", [{"exact": True}, {"passes": ["checkpoint_segments"]}], ids=["exact", "passes"])
def test_it_is_refused_where_it_may_not_change_the_arithmetic(options: dict[str, Any]) -> None:
    with pytest.raises(memrewrite.UsageError, match=r"rows of at a time \(not with exact=True\); this one"):
        lazy(speaker(), **options)


@pytest.mark.filterwarnings("ignore::memrewrite.LazyOutputWarning")
def test_another_loss_leaves_the_model_as_it_is() -> None:
    model: nn.Module = speaker()
    result: nn.Module = memrewrite.optimize(model, tokens(), loss_fn=MADE["other order"], returns="lazy")
    assert result is model
    (note,) = memrewrite.report_of(result).notes
    assert note.startswith("returns='lazy' has no effect: the step would take more so")


def test_a_few_logits_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    result = memrewrite.optimize(speaker(), tokens(), loss_fn=flat, returns="lazy", budget="min")
    assert memrewrite.report_of(result).notes[-1].startswith("returns='lazy' has no effect: what its loss is made of")
    assert type(result(tokens())) is Tensor


@pytest.mark.parametrize(
    ("options", "how"),
    [
        ({}, "((), 512, False)"),
        ({"device": "cuda"}, "((), 512, False)"),
        ({"device": "cuda", "passes": "all"}, "((), 512, True)"),
    ],
    ids=str,
)
def test_rows_are_many_and_compiled_for_cuda_on_request(tmp_path: Path, options: Any, how: str) -> None:
    result = memrewrite.optimize(speaker(), tokens(), loss_fn=flat, returns="lazy", verify=False, **options)
    save(result, tmp_path / "artifact")
    (line,) = [line for line in (tmp_path / "artifact/memrewrite_model.py").read_text().splitlines() if how in line]
    assert "lazy_output(" in line


def test_rows_are_few_where_many_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "_WIDE", 0)
    few = memrewrite.report_of(lazy(speaker(), budget="min")).predicted_after.peak
    monkeypatch.setattr(planning, "_WIDE", 512)
    wide = memrewrite.report_of(lazy(speaker())).predicted_after.peak
    assert few < wide
    assert memrewrite.report_of(lazy(speaker(), budget=few)).predicted_after.peak <= few


def test_an_artifact_makes_rows_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = lazy(speaker(), budget="min")
    save(result, tmp_path / "artifact")
    applied = memrewrite.load(tmp_path / "artifact", speaker())
    monkeypatch.setattr(sys.modules[type(applied(tokens())).__module__], "_LEAST_LOGITS", 2**11)
    for ours, theirs in zip(gradients(applied, flat), gradients(result, flat), strict=True):
        assert torch.equal(ours, theirs)
