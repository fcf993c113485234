"""What two processes take under FSDP2 in ``tests/torch_internals/test_fsdp.py``, the storages of each counted."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

import memrewrite
from memrewrite.runtime.dropin import programs
from memrewrite.runtime.promise import FallbackWarning
from memrewrite.simulate.memory.tracker import Tracker
from memrewrite.torch_internals.fsdp import seen_by
from memrewrite.torch_internals.spread import local_part
from tests.support.parallelized import ROWS, Mlp

MESHES: dict[str, dict[str, Any]] = {
    "fsdp=2": {},
    "fsdp=2,no-reshard": {"reshard_after_forward": False},
    "fsdp=2,param-dtype=bf16,reduce-dtype=fp32,output-dtype=bf16": {
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.bfloat16)
    },
    "fsdp=2,reshard-root": {"reshard_after_forward": True},
    "fsdp=1,replicas=2": {},
    "fsdp=2,units=layers.1": {},
}
BF16 = "fsdp=2,param-dtype=bf16,output-dtype=bf16,no-cast-inputs"
NESTED = "fsdp=2,nested"  # of Mlp, whose layers have a unit in them and a hook at their ends
IGNORED = "fsdp=2,ignored=outward.weight,ignored=layers.1.0.*"
OTHERWISE: dict[str, dict[str, Any]] = {
    "fsdp=2,cpu-offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},  # to the memory of the same CPU
    BF16: {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, None, torch.bfloat16, cast_forward_inputs=False)},
    IGNORED: {},
}
X = torch.ones(512, 16)  # of which activations are so large that what gloo itself copies to reduce decides no peak


class Net(nn.Module):
    """Layers that are sharded one by one, and parameters of the model's own before and after them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inward, self.outward = nn.Linear(16, 64), nn.Linear(64, 33)
        layers = (nn.Sequential(nn.Linear(64, 255), nn.ReLU(), nn.Linear(255, 64)) for _ in range(3))
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inward(x)
        for layer in self.layers:
            x = x + layer(x)
        result: Tensor = self.outward(x)
        return result


@dataclass(frozen=True)
class Trained:
    """What came of some steps: the peak in bytes of the later ones, and all numbers by name.

    ``predicted`` are the peaks before and after, and the budget, of a model that was optimized in the process.
    """

    peak: int
    numbers: dict[str, Tensor]
    said: list[str]
    predicted: tuple[int, int, int] = (0, 0, 0)


PREFETCH, GROUPED = ",prefetch", ",grouped"
CAST = "fsdp=2,param-dtype=bf16,reduce-dtype=fp32,output-dtype=bf16"
AFTER = [CAST + PREFETCH, "fsdp=2" + GROUPED, CAST + GROUPED]  # optimized when sharded


def trainings(models: dict[str, nn.Module], later: Sequence[str]) -> dict[str, tuple[Trained, Trained]]:
    """The model as it is, and what was made of it before it was sharded, or later, by mesh."""
    found = {name: (train(Net(), name), train(model, name)) for name, model in models.items()}
    after = {f"after {name}": (train(Net(), name), train(Net(), name, optimized)) for name in later}
    return found | after


ASKED: dict[str, Any] = {"budget": "85%", "passes": ["checkpoint_segments"], "verify": False}


def optimized(model: nn.Module, x: Tensor = X) -> nn.Module:
    """By segments alone, within as much as is asked for before sharding."""
    return memrewrite.optimize(model, x, **ASKED)


def trainings_otherwise(models: dict[str, nn.Module]) -> dict[str, tuple[Trained, ...]]:
    """The model as it is, what was made of it before it was sharded, and what is made of it afterwards."""
    found = {
        name: (train(Net(), name), train(model, name), train(Net(), name, optimized)) for name, model in models.items()
    }
    return found | {NESTED: (train(Mlp(), NESTED), train(Mlp(), NESTED, optimized))}


def input_of(name: str) -> Tensor:
    """The input of a training."""
    return X.bfloat16() if name == BF16 else ROWS if name == NESTED else X


def train(model: Any, name: str, then: Callable[..., Any] = lambda model, x: model) -> Trained:
    """Steps of PyTorch's tutorial loop with the model sharded for one mesh, and changed then."""
    known, twice = MESHES | OTHERWISE | {NESTED: {}}, "replicas" in name
    given = known[name.removesuffix(PREFETCH).removesuffix(GROUPED)]
    calls: list[int] = []
    if name == IGNORED:
        given = {"ignored_params": {model.outward.weight, *model.layers[1][0].parameters()}}
    mesh = init_device_mesh("cpu", (2, 1) if twice else (2,), mesh_dim_names=("outer", "inner") if twice else None)
    if name == NESTED:
        for layer in model.layers:
            fully_shard(layer[0], mesh=mesh)
            layer[4].register_forward_hook(lambda *_: calls.append(1))
    for unit in model.layers if "units" not in name else [model.layers[1]]:
        fully_shard(unit, mesh=mesh, **given)
    if name.endswith(GROUPED):  # the first and the last parameters as one, as accelerate does it
        fully_shard([model.outward, model.inward], mesh=mesh, **{**given, "reshard_after_forward": False})
        register_fsdp_forward_method(model, "extra_repr")
    fully_shard(model, mesh=mesh, **given)
    if name.endswith(PREFETCH):
        model.layers[0].set_modules_to_forward_prefetch([*model.layers[1:]])
    x = input_of(name).clone()
    model = then(model, x)
    optimizer, tracker = torch.optim.AdamW(model.parameters()), Tracker("cpu")
    tracker.register([*model.parameters()], "parameters")
    tracker.register([x], "inputs")
    peaks: list[int] = []
    numbers: dict[str, Tensor] = {}
    calls.clear()
    with seen_by(tracker), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", FallbackWarning)
        for number in range(5):
            tracker.reset_peak()
            with tracker:
                output = model(x)
                loss = output.float().mean()
                loss.backward()
            grads = {name: parameter.grad for name, parameter in model.named_parameters()}
            numbers |= {f"gradient {name}": local_part(grad).clone() for name, grad in grads.items()}
            del grads
            with tracker:
                optimizer.step()
                optimizer.zero_grad()
            peaks.append(tracker.peak)
            numbers[f"loss {number}"] = loss.detach().clone()
            numbers[f"hooks {number}"] = torch.tensor(len(calls))
    numbers |= {name: local_part(parameter).detach().clone() for name, parameter in model.named_parameters()}
    told = [str(each.message) for each in said if issubclass(each.category, FallbackWarning)]
    predicted = (0, 0, 0)
    if programs(model) and then is optimized:
        report = memrewrite.report_of(model)
        predicted = report.predicted_before.peak, report.predicted_after.peak, report.budget or 0
    return Trained(min(peaks[1:]), numbers, told, predicted)  # gloo's threads may let go of a buffer later than that
