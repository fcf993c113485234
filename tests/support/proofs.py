"""What two processes do in ``tests/equivalence/test_in_mesh.py``: optimize with a proof that holds, or must fail."""

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import memrewrite
from memrewrite.equivalence import in_mesh as comparing
from memrewrite.equivalence.trial import take_step
from memrewrite.equivalence.verdict import Verdict
from memrewrite.optimizing import in_mesh, ranks
from memrewrite.optimizing.in_mesh import Pair, prove_in_mesh, written_in
from memrewrite.runtime.dropin import program_from
from memrewrite.workload.step import Inputs
from tests.support import ddp, fsdp, parallelized

SEGMENTS: dict[str, Any] = {"passes": ["checkpoint_segments"]}
ROWS = 512


@dataclass(frozen=True)
class Proved:
    """The verdict in the mesh, the notes of the report, and what was not as before afterwards."""

    verdict: Verdict
    notes: tuple[str, ...]
    changed: list[str]


def halves() -> Tensor:
    """Inputs of this process alone."""
    return torch.randn(ROWS, 16, generator=torch.Generator().manual_seed(dist.get_rank()))


def sharded() -> nn.Module:
    """A model that is sharded before it is optimized."""
    model: Any = fsdp.Net()
    mesh = init_device_mesh("cpu", (2,))
    for unit in model.layers:
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.layers[0].set_modules_to_forward_prefetch([*model.layers[1:]])
    return model


def convolutional() -> nn.Module:
    """With buffers, for DDP."""
    return ddp.Net(False)


