"""What two processes take under FSDP2 in ``tests/torch_internals/test_fsdp.py``, the storages of each counted."""

import pickle
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from memrewrite.runtime.promise import FallbackWarning
from memrewrite.simulate.memory.tracker import Tracker
from memrewrite.torch_internals.fsdp import seen_by

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
    """What came of some steps: the peak in bytes of the later ones, and all numbers by name."""

    peak: int
    numbers: dict[str, Tensor]
    said: list[str]


def trainings(pickled: bytes) -> bytes:
    """The model as it is, and what was made of it, by mesh; plain pickles, as queues share tensors by open files."""
    models: dict[str, nn.Module] = pickle.loads(pickled)
    return pickle.dumps({name: (train(Net(), name), train(model, name)) for name, model in models.items()})


def train(model: Any, name: str) -> Trained:
    """Steps of PyTorch's tutorial loop with the model sharded for one mesh."""
    given, twice = MESHES[name], "replicas" in name
    mesh = init_device_mesh("cpu", (2, 1) if twice else (2,), mesh_dim_names=("outer", "inner") if twice else None)
    for unit in model.layers if "units" not in name else [model.layers[1]]:
        fully_shard(unit, mesh=mesh, **given)
    fully_shard(model, mesh=mesh, **given)
    optimizer, tracker, x = torch.optim.AdamW(model.parameters()), Tracker("cpu"), X.clone()
    tracker.register([*model.parameters()], "parameters")
    tracker.register([x], "inputs")
    peaks: list[int] = []
    numbers: dict[str, Tensor] = {}
    with seen_by(tracker), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", FallbackWarning)
        for number in range(5):
            tracker.reset_peak()
            with tracker:
                output = model(x)
                loss = output.float().mean()
                loss.backward()
            grads = {name: parameter.grad for name, parameter in model.named_parameters()}
            numbers |= {f"gradient {name}": grad.to_local().clone() for name, grad in grads.items()}
            del grads
            with tracker:
                optimizer.step()
                optimizer.zero_grad()
            peaks.append(tracker.peak)
            numbers[f"loss {number}"] = loss.detach().clone()
    numbers |= {name: parameter.to_local().detach().clone() for name, parameter in model.named_parameters()}
    told = [str(each.message) for each in said if issubclass(each.category, FallbackWarning)]
    return Trained(min(peaks[1:]), numbers, told)  # gloo's threads may let go of a buffer later than that
