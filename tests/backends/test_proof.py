"""``verify=True``: what is told of the first call, what it leaves as it was, and that a wrong graph is an error."""

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel

import memrewrite
from memrewrite.backends import entry, proof
from memrewrite.backends.asked import Asked
from memrewrite.backends.partition import Partition
from memrewrite.backends.proof import Proof
from memrewrite.equivalence.reference import FusedRandomnessError
from memrewrite.records.errors import MeasurementError, NotEquivalentError
from memrewrite.state.random_state import RandomState
from tests.backends.test_partition import MODELS, Block, Loss, made, mlp
from tests.support.divided import NOTHING, gradients

STOCK = "as the stock partitioner's graph bit for bit"


def verifying(model: Callable[..., Any], **options: Any) -> Any:
    given = {"budget": "min", "optimizer": "sgd", "verify": True, **options}
    return torch.compile(model, backend=entry.memrewrite, options=given)


def told(model: Any) -> list[str]:
    return [graph.verified for graph in memrewrite.report_of(model).graphs]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("partitions")
def test_a_plan_is_proved_and_the_step_is_as_ever(name: str) -> None:
    """The same losses, gradients and buffers as eager's, though the graph has run on copies before."""
    model, x = made(name)
    eager, usual = copy.deepcopy(model), copy.deepcopy(model)
    compiled = verifying(model)
    torch.manual_seed(1)
    loss = compiled(x)
    loss.backward()
    (words,) = told(compiled)
    assert words in (f"{STOCK}, as eager bit for bit", f"{STOCK}, as eager by the float64 rule")
    torch.manual_seed(1)
    expected = eager(x)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for mine, theirs in zip(gradients(model), gradients(eager), strict=True):
        torch.testing.assert_close(mine, theirs)
    for mine, theirs in zip(model.buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs)
    state = torch.get_rng_state()
    torch.manual_seed(1)
    usual(x)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.usefixtures("partitions")
def test_the_default_device_may_be_any() -> None:
    """As after ``torch.set_default_device("cuda")``: what is drawn for the proof says where."""
    model, x = made("mlp")
    with torch.device("meta"):
        compiled = verifying(model)
        compiled(x).backward()
    assert told(compiled)


class Writes(nn.Module):
    """A buffer and, after a break, what is no leaf are written."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)
        self.count: Tensor
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        x = self.first(x)
        torch._dynamo.graph_break()
        result: Tensor = self.second(F.relu_(x)).sum()
        return result


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo's own, where it resumes
@pytest.mark.usefixtures("partitions")
def test_writes_happen_once() -> None:
    model = Writes()
    compiled = verifying(model)
    for count in (1, 2):
        compiled(torch.randn(8, 32)).backward()
        assert float(model.count) == count
    assert told(compiled) == [f"{STOCK}, as eager bit for bit"] * 2


@pytest.mark.usefixtures("partitions")
def test_the_step_of_an_optimizer_happens_once() -> None:
    """Its graph holds parameters and their state itself."""
    model, x = made("mlp")
    usual = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(each.parameters(), 0.1, momentum=0.9) for each in (model, usual)]
    step = verifying(optimizers[0].step)
    for _ in range(2):
        for each, steps in ((model, step), (usual, optimizers[1].step)):
            each(x).backward()
            steps()
    for mine, theirs in zip(model.parameters(), usual.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert told(step)[0].startswith(STOCK)


@pytest.mark.usefixtures("partitions")
def test_a_number_that_python_made_of_a_tensor() -> None:
    """Once it is another, the graph after the break is given a tensor again, of which it takes the item."""
    model, x = made("mlp")

    def scaled(x: Tensor) -> Tensor:
        scale = x.mean().item()
        result: Tensor = model(x) * scale
        return result

    compiled = verifying(scaled)
    for factor in (1, 2, 3):
        compiled(x * factor).backward()
    assert all(words.startswith(STOCK) for words in told(compiled))


@pytest.mark.usefixtures("partitions")
def test_graphs_that_ddp_divides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By its buckets of gradients; it calls each part on fake tensors first."""
    monkeypatch.setattr(torch.distributed, "_DEFAULT_FIRST_BUCKET_BYTES", 2**14)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        compiled = verifying(DistributedDataParallel(mlp(), bucket_cap_mb=0.02))
        compiled(torch.randn(16, 32)).backward()
        assert told(compiled) == [f"{STOCK}, as eager bit for bit"] * 2
        del compiled
    finally:
        gc.collect()  # DDP goes first: it would wait for the group's threads while holding the interpreter's lock
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("autocast", [False, True], ids=["bfloat16", "autocast"])
@pytest.mark.usefixtures("partitions")
def test_half_precision(autocast: bool) -> None:
    torch.manual_seed(0)
    kind = torch.float32 if autocast else torch.bfloat16
    compiled = verifying(Loss(Block(32)).to(kind))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        compiled(torch.randn(4, 32, 32, dtype=kind)).backward()
    assert told(compiled) == [f"{STOCK}, as eager by the float64 rule"]


@pytest.mark.usefixtures("partitions")
def test_lengths_and_graphs_without_backward() -> None:
    compiled = verifying(mlp(2))
    for rows in (24, 48, 36):
        compiled(torch.randn(rows, 32)).backward()
    with torch.no_grad():
        compiled(torch.randn(24, 32))
    assert told(compiled) == [f"{STOCK}, as eager bit for bit"] * 3


