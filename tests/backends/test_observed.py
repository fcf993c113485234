"""What compiled code takes, told by running it on fake tensors, and plans that make room for it."""

import contextlib
import itertools
from collections.abc import Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memrewrite
from memrewrite.backends import entry, observed
from memrewrite.backends.observed import Seen, seen
from memrewrite.backends.partition import Partition
from memrewrite.records.attached import report_of
from memrewrite.records.compiled import CompiledReport
from memrewrite.records.errors import BudgetInfeasibleError
from memrewrite.runtime.linear_cross_entropy import linear_cross_entropy
from memrewrite.simulate import simulate
from memrewrite.targets.allocator import Allocator
from memrewrite.targets.layout import Layout, Segment, Standing
from memrewrite.targets.transients import Call, Taken, Transients
from memrewrite.torch_internals import compiled_code
from memrewrite.torch_internals.compiled_code import Buffers, CompiledCode, beside, compiled_codes
from memrewrite.torch_internals.compiling import cache_hits
from memrewrite.workload.step import Inputs
from memrewrite.workload.stepspec import StepSpec
from tests.backends.test_partition import MODELS, Loss, made, mlp


def compiled(model: nn.Module, x: Tensor) -> list[CompiledCode]:
    torch._dynamo.reset()
    with compiled_codes() as codes:
        torch.compile(model)(x).backward()
    return codes


class Real(Buffers):
    """Makes real tensors, as operators that a tracker sees."""

    def empty(self, device: str, size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    def reinterpret(self, tensor: Tensor, size: Any, stride: Any, offset: int = 0) -> Tensor:
        return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)


@pytest.mark.parametrize("name", MODELS)
def test_the_peaks_are_those_of_the_code_with_its_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = made(name)
    codes = compiled(model, x)
    found = seen(codes)
    assert [code.is_backward for code in codes] == [False, True]
    assert seen(compiled(model, x)) == found  # from Inductor's caches

    def stand_in(name: str, value: Any, buffers: Buffers) -> Any:
        return replaced(name, value, buffers) if name.startswith(("empty_strided_", "reinterpret")) else value

    replaced = compiled_code._stand_in
    monkeypatch.setattr(compiled_code, "_stand_in", stand_in)
    monkeypatch.setattr(observed, "Buffers", Real)
    monkeypatch.setattr(observed, "Recall", contextlib.nullcontext)
    for mode in ("FakeTensorMode", "Written"):
        monkeypatch.setattr(observed, mode, contextlib.ExitStack)
    assert seen(codes) == found


class Head(nn.Module):
    """A head with its loss, by one operator, whose classes count as much as each other or as ``weight`` says."""

    def __init__(self, weight: Tensor | None = None) -> None:
        super().__init__()
        self.head, self.weight = nn.Linear(16, 8, bias=False), weight

    def forward(self, x: Tensor) -> Tensor:
        target = torch.arange(len(x)) % 8
        how: Any = {"reduction": 1, "ignore_index": -100, "label_smoothing": 0.0}
        return linear_cross_entropy(x, self.head.weight, None, target, self.weight, (), **how, rows=4, early=True)


@pytest.mark.parametrize(
    ("model", "biases"),
    [
        (Loss(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)), True),
        (Loss(nn.Linear(16, 32, bias=False), nn.ReLU(), nn.Linear(32, 8, bias=False)), False),
        (Head(), False),
        (Head(torch.ones(8)), True),  # which is told from a bias by nothing
    ],
    ids=["added", "none", "head", "weights"],
)
def test_code_tells_whether_a_product_may_add_a_bias(model: nn.Module, biases: bool) -> None:
    found = seen(compiled(model, torch.randn(8, 16)))
    assert isinstance(found, Seen)
    assert found.biases == biases


def test_code_that_is_given_several_parts_of_one_storage_is_read() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both = nn.Linear(32, 64)

        def forward(self, x: Tensor) -> Tensor:
            left, right = self.both(x).chunk(2, -1)
            return (left @ right.T).square().mean()

    found = seen(compiled(Halves(), torch.randn(64, 32)))
    assert isinstance(found, Seen)
    assert found.forward == 2 * 64 * 64 * 4 + 512  # the halves in one storage, their product, and the loss


def test_what_is_compiled_beside_a_graph_is_no_part_of_it() -> None:
    with compiled_codes() as codes, beside():
        torch.compile(mlp(1))(torch.randn(4, 32))
    assert not codes


