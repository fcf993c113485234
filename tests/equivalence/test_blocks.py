"""Blocks that run again in backward give a float64 step the same bits and less memory, or are told to be unfit."""

import contextlib
import gc
import importlib
import importlib.util
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from memrewrite.equivalence import blocks, judging
from memrewrite.equivalence.blocks import UnfitError, repeated_blocks
from memrewrite.equivalence.reference import OtherDrawsError, Recorder, double_step
from memrewrite.equivalence.trial import EVERYTHING, Record, take_step
from memrewrite.equivalence.verifying import verify
from memrewrite.measurement.snapshot import State
from memrewrite.records.errors import MeasurementError
from memrewrite.runtime.attention import attention_in_pieces
from memrewrite.simulate.memory.tracker import Tracker
from memrewrite.state.bits import same_bits
from memrewrite.workload.step import Inputs, Step
from tests.equivalence.test_verify import ADAM
from tests.support.verification import rewrite

Forward = Callable[..., Any]


class Block(nn.Module):
    """A residual of two layers with dropout between them; ``around`` is what its forward does with that."""

    def __init__(self, around: Forward | None = None) -> None:
        super().__init__()
        self.up, self.down, self.around = nn.Linear(8, 16), nn.Linear(16, 8), around
        self.runs = nn.Buffer(torch.zeros(()))
        self.seen = 0

    def layers(self, x: Tensor) -> Tensor:
        return x + self.down(functional.dropout(self.swish(self.up(x)), 0.25, self.training))

    def swish(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return self.layers(x) if self.around is None else self.around(self, x, *args, **kwargs)


class Net(nn.Module):
    """Three blocks, called by ``through``, and a head."""

    def __init__(self, around: Forward | None = None, through: Forward | None = None) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block(around) for _ in range(3)), nn.Linear(8, 4)
        self.through = through

    def run(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.run(x) if self.through is None else self.through(self, x))


def net(around: Forward | None = None, through: Forward | None = None) -> Net:
    torch.manual_seed(0)
    return Net(around, through).train()


X = Inputs((torch.randn(4, 8, generator=torch.Generator().manual_seed(1)),), {})


def steps(model: nn.Module, inputs: Inputs = X, step: Step = ADAM) -> tuple[Record, Record]:
    """One in float64 as the model is, and one with blocks that run again."""
    torch.manual_seed(2)
    with Recorder() as recorder:
        take_step(model, inputs, step, None, (), False)
    draws = recorder.draws
    whole = double_step(model, inputs, step, draws, (), True)
    return whole, double_step(model, inputs, step, draws, (), True, unfit=set())


def same(one: Record, other: Record) -> bool:
    pairs = [(value, other[key]) for key, value in one.items() if isinstance(value, Tensor)]
    return one.keys() == other.keys() and all(same_bits(*pair) for pair in pairs)


def with_kwargs(self: Net, x: Tensor) -> Tensor:
    shared = [torch.ones(8)]
    for i, block in enumerate(self.blocks):
        x, number = block({"x": x}, scale=shared, flag=i > 0, module=self.head)["out"]
        assert number == i
    return x + sum(shared)


def kwargs_used(self: Block, given: Any, scale: list[Tensor], flag: bool, module: nn.Linear) -> Any:
    """Appends to a list that is given, as layers do to a cache."""
    number = len(scale) - 1
    scale.append(self.layers(given["x"]) * scale[-1])
    return {"out": (functional.linear(scale[-1], module.weight.T @ module.weight) * (1 + flag), number)}


def own_checkpoint(self: Block, x: Tensor) -> Tensor:
    return checkpoint(self.layers, x, use_reentrant=False).sin() + checkpoint(self.layers, x, use_reentrant=True)


