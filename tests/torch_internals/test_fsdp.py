"""FSDP2 on fake tensors takes what it takes in two processes over gloo, and rewritten units train as they did."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import memrewrite
from memrewrite.records.errors import UsageError
from memrewrite.records.mesh import Fsdp, Mesh
from memrewrite.runtime.dropin import programs
from memrewrite.simulate import simulate
from memrewrite.targets.cuda_from_cpu import CUDA_FROM_CPU
from memrewrite.torch_internals.fsdp import units
from memrewrite.workload.step import Inputs, Step
from tests.support import fsdp
from tests.support.fsdp import Trained
from tests.support.processes import together

WHOLE = [*fsdp.MESHES][:3:2]  # every layer is a unit
Found = tuple[dict[str, Any], list[dict[str, tuple[Trained, Trained]]]]


def trained(folder: Path, meshes: Sequence[str], later: Sequence[str]) -> Found:
    """What was made of the model, by mesh, and the trainings in each of two processes."""
    whole = [name for name in meshes if name in WHOLE]
    optimized = {name: memrewrite.optimize(fsdp.Net(), fsdp.X, mesh=name, **fsdp.ASKED) for name in whole}
    models = {name: optimized.get(name, fsdp.Net()) for name in meshes}
    return optimized, together(fsdp.trainings, folder, models, later)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """The trainings in one mesh."""
    return trained(tmp_path_factory.mktemp("fsdp"), WHOLE[:1], fsdp.AFTER[:1])


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Those in the others."""
    return trained(tmp_path_factory.mktemp("fsdp"), [*fsdp.MESHES][1:], fsdp.AFTER[1:])


@pytest.fixture
def found(name: str, request: pytest.FixtureRequest) -> Found:
    """Where the trainings in a mesh are."""
    known = (WHOLE[0], f"after {fsdp.AFTER[0]}", fsdp.AFTER[0])
    result: Found = request.getfixturevalue("first" if name in known else "others")
    return result


@pytest.mark.parametrize("name", fsdp.MESHES)
def test_what_is_simulated_is_what_two_processes_take(found: Found, name: str) -> None:
    predicted = simulate(fsdp.Net(), Inputs((fsdp.X,), {}), Step(optimizer=torch.optim.AdamW, mesh=Mesh.parse(name)))
    assert found[1][0][name][0].peak == predicted.peak
    assert "communication buffers" in predicted.categories
    assert ("gathered parameters" in predicted.categories) == (not name.startswith("fsdp=1,"))


@pytest.mark.parametrize("name", WHOLE)
def test_a_budget_holds_in_two_processes(found: Found, name: str) -> None:
    optimized, ranks = found
    report = optimized[name].report
    original, rewritten = ranks[0][name]
    assert original.peak == report.predicted_before.peak
    assert rewritten.peak == report.predicted_after.peak <= report.budget < original.peak
    assert not dist.is_initialized()


@pytest.mark.parametrize("name", fsdp.AFTER)
def test_a_budget_holds_for_what_was_sharded_before(found: Found, name: str) -> None:
    original, rewritten = found[1][0][f"after {name}"]
    before, after, budget = rewritten.predicted
    assert original.peak == before
    assert rewritten.peak == after <= budget < before


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", [*WHOLE, *(f"after {name}" for name in fsdp.AFTER)])
def test_sharded_units_train_as_they_did(found: Found, name: str, rank: int) -> None:
    original, rewritten = found[1][rank][name]
    assert original.numbers.keys() == rewritten.numbers.keys()
    assert [key for key, value in original.numbers.items() if not torch.equal(value, rewritten.numbers[key])] == []
    assert rewritten.said == []


def test_a_second_simulation_finds_what_the_first_one_found() -> None:
    step = Step(optimizer=torch.optim.AdamW, mesh=Fsdp(7, param_dtype="bf16"))
    first, second = (simulate(fsdp.Net(), Inputs((fsdp.X,), {}), step) for _ in range(2))
    assert first.events == second.events


def test_what_streams_of_their_own_ask_for_is_reserved_besides(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(optimizer=torch.optim.AdamW, mesh=Fsdp(2), target=CUDA_FROM_CPU)
    apart = simulate(fsdp.Net(), Inputs((fsdp.X,), {}), step)
    usual = torch.cpu.current_stream()
    monkeypatch.setattr(torch.cpu, "current_stream", lambda: usual)
    together = simulate(fsdp.Net(), Inputs((fsdp.X,), {}), step)
    assert apart.peak == together.peak
    assert apart.reserved > together.reserved  # what is gathered into, and reduced gradients, have no place in a rest


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


class Bare(nn.Module):
    """Units alone, and no parameters beside theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = fsdp.Net().layers

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_a_model_of_units_alone_is_rewritten() -> None:
    result = memrewrite.optimize(
        Bare(), torch.ones(512, 64), budget="85%", mesh="fsdp=2", passes=["checkpoint_segments"]
    )
    assert result.report.verdict.startswith("bit-equal: 3 steps, 12 gradients")
    assert sorted(programs(result)) == ["", "layers.0", "layers.1", "layers.2"]


@pytest.mark.parametrize("size", [2, 4])
def test_what_is_resharded_to_parts_takes_more_the_fewer_they_are(size: int) -> None:
    peaks = [
        memrewrite.estimate(fsdp.Net(), fsdp.X, mesh=f"fsdp=8{how}").peak.bytes
        for how in ("", f",reshard={size}", ",no-reshard")
    ]
    assert peaks[0] < peaks[1] <= peaks[2]


def test_what_is_not_sharded_yet_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^No part of the model is a unit of fsdp=2; name them, units=model"):
        memrewrite.optimize(nn.Linear(16, 4), fsdp.X, budget="min", mesh="fsdp=2")
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


def test_an_estimate_leaves_the_process_group_alone() -> None:
    alone = memrewrite.estimate(fsdp.Net(), fsdp.X, mesh="fsdp=8")
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        group = init_device_mesh("cpu", (2,)).get_group()
        assert memrewrite.estimate(fsdp.Net(), fsdp.X, mesh="fsdp=8").peak == alone.peak
        assert (dist.get_rank(), dist.get_world_size(), dist.get_process_group_ranks(group)) == (1, 2, [0, 1])
        dist.all_reduce(torch.ones(2), group=dist.new_group())
    finally:
        dist.destroy_process_group()