def test_blocks_of_the_allocator_count_as_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of 15.5 MiB is handed 16, of whose rest the allocator makes no other block."""
    width, state = (15 * 2**20 + 2**19) // 2**12, 15 * 2**20 + 2**19
    codes = compiled(Loss(nn.Linear(1024, width, bias=False)), torch.randn(4, 1024))
    plain = seen(codes)
    assert isinstance(plain, Seen)
    assert seen(codes, [state, state]) == plain
    monkeypatch.setattr(observed, "allocator_on", lambda kind, layout: Allocator(layout=layout))
    with_weight, with_state = seen(codes), seen(codes, [state, state])
    assert isinstance(with_weight, Seen)
    assert isinstance(with_state, Seen)
    assert with_weight.forward == plain.forward + 2**19
    assert with_weight.backward == plain.backward + 2 * 2**19  # of the weight, and of its gradient
    assert with_state.backward == with_weight.backward + 2 * 2**19
    roomy = (Segment(0, False, (Standing(17 * 2**20, False, state), Standing(3 * 2**20, False))),)
    in_its_block = seen(codes, layout=roomy)
    assert isinstance(in_its_block, Seen)
    assert in_its_block.forward == plain.forward + 2**20 + 2**19


def test_code_runs_once_where_calls_are_measured_and_blocks_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a product takes is counted once it is known, in a second step that begins where the first one ended."""
    width = 15 * 2**18 + 2**17
    codes = compiled(Loss(nn.Linear(4, width, bias=False)), torch.randn(1, 4))
    ran: list[bool] = []
    run = CompiledCode.run

    def noted(code: CompiledCode, arguments: list[Any], buffers: Buffers) -> tuple[Any, ...]:
        ran.append(code.is_backward)
        return run(code, arguments, buffers)

    def measured(calls: Sequence[Call]) -> list[Taken]:
        asked.extend(func.__name__ for func, _, _ in calls)
        return [Taken(2**20, (2**20, -1)) if func in products else Taken() for func, _, _ in calls]

    asked: list[str] = []
    products = torch.ops.aten.mm.out, torch.ops.aten.mm.default
    table = Transients(measured)
    monkeypatch.setattr(CompiledCode, "run", noted)
    monkeypatch.setattr(observed, "transients_on", lambda device: table)
    monkeypatch.setattr(observed, "allocator_on", lambda kind, layout: Allocator(layout=layout))
    found = seen(codes)
    assert ran == [False, True]
    assert any(name.startswith("mm") for name in asked)
    assert seen(codes) == found
    assert isinstance(found, Seen)
    assert found.forward == 16 * 2**20 + 2**20  # the product, in a block that is larger, while it is made


def test_outputs_of_the_step_before_count_in_forward() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(32, 4096)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            values = self.head(x)
            return values, values.square().mean()

    torch._dynamo.reset()
    with compiled_codes() as codes:
        torch.compile(Both())(torch.randn(256, 32))[1].backward()
    dropped, held = seen(codes), seen(codes, held=True)
    assert isinstance(dropped, Seen)
    assert isinstance(held, Seen)
    assert held.forward == dropped.forward + 256 * 4096 * 4 + 512
    assert held.backward == dropped.backward


@pytest.mark.parametrize("budget", ["min", "100%"])
def test_batch_and_output_live_while_the_optimizer_works(budget: str) -> None:
    torch._dynamo.reset()
    model, x = nn.Linear(400, 400), torch.randn(100, 400)
    compiled = torch.compile(model, backend="memrewrite", options={"budget": budget, "optimizer": "adamw"})
    compiled(x).sum().backward()
    told = report_of(compiled)
    assert isinstance(told, CompiledReport)
    assert told.peak is not None
    timeline = simulate(model, Inputs((x,), {}), StepSpec(optimizer="adamw").build())
    assert timeline.peak == timeline.peak_of_optimizer
    assert abs(timeline.peak - told.peak) <= 4096  # the loss, which is in no graph, and numbers of the optimizer's