def reentrant(self: Net, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    for block in self.blocks:
        x = checkpoint(block, x, use_reentrant=True)
    return x


def in_autocast(self: Block, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return self.layers(x).float()


def around_autocast(self: Net, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return self.run(x).float()


def twice(self: Net, x: Tensor) -> Tensor:
    return self.run(self.run(x).relu())


def frozen(self: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        x = self.blocks[0](x)
    return self.blocks[2](self.blocks[1](x)) + self.blocks[0](x)


def written_between(self: Net, x: Tensor) -> Tensor:
    for block in self.blocks:
        x = block(x)
        x += 1
    return x


SAME: dict[str, tuple[Forward | None, Forward | None]] = {
    "plain": (None, None),
    "arguments": (kwargs_used, with_kwargs),
    "checkpoints inside": (own_checkpoint, lambda self, x: self.run(x.detach().requires_grad_())),
    "checkpoints around": (None, reentrant),
    "autocast inside": (in_autocast, None),
    "autocast around": (None, around_autocast),
    "called twice": (None, twice),
    "frozen": (None, frozen),
    "written between": (None, written_between),
}


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize(("around", "through"), SAME.values(), ids=SAME)
def test_the_same_bits(around: Forward | None, through: Forward | None, passes: int) -> None:
    assert same(*steps(net(around, through), step=Step(micro_batches=passes)))


def test_members_that_are_one_module_have_the_same_bits() -> None:
    model, block = net(), Block()
    block.down.weight = block.up.weight = nn.Parameter(torch.randn(8, 8))
    block.up.bias = nn.Parameter(torch.randn(8))
    model.blocks = nn.ModuleList([block] * 3)
    assert len(repeated_blocks(model)) == 1
    assert same(*steps(model))


def test_hooks_of_a_block_are_called_once() -> None:
    model, calls = net(), list[str]()
    for block in model.blocks:
        block.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
        block.register_forward_hook(lambda module, args, result: calls.append("after"))
    assert len(repeated_blocks(model)) == 3
    assert same(*steps(model))
    assert len(calls) == 3 * 3  # the step whose draws are recorded, and both in float64


@contextlib.contextmanager
def nothing_held(model: Net) -> Iterator[None]:
    """Nothing is left of copies of the model, though nobody collects cycles."""
    importlib.import_module("torch._dynamo")  # as any capture does: the first time, that leaves cycles
    gc.collect()
    gc.freeze()  # so that only what is made from here on is looked through
    gc.disable()
    try:
        yield
        alive = {id(each) for each in gc.get_objects() if isinstance(each, Block)}
    finally:
        gc.enable()
    assert alive & {id(block) for block in model.blocks} == alive


def test_blocks_run_twice_and_hold_nothing_afterwards() -> None:
    runs: list[bool] = []

    def counted(self: Block, x: Tensor) -> Tensor:
        runs.append(torch.is_grad_enabled())
        return self.swish(self.up(x))[:, :8]

    model = net(counted)
    with nothing_held(model):
        double_step(model, X, ADAM, [], (), False, unfit=set())
    assert runs == [True] * 6


@pytest.mark.parametrize("run", [2, 5], ids=["forward", "again"])
@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, KeyboardInterrupt])
def test_what_ends_a_run_is_raised_and_holds_nothing(kind: type[BaseException], run: int) -> None:
    runs = itertools.count(1)

    def around(self: Block, x: Tensor) -> Tensor:
        x = self.swish(self.up(x))[:, :8]
        if next(runs) == run:
            raise kind("out")
        return x

    model = net(around)
    with nothing_held(model):
        with contextlib.suppress(kind):
            double_step(model, X, ADAM, [], (), False, unfit=set())
        assert next(runs) == run + 1


def test_less_memory_is_taken() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Sigmoid(), nn.ELU()) for _ in range(8)))
    inputs = Inputs((torch.randn(2048, 32),), {})

    def peak(*unfit: Any) -> int:
        with Tracker("cpu") as tracker:
            double_step(model, inputs, Step(), [], (), False, EVERYTHING, *unfit)
        return tracker.peak

    layer = 2048 * 32 * 8  # bytes
    assert peak() - peak(set()) == 7 * 2 * layer  # what tanh and sigmoid give, but for the block that has run again


def counts(self: Block, x: Tensor) -> Tensor:
    self.seen += 1
    return self.layers(x)


def writes_a_buffer(self: Block, x: Tensor) -> Tensor:
    self.runs.add_(1)
    return self.layers(x)


def writes_its_input(self: Block, x: Tensor) -> Tensor:
    return self.layers(x.mul_(2))


def draws_elsewhere(self: Block, x: Tensor) -> Tensor:
    return self.layers(x) * random.random()  # noqa: S311


def remembers_elsewhere(table: list[int] = []) -> Forward:  # noqa: B006
    def forward(self: Block, x: Tensor) -> Tensor:
        table.append(0)
        return self.layers(x) * len(table)

    return forward


def fails_later() -> Forward:
    seen: list[int] = []

    def forward(self: Block, x: Tensor) -> Tensor:
        seen.append(id(self))
        if seen.count(id(self)) > 1:
            raise ValueError("twice")
        return self.layers(x)

    return forward


