"""FSDP2 on fake tensors takes what it takes in two processes over gloo."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import memrewrite
from memrewrite.records.errors import UsageError
from memrewrite.records.mesh import Fsdp, Mesh
from memrewrite.simulate import simulate
from memrewrite.torch_internals.fsdp import units
from memrewrite.workload.step import Inputs, Step
from tests.support import fsdp
from tests.support.processes import together


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, int]]:
    """The peaks in each of two processes."""
    return together(fsdp.peaks, tmp_path_factory.mktemp("fsdp"))


@pytest.mark.parametrize("name", fsdp.MESHES)
def test_simulated_is_what_two_processes_take(measured: list[dict[str, int]], name: str) -> None:
    step = Step(optimizer=torch.optim.AdamW, mesh=Mesh.parse(name))
    predicted = simulate(fsdp.Net(), Inputs((fsdp.X,), {}), step)
    assert predicted.peak == measured[0][name]
    assert not dist.is_initialized()
    assert {"communication buffers", "gathered parameters"} <= {*predicted.categories}


def test_a_second_simulation_finds_what_the_first_one_found() -> None:
    step = Step(optimizer=torch.optim.AdamW, mesh=Fsdp(7, param_dtype="bf16"))
    first, second = (simulate(fsdp.Net(), Inputs((fsdp.X,), {}), step) for _ in range(2))
    assert first.events == second.events


class Blocks(nn.Module):
    """Lists of layers in a part of the model, and a list of which no two are alike."""

    def __init__(self) -> None:
        super().__init__()
        self.model = fsdp.Net()
        self.head = nn.Sequential(nn.Linear(33, 8), nn.ReLU())


def test_units_are_the_members_of_lists() -> None:
    blocks = Blocks()
    assert units(blocks, Fsdp(2)) == [*blocks.model.layers]
    assert units(blocks, Fsdp(2, units="model.layers.*")) == [*blocks.model.layers]
    assert units(blocks, Fsdp(2, units="head.0")) == [blocks.head[0]]
    with pytest.raises(UsageError, match=r"^No module has a path like 'layers\.\*', the units of the mesh\.$"):
        units(blocks, Fsdp(2, units="layers.*"))


def test_what_is_not_sharded_yet_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot be optimized yet; their step can be predicted, by estimate"):
        memrewrite.optimize(fsdp.Net(), fsdp.X, budget="min", mesh="fsdp=2")
    with pytest.raises(UsageError, match=r"^A mesh of fsdp=2 cannot be measured in one process"):
        memrewrite.measure(fsdp.Net(), fsdp.X, mesh="fsdp=2")


def test_an_estimate_of_a_model_that_is_not_there_says_which_mesh_is_large_enough() -> None:
    with torch.device("meta"):
        model = fsdp.Net()
    found = memrewrite.estimate(model, fsdp.X, mesh="fsdp=64", device_memory="3.8MB")
    assert found.mesh == "fsdp=64"
    assert found.fits
    assert found.inference_peak is None
    assert found.peak.categories["parameters"] < sum(p.nbytes for p in model.parameters()) / 32  # some in granules
    (note,) = found.notes
    assert note == "The smallest mesh of a power of two that fits is fsdp=8, with 3.8 MB (3.6 MiB) on each device."
    assert not dist.is_initialized()


def test_an_estimate_beside_a_process_group_is_refused() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.raises(UsageError, match="and this process is in one; call estimate before init_process_group"):
            memrewrite.estimate(fsdp.Net(), fsdp.X, mesh="fsdp=2")
    finally:
        dist.destroy_process_group()