@pytest.mark.parametrize("by", ["its code", "the plan"])
def test_the_gradient_of_an_output_lives_as_long_as_backward(by: str, request: pytest.FixtureRequest) -> None:
    """Autograd hands it over and holds it; the peak here lies at the end, where nothing reads it any more."""

    class Wide(nn.Module):
        def __init__(self, returns_all: bool) -> None:
            super().__init__()
            self.wide = nn.Sequential(nn.Linear(32, 8192), nn.Tanh(), nn.Linear(8192, 32))
            self.head, self.returns_all = nn.Linear(32, 1024), returns_all

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            values = self.head(self.wide(x))
            return (values.square().mean(), values) if self.returns_all else (values.square().mean(),)

    if by == "the plan":
        request.getfixturevalue("partitions")  # without code
    found = []
    for returns_all in (True, False):
        torch._dynamo.reset()
        options: Any = {"budget": "100%", "optimizer": "none"}
        compiled: Any = torch.compile(Wide(returns_all), backend=entry.memrewrite, options=options)
        compiled(torch.randn(256, 32))[0].backward()
        found.append(memrewrite.report_of(compiled).peak or 0)
    assert found[0] - found[1] >= 2 * 256 * 1024 * 4


def test_values_that_one_kernel_makes_are_foreseen_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients of both factors of a gated MLP, and their product again, lie in what they are made of."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up, self.down = nn.Linear(16, 256), nn.Linear(16, 256), nn.Linear(256, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.gate(x).relu() * self.up(x)).square().sum()

    divided: list[Partition] = []

    def kept(*args: Any, **kwargs: Any) -> Partition:
        divided.append(Partition(*args, **kwargs))
        return divided[-1]

    monkeypatch.setattr(entry, "Partition", kept)
    torch._dynamo.reset()
    options: Any = {"budget": "min", "optimizer": "none"}
    with torch._functorch.config.patch(enable_autograd_cache=False):  # what is cached nothing divides
        torch.compile(Gated(), backend=entry.memrewrite, options=options)(torch.randn(1024, 16)).backward()
    (partition,) = divided
    assert partition.foreseen is not None
    assert partition.observed is not None
    assert partition.observed == pytest.approx(partition.foreseen.after, rel=0.01)
    assert partition.observed < 3.3 * 1024 * 256 * 4


def test_code_of_which_nothing_can_be_told_says_why() -> None:
    forward, backward = compiled(*made("mlp"))
    assert seen([]) == ""
    assert seen([forward, backward, backward]) == "it is not one forward and one backward"
    assert seen([forward, CompiledCode(True, lambda arguments: ())]) == "it is not in Python"
    names = {"get_args": lambda: [torch.ones(1).item()]}
    broken = CompiledCode(True, FunctionType((lambda arguments: ()).__code__, names))
    assert "does not run on fake tensors" in str(seen([forward, broken]))


def steps(model: Any, x: Tensor) -> Tensor:
    loss: Tensor = model(x)
    loss.backward()
    return loss.detach()


@pytest.fixture
def beyond(monkeypatch: pytest.MonkeyPatch, partitions: list[Partition]) -> list[int]:
    """By how many bytes code takes more than the budget, try by try; after that it takes what is foreseen."""
    more: list[int] = []

    def told(codes: Sequence[CompiledCode], state: Sequence[int], held: bool, layout: Layout) -> Seen:
        partition = partitions[-1]
        assert partition.foreseen is not None
        limit = partition.asked.budget.bytes if partition.asked.budget else None
        peak = partition.foreseen.after if limit is None or not more else limit + more.pop(0)
        return Seen(peak - partition.base, 0)

    monkeypatch.setattr(entry, "seen", told)
    return more


def test_a_graph_is_compiled_again_with_less_room_where_its_code_takes_more(
    partitions: list[Partition], beyond: list[int]
) -> None:
    x = torch.randn(256, 32)
    torch.manual_seed(0)
    model = mlp()
    usual = torch.compile(model, backend=entry.memrewrite, options={"budget": "100%", "optimizer": "none"})
    expected = steps(usual, x)
    report = memrewrite.report_of(usual)
    assert report.peak is not None
    budget = int(report.peak * 0.9)
    torch._dynamo.reset()
    partitions.clear()
    beyond += [3_000, 2_000, 1_000]  # the first plan is tried once more with what is made apart
    fitting = torch.compile(model, backend=entry.memrewrite, options={"budget": budget, "optimizer": "none"})
    assert torch.equal(steps(fitting, x), expected)
    first = partitions[0]
    assert len(partitions) == 4
    assert all(each is first for each in partitions)
    (graph,) = memrewrite.report_of(fitting).graphs
    assert graph.peak == first.observed
    assert first.observed is not None
    assert [made + first.base - budget for made in first.taken] == [3_000, 2_000, 1_000]
    assert first.observed <= budget - 1_000