class Uncopied:
    """Cannot be copied."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __reduce__(self) -> Any:
        raise TypeError("no copies")


def wrapped(self: Net, x: Tensor) -> Tensor:
    return self.blocks[0](Uncopied(x)) + self.blocks[1](Uncopied(x))


def hidden(self: Net, x: Tensor) -> Tensor:
    return self.blocks[1](self.blocks[0](x).x).x


UNFIT: dict[str, tuple[Forward, Forward | None]] = {
    "attribute": (counts, None),
    "buffer": (writes_a_buffer, None),
    "input": (writes_its_input, lambda self, x: self.run(x * 1)),
    "random": (draws_elsewhere, None),
    "elsewhere": (remembers_elsewhere(), None),
    "given what cannot be copied": (lambda self, given: self.layers(given.x), wrapped),
    "gives what is not seen": (lambda self, x: Uncopied(self.layers(x)), hidden),
}


@pytest.mark.parametrize(("around", "through"), UNFIT.values(), ids=UNFIT)
def test_a_block_that_does_something_else_is_told(around: Forward, through: Forward | None) -> None:
    with pytest.raises(UnfitError) as told:
        steps(net(around, through))
    assert told.value.kind is Block


def test_a_block_that_fails_when_it_runs_again_is_told() -> None:
    model = net(fails_later()).eval()
    with pytest.raises(UnfitError, match="A Block does not do the same when it runs again"):
        double_step(model, X, ADAM, [], (), False, EVERYTHING, set())


def test_checkpoints_of_the_models_own_that_would_draw_less_are_told() -> None:
    """They run again only as far as a block is given something."""

    def around(self: Net, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    with pytest.raises(OtherDrawsError, match="With blocks that run again, 3 random operators were not run"):
        steps(net(None, around))


def test_which_blocks_there_are() -> None:
    layer = nn.Linear(2, 2)
    stage = nn.Sequential(Block(), Block())
    named = nn.ModuleDict({"a": Block(), "b": layer, "c": Block()})
    model = nn.Sequential(layer, nn.Linear(2, 2), named, stage, stage)
    odd = nn.Sequential(layer, stage)
    assert repeated_blocks(nn.Sequential(layer, nn.Linear(2, 2), nn.Tanh())) == []
    assert repeated_blocks(Block()) == []
    assert repeated_blocks(model) == [named["a"], named["c"], stage]
    assert repeated_blocks(model, {nn.Sequential}) == [named["a"], named["c"], *stage]
    assert repeated_blocks(odd) == [*stage]
    assert repeated_blocks(odd, {Block}) == []
    hooked = stage[1].get_submodule("up")
    hooked.register_forward_hook(lambda module, args, result: None)
    assert repeated_blocks(odd) == [stage[0]]


# Of verification: where a step in float64 is too large.


def another_swish(model: Net) -> nn.Module:
    """The same model with other arithmetic in its blocks, which share everything with the model's."""
    other = rewrite(model)
    blocks = [rewrite(block, swish=lambda self, x: functional.silu(x)) for block in model.blocks]
    vars(other)["_modules"] = {**model._modules, "blocks": nn.ModuleList(blocks)}
    return other


def without_room(monkeypatch: pytest.MonkeyPatch, fits: Callable[[int, bool, bool], bool]) -> list[tuple[Any, ...]]:
    """Steps in float64 run out of memory unless one of that batch, near and with blocks that run again, ``fits``."""
    tried: list[tuple[Any, ...]] = []

    def step(model: nn.Module, inputs: Inputs, *args: Any) -> Record:
        kept, again = args[4], len(args) > 5
        tried.append((len(inputs.args[0]), kept.near, again))
        if not fits(*tried[-1]):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return double_step(model, inputs, *args)

    monkeypatch.setattr(judging, "double_step", step)
    return tried


def attending(self: Block, x: Tensor) -> Tensor:
    heads = self.layers(x).view(1, 4, 2, 4).transpose(1, 2)
    return (
        x + functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2).flatten(2)[0]
    )