def fine(x: Tensor, w: Tensor) -> tuple[Tensor]:
    return ((x @ w).relu(),)


def proved(
    compiled: Callable[..., Any], stock: Callable[..., Any] = fine, graph: Callable[..., Any] = fine
) -> Partition:
    """A partition whose ``graph`` was compared, as if ``compiled`` and ``stock`` had been made of it."""
    partition = Partition(Asked(verify=True), NOTHING)
    first = Proof(fx.symbolic_trace(graph), partition, lambda graph: stock).first(compiled)
    torch.manual_seed(0)
    x, w = torch.randn(8, 4), torch.randn(4, 4, requires_grad=True)
    first(x, w)
    return partition


def other_output(x: Tensor, w: Tensor) -> tuple[Tensor]:
    return ((x @ w).relu() * 1.001,)


def other_gradient(x: Tensor, w: Tensor) -> tuple[Tensor]:
    return (fine(x, w)[0] + 1e-3 * (w - w.detach()).sum(),)


def other_write(x: Tensor, w: Tensor) -> tuple[Tensor]:
    made = fine(x.clone(), w)
    x.add_(1e-3)
    return made


@pytest.mark.parametrize(
    ("wrong", "value"),
    [(other_output, "output 0"), (other_gradient, "gradient w"), (other_write, "buffer x")],
    ids=["output", "gradient", "write"],
)
def test_a_wrong_graph_is_an_error(wrong: Callable[..., Any], value: str) -> None:
    with pytest.raises(
        NotEquivalentError, match=rf"other numbers than the stock .* such as {value} is off by"
    ) as found:
        proved(wrong)
    assert str(found.value).endswith("Please report it; without a budget the graph is left to PyTorch.")


def test_what_inductor_does_is_told() -> None:
    words = proved(other_gradient, stock=other_gradient).verified
    assert words.startswith(f"{STOCK}, as eager but for 1 of 3 values, in which the two differ: ")


def test_a_luckily_exact_stock_graph_is_no_measure_of_others() -> None:
    """What float32 makes of sums that cancel is as far from float64 as eager's, which the stock one's may not be."""

    def cancels(x: Tensor, w: Tensor) -> tuple[Tensor]:
        return (x @ w + 1e4 - 1e4,)

    def lucky(x: Tensor, w: Tensor) -> tuple[Tensor]:
        return (cancels(x.double(), w.double())[0].float(),)

    words = proved(cancels, stock=lucky, graph=cancels).verified
    assert words.startswith("as the stock partitioner's graph but for ")
    assert ", in which the two differ: output 0 is off by " in words
    assert words.endswith(", as eager bit for bit")


def test_another_rounding_passes() -> None:
    def rounds(x: Tensor, w: Tensor) -> tuple[Tensor]:
        return (fine(x.double(), w.double())[0].float(),)

    assert proved(rounds).verified.startswith("as the stock partitioner's graph by the float64 rule")


def test_only_the_first_call_is_compared() -> None:
    calls = []

    def counted(x: Tensor, w: Tensor) -> tuple[Tensor]:
        calls.append(x)
        return fine(x, w)

    first = Proof(fx.symbolic_trace(fine), Partition(Asked(), NOTHING), lambda *_: fine).first(counted)
    x, w = torch.randn(8, 4), torch.randn(4, 4, requires_grad=True)
    first(x, w)
    assert len(calls) == 2
    assert calls[-1] is x
    first(x, w)
    assert len(calls) == 3


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(3, 1).expand(3, 4), torch.arange(24).view(4, 6)[1:, ::2].t(), torch.empty(0, 3), torch.tensor(2.0)],
    ids=["expanded", "strided", "empty", "scalar"],
)
def test_copies_lie_as_what_they_are_of(tensor: Tensor) -> None:
    (_,), (copied,) = proof.Case(["x"], [tensor], RandomState()).copies()
    assert torch.equal(copied, tensor)
    assert copied.stride() == tensor.stride()
    assert copied.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr() or not tensor.numel()


def test_what_eager_cannot_show_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fused(*_: Any) -> Any:
        raise FusedRandomnessError("attention")

    def unknown(*_: Any) -> Any:
        raise NotImplementedError("no rule for this\nand more")

    for raises, words in ((fused, "dropout inside of a fused operator"), (unknown, r"\(no rule for this\); compile")):
        monkeypatch.setattr(proof, "copied", lambda *_, raises=raises, **__: raises)
        with pytest.raises(MeasurementError, match=words):
            proved(fine)


class Branches(nn.Module):
    """One of two graphs runs, by what is in a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp(1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.cond(x.sum() > 0, lambda x: self.inner(x.sin()), lambda x: self.inner(x.cos()), (x,))
        return result


@pytest.mark.usefixtures("partitions")
def test_what_runs_graphs_of_its_own_is_named() -> None:
    with pytest.raises(MeasurementError, match=r"the graph in eager \(cond runs graphs of its own\); compile without"):
        verifying(Branches())(torch.randn(8, 32)).backward()


def test_what_cannot_be_copied_is_refused() -> None:
    with pytest.raises(MeasurementError, match=r"takes x, a tensor of layout torch\.sparse_coo; compile without it"):
        proof.refuse(["x"], [torch.eye(2).to_sparse()])
