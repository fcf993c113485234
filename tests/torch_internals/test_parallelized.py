"""What ``parallelize_module`` was called of is rewritten: in two processes over gloo, and alone in a fake group."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

import memrewrite
from memrewrite.observe.effects import observe
from memrewrite.records.errors import UsageError
from memrewrite.records.mesh import Tp
from memrewrite.runtime.dropin import programs
from memrewrite.search.regions import find
from memrewrite.torch_internals.groups import alone_among
from memrewrite.torch_internals.mesh_groups import meshes_in, speaking_to_nobody
from memrewrite.workload.step import Inputs, Step
from tests.support import parallelized
from tests.support.parallelized import ROWS, Trained, assert_budget_holds, assert_trained_alike
from tests.support.processes import together
from tests.support.tensor_parallel import TOKENS, Mixture

Found = list[dict[str, tuple[Trained, Trained]]]
FIRST = ["mlp"]
OTHERS = [
    "prepared",
    parallelized.BEFORE,
    "llama",
    "sequence",
    *(["transformers"] if find_spec("transformers") else []),
]
BOTH = pytest.mark.parametrize("rank", [0, 1])
EACH = pytest.mark.parametrize("name", FIRST + OTHERS)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """The trainings of some models in each of two processes."""
    return together(parallelized.trainings, tmp_path_factory.mktemp("parallelized"), FIRST)


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Those of the others."""
    return together(parallelized.trainings, tmp_path_factory.mktemp("parallelized"), OTHERS)


@pytest.fixture
def found(name: str, request: pytest.FixtureRequest) -> Found:
    """Where the trainings of a model are."""
    result: Found = request.getfixturevalue("first" if name in FIRST else "others")
    return result


@BOTH
@EACH
def test_a_budget_holds_in_two_processes(found: Found, name: str, rank: int) -> None:
    assert_budget_holds(*found[rank][name])


@BOTH
@EACH
def test_they_train_as_they_did(found: Found, name: str, rank: int) -> None:
    assert_trained_alike(*found[rank][name], mesh="tp=2")


@EACH
def test_each_process_has_the_same_plan(found: Found, name: str) -> None:
    first, second = (each[name][1] for each in found)
    assert first.programs == second.programs
    assert "run_segment" in first.programs[""]
    assert first.predicted == second.predicted


