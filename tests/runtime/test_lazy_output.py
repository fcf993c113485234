"""An output that is made when it is first used: what asks for its numbers gets those of the model, with a gradient."""

import copy
import io
import pickle
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import memrewrite
from memrewrite.passes.linear_cross_entropy import LinearCrossEntropy
from memrewrite.runtime.lazy_output import made_when_used
from memrewrite.search import registry

WORDS, WIDTH, ROWS = 200, 16, 8
QUIET = pytest.mark.filterwarnings(
    "ignore::memrewrite.LazyOutputWarning",
    "ignore:Dynamo does not know how to trace:UserWarning",
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
)


class Speaker(nn.Module):
    """A language model that returns its loss, its logits and what these are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Any:
        hidden = torch.tanh(self.embed(tokens))
        logits = self.head(hidden)
        loss = F.cross_entropy(logits.view(-1, WORDS), tokens.view(-1))
        return {"loss": loss, "logits": logits, "hidden": hidden}


def tokens() -> Tensor:
    return torch.randint(WORDS, (ROWS, 16), generator=torch.Generator().manual_seed(0))


def speaker() -> Speaker:
    torch.manual_seed(0)
    return Speaker()


def lazy(**options: Any) -> Any:
    result = memrewrite.optimize(speaker(), tokens(), returns="lazy", **options)
    assert made_when_used(type(result(tokens())["logits"]))
    return result


@pytest.fixture(scope="module")
def planned() -> Any:
    """One drop-in for all tests that leave it as it is."""
    return lazy()


def both(planned: Any) -> tuple[Any, Any]:
    """The original and the drop-in, without gradients."""
    planned.zero_grad()
    return speaker(), planned


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def written(logits: Tensor) -> Tensor:
    logits.div_(2)
    logits.view(-1)[3] = 0
    logits[0, 1] += 2
    return logits


def cast_then_written(logits: Tensor) -> Tensor:
    cast = logits.double()
    logits.mul_(3)
    return cast + logits


def written_by_another_name(logits: Tensor) -> Tensor:
    logits.detach().mul_(3)
    return logits


def copied(logits: Tensor) -> Tensor:
    return torch.empty(logits.shape).copy_(logits.detach())


def saved(logits: Tensor) -> Any:
    file = io.BytesIO()
    torch.save(logits, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


USES: dict[str, Callable[[Tensor], Any]] = {
    "argmax": lambda y: y.argmax(-1),
    "float": lambda y: y.float().sin().sum(),
    "cpu": lambda y: y.cpu(),
    "numpy": lambda y: torch.from_numpy(np.asarray(y.detach())),
    "list": lambda y: torch.tensor(y.tolist()),
    "text": lambda y: repr(y.detach()),
    "format": lambda y: f"{y.mean():.6f}",
    "item": lambda y: y[0, 0, 0].item(),
    "iteration": lambda y: torch.stack([*y]),
    "clone": lambda y: y.clone(),
    "concatenation": lambda y: torch.cat([y, y]),
    "keyword": lambda y: torch.add(input=y, other=y),
    "out": lambda y: torch.add(y.detach(), 1, out=torch.empty(y.shape)),
    "copy": copied,
    "tree_map": lambda y: tree_map(lambda each: each * 2, {"a": [y]})["a"][0],
    "pickle": lambda y: pickle.loads(pickle.dumps(y.detach())),
    "save": saved,
    "deepcopy": lambda y: copy.deepcopy(y.detach()),
    "strides": lambda y: (y.stride(), y.is_contiguous(), y.storage_offset(), y.data_ptr() > 0, y.nbytes),
    "vmap": lambda y: torch.func.vmap(lambda row: row * 2)(y),
    "dlpack": lambda y: torch.utils.dlpack.from_dlpack(y.detach()),
    "written": written,
    "cast, then written": cast_then_written,
    "written by another name": written_by_another_name,
    "compiled": lambda y: torch.compile(lambda each: each.float().softmax(-1).argmax(-1), backend="aot_eager")(y),
}


@QUIET
@pytest.mark.parametrize("first", [False, True])
def test_writes_count_whatever_name_they_are_by(first: bool, planned: Any) -> None:
    for model in both(planned):
        logits = model(tokens())["logits"]
        other = logits.detach()
        if first:
            other.sin()
        total = logits.sin().sum()
        other.mul_(3)
        assert not other.requires_grad
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            total.backward()


def alike(found: Any, expected: Any) -> bool:
    if not isinstance(expected, Tensor):
        return bool(found == expected)
    same = (found.dtype, found.requires_grad) == (expected.dtype, expected.requires_grad)
    return same and torch.equal(found, expected)


@QUIET
@pytest.mark.parametrize("use", USES)
def test_every_use_finds_the_numbers_of_the_model(use: str, planned: Any) -> None:
    original, result = both(planned)
    assert alike(USES[use](result(tokens())["logits"]), USES[use](original(tokens())["logits"]))


def test_what_takes_no_numbers_makes_nothing(planned: Any) -> None:
    original, result = both(planned)
    logits, theirs = result(tokens())["logits"], original(tokens())["logits"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asked = [(y.shape, y.dtype, y.device, y.dim(), len(y), y.requires_grad, y.is_leaf) for y in (logits, theirs)]
        assert asked[0] == asked[1]
        assert logits.grad_fn is not None
        assert isinstance(logits, Tensor)
        assert not logits.detach().requires_grad
        for other in (logits.detach(), logits.double(), logits.to(torch.bfloat16), tree_map(lambda y: y, [logits])[0]):
            assert made_when_used(type(other))
        assert logits.float() is logits
        assert logits.to(torch.float16).dtype is torch.float16


def test_it_says_once_what_reading_takes() -> None:
    result = lazy()
    outputs = [result(tokens()) for _ in range(2)]
    with pytest.warns(memrewrite.LazyOutputWarning) as told:
        assert [len(output["logits"].softmax(1)) for output in outputs] == [ROWS, ROWS]
    (one,) = told
    assert "Optimized Speaker made an output (8, 16, 200) as it was read: 102.40 kB that its peak was told" in (
        str(one.message)
    )
    assert one.filename == __file__


def test_a_strict_result_refuses_to_make_it() -> None:
    result = lazy(budget="min", strict=True)
    with pytest.raises(memrewrite.BeyondPlanError, match="is strict, and would have made an output"):
        result(tokens())["logits"].softmax(1)


LOSSES: dict[str, Callable[[Any], Tensor]] = {
    "of the output": lambda output: output["logits"].float().softmax(-1).square().sum(),
    "of a cast": lambda output: output["logits"].double().softmax(-1).square().sum(),
    "of what was written": lambda output: written(output["logits"]).square().sum(),
    "twice": lambda output: output["logits"].sin().sum() + output["logits"].cos().sum(),
    "compiled": lambda output: torch.compile(lambda y: y.square().sum(), backend="aot_eager")(output["logits"]),
}


@QUIET
@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_go_through_it(loss: str, planned: Any) -> None:
    found, expected = list[Tensor](), list[Tensor]()
    for model, result in zip(both(planned), (expected, found), strict=True):
        LOSSES[loss](model(tokens())).backward()
        result += gradients(model)
    assert len(found) == 3
    assert all(map(torch.equal, found, expected))


@QUIET
@pytest.mark.parametrize("reading", [False, True], ids=["forward", "reading"])
def test_autocast_is_that_of_the_forward_pass(reading: bool, planned: Any) -> None:
    found, slopes = [], []
    for model in both(planned):
        with torch.autocast("cpu", torch.bfloat16, enabled=not reading):
            logits = model(tokens())["logits"]
        with torch.autocast("cpu", torch.bfloat16, enabled=reading):
            found.append(logits * 1)
        found[-1].square().sum().backward()
        slopes.append(gradients(model))
    assert found[0].dtype == found[1].dtype == (torch.float32 if reading else torch.bfloat16)
    assert torch.equal(*found)
    assert all(map(torch.equal, *slopes))


@QUIET
def test_gradients_of_both_outputs_add_up(planned: Any) -> None:
    found, expected = list[Tensor](), list[Tensor]()
    for model, result in zip(both(planned), (expected, found), strict=True):
        output = model(tokens())
        (output["loss"] + output["logits"].square().mean()).backward()
        result += gradients(model)
    assert all(torch.allclose(*pair, rtol=1e-5, atol=1e-7) for pair in zip(found, expected, strict=True))


@QUIET
def test_compiled_code_that_is_given_the_output_keeps_its_gradient(planned: Any) -> None:
    def total(output: Any) -> Tensor:
        loss: Tensor = output["loss"] + output["logits"].square().mean()
        return loss

    found, expected = list[Tensor](), list[Tensor]()
    for how, result in ((torch.compile(total, backend="aot_eager"), found), (total, expected)):
        planned.zero_grad()
        how(planned(tokens())).backward()
        result += [gradient.clone() for gradient in gradients(planned)]
    assert all(map(torch.equal, found, expected))


@QUIET
def test_gradients_of_gradients_go_through_it(planned: Any) -> None:
    found = []
    for model in both(planned):
        (slope,) = torch.autograd.grad(model(tokens())["logits"].square().mean(), model.head.weight, create_graph=True)
        slope.square().sum().backward()
        found.append(gradients(model))
    assert all(map(torch.equal, *found))


@QUIET
def test_read_in_inference_mode_it_still_has_a_gradient(planned: Any) -> None:
    found = []
    for model in both(planned):
        logits = model(tokens())["logits"]
        with torch.inference_mode():
            logits.argmax(-1)
        logits.square().sum().backward()
        found.append(gradients(model))
    assert all(map(torch.equal, *found))


@QUIET
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_it_has_none(mode: Any, planned: Any) -> None:
    with mode():
        expected, found = (model(tokens())["logits"] for model in both(planned))
    assert not found.requires_grad
    assert torch.equal(found, expected)


def optimizer_step(model: Any, output: Any) -> None:
    output["loss"].backward()
    torch.optim.SGD(model.parameters(), 0.1).step()


def step_by_data(model: Any, output: Any) -> None:
    output["loss"].backward()
    for parameter in model.parameters():
        parameter.data -= 0.1 * parameter.grad


def step_past_pytorch(model: Any, output: Any) -> None:
    """As optimizers with kernels of their own."""
    for parameter in model.parameters():
        parameter.detach().numpy()[:] += 1e-3


def source_written(model: Any, output: Any) -> None:
    with torch.no_grad():
        output["hidden"].zero_()


WRITES = {
    "step": (optimizer_step, "head.weight"),
    "data": (step_by_data, "head.weight"),
    "kernel": (step_past_pytorch, "head.weight"),
    "source": (source_written, "what it is made of"),
}


@pytest.mark.parametrize("write", WRITES)
def test_what_it_is_made_of_was_written_since(write: str) -> None:
    result = lazy()
    output = result(tokens())
    how, name = WRITES[write]
    how(result, output)
    told = f"An output of Speaker was not made when it was returned, and cannot be made any more: {name} was written"
    for other in (output["logits"], output["logits"].detach(), output["logits"].double()):
        with pytest.raises(RuntimeError, match=told):
            other.sin()


@QUIET
def test_what_was_read_before_stays() -> None:
    result, original = lazy(), speaker()
    output, expected = result(tokens()), original(tokens())["logits"]
    output["logits"].sin()
    optimizer_step(result, output)
    assert torch.equal(output["logits"], expected)


@QUIET
def test_weights_that_were_replaced_since_are_those_of_then() -> None:
    result, original = lazy(), speaker()
    output, expected = result(tokens()), original(tokens())["logits"]
    for parameter in result.parameters():
        parameter.data = torch.zeros_like(parameter)
    assert torch.equal(output["logits"], expected)


@QUIET
@pytest.mark.parametrize("read", [False, True])
def test_nothing_stays_when_the_output_is_gone(read: bool, planned: Any) -> None:
    output = planned(tokens())
    hidden = weakref.ref(output["hidden"].untyped_storage())
    if read:
        output["logits"].sin()
    assert hidden() is not None
    del output
    assert hidden() is None


@QUIET
@pytest.mark.parametrize("whole", [True, False], ids=["model", "loop"])
def test_compiled_it_is_made_at_once(whole: bool, planned: Any) -> None:
    original, result = both(planned)

    def loop(x: Tensor) -> Any:
        return result(x)

    found = torch.compile(result if whole else loop, backend="aot_eager")(tokens())["logits"]
    assert type(found) is Tensor
    assert torch.equal(found, original(tokens())["logits"])


def test_watching_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.LOWER, LinearCrossEntropy.name, lambda *_: LinearCrossEntropy(elements=2**12))
    result = lazy(budget="min")
    optimizer = torch.optim.AdamW(result.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with memrewrite.watch(result):
            for _ in range(3):
                output = result(tokens())
                output["loss"].backward()
                optimizer.step()
                optimizer.zero_grad()
    assert made_when_used(type(output["logits"]))
