"""Models spread over several processes: what DDP wraps comes back in it, others are refused in a sentence."""

from collections import Counter
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import memrewrite
from memrewrite.records.errors import UsageError
from memrewrite.workload.hooks import without_hooks
from memrewrite.workload.sharding import bucket_notes
from tests.support.ddp import half

X = torch.ones(4, 8)


class Net(nn.Module):
    """Cannot be made without its argument, as most models of transformers cannot."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 64), nn.Linear(64, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.second(hidden * torch.sigmoid(hidden))


@pytest.fixture
def two_processes() -> Iterator[None]:
    """A process group of two, of which this process is one and there is no other."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def sharded(net: Net, **given: Any) -> nn.Module:
    fully_shard(net, mesh=init_device_mesh("cpu", (2,)), **given)
    return net


def gathered_after_backward(net: Net) -> nn.Module:
    model: Any = sharded(net)
    model.set_reshard_after_backward(False)
    return cast(nn.Module, model)


def sharded_inside(net: Net) -> Net:
    fully_shard(net.second, mesh=init_device_mesh("cpu", (2,)))
    return net


def sharded_across(net: Net) -> nn.Module:
    model, mesh = nn.Sequential(net, nn.Linear(8, 8)), init_device_mesh("cpu", (2,))
    for together in ([net.second, model[1]], net, model):
        fully_shard(together, mesh=mesh)
    return model


def parallelized(net: Net) -> nn.Module:
    styles = {"first": ColwiseParallel(), "second": RowwiseParallel()}
    return parallelize_module(net, init_device_mesh("cpu", (2,)), styles)


def in_three_ways(net: Net) -> nn.Module:
    for name, style in {"first": ColwiseParallel(), "second": RowwiseParallel()}.items():
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", name))
        parallelize_module(net, mesh[name], {name: style})
    fully_shard(net, mesh=mesh["shard"])
    return net


def over_two_meshes(net: Net) -> nn.Module:
    for name in ("first", "second"):
        part = net.get_submodule(name)
        distribute_module(part, init_device_mesh("cpu", (2,), mesh_dim_names=(name,)))
    return net


def wrapped_inside(net: Net) -> nn.Module:
    return nn.Sequential(DistributedDataParallel(net))


