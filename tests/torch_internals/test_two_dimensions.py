"""FSDP2 across tensor parallelism is rewritten: in four processes over gloo, and alone in a fake group."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import PrepareModuleInput, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import memrewrite
from memrewrite.records.errors import UsageError
from memrewrite.runtime.dropin import programs
from memrewrite.torch_internals.mesh_groups import speaking_to_nobody
from tests.support import fsdp, parallelized, tensor_parallel, two_dimensions
from tests.support.parallelized import BEFORE, Trained, assert_budget_holds, assert_trained_alike
from tests.support.processes import together
from tests.support.tensor_parallel import TOKENS, Llama
from tests.support.two_dimensions import devices, sharded

Found = list[dict[str, tuple[Trained, Trained]]]
FIRST = ["llama", BEFORE]
OTHERS = [name for name in two_dimensions.CASES if name not in FIRST]
RANKS = pytest.mark.parametrize("rank", range(4))
EACH = pytest.mark.parametrize("name", FIRST + OTHERS)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """The trainings of some models in each of four processes."""
    return together(two_dimensions.trainings, tmp_path_factory.mktemp("dimensions"), FIRST, count=4)


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Those of the others."""
    return together(two_dimensions.trainings, tmp_path_factory.mktemp("dimensions"), OTHERS, count=4)


@pytest.fixture
def found(name: str, request: pytest.FixtureRequest) -> Found:
    """Where the trainings of a model are."""
    result: Found = request.getfixturevalue("first" if name in FIRST else "others")
    return result


@RANKS
@EACH
def test_a_budget_holds_in_four_processes(found: Found, name: str, rank: int) -> None:
    assert_budget_holds(*found[rank][name])


@RANKS
@EACH
def test_they_train_as_they_did(found: Found, name: str, rank: int) -> None:
    mesh = "fsdp=1,tp=2,replicas=2" if "replicas" in name else "fsdp=2,tp=2"
    assert_trained_alike(*found[rank][name], mesh=mesh)


@EACH
def test_each_process_has_the_same_plan(found: Found, name: str) -> None:
    first, *others = (each[name][1] for each in found)
    assert [*first.programs] == ["", "layers.0", "layers.1"]
    assert any("run_segment" in program for program in first.programs.values())
    for other in others:
        assert other.programs == first.programs
        assert other.predicted == first.predicted


def test_each_process_estimates_what_it_takes(tmp_path: Path, first: Found) -> None:
    for rank, (both, kept, peak) in enumerate(together(two_dimensions.estimates, tmp_path, count=4)):
        assert both == first[rank]["llama"][1].predicted[0]
        assert kept >= peak
        assert kept == peak or rank == 3  # which has less than the others


@pytest.fixture
def four() -> Iterator[None]:
    """A group of four processes, of which this is the first and the others are not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("four")
def test_divided_layers_are_calls_in_units() -> None:
    sharding, tensors = devices("llama")
    model = sharded(parallelized.llama(tensors), sharding)
    estimated = memrewrite.estimate(model, TOKENS)
    result = memrewrite.optimize(model, TOKENS, budget="min", passes=["checkpoint_segments"])
    root, unit = (programs(result)[path].source for path in ("", "layers.0"))
    inside, _, _ = unit.partition("def part_0_graph(")
    assert estimated.peak.bytes == memrewrite.report_of(result).predicted_before.peak
    assert estimated.mesh == "fsdp=2,tp=2"
    assert "self.embedding(" in root
    assert "self.q(" in inside
    assert "self.o(" in inside


def test_a_plan_is_made_without_any_process_group() -> None:
    model = Llama()
    result = memrewrite.optimize(model, TOKENS, budget="60%", mesh="fsdp=2,tp=2")
    assert not dist.is_initialized()
    assert result.report.config["mesh"] == "fsdp=2,tp=2"
    before = memrewrite.estimate(model, TOKENS, mesh="fsdp=2,tp=2").peak.bytes
    assert result.report.predicted_after.peak <= 0.6 * result.report.predicted_before.peak
    assert result.report.predicted_before.peak == before
    assert dict(result.named_parameters()) == dict(model.named_parameters())


@pytest.mark.usefixtures("four")
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view")
def test_what_is_planned_before_runs_once_both_are_done() -> None:
    sharding, tensors = devices("llama")
    asked: dict[str, Any] = {"budget": "60%", "mesh": "fsdp=2,tp=2", "verify": False}
    whole = sharded(memrewrite.optimize(Llama(), TOKENS, **asked), sharding)
    with pytest.warns(memrewrite.FallbackWarning, match=r"is whole, and was planned for after parallelize_module"):
        whole(TOKENS)
    result = tensor_parallel.by_hand(memrewrite.optimize(Llama(), TOKENS, **asked), tensors)
    assert sharded(result, sharding)(TOKENS).shape == (4, 256, 96)  # without a warning of ours, which would be an error


@pytest.mark.usefixtures("four")
def test_groups_are_as_they_were() -> None:
    meshes = devices("replicas")
    names = [[*mesh._dim_group_names] for mesh in meshes]
    with speaking_to_nobody(4):
        for mesh, each in zip(meshes, names, strict=True):
            assert not {*mesh._dim_group_names} & {*each}
            assert mesh.get_all_groups()
        assert [dist.get_process_group_ranks(group) for group in meshes[0].get_all_groups()] == [[0, 2], [0]]
        made = meshes[0]["data"]
    assert [mesh._dim_group_names for mesh in meshes] == names
    assert made._dim_group_names == names[0][1:]


@pytest.mark.usefixtures("four")
def test_a_unit_with_a_style_of_its_own_is_refused() -> None:
    sharding, tensors = devices("llama")
    model: nn.Module = parallelized.llama(tensors)
    style = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate(), use_local_output=True)
    parallelize_module(model, tensors, {"layers.0": style})
    with pytest.raises(UsageError, match=r"^parallelize_module gave a unit of fully_shard \(Block\) a style, and only"):
        memrewrite.optimize(sharded(model, sharding), TOKENS, budget="min")


@pytest.mark.usefixtures("four")
def test_units_over_different_dimensions_are_refused() -> None:
    model = fsdp.Net()
    for layer, mesh in zip(model.layers, devices("one over the other"), strict=False):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=devices("one over the other")[0])
    with pytest.raises(UsageError, match=r"^layers\.1 has another mesh, mp_policy or offload_policy than the model"):
        memrewrite.optimize(model, fsdp.X, budget="min")


@pytest.mark.usefixtures("four")
def test_what_some_processes_have_is_refused() -> None:
    mesh = devices("llama")[0]  # whose processes are two
    model: nn.Module = parallelized.llama(mesh)
    with pytest.raises(UsageError, match=r"^The model is tensor parallel among 2 of 4 processes, which would not have"):
        memrewrite.optimize(model, TOKENS, budget="min")