@pytest.fixture
def mesh() -> Iterator[Any]:
    """A mesh of two processes, of which this is the first and the other is not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def test_segments_hold_products_and_what_is_sent_for_them(mesh: Any) -> None:
    result = memrewrite.optimize(parallelized.llama(mesh), TOKENS, budget="min", passes=["checkpoint_segments"])
    source = programs(result)[""].source
    inside, _, _ = source.partition("def graph(")
    assert "self_layers_0.q(" in inside
    assert "self_layers_0.o(" in inside
    products = [line for line in source.splitlines() if "run_segment(" in line and "q.weight" not in line]
    assert any("gate.weight" in line for line in products)
    assert not [line for line in products if "random=True" in line]  # they draw nothing, whatever they are given
    assert result.report.verdict.startswith("bit-equal: 3 steps, 27 gradients")
    assert not [note for note in result.report.notes if "_FromTorchTensor" in note]
    assert "15 calls of layers that are divided among processes stand in segments and run again; what" in str(
        result.report.notes
    )


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # one of the mode that counts
def test_sums_after_products_are_sent_once(mesh: Any) -> None:
    def sent(model: nn.Module) -> dict[Any, int]:
        with CommDebugMode() as seen:
            model(TOKENS).mean().backward()
        return dict(seen.get_comm_counts())

    asked: dict[str, Any] = {"budget": "75%", "passes": ["checkpoint_segments"], "verify": False}
    result = memrewrite.optimize(parallelized.llama(mesh), TOKENS, **asked)
    assert "self_layers_0.o(" in programs(result)[""].source.partition("def graph(")[0]
    assert sent(result) == sent(parallelized.llama(mesh))


def test_what_has_a_hook_of_the_users_runs_once(mesh: Any) -> None:
    model, calls = parallelized.llama(mesh), []
    model.get_submodule("layers.0.gate").register_forward_hook(lambda *_: calls.append(1))
    result = memrewrite.optimize(model, TOKENS, budget="min", passes=["checkpoint_segments"], verify=False)
    inside, _, outside = programs(result)[""].source.partition("def graph(")
    assert "self_layers_1.gate(" in inside
    assert "self_layers_0.gate(" in outside
    assert "self_layers_0.gate(" not in inside
    calls.clear()
    result(TOKENS).mean().backward()
    assert calls == [1]


OTHERWISE: dict[str, dict[str, Any]] = {
    "in bf16": {"amp": "bf16"},
    "micro batches": {"micro_batches": 2},
    "a range of lengths": {"dynamic": {"tokens": {1: (8, 256)}}},
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_another_step_is_planned(mesh: Any, name: str) -> None:
    result = memrewrite.optimize(parallelized.llama(mesh), TOKENS, budget="65%", **OTHERWISE[name])
    assert result.report.predicted_after.peak <= 0.65 * result.report.predicted_before.peak
    assert "bit-equal: 3 steps" in result.report.verdict


def test_inference_is_planned(mesh: Any) -> None:
    result = memrewrite.optimize(parallelized.llama(mesh).eval(), TOKENS, budget="min", mode="inference")
    assert result.report.config["mesh"] == "tp=2"
    assert result.report.predicted_after.peak < result.report.predicted_before.peak


def moved(mesh: Any, layouts: Any) -> int:
    """The bytes that the call of a product counts as moving, which puts out what has these layouts."""
    model = parallelize_module(nn.Sequential(nn.Linear(64, 64)), mesh, {"0": ColwiseParallel(output_layouts=layouts)})
    with speaking_to_nobody(2):
        (region,) = find(model, Inputs((ROWS,), {}), Step(mesh=Tp(2, applied=True))).found
        effects = observe(region.captured.graph_module, region.example)
    return next(facts.moved for node, facts in effects.of.items() if node.op == "call_module")


def test_what_is_sent_takes_longer_than_what_is_moved(mesh: Any) -> None:
    part = ROWS.shape[0] * 32 * 4
    assert moved(mesh, Replicate()) - moved(mesh, None) >= 9 * (part + 2 * part)


def test_what_is_sent_in_a_group_that_a_hook_holds_is_refused(mesh: Any) -> None:
    model, group = parallelized.mlp(mesh), dist.new_group([0, 1])
    model.get_submodule("layers.1").register_forward_hook(
        lambda *given: dist.all_reduce(given[2].detach(), group=group)
    )
    with pytest.raises(UsageError, match=r"^The model sends in a process group that a hook or its forward holds, "):
        memrewrite.optimize(model, ROWS, budget="min")


def test_a_mixture_of_experts_is_planned() -> None:
    result = memrewrite.optimize(Mixture(), TOKENS, budget="92%", mesh="tp=2")
    assert result.report.verdict.startswith("bit-equal: 3 steps, 10 gradients")


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of the older name, which is that of every version
@pytest.mark.parametrize("dim", [0, 1])
def test_what_is_scattered_without_peers_is_a_part_of_it(dim: int) -> None:
    whole = torch.arange(16.0).reshape(4, 4)
    with alone_among(2):
        group: Any = dist.group.WORLD
        part = functional.reduce_scatter_tensor(whole, "sum", dim, group) + 0
        into = torch.full((2, 4), torch.nan)
        dist.reduce_scatter_tensor(into, whole)
    assert torch.equal(part, whole.narrow(dim, 0, 2))
    assert torch.equal(into, whole[:2])


def test_groups_are_as_they_were(mesh: Any) -> None:
    names = mesh._dim_group_names
    with speaking_to_nobody(2):
        assert mesh.get_group().name() != ""
        assert mesh._dim_group_names != names
        assert dist.get_rank() == 0
    with meshes_in([dist.new_group([0])]):
        assert mesh._dim_group_names == names  # of another size
    assert mesh._dim_group_names == names
    assert mesh.get_group() is dist.group.WORLD or mesh.get_group().size() == 2


class Gated(nn.Module):
    """Residual layers with a plan, and a parameter of the model's own."""

    tp_plan: ClassVar[dict[str, Any]] = {"*.up": "colwise", "*.down": "rowwise", "head": "colwise_gather_output"}

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = Layer(), Layer(), nn.Linear(64, 128)
        self.shift = nn.Parameter(torch.zeros(64))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.second(self.first(x + self.shift)))
        return result


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        result: Tensor = x + self.down(y * torch.sigmoid(y))
        return result