def in_both() -> nn.Module:
    """A model that is tensor parallel, and sharded across that, before it is optimized."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    model: Any = parallelized.mlp(mesh["tensor"])
    for unit in model.layers:
        fully_shard(unit, mesh=mesh["data"])
    return fully_shard(model, mesh=mesh["data"])


def tensor_parallel() -> nn.Module:
    """A model that is tensor parallel before it is optimized."""
    return parallelized.mlp(init_device_mesh("cpu", (2,)))


class Divided(parallelized.Mlp):
    """With a plan, by which it is parallelized when that is made."""

    tp_plan: ClassVar[dict[str, str]] = {"layers.*.0": "colwise", "layers.*.3": "rowwise"}


BF16 = "fsdp=2,param-dtype=bf16,reduce-dtype=fp32,output-dtype=bf16"
MODELS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "fsdp": (fsdp.Net, {"mesh": "fsdp=2", **SEGMENTS}),
    "fsdp in bf16": (fsdp.Net, {"mesh": BF16, **SEGMENTS}),
    "replicas": (fsdp.Net, {"mesh": "fsdp=1,replicas=2"}),
    "sharded before": (sharded, SEGMENTS),
    "tensor parallel": (tensor_parallel, SEGMENTS),
    "in both": (in_both, SEGMENTS),
    "tensor parallel later": (Divided, {"mesh": "tp=2"}),  # by all passes
    "ddp": (convolutional, {"mesh": "ddp=2,gradient-as-bucket-view", **SEGMENTS}),
    "wrapped before": (lambda: DistributedDataParallel(convolutional()), {}),  # by all passes: arithmetic changes
}
FAILING = ("fsdp", "sharded before", "in both", "tensor parallel", "tensor parallel later", "ddp")
FIRST = ("fsdp", "tensor parallel later", "ddp")  # apart from the others, which are slow


def found(names: Sequence[str]) -> tuple[dict[str, Proved], dict[str, str]]:
    """The proof of some models, in this process, and what is raised where it is not to hold, or cannot."""
    pairs: dict[str, Pair] = {}
    proofs = {name: proved(name, pairs) for name in names}
    raised = {
        f"{name}, {model}": told(in_one(kind), partial(again, pairs[model]))
        for name, kind in {"wrong": wrong, "failing": failing}.items()
        for model in names
        if model in FAILING
    }
    return proofs, raised | (of_any_model(pairs) if names == FIRST else {})


def of_any_model(pairs: dict[str, Pair]) -> dict[str, str]:
    """What is raised in this process whatever the model is."""
    raised: dict[str, str] = {}
    raised["in optimize"] = told(in_one(wrong), notes)
    raised["unasked"] = told(in_one(wrong), partial(notes, verify=False))
    raised["less memory"] = told(in_one(small), partial(again, pairs["ddp"]))
    raised["no memory"] = told(in_one(none), partial(again, pairs["ddp"]))
    raised["interrupted"] = told(in_one(interrupted), partial(again, pairs["fsdp"]))
    gc.collect()  # as where an interrupted process ends
    dist.barrier()  # which is as it was
    return raised


def proved(name: str, pairs: dict[str, Pair]) -> Proved:
    """What is found as a model is optimized in this process; notes what was compared in ``pairs``."""
    make, asked = MODELS[name]
    model = make()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    verdicts: list[Verdict] = []
    before = dict(_state(model))

    def noting(pair: Pair, *given: Any) -> str:
        pairs[name] = pair
        return prove_in_mesh(pair, *given)

    def compared(*given: Any, **named: Any) -> Verdict:
        verdicts.append(comparing.verify_in_mesh(*given, **named))
        return verdicts[-1]

    with mock.patch.object(ranks, "prove_in_mesh", noting), mock.patch.object(in_mesh, "verify_in_mesh", compared):
        result = optimized(model, asked)
    after = dict(_state(model))
    changed = [key for key in before | after if key not in before or not same(before[key], after.get(key))]
    return Proved(verdicts[-1], memrewrite.report_of(result).notes, changed)


def _state(model: Any) -> Iterator[tuple[str, Any]]:
    """All that a proof is to leave as it was."""
    for name, value in model.state_dict().items():
        yield name, _here(value).clone()
    for name, parameter in model.named_parameters():
        yield f"gradient {name}", _here(parameter.grad).clone()
    for path, module in model.named_modules():
        yield f"hooks of {path}", {name: len(table) for name, table in vars(module).items() if "hooks" in name}
        yield f"mode of {path}", module.training
    yield "random state", torch.get_rng_state()


def _here(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def same(one: Any, other: Any) -> bool:
    """Whether two values are, tensors by their bits."""
    return torch.equal(one, other) if isinstance(one, Tensor) else one == other


def optimized(model: Any, asked: dict[str, Any]) -> Any:
    """By momentum, so that what gradients leave behind shows in parameters."""
    inner = getattr(model, "module", model)
    images = isinstance(inner, ddp.Net)
    inputs = ddp.images() if images else parallelized.ROWS if isinstance(inner, parallelized.Mlp) else halves()
    given: dict[str, Any] = {"budget": "75%" if images else "85%", "optimizer": ddp.optimizer, **asked}
    return memrewrite.optimize(model, inputs, **given)


def told(broken: Any, work: Callable[[], str]) -> str:
    """What ``work`` says or raises in this process where something is broken."""
    try:
        with broken:
            return work()
    except (Exception, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}"


def again(pair: Pair) -> str:
    """The proof of a pair, among all processes."""
    group: Any = dist.new_group(backend="gloo")
    try:
        return prove_in_mesh(pair, 0, group)
    finally:
        dist.destroy_process_group(group)


def notes(**asked: Any) -> str:
    """Those of the report on a model that is optimized."""
    return "".join(memrewrite.report_of(optimized(fsdp.Net(), MODELS["fsdp"][1] | asked)).notes)


def in_one(kind: Callable[[], Any]) -> Any:
    """What is broken, in the second process alone."""
    return kind() if dist.get_rank() == 1 else mock.MagicMock()


def wrong() -> Any:
    """Programs of a result that add almost the same, which the first process has not seen."""

    def changed(result: nn.Module) -> in_mesh.Written:
        return {
            path: (program_from(almost(program.source)), constants)
            for path, (program, constants) in written_in(result).items()
        }

    return mock.patch.object(in_mesh, "written_in", changed)


def almost(source: str) -> str:
    """A program whose kernels give almost the same."""
    for kernel in KERNELS:
        source = source.replace(kernel, f"almost({kernel.removesuffix('(')})(")
    return source + ALMOST


def step_that(decides: Callable[[int, Inputs], BaseException | None]) -> Any:
    """Steps that raise what is decided by their number and their inputs."""
    numbers = iter(range(100))

    def take(module: nn.Module, inputs: Inputs, *given: Any) -> Any:
        if (error := decides(next(numbers), inputs)) is not None:
            raise error
        return take_step(module, inputs, *given)

    return mock.patch.object(comparing, "take_step", take)


def failing() -> Any:
    """The second step of the rewritten model, while the other process waits for what this one has of it."""
    return step_that(lambda number, _: ZeroDivisionError("no step here") if number == comparing.STEPS + 1 else None)


def interrupted() -> Any:
    """The same by the user."""
    return step_that(lambda number, _: KeyboardInterrupt() if number == comparing.STEPS + 1 else None)


def small() -> Any:
    """There is no memory for more than half of the batch."""
    full = ddp.images().shape[0]
    return step_that(lambda _, inputs: torch.OutOfMemoryError() if len(inputs.args[0]) == full else None)


def none() -> Any:
    """There is no memory for any."""
    return step_that(lambda number, inputs: torch.OutOfMemoryError())


KERNELS = "aten.linear.default(", "aten.gelu.default("
ALMOST = """

def almost(kernel):
    return lambda *args: kernel(*args) * 1.000001
"""