def test_attention_is_made_in_pieces_both_times(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[int] = []

    def in_pieces(
        query: Tensor, key: Tensor, value: Tensor, mask: None, number: int, *how: Any, **named: Any
    ) -> Tensor:
        pieces.append(number)
        return attention_in_pieces(query, key, value, mask, number, *how, **named) * (1 + 1e-9)

    monkeypatch.setattr(blocks, "attention_in_pieces", in_pieces)
    whole, again = steps(net(attending))
    assert pieces == [2] * 6  # of three blocks
    for key, value in whole.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            torch.testing.assert_close(again[key], value, rtol=1e-6, atol=1e-12)


def test_where_the_whole_does_not_fit_blocks_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    tried = without_room(monkeypatch, lambda batch, near, again: again)
    verdict = verify(model, another_swish(model), X, ADAM, exact=False)
    assert verdict.equivalent
    assert (verdict.exact, verdict.batch) == (False, 4)
    assert "does not fit" not in verdict.summary
    assert tried == [(4, True, False), (4, True, True)]


def test_what_is_wrong_is_found_with_blocks_that_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    without_room(monkeypatch, lambda batch, near, again: again)
    other = rewrite(model, forward=lambda self, x: self.head(self.run(x)) * 1.001)
    assert not verify(model, other, X, ADAM, exact=False).equivalent


def test_verdicts_are_the_same_as_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    whole = verify(model, another_swish(model), X, ADAM, exact=False)
    without_room(monkeypatch, lambda batch, near, again: again)
    assert verify(model, another_swish(model), X, ADAM, exact=False) == whole


def test_where_blocks_that_run_again_do_not_fit_results_leave_their_room(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[str] = []
    monkeypatch.setattr(State, "bring_to_cpu", lambda state: moved.append("away"))
    monkeypatch.setattr(State, "bring_back", lambda state: moved.append("back"))
    model = net()
    tried = without_room(monkeypatch, lambda batch, near, again: again and not near)
    verdict = verify(model, another_swish(model), X, ADAM, exact=False)
    assert verdict.batch == 4
    assert tried == [(4, True, False), (4, True, True), (4, False, True)]
    assert moved == ["away", "back"]


def test_where_nothing_fits_less_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    tried = without_room(monkeypatch, lambda batch, near, again: batch == 2)
    verdict = verify(model, another_swish(model), X, ADAM, exact=False)
    assert verdict.equivalent
    assert verdict.summary.endswith("; verified at batch 2, as 4 does not fit in memory")
    assert tried == [(4, True, False), (4, True, True), (4, False, True), (2, True, False)]


@pytest.mark.parametrize("around", [writes_a_buffer, counts], ids=["buffer", "attribute"])
def test_where_blocks_are_unfit_less_is_verified(around: Forward, monkeypatch: pytest.MonkeyPatch) -> None:
    model = net(around)
    tried = without_room(monkeypatch, lambda batch, near, again: again or batch == 2)
    verdict = verify(model, another_swish(model), X, ADAM, exact=False)
    assert verdict.equivalent
    assert verdict.summary.endswith("; verified at batch 2, as 4 does not fit in memory")
    assert tried == [(4, True, False), (4, True, True), (4, False, False), (2, True, False)]


def test_fit_blocks_run_again_beside_unfit_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counted(Block):
        """Another class."""

    model = net()
    model.first = nn.ModuleList(Counted(writes_a_buffer) for _ in range(2))
    model.through = lambda self, x: self.run(self.first[1](self.first[0](x)))
    tried = without_room(monkeypatch, lambda batch, near, again: again)
    verdict = verify(model, another_swish(model), X, ADAM, exact=False)
    assert (verdict.equivalent, verdict.batch) == (True, 4)
    assert tried == [(4, True, False), *[(4, True, True)] * 2]


def test_a_model_that_does_not_run_in_float64_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def narrow(self: Net, x: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            raise TypeError("float32 alone")
        return self.run(x)

    model = net(None, narrow)
    without_room(monkeypatch, lambda batch, near, again: again or batch == 2)
    with pytest.raises(MeasurementError, match=r"does not run in float64 .TypeError: float32 alone"):
        verify(model, another_swish(model), X, ADAM, exact=False)


def test_draws_of_a_generator_of_its_own_are_recorded_for_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(3)

    def scaled(self: Block, x: Tensor) -> Tensor:
        return x + self.down(self.swish(self.up(x * torch.rand(8, generator=generator))))

    model = net(scaled, lambda self, x: (generator.manual_seed(3), self.run(x))[1])
    without_room(monkeypatch, lambda batch, near, again: again)
    verdict = verify(model, another_swish(model), X, ADAM, exact=False)
    assert (verdict.equivalent, verdict.exact, verdict.batch) == (True, False, 4)


LANGUAGE: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2},
    "GPT2LMHeadModel": {"n_embd": 16, "n_layer": 3, "n_head": 2, "attn_implementation": "eager"},
    "T5ForConditionalGeneration": {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2},
}


@pytest.mark.parametrize("cached", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize("name", LANGUAGE)
def test_language_models_have_the_same_bits(name: str, cached: bool) -> None:
    """Also where each layer is given a cache that all write to."""
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    transformers = importlib.import_module("transformers")
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0}
    config = kind.config_class(vocab_size=50, use_cache=cached, **tokens, **LANGUAGE[name])
    model = kind(config).train()
    ids = torch.randint(3, 50, (2, 8))
    assert len(repeated_blocks(model)) >= 3
    assert same(*steps(model, Inputs((), {"input_ids": ids, "labels": ids}), Step()))