def with_a_hook_of_its_own(net: Net) -> nn.Module:
    def hook(state: Counter[str], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        raise AssertionError("nothing is sent")

    wrapped = DistributedDataParallel(net)
    wrapped.register_comm_hook(Counter(), hook)
    return wrapped


CASES: dict[str, tuple[Any, str]] = {
    "fsdp2, evaluating": (
        lambda net: sharded(net).eval(),
        r"^A model that fully_shard has sharded is planned in training",
    ),
    "fsdp2, offload": (
        lambda net: sharded(net, offload_policy=CPUOffloadPolicy(pin_memory=False), ignored_params={net.first.bias}),
        r"^Parameters on the host \(cpu-offload, CPUOffloadPolicy\) beside others that are whole on the device ",
    ),
    "fsdp2, gathered": (
        gathered_after_backward,
        r"^set_reshard_after_backward was called of FSDPNet, which no plan counts; leave it out\.$",
    ),
    "fsdp2, float64": (
        lambda net: sharded(net, mp_policy=MixedPrecisionPolicy(torch.float64)),
        r"^FSDPNet is sharded with MixedPrecisionPolicy\(.*; of its types bf16, fp16 and fp32 are supported\.$",
    ),
    "fsdp2, otherwise": (
        lambda net: sharded(sharded_inside(net), mp_policy=MixedPrecisionPolicy(torch.bfloat16)),
        r"^second has another mesh, mp_policy or offload_policy than the model itself; give all the same\.$",
    ),
    "fsdp2, across units": (
        sharded_across,
        r"^0\.second and 1 are sharded as one and lie in different units; shard them one by one\.$",
    ),
    "fsdp2 inside": (sharded_inside, r"second \(FSDPLinear\) was sharded by fully_shard \(FSDP2\), and the model was"),
    "fsdp1": (
        lambda net: FullyShardedDataParallel(net, device_id=torch.device("cpu")),
        r"FullyShardedDataParallel is a FullyShardedDataParallel \(FSDP1\), which is not supported yet",
    ),
    "fsdp2, dtensors of two meshes": (
        in_three_ways,
        r"^Parameters of the model itself were spread over more than one mesh, or one of more dim.* is supported\.$",
    ),
    "dtensor, two meshes": (
        lambda net: over_two_meshes(net),
        r"^first\.weight and second\.weight are spread over different meshes; give one to all\.$",
    ),
    "dtensor, two dimensions": (
        lambda net: distribute_module(net, init_device_mesh("cpu", (1, 2))),
        r'^first\.weight is spread over a mesh of 2 dimensions; give the model before fully_shard, with mesh="fsdp=64',
    ),
    "ddp, static": (
        lambda net: DistributedDataParallel(net, static_graph=True),
        r"whose first step must be the loop's",
    ),
    "ddp, evaluating": (lambda net: DistributedDataParallel(net).eval(), r"^DistributedDataParallel is for training"),
    "ddp, own hook": (
        with_a_hook_of_its_own,
        r"hook has a Counter as its state, and what such a hook takes is not known",
    ),
    "ddp inside": (wrapped_inside, r"^0 \(DistributedDataParallel\) is a wrapper .* the model inside \(\.0\.module\)"),
}


@pytest.mark.usefixtures("two_processes")
@pytest.mark.filterwarnings("ignore")  # PyTorch's own, of FSDP1 and of a process group without peers
@pytest.mark.parametrize("call", ["optimize", "estimate"])
@pytest.mark.parametrize("name", CASES)
def test_a_model_that_is_spread_out_is_refused(name: str, call: str) -> None:
    spread, sentence = CASES[name]
    with pytest.raises(UsageError, match=sentence):
        getattr(memrewrite, call)(spread(Net(8)), X)


@pytest.mark.usefixtures("two_processes")
def test_a_parallelized_model_says_its_mesh() -> None:
    model = parallelized(Net(8))
    state = torch.get_rng_state()
    found = memrewrite.estimate(model, X)
    assert torch.equal(torch.get_rng_state(), state)
    assert found.mesh == found.to_json()["mesh"] == "tp=2"
    assert found.inference_peak is not None
    assert found.peak.categories["parameters"] < memrewrite.estimate(Net(8), X).peak.categories["parameters"]
    with pytest.raises(UsageError, match=r"^The model is parallelized by parallelize_module, .*; leave out mesh\.$"):
        memrewrite.estimate(model, X, mesh="tp=2")
    assert isinstance(model.get_parameter("first.weight"), DTensor)


@pytest.mark.usefixtures("two_processes")
@pytest.mark.parametrize("mesh", ["tp=4", "fsdp=2,tp=2"])
def test_as_many_processes_plan_as_there_are_to_be(mesh: str) -> None:
    with pytest.raises(UsageError, match=rf"^The mesh {mesh} has 4 processes, and here are 2; start as many, or plan"):
        memrewrite.optimize(Net(8), X, budget="min", mesh=mesh)


@pytest.mark.usefixtures("two_processes")
@pytest.mark.parametrize("mesh", [None, "tp=2", "fsdp=2,tp=2"])
def test_tensor_parallelism_is_not_measured_in_one_process(mesh: str | None) -> None:
    model = parallelized(Net(8)) if mesh is None else Net(8)
    with pytest.raises(UsageError, match=rf"^A mesh of {mesh or 'tp=2'} cannot be measured in one process"):
        memrewrite.measure(model, X, mesh=mesh)


@pytest.mark.usefixtures("two_processes")
def test_a_sharded_model_says_its_mesh() -> None:
    net = sharded_inside(Net(8))
    fully_shard(net, mesh=init_device_mesh("cpu", (2,)), reshard_after_forward=True)
    state = torch.get_rng_state()
    found = memrewrite.estimate(net, X)
    assert torch.equal(torch.get_rng_state(), state)
    assert found.mesh == "fsdp=2,reshard-root"
    assert found.peak == memrewrite.estimate(Net(8), X, mesh="fsdp=2,reshard-root,units=second").peak
    with pytest.raises(
        UsageError, match=r"^The model is sharded by fully_shard, which says its mesh; leave out mesh\.$"
    ):
        memrewrite.estimate(net, X, mesh="fsdp=2")
    assert net(X).shape == X.shape


@pytest.mark.usefixtures("two_processes")
def test_optimizers_step_the_parameters_that_they_have() -> None:
    def told(*parts: str) -> int:
        model = sharded(Net(8))
        given = [torch.optim.Adam(model.get_submodule(part).parameters()) for part in parts]
        return memrewrite.estimate(model, X, optimizer=given).peak.bytes

    assert told("first", "second") == told("")
    assert told("first") < told("")


@pytest.mark.usefixtures("two_processes")
def test_what_a_hook_of_pytorch_sends_is_held_until_backward_is_over() -> None:
    """As with the hook of ``tests/api/test_ddp.py``, which holds as much however soon it arrives."""
    peaks = []
    for hook in (None, fp16_compress_hook, half):
        wrapped = DistributedDataParallel(Net(512), bucket_cap_mb=0.1)
        if hook is not None:
            wrapped.register_comm_hook(None, hook)
        peaks.append(memrewrite.estimate(wrapped, torch.ones(4, 512), optimizer=None).peak)
    plain, *hooked = peaks
    assert hooked[0] == hooked[1]
    assert hooked[0].bytes > plain.bytes


@pytest.mark.usefixtures("two_processes")
def test_a_class_that_was_swapped_is_copied_without_its_init() -> None:
    model = sharded(Net(8))
    copied = without_hooks(model)
    assert type(copied) is type(model)
    assert [*copied.parameters()] == [*model.parameters()]


class Named(Net):
    """Has a ``__new__`` of its own, as the classes that ``fully_shard`` makes do."""

    def __new__(cls, width: int) -> "Named":
        made = super().__new__(cls)
        made.__init__(width)  # type: ignore[misc]
        return made


def test_a_class_with_a_new_of_its_own_is_rewritten() -> None:
    model = Named(8)
    optimized = memrewrite.optimize(model, X, budget="min", passes=["checkpoint_segments"])
    assert isinstance(optimized, Named)
    assert torch.equal(optimized(X), model(X))


@pytest.mark.usefixtures("two_processes")
def test_what_the_buckets_take_is_told() -> None:
    model = Net(8)
    model.first.bias.requires_grad_(False)
    size = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    (note,) = bucket_notes(model)
    assert f'give mesh="ddp=2": its buckets take up to {size} B more than is predicted' in note
    assert memrewrite.optimize(model, X, budget="min", mesh="ddp=2").report.notes == ()
    optimized = memrewrite.optimize(model, X, budget="min")
    assert note in optimized.report.notes
    inference = memrewrite.optimize(model.eval(), X, mode="inference", budget="min")
    assert note not in memrewrite.report_of(inference).notes


def test_one_process_has_no_buckets() -> None:
    assert bucket_notes(Net(8)) == ()
    assert bucket_notes(Net(8).requires_grad_(False)) == ()


@pytest.mark.usefixtures("two_processes")
def test_what_ddp_wraps_comes_back_in_it() -> None:
    wrapped = DistributedDataParallel(Net(8), bucket_cap_mb=1, gradient_as_bucket_view=True)
    optimized = memrewrite.optimize(wrapped, X, budget="min", passes=["checkpoint_segments"])
    assert isinstance(optimized, DistributedDataParallel)
    assert isinstance(optimized.module, Net)
    assert optimized.reducer is wrapped.reducer
    assert optimized.report.config["mesh"] == "ddp=2,bucket-cap-mb=1,gradient-as-bucket-view"
    assert memrewrite.report_of(optimized) is optimized.report
    assert [*optimized.state_dict()] == [*wrapped.state_dict()]
    with pytest.raises(UsageError, match=r"which says its mesh; leave out mesh\.$"):
        memrewrite.optimize(wrapped, X, budget="min", mesh="ddp=2")


@pytest.mark.usefixtures("two_processes")
def test_where_nothing_is_gained_the_wrapper_is_given_back() -> None:
    wrapped = DistributedDataParallel(Net(8))
    result: Any = memrewrite.optimize(wrapped, X, budget="1GB", passes=["checkpoint_segments"])
    assert result is wrapped
    assert memrewrite.report_of(wrapped).budget == 10**9


def test_a_compiled_mesh_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^What torch.compile makes of a model in a mesh is not known"):
        memrewrite.optimize(Net(8), X, budget="min", compiled=True, mesh="ddp=2")
