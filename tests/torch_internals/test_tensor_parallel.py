"""Tensor parallelism on fake tensors takes what it takes in two processes over gloo, which train as one does."""

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import memrewrite
from memrewrite.cli import main
from memrewrite.records.errors import UsageError
from tests.support import tensor_parallel
from tests.support.processes import together
from tests.support.tensor_parallel import MESHES, OF_PLANS, TOKENS, Llama, Mixture, Trained


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Trained]]:
    """The trainings in each of two processes, in float32."""
    return together(tensor_parallel.trainings, tmp_path_factory.mktemp("tp"), torch.float32)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("mesh", MESHES)
def test_what_is_estimated_is_what_two_processes_take(found: list[dict[str, Trained]], mesh: str, rank: int) -> None:
    estimated = memrewrite.estimate(Llama(), TOKENS, mesh=mesh)
    assert found[rank][mesh].peak == estimated.peak.bytes
    assert estimated.peak.categories["communication buffers"] > 0
    assert estimated.mesh == mesh


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", OF_PLANS)
def test_what_a_plan_divides_takes_what_is_estimated(found: list[dict[str, Trained]], name: str, rank: int) -> None:
    assert found[rank][name].peak == memrewrite.estimate(OF_PLANS[name](), TOKENS, mesh="tp=2").peak.bytes


@pytest.mark.parametrize("rank", [0, 1])
def test_a_model_that_is_parallelized_says_its_mesh(found: list[dict[str, Trained]], rank: int) -> None:
    assert found[rank]["tp=2"].estimated == found[rank]["tp=2"].peak


def test_two_processes_train_as_one_does(tmp_path: Path) -> None:
    llama = tensor_parallel.train(Llama().double())
    others = {name: tensor_parallel.train(kind().double()) for name, kind in OF_PLANS.items()}
    for rank in together(tensor_parallel.trainings, tmp_path, torch.float64):
        for name, trained in rank.items():
            alone = others.get(name, llama)
            assert trained.losses == pytest.approx(alone.losses, rel=1e-10)
            assert trained.gradients.keys() == alone.gradients.keys()
            for path, gradient in alone.gradients.items():
                torch.testing.assert_close(trained.gradients[path], gradient, rtol=1e-9, atol=1e-12)


def test_one_process_takes_what_it_takes_without_a_mesh() -> None:
    alone, in_mesh = (memrewrite.estimate(Llama(), TOKENS, mesh=mesh) for mesh in (None, "tp=1"))
    assert in_mesh.peak == alone.peak
    assert in_mesh.inference_peak == alone.inference_peak


def test_a_model_that_is_not_there_is_estimated_in_any_mesh() -> None:
    with torch.device("meta"):
        model = Llama()
    found = {mesh: memrewrite.estimate(model, TOKENS, mesh=mesh) for mesh in ("tp=2", "tp=4", "fsdp=64,tp=4")}
    assert {name for name, each in found.items() if each.inference_peak is None} == {"fsdp=64,tp=4"}  # as of fsdp alone
    peaks = [each.peak.bytes for each in found.values()]
    assert peaks == sorted(peaks, reverse=True)
    assert memrewrite.estimate(model, TOKENS, mesh="tp=2").peak == found["tp=2"].peak
    assert memrewrite.estimate(Llama(), TOKENS, mesh="tp=4").peak == found["tp=4"].peak
    evaluated = memrewrite.estimate(model.eval(), TOKENS, mesh="tp=4")
    assert evaluated.peak.bytes == found["tp=4"].inference_peak
    assert evaluated.mesh == "tp=4"
    assert not dist.is_initialized()


def test_a_mixture_of_experts_is_estimated_in_two_dimensions() -> None:
    found = [memrewrite.estimate(Mixture(), TOKENS, mesh=mesh).peak for mesh in (None, "fsdp=2,tp=2", "fsdp=4,tp=4")]
    parameters = [each.categories["parameters"] for each in found]
    assert parameters == sorted(parameters, reverse=True)
    assert parameters[1] < 0.3 * parameters[0]


def test_a_model_that_is_not_there_can_be_parallelized_before() -> None:
    expected = memrewrite.estimate(Llama(), TOKENS, mesh="tp=4")
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        with torch.device("meta"):
            model = Llama()
        tensor_parallel.by_hand(model, init_device_mesh("cpu", (4,)))
        assert memrewrite.estimate(model, TOKENS).peak == expected.peak
    finally:
        dist.destroy_process_group()


def test_the_smallest_mesh_has_as_many_tensor_parallel_processes() -> None:
    found = memrewrite.estimate(Llama(), TOKENS, mesh="fsdp=4,tp=2", device_memory="1GB")
    assert found.fits
    assert found.notes[-1].startswith("The smallest mesh of a power of two that fits is fsdp=1,tp=2, with ")