def test_code_that_never_fits_is_refused_with_what_it_takes(partitions: list[Partition], beyond: list[int]) -> None:
    x = torch.randn(256, 32)
    model = mlp()
    options: dict[str, Any] = {"budget": "1GB", "optimizer": "none"}
    beyond += itertools.repeat(1_000, 20)
    with pytest.raises(BudgetInfeasibleError, match=r"the lowest reachable peak is") as caught:
        steps(torch.compile(model, backend=entry.memrewrite, options=options), x)
    assert caught.value.lowest == 10**9 + 1_000
    assert 5 <= len(partitions) <= 7


@pytest.mark.parametrize("more", [-1_000, 1_000])
def test_the_lowest_peak_is_that_of_the_lower_code(more: int, beyond: list[int], partitions: list[Partition]) -> None:
    """Gradients that are made apart may take more or less than others; another division takes more here."""
    x, model = torch.randn(256, 32), mlp()
    told: Any = vars(entry)["seen"]

    def first_more(codes: Any, state: Any, held: bool, layout: Layout) -> Seen | str:
        found = told(codes, state, held, layout)
        assert isinstance(found, Seen)
        return Seen(found.forward + 50_000 + (more if partitions[-1].apart else 0), 0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entry, "seen", first_more)
        lowest = torch.compile(model, backend=entry.memrewrite, options={"budget": "min", "optimizer": "none"})
        steps(lowest, x)
    assert len(partitions) == 3
    (graph,) = memrewrite.report_of(lowest).graphs
    assert partitions[-1].foreseen is not None
    assert partitions[-1].apart == (more < 0)
    assert graph.peak == partitions[-1].foreseen.after + 50_000 + min(more, 0)


def test_graphs_from_caches_are_given_up_for_the_same_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing divides them there; what their code takes tells which graph was made next."""

    def told(codes: Sequence[CompiledCode], state: Sequence[int], held: bool, layout: Layout) -> Seen | str:
        found = seen(codes, state, held, layout)
        return Seen(found.forward + 30_000, found.backward + 30_000) if isinstance(found, Seen) else found

    x, model = torch.randn(256, 32), mlp()
    usual = torch.compile(model, backend=entry.memrewrite, options={"budget": "100%", "optimizer": "none"})
    steps(usual, x)
    budget = memrewrite.report_of(usual).peak
    assert budget is not None
    monkeypatch.setattr(entry, "seen", told)
    found = []
    for _ in range(2):
        torch._dynamo.reset()
        model.zero_grad()
        before = cache_hits()
        fitting = torch.compile(model, backend=entry.memrewrite, options={"budget": budget, "optimizer": "none"})
        steps(fitting, x)
        (graph,) = memrewrite.report_of(fitting).graphs
        found.append((graph.choice, graph.peak, cache_hits() - before))
    (_, peak, _), again = found
    assert again == ("from cache", peak, 3)
    assert peak is not None
    assert peak <= budget


def test_the_lowest_peak_comes_from_caches_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also where the first plan was not the lowest."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # which has no code yet of which nothing is noted

    def told(codes: Sequence[CompiledCode], state: Sequence[int], held: bool, layout: Layout) -> Seen | str:
        found = seen(codes, state, held, layout)
        asked.append(next(more))
        return Seen(found.forward, found.backward + asked[-1]) if isinstance(found, Seen) else found

    asked: list[int] = []
    monkeypatch.setattr(entry, "seen", told)
    x, model = torch.randn(256, 32), mlp(4)
    found = []
    for _ in range(3):
        torch._dynamo.reset()
        asked.clear()
        before, more = cache_hits(), iter([90_000, 60_000, 30_000, 0])
        lowest = torch.compile(model, backend=entry.memrewrite, options={"budget": "min", "optimizer": "none"})
        steps(lowest, x)
        found.append((memrewrite.report_of(lowest).peak, len(asked), cache_hits() - before))
    (peak, tries, _), *others = found
    assert tries >= 3
    assert others == [(peak, tries, tries)] * 2
