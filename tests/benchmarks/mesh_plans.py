"""What ``mesh`` trains, and what is predicted and planned of it in a process alone, as on a laptop."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

import memrewrite
from memrewrite.measurement.measuring import predict
from memrewrite.optimizing.in_mesh import written_in
from memrewrite.records.errors import MemrewriteError
from memrewrite.records.mesh import Ddp, Fsdp, Tp
from memrewrite.runtime.assembled import assembled
from memrewrite.runtime.dropin import program_from
from memrewrite.simulate import Timeline
from memrewrite.targets.workspaces import measured as workspace_bytes
from memrewrite.workload.step import Inputs, Step
from tests.benchmarks.contenders import BLOCK, COMPILE, EAGER, OURS, rewritten
from tests.benchmarks.language import decoder, llama, tokens
from tests.benchmarks.models import WORKLOADS
from tests.benchmarks.rows import reason
from tests.benchmarks.workload import Workload

_BLOCK = 1.005  # of its predicted peak: lowest peaks are found to half a percent


def _vit_large(tiny: bool) -> nn.Module:
    import timm

    small: dict[str, Any] = {"img_size": 64, "embed_dim": 32, "depth": 4, "num_heads": 2} if tiny else {}
    return cast(nn.Module, timm.create_model("vit_large_patch16_224", pretrained=False, **small))


def _llama_670m(tiny: bool) -> nn.Module:
    return llama(decoder(tiny, 2048, 10, 32, 32000))


def _llama_1b_divided(tiny: bool) -> nn.Module:
    """As ``llama_1b``; a tiny one can be divided in two."""
    even = {"num_key_value_heads": 2, "vocab_size": 98} if tiny else {}
    return llama(decoder(tiny, 2048, 16, 32, 128256) | even)


_LLAMA = WORKLOADS["llama_1b"]
_LLAMA_670M = replace(_LLAMA, build=_llama_670m, inputs=tokens(2048, 32000), batch=4)
_UNET = replace(WORKLOADS["unet"], batch=4)  # on request: it needs no library
CASES: dict[str, Workload] = {
    "llama_1b-fsdp": replace(_LLAMA, batch=4),
    "llama_1b-tp": replace(_LLAMA, build=_llama_1b_divided, batch=4),
    "llama_1b-ddp": replace(_LLAMA, batch=2),
    "vit_large-ddp": replace(WORKLOADS["vit_base"], build=_vit_large, batch=64),
    "resnet50-ddp": replace(WORKLOADS["resnet50"], batch=96),
    "llama_670m-fsdp": _LLAMA_670M,
    "llama_670m-fsdp-offload": _LLAMA_670M,
    "unet-ddp": _UNET,
    "unet-fsdp": _UNET,
    "unet-fsdp-offload": _UNET,
}
USUAL = [name for name in CASES if "670m" not in name and "unet" not in name]


@dataclass(frozen=True)
class Case:
    """A workload among ``size`` processes."""

    name: str
    size: int
    tiny: bool = False

    @property
    def workload(self) -> Workload:
        return CASES[self.name]

    @property
    def batch(self) -> int:
        return 2 if self.tiny else self.workload.batch

    @property
    def mesh(self) -> Ddp | Fsdp | Tp:
        kind = self.name.split("-")[1]
        return {"ddp": Ddp, "tp": Tp}[kind](self.size) if kind != "fsdp" else Fsdp(self.size, offload=self.offloads)

    @property
    def offloads(self) -> bool:
        """Whether parameters lie on the host."""
        return self.name.endswith("-offload")

    @property
    def step(self) -> Step:
        return replace(self.workload.step(), mesh=self.mesh)

    def made(self, device: torch.device, contender: str, rank: int = 0) -> tuple[nn.Module, Inputs]:
        """The model, in every process the same, as its contender has blocks, and the batch of one of them."""
        torch.manual_seed(0)
        with torch.device(device):
            model = self.workload.build(self.tiny).train()
            if contender == BLOCK:
                self.workload.checkpoint_blocks(model)
            torch.manual_seed(1 + (0 if isinstance(self.mesh, Tp) else rank))
            return model, self.workload.inputs(self.batch, self.tiny)


@dataclass(frozen=True)
class Prepared:
    """What is known of a contender before it trains: bytes, and what ours runs; ``note`` says why there is nothing.

    Of each program its source, and of its constants whether they belong on the device.
    """

    predicted: int | None = None
    budget: int | None = None
    reserved: int | None = None
    setup_s: float | None = None
    note: str = ""
    written: dict[str, tuple[str, dict[str, tuple[Tensor, bool]]]] = field(default_factory=dict)

    def applied(self, model: nn.Module, device: torch.device) -> nn.Module:
        """The drop-in for ``model``, as every process of a mesh has it once the first one sent its plan."""
        written = {
            path: (program_from(source), {n: t.to(device) if moves else t for n, (t, moves) in constants.items()})
            for path, (source, constants) in self.written.items()
        }
        return assembled(model, written)


def prepared(case: Case, contender: str, device: torch.device) -> Prepared:
    """Predict the peak of a contender, which is optimized before where it is ours, without another process."""
    start = time.perf_counter()
    find = _optimized if contender.startswith(OURS) else _as_it_is
    try:
        found = find(case, contender, device)
    except (RuntimeError, MemrewriteError) as error:  # out of memory among them
        return Prepared(note=reason(error))
    return replace(found, setup_s=time.perf_counter() - start)


def _as_it_is(case: Case, contender: str, device: torch.device) -> Prepared:
    if contender.startswith(COMPILE):
        return Prepared()
    timeline = _timeline(case, contender, device)
    return Prepared(timeline.peak, reserved=timeline.reserved)


def _timeline(case: Case, contender: str, device: torch.device) -> Timeline:
    model, inputs = case.made(device, contender)
    workspace = workspace_bytes(device, case.step.amp, case.step.mode)
    return predict(model, inputs, case.step, workspace_bytes=workspace)


def _budget(case: Case, contender: str, device: torch.device) -> int | None:
    what = contender.split()[1]
    if what == "min":
        return None
    if what == "block":
        return int(_BLOCK * _timeline(case, BLOCK, device).peak)
    eager = _timeline(case, EAGER, device)
    return eager.floor + int(float(what.rstrip("%")) / 100 * (eager.peak - eager.floor))


def _optimized(case: Case, contender: str, device: torch.device) -> Prepared:
    budget = _budget(case, contender, device)
    model, inputs = case.made(device, contender)
    found = rewritten(budget, case.step, model, inputs)
    place = next(model.parameters()).device
    written = {
        path: (program.source, {name: (t.detach().cpu(), t.device == place) for name, t in constants.items()})
        for path, (program, constants) in written_in(found.module).items()
    }
    after = memrewrite.report_of(found.module).predicted_after
    return Prepared(after.peak, budget, after.reserved, written=written)


def tracked(case: Case, contender: str, device: torch.device) -> Prepared:
    """What PyTorch's ``FSDPMemTracker`` predicts of a contender, on fake tensors as well."""
    from torch._subclasses import FakeTensorMode
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed.device_mesh import init_device_mesh

    from memrewrite.torch_internals.fsdp import sharded
    from memrewrite.torch_internals.groups import alone_among

    start, mesh = time.perf_counter(), case.mesh
    if not isinstance(mesh, Fsdp):
        raise TypeError(f"{case.name} is not sharded")
    with alone_among(mesh.size):
        devices = init_device_mesh(device.type, (mesh.size,))
        with FakeTensorMode():
            model, inputs = case.made(device, contender)
            sharded(model, mesh, devices)
            optimizer = case.step.make_optimizer(model)
            loop, tracker = case.step.begin(model, inputs, optimizer), FSDPMemTracker(model, optimizer)
            tracker.track_inputs((*inputs.tensors(),))
            with tracker:
                loop.take()
                tracker.reset_mod_stats()  # which the second step, the first steady one, takes
                loop.take()
    peaks = tracker.get_tracker_snapshot("peak")
    (peak,) = (each["Total"] for place, each in peaks.items() if place.type == device.type)
    return Prepared(peak, setup_s=time.perf_counter() - start)


OWN, TRACKED = "ours", "FSDPMemTracker"
WAYS: dict[str, Callable[[Case, str, torch.device], Prepared]] = {OWN: prepared, TRACKED: tracked}


def prepared_in_child(case: Case, contender: str, way: str, number: int, file: Path) -> None:
    """Write to ``file`` what one of ``WAYS`` finds, in a process that does nothing else."""
    found = torch.cuda.is_available() and not case.tiny
    device = torch.device("cuda", number % torch.cuda.device_count()) if found else torch.device("cpu")
    if found:
        torch.cuda.set_device(device)
    torch.save(WAYS[way](case, contender, device), file)