def test_the_command_estimates_and_its_json_has_the_mesh(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "found.json"
    target = "tests.support.tensor_parallel:Llama"
    given = ["--input", "4x256:int64:96", "--mesh", "fsdp=2,tp=2", "--json", str(file), "-q", "--device", "cpu"]
    with pytest.raises(SystemExit) as ended:
        main(["estimate", target, *given])
    assert ended.value.code == 0
    assert "each process of fsdp=2,tp=2" in capsys.readouterr().out
    found = json.loads(file.read_text())
    assert found["mesh"] == "fsdp=2,tp=2"
    assert found["peak"]["bytes"] == memrewrite.estimate(Llama(), TOKENS, mesh="fsdp=2,tp=2").peak.bytes


class Small(nn.Module):
    """Two layers and a norm in between, with a plan of one's own."""

    tp_plan: ClassVar[dict[str, Any]] = {"first": ColwiseParallel(), "second": RowwiseParallel()}

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 64), nn.RMSNorm(16), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.norm(self.first(x).unflatten(-1, (-1, 16)))
        result: Tensor = self.second(heads.flatten(-2))
        return result


X = torch.ones(64, 8)


def test_styles_of_pytorch_are_a_plan() -> None:
    words = Small()
    words.tp_plan = {"first": "colwise", "second": "rowwise"}  # type: ignore[misc]
    assert memrewrite.estimate(Small(), X, mesh="tp=2").peak == memrewrite.estimate(words, X, mesh="tp=2").peak


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_gradient_of_a_norm_of_heads_is_summed(micro_batches: int) -> None:
    model = Small()
    model.tp_plan = {**model.tp_plan, "norm": "replicated_with_grad_allreduce"}  # type: ignore[misc]
    for mesh in ("tp=2", "fsdp=2,tp=2"):
        found = memrewrite.estimate(model, X, mesh=mesh, micro_batches=micro_batches)
        assert found.peak.bytes >= memrewrite.estimate(Small(), X, mesh=mesh, micro_batches=micro_batches).peak.bytes


class Tied(nn.Module):
    """An embedding whose weight is that of the head."""

    tp_plan: ClassVar[dict[str, Any]] = {"head": "colwise_rep"}

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, 32), nn.Linear(32, 64, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.head(self.embedding(tokens))
        return result


def test_what_is_tied_stays_tied() -> None:
    tokens = torch.zeros(2, 8, dtype=torch.long)
    found = memrewrite.estimate(Tied(), tokens, mesh="tp=2")
    assert found.peak.categories["parameters"] == 64 * 32 * 4 // 2
    model = Tied()
    model.tp_plan = {"head": "rowwise_rep"}  # type: ignore[misc]
    with pytest.raises(
        UsageError, match=r"^Embedding and Linear share a parameter, their weight, which the tensor-parallel"
    ):
        memrewrite.estimate(model, tokens, mesh="tp=2")


REFUSED: dict[str, tuple[Any, str]] = {
    "no plan": ({}, r"^Small has no tensor-parallel plan; give it one \(model\.tp_plan, of paths and styles as "),
    "no module": ({"third": "colwise"}, r"^No module of Small has a path that its tensor-parallel plan names\.$"),
    "a style": (
        {"first": "all_reduce"},
        r"^The tensor-parallel plan has 'all_reduce' for first, which is not supported; call parallelize_module",
    ),
    "no width": (
        {"first": "mla_kv_a_proj"},
        r"^The tensor-parallel plan of Small has 'mla_kv_a_proj', for which its config must have qk_rope_head_dim\.$",
    ),
    "a parameter": (
        {"first.weight": "moe_tp_experts"},
        r"^The tensor-parallel plan has 'moe_tp_experts' for first\.weight, which is",
    ),
    "a norm": ({"norm": "colwise"}, r"^norm is a RMSNorm, and parallelize_module divides Linear and Embedding; leave"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_plan_that_is_not_supported_is_refused(name: str) -> None:
    plan, sentence = REFUSED[name]
    model = Small()
    model.tp_plan = plan  # type: ignore[misc]
    with pytest.raises(UsageError, match=sentence):
        memrewrite.estimate(model, X, mesh="tp=2")


def test_what_cannot_be_divided_evenly_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"^first\.weight of 64x8 cannot be divided among tp=3; give another number\.$"
    ):
        memrewrite.estimate(Small(), X, mesh="tp=3")
    model: Any = Small()
    model.config = type("Config", (), {"num_attention_heads": 4, "num_key_value_heads": 2})()
    with pytest.raises(
        UsageError, match=r"^num_key_value_heads=2 cannot be divided among tp=4; give a divisor of 2\.$"
    ):
        memrewrite.estimate(model, X, mesh="tp=4")
