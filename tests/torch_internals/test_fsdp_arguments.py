"""What ``fully_shard`` can be told besides: in two processes over gloo, and for CUDA with the host apart."""

import pytest
import torch
from torch import nn

import memrewrite
from memrewrite.records.errors import UsageError
from memrewrite.records.mesh import Fsdp
from memrewrite.torch_internals.fsdp import ignored
from tests.support import fsdp
from tests.support.fsdp import NESTED, OTHERWISE, Trained, input_of
from tests.support.processes import together

Found = list[dict[str, tuple[Trained, ...]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """The trainings in each of two processes."""
    models = {name: memrewrite.optimize(fsdp.Net(), input_of(name), mesh=name, **fsdp.ASKED) for name in OTHERWISE}
    return together(fsdp.trainings_otherwise, tmp_path_factory.mktemp("arguments"), models)


@pytest.mark.parametrize("name", OTHERWISE)
def test_a_budget_holds_in_two_processes(found: Found, name: str) -> None:
    original, before, after = found[0][name]
    unsharded, sharded, budget = after.predicted
    assert original.peak == unsharded == memrewrite.estimate(fsdp.Net(), input_of(name), mesh=name).peak.bytes
    assert before.peak == after.peak == sharded <= budget < unsharded


def test_a_budget_holds_for_units_in_units_and_hooks_in_units(found: Found) -> None:
    original, result = found[0][NESTED]
    before, after, budget = result.predicted
    assert original.peak == before
    assert result.peak == after <= budget < before


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", [*OTHERWISE, NESTED])
def test_they_train_as_they_did(found: Found, name: str, rank: int) -> None:
    original, *others = found[rank][name]
    for other in others:
        assert original.numbers.keys() == other.numbers.keys()
        assert [key for key, value in original.numbers.items() if not torch.equal(value, other.numbers[key])] == []
        assert other.said == []


@pytest.mark.parametrize("more", ["", ",replicas=2", ",param-dtype=bf16,reduce-dtype=fp32", ",no-reshard"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_what_lies_on_the_host_takes_nothing_of_a_gpu(more: str, micro_batches: int) -> None:
    here, apart = (
        memrewrite.estimate(fsdp.Net(), fsdp.X, mesh=mesh, device="cuda", micro_batches=micro_batches).peak
        for mesh in (f"fsdp=4{more}", f"fsdp=4{more},cpu-offload")
    )
    on_host = {"parameters", "gradients", "optimizer state"}
    assert not on_host & apart.categories.keys()
    assert here.bytes - apart.bytes == sum(here.categories.get(kind, 0) for kind in on_host)
    assert apart.categories["gathered parameters"] == here.categories["gathered parameters"]


class Alone(nn.Module):
    """A layer whose parameters are most of what its step takes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.layers[0](x)) if self.training else x


def test_what_is_gathered_is_copied_to_the_gpu_before() -> None:
    x, part = torch.ones(8, 1024), 1024 * 1024 * 4 // 2
    here, apart = (
        memrewrite.estimate(Alone(), x, mesh=mesh, device="cuda", optimizer="sgd").peak.categories
        for mesh in ("fsdp=2,no-reshard", "fsdp=2,no-reshard,cpu-offload")
    )
    assert here["parameters"] == 2 * part
    assert "parameters" not in apart
    assert apart["gathered parameters"] == 4 * part


def test_a_plan_for_a_gpu_leaves_out_the_host() -> None:
    result = memrewrite.optimize(
        fsdp.Net(), fsdp.X, budget="min", mesh="fsdp=4,cpu-offload", device="cuda", passes=["checkpoint_segments"]
    )
    assert result.report.config["mesh"] == "fsdp=4,cpu-offload"
    assert "optimizer state" not in result.report.predicted_after.categories
    assert result.report.predicted_after.peak < result.report.predicted_before.peak
    assert result.report.verdict.startswith("bit-equal: 3 steps")


def test_what_is_ignored_is_there() -> None:
    net = fsdp.Net()
    assert ignored(net, Fsdp(2)) == []
    assert ignored(net, Fsdp(2, ignored=("layers.*.0.bias",))) == [layer[0].bias for layer in net.layers]  # type: ignore[index]
    with pytest.raises(UsageError, match=r"^No parameter has a path like 'layers', which the mesh says is ignored\.$"):
        memrewrite.estimate(net, fsdp.X, mesh="fsdp=2,ignored=layers")