def test_a_plan_is_made_without_any_process_group() -> None:
    model = Gated()
    before = memrewrite.estimate(model, ROWS, mesh="tp=2").peak.bytes
    result = memrewrite.optimize(model, ROWS, budget="70%", mesh="tp=2")
    report, most = result.report, 0.7 * before
    assert not dist.is_initialized()
    assert report.config["mesh"] == "tp=2"
    assert report.predicted_before.peak == before
    assert report.predicted_after.peak <= most
    assert report.verdict.startswith("equivalent: ")  # by swish, whose arithmetic is another
    assert dict(result.named_parameters()) == dict(model.named_parameters())
    assert not any(vars(module)["_forward_hooks"] for module in model.modules())


def test_what_is_planned_before_runs_once_it_is_parallelized(mesh: Any) -> None:
    model = Gated()
    result = memrewrite.optimize(model, ROWS, budget="min", mesh="tp=2", verify=False)
    with pytest.warns(memrewrite.FallbackWarning, match=r"its original forward: first\.up\.weight is whole, and was p"):
        assert torch.equal(result(ROWS), model(ROWS))
    result = memrewrite.optimize(model, ROWS, budget="min", mesh="tp=2", verify=False)
    for layer in (model.first, model.second):  # which are those of the result, too
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    parallelize_module(result, mesh, {"head": ColwiseParallel(output_layouts=Replicate())})
    assert result(ROWS).shape == (512, 128)  # without a warning, which would be an error


def test_parameters_of_two_kinds_are_refused_for_cuda() -> None:
    with pytest.raises(UsageError, match=r"^Some parameters of Gated are tensor parallel and others are not, which an"):
        memrewrite.optimize(Gated(), ROWS, budget="min", mesh="tp=2", device="cuda")


def of_two_in_four() -> nn.Module:
    return parallelized.mlp(init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))["tensor"])


def with_a_style_of_its_own() -> nn.Module:
    style = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate(), use_local_output=True)
    mesh = init_device_mesh("cpu", (4,))
    return parallelize_module(parallelized.mlp(mesh), mesh, style)


def divided_unevenly() -> nn.Module:
    return parallelize_module(parallelized.Mlp(), init_device_mesh("cpu", (4,)), {"head": ColwiseParallel()})


def with_another_forward() -> nn.Module:
    model = parallelized.mlp(init_device_mesh("cpu", (4,)))
    first, forward = model.get_submodule("layers.0.0"), model.get_submodule("layers.0.0").forward
    first.forward = lambda x: forward(x)  # as transformers wraps it
    return model


REFUSED = {
    "wrapped": (
        with_another_forward,
        r"^The forward of layers\.0\.0 was put on the object, as transformers' own",
    ),
    "two of four": (
        of_two_in_four,
        r"^The model is tensor parallel among 2 of 4 processes, which would not have the same plan; it can be opti",
    ),
    "a style": (
        with_a_style_of_its_own,
        r"^parallelize_module gave the model itself \(Mlp\) a style, and only modules",
    ),
    "unevenly": (divided_unevenly, r"^head\.weight of 33x64 cannot be divided among tp=4; give another number\.$"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_parallel_otherwise_is_refused(name: str) -> None:
    make, sentence = REFUSED[name]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        with pytest.raises(UsageError, match=sentence):
            memrewrite.optimize(make(), ROWS, budget="min")
    finally:
        dist.destroy_process_group()
