"""DDP in one process: what its reducer makes on fake tensors is what it makes on real ones, by DDP's own assignment."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from memrewrite.measurement.measuring import preserved_state
from memrewrite.records.mesh import Ddp, Mesh
from memrewrite.simulate import Timeline, run_tracked, simulate
from memrewrite.targets.cuda_from_cpu import CUDA_FROM_CPU
from memrewrite.torch_internals.ddp import Replica
from memrewrite.torch_internals.fake_tensors import FakeTensorMode
from memrewrite.workload.step import Inputs, Step

MIB = 2**20
USED = 512  # bytes of the table of used parameters, which is real among fake tensors
MESHES = [
    "ddp=2",
    "ddp=64,no-buffers",
    "ddp=2,gradient-as-bucket-view",
    "ddp=2,bucket-cap-mb=0.2",
    "ddp=2,static-graph",
    "ddp=2,find-unused-parameters",
    "ddp=2,find-unused-parameters,gradient-as-bucket-view,bucket-cap-mb=0.2",
]


def net() -> nn.Module:
    """Its gradients are ready from the last layer to the first."""
    torch.manual_seed(0)
    layers = [nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 512)]
    return nn.Sequential(*layers)


X = torch.ones(8, 64)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("text", MESHES)
@pytest.mark.filterwarnings("ignore")  # that no parameter is unused
def test_simulated_is_what_real_tensors_take(text: str, micro_batches: int) -> None:
    module, inputs = net(), Inputs((X,), {})
    step = Step(optimizer=torch.optim.AdamW, mesh=Mesh.parse(text), micro_batches=micro_batches)
    predicted = simulate(module, inputs, step)
    with preserved_state(module, inputs):
        real = run_tracked(module, inputs, step)
    assert 0 <= real.peak - predicted.peak <= USED
    assert _sizes(predicted) == pytest.approx(_sizes(real), abs=USED)
    weights = sum(p.nbytes for p in module.parameters())
    in_view = isinstance(step.mesh, Ddp) and step.mesh.gradient_as_bucket_view
    assert predicted.categories.get("communication buffers", 0) >= (0 if in_view else weights)


def _sizes(timeline: Timeline) -> dict[str, int]:
    return dict(timeline.categories)


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize("cap", [None, 0.2, 1.0])
def test_buckets_are_those_of_ddps_own_assignment(cap: float | None, fake: bool) -> None:
    seen: list[int] = []
    mode = FakeTensorMode()
    module = net()
    x = X
    if fake:
        with mode:
            module, x = net(), torch.ones(8, 64)
    mesh = Ddp(2, cap, buffers=False)
    with mode if fake else torch.enable_grad():
        replica = Replica(module, mesh, lambda tensors: seen.extend(t.nbytes for t in tensors if t.is_floating_point()))
    ready: list[Tensor] = [*reversed([*module.parameters()])]
    limits = [MIB, 25 * MIB] if cap is None else [int(cap * MIB)]
    for _ in range(2):
        seen.clear()
        with mode if fake else torch.enable_grad(), replica.around(last=True):
            loss: Tensor = replica(x).sum()
            loss.backward()
            replica.end_step()
    indices, _ = dist._compute_bucket_assignment_by_size(ready, limits)  # type: ignore[attr-defined]
    assert sorted(seen) == sorted(sum(ready[i].nbytes for i in bucket) for bucket in indices)


def test_buckets_are_made_anew_once_and_in_no_step_that_comes_again() -> None:
    step = Step(mesh=Ddp(2), target=CUDA_FROM_CPU)
    model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(4)))
    found = simulate(model, Inputs((torch.ones(4, 2048),), {}), step)
    assert found.peak <= found.reserved < found.peak + 4 * MIB  # no bucket fits into that


def test_micro_batches_but_the_last_send_nothing() -> None:
    sent: list[list[Tensor]] = []
    module = net()
    replica = Replica(module, Ddp(2, buffers=False), sent.append)
    with replica.around(last=False):
        replica(X).sum().backward()
    assert sent == []
    with replica.around(last=True):
        replica(X).sum().backward()
    assert len(sent) == 1


def test_nothing_is_left_of_it() -> None:
    module = net()
    replica = Replica(module, Ddp(2), lambda tensors: None)
    gone = weakref.ref(replica._ddp)
    with replica.around(last=True):
        replica(X).sum().backward()
    before = {name: p.grad for name, p in module.named_parameters()}
    gc.disable()
    try:
        del replica
        assert gone() is None
    finally:
        gc.enable()
    module(X).sum().backward()  # no hook of the reducer is called any more
    assert all(p.grad is before[name] for name, p in module.named_parameters())
