"""What two processes take under FSDP2 in ``tests/torch_internals/test_fsdp.py``, the storages of each counted."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from memrewrite.simulate.memory.tracker import Tracker
from memrewrite.torch_internals.fsdp import seen_by

MESHES: dict[str, dict[str, Any]] = {
    "fsdp=2": {},
    "fsdp=2,no-reshard": {"reshard_after_forward": False},
    "fsdp=2,param-dtype=bf16,reduce-dtype=fp32": {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    },
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


def peaks() -> dict[str, int]:
    """The peak in bytes of a later step of PyTorch's tutorial loop, by mesh."""
    return {name: peak(name) for name in MESHES}


def peak(name: str) -> int:
    """That of one mesh."""
    model, mesh, given = Net(), init_device_mesh("cpu", (2,)), MESHES[name]
    for unit in model.layers if "units" not in name else [model.layers[1]]:
        fully_shard(unit, mesh=mesh, **given)
    fully_shard(model, mesh=mesh, **given)
    optimizer, tracker, x = torch.optim.AdamW(model.parameters()), Tracker("cpu"), X.clone()
    tracker.register([*model.parameters()], "parameters")
    tracker.register([x], "inputs")
    found = []
    with seen_by(tracker):
        for _ in range(5):
            tracker.reset_peak()
            with tracker:
                output = model(x)
                loss = output.float().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append(tracker.peak)
    return min(found[1:])  # gloo's threads may let go of a buffer later than that
