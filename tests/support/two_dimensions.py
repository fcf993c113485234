"""What four processes do in ``tests/torch_internals/test_two_dimensions.py``: FSDP2 across tensor parallelism."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import memrewrite
from memrewrite.runtime.dropin import programs
from tests.support import fsdp, parallelized, tensor_parallel
from tests.support.parallelized import MODELS, Trained, loss_of, train

CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "prepared": {},
    "llama in bf16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.bfloat16)},
    "llama, replicas": {},
    "llama, planned before": {},
}


def devices(name: str) -> tuple[Any, Any]:
    """The meshes for ``fully_shard`` and ``parallelize_module``; replicas are those of one part."""
    if "replicas" in name:
        mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("copy", "data", "tensor"))
        return mesh["copy", "data"], mesh["tensor"]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    return mesh["data"], mesh["tensor"]


def sharded(model: Any, mesh: Any, **given: Any) -> Any:
    """The model, whose layers are units."""
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **given)
    fully_shard(model, mesh=mesh, **given)
    return model


def tokens() -> Tensor:
    """Those of all processes that have parts of the same layers; others have others."""
    return (tensor_parallel.TOKENS + dist.get_rank() // 2) % 96


def estimates() -> tuple[int, int, int]:
    """What ``estimate`` says in this process of a model in both, and of one resharded to parts, whose peak it takes."""
    sharding, tensors = devices("llama")
    both = memrewrite.estimate(sharded(MODELS["llama"][0](tensors), sharding), tokens()).peak.bytes
    mesh = init_device_mesh("cpu", (4,))
    model: Any = fsdp.Net()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=2)
    fully_shard(model, mesh=mesh)
    return both, memrewrite.estimate(model, fsdp.X).peak.bytes, train(model, fsdp.X).peak


def trainings(names: list[str]) -> dict[str, tuple[Trained, Trained]]:
    """Each model as it is, and what was made of it in this process."""
    found = {}
    for name in names:
        sharding, tensors = devices(name)
        make: Callable[[Any], nn.Module] = MODELS[name.replace(",", " ").split()[0]][0]
        asked: dict[str, Any] = {"budget": "60%", "loss_fn": loss_of, "passes": ["checkpoint_segments"]}
        original = train(sharded(make(tensors), sharding, **CASES[name]), tokens())
        if name == parallelized.BEFORE:
            result: Any = memrewrite.optimize(tensor_parallel.Llama(), tokens(), mesh="fsdp=2,tp=2", **asked)
            written = {path: program.source for path, program in programs(result).items()}
            model = sharded(tensor_parallel.by_hand(result, tensors), sharding)
        else:
            model = memrewrite.optimize(sharded(make(tensors), sharding, **CASES[name]), tokens(), **asked)
            written = {path: program.source for path, program in programs(model).items()}
        report, trained = memrewrite.report_of(model), train(model, tokens())
        peaks = report.predicted_before.peak, report.predicted_after.peak, report.budget or 0
        found[name] = original, Trained(trained.peak, trained.numbers, peaks, report.notes, written)
    return found
