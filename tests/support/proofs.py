"""What two processes do in ``tests/equivalence/test_in_mesh.py``: optimize with a proof that holds, or must fail."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import memrewrite
from memrewrite.equivalence import in_mesh as comparing
from memrewrite.equivalence.trial import take_step
from memrewrite.equivalence.verifying import Verdict
from memrewrite.optimizing import in_mesh
from memrewrite.optimizing.in_mesh import written_in
from memrewrite.runtime.dropin import program_from
from tests.support import ddp, fsdp

SEGMENTS: dict[str, Any] = {"budget": "85%", "passes": ["checkpoint_segments"]}
Models = dict[str, tuple[Callable[[], Any], dict[str, Any]]]


@dataclass(frozen=True)
class Proved:
    """The verdict in the mesh, and what of the model and the random state was not as before afterwards."""

    verdict: Verdict
    changed: list[str]


def halves() -> Tensor:
    """Inputs of this process alone."""
    return torch.randn(512, 16, generator=torch.Generator().manual_seed(dist.get_rank()))


def sharded(**given: Any) -> nn.Module:
    """A model that is sharded before it is optimized."""
    model: Any = fsdp.Net()
    for unit in model.layers:
        fully_shard(unit, mesh=init_device_mesh("cpu", (2,)), **given)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)), **given)
    model.layers[0].set_modules_to_forward_prefetch([*model.layers[1:]])
    return model


BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.bfloat16)
MODELS: Models = {
    "fsdp": (fsdp.Net, {"mesh": "fsdp=2", **SEGMENTS}),
    "fsdp, all passes": (fsdp.Net, {"mesh": "fsdp=2", "budget": "85%"}),
    "fsdp in bf16": (fsdp.Net, {"mesh": "fsdp=2,param-dtype=bf16,reduce-dtype=fp32,output-dtype=bf16", **SEGMENTS}),
    "replicas": (fsdp.Net, {"mesh": "fsdp=1,replicas=2", **SEGMENTS}),
    "sharded before": (sharded, SEGMENTS),
    "sharded in bf16 before": (lambda: sharded(mp_policy=BF16), SEGMENTS),
    "ddp": (lambda: ddp.Net(False), {"mesh": "ddp=2,gradient-as-bucket-view", **SEGMENTS, "budget": "75%"}),
    "ddp, changed arithmetic": (lambda: ddp.Net(False), {"mesh": "ddp=2", "budget": "75%"}),
    "wrapped before": (lambda: DistributedDataParallel(ddp.Net(False)), {**SEGMENTS, "budget": "75%"}),
}


def proofs() -> dict[str, Proved]:
    """Of every model, in this process."""
    return {name: proved(*asked) for name, asked in MODELS.items()}


def proved(make: Callable[[], Any], asked: dict[str, Any]) -> Proved:
    """What is found as a model is optimized, with the numbers of this process as they were."""
    model = make()
    found: list[Verdict] = []
    before = {name: value.detach().clone() for name, value in _numbers(model)}
    random = torch.get_rng_state()
    with mock.patch.object(in_mesh, "verify_in_mesh", _noting(found)):
        optimized(model, asked)
    (verdict,) = found
    changed = [name for name, value in _numbers(model) if not torch.equal(before[name], value)]
    changed += [] if torch.equal(random, torch.get_rng_state()) else ["random state"]
    return Proved(verdict, changed)


def _numbers(model: Any) -> Iterator[tuple[str, Tensor]]:
    for name, value in model.state_dict().items():
        yield name, value.to_local() if hasattr(value, "to_local") else value


def _noting(found: list[Verdict]) -> Any:
    def noted(*args: Any, **kwargs: Any) -> Verdict:
        found.append(comparing.verify_in_mesh(*args, **kwargs))
        return found[-1]

    return noted


def optimized(model: Any, asked: dict[str, Any]) -> Any:
    """By momentum, so that what gradients leave behind shows in parameters."""
    convolutional = isinstance(getattr(model, "module", model), ddp.Net)
    return memrewrite.optimize(model, ddp.images() if convolutional else halves(), optimizer=ddp.optimizer, **asked)


def failures() -> dict[str, str]:
    """What is raised where the rewritten model is another one, or fails, in the processes that a case names."""
    given: Models = {"before": MODELS["fsdp"], "after": MODELS["sharded before"], "ddp": MODELS["ddp"]}
    cases = {"wrong in both": (wrong, (0, 1)), "wrong in one": (wrong, (1,)), "failing in one": (failing, (1,))}
    found = {
        f"{name}, {model}": raised(*given[model], broken if dist.get_rank() in ranks else mock.MagicMock)
        for name, (broken, ranks) in cases.items()
        for model in given
    }
    dist.barrier()  # which is as it was
    return found


def raised(make: Callable[[], Any], asked: dict[str, Any], broken: Callable[[], Any]) -> str:
    """What ``optimize`` raises in this process where something is ``broken`` in the mesh."""
    try:
        with broken():
            optimized(make(), asked)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def wrong() -> Any:
    """Programs of a result that add almost the same, which the first process has not seen."""

    def changed(result: nn.Module) -> in_mesh.Written:
        found = written_in(result)
        return {
            path: (program_from(program.source.replace("aten.linear.default(", "almost(") + ALMOST), constants)
            for path, (program, constants) in found.items()
        }

    return mock.patch.object(in_mesh, "written_in", changed)


def failing() -> Any:
    """The second step of the rewritten model, while the other process waits for what this one has of it."""
    taken = iter(range(100))

    def take(*args: Any) -> Any:
        if next(taken) == comparing.STEPS + 1:
            raise ZeroDivisionError("no step here")
        return take_step(*args)

    return mock.patch.object(comparing, "take_step", take)


ALMOST = """

def almost(x, weight, bias):
    return aten.linear.default(x, weight, bias) * 1.000001
"""
