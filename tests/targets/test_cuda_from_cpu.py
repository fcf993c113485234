"""Planning for CUDA on CPU tensors: what operators keep is what CUDA's keep, and nothing of it outlasts the context."""

import copy
import functools
import math
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import memrewrite
from memrewrite import cli
from memrewrite.measurement.measuring import predict
from memrewrite.observe.effects import observe
from memrewrite.records.errors import DataDependentError, UsageError
from memrewrite.simulate import run_tracked, simulate
from memrewrite.targets.cuda_from_cpu import CUDA_FROM_CPU, STATED_ERROR
from memrewrite.targets.cuda_kernels import _kernels, as_cuda
from memrewrite.targets.cuda_scratch import Scratch
from memrewrite.targets.eager import EAGER
from memrewrite.targets.workspaces import library_bytes
from memrewrite.torch_internals.fake_tensors import FakeTensorMode
from memrewrite.torch_internals.kernels import autocast_operators
from memrewrite.workload.step import Inputs, Step
from memrewrite.workload.stepspec import optimizer_factory

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
B, H, S, D = 2, 4, 16, 8
LOG_SUM_EXP = B * H * S * 4


@contextmanager
def on_cuda(amp: torch.dtype | None = None) -> Iterator[FakeTensorMode]:
    """Fake tensors as on CUDA, under autocast if asked for."""
    mode = FakeTensorMode()
    with mode, as_cuda(), torch.autocast("cpu", amp or BF16, enabled=amp is not None):
        yield mode


def saved_bytes(function: Callable[[], Tensor]) -> int:
    """The storages autograd keeps for what ``function`` gives; seeds of random numbers, which are tiny, left out."""
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.dtype not in (torch.int64, torch.uint64):
            kept[id(tensor.untyped_storage())] = tensor.untyped_storage()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function()
    assert result.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


def leaf(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.zeros(shape, dtype=dtype, requires_grad=True)


def attention(
    dtype: torch.dtype, depth: int = D, heads: int = H, mask: Any = None, across: bool = False, **options: Any
) -> Tensor:
    """Attention of ``H`` heads over as many or fewer ``heads`` of keys and values; ``mask`` has a type and a shape."""
    q, k = leaf(B, H, S, depth, dtype=dtype), leaf(B, heads, S, depth, dtype=dtype)
    given = None if mask is None else torch.zeros(mask[1:], dtype=mask[0])
    if across and given is not None:
        given = given.mT
    return F.scaled_dot_product_attention(q, k, leaf(*k.shape, dtype=dtype), given, **options)


# What autograd keeps, in bytes, by the shapes that the operators document.
KEPT: dict[str, tuple[Callable[[], Tensor], torch.dtype | None, int]] = {
    "dropout": (lambda: F.dropout(leaf(S, D), 0.3), None, S * D),
    "dropout-of-all": (lambda: F.dropout(leaf(S, D) * 2, 0.3), None, S * D),
    "no-dropout": (lambda: F.dropout(leaf(S, D) * 2, 0.0), None, 0),
    "flash": (lambda: attention(BF16), None, 4 * B * H * S * D * 2 + LOG_SUM_EXP),
    "flash-half": (lambda: attention(F16, is_causal=True), None, 4 * B * H * S * D * 2 + LOG_SUM_EXP),
    "flash-dropout": (lambda: attention(BF16, dropout_p=0.1), None, 4 * B * H * S * D * 2 + LOG_SUM_EXP),
    "flash-padded": (lambda: attention(BF16, 6), None, 4 * B * H * S * 8 * 2 + LOG_SUM_EXP),
    "flash-shared-heads": (
        lambda: attention(BF16, heads=2, enable_gqa=True),
        None,
        (2 * H + 2 * 2) * B * S * D * 2 + LOG_SUM_EXP,
    ),
    "flash-autocast": (lambda: attention(F32), BF16, 4 * B * H * S * D * 2 + LOG_SUM_EXP),
    "efficient": (lambda: attention(F32), None, 4 * B * H * S * D * 4 + 2 * LOG_SUM_EXP),  # rows in steps of 32
    "efficient-deep": (lambda: attention(BF16, 264), None, 4 * B * H * S * 264 * 2 + 2 * LOG_SUM_EXP),
    "efficient-boolean-mask": (
        lambda: attention(BF16, mask=(torch.bool, B, 1, S, S)),
        None,
        4 * B * H * S * D * 2 + 2 * LOG_SUM_EXP + B * S * S * 2,
    ),
    "efficient-float-mask": (
        lambda: attention(F32, mask=(F32, S, S), dropout_p=0.1),
        None,
        4 * B * H * S * D * 4 + 2 * LOG_SUM_EXP + S * S * 4,
    ),
    "plain": (lambda: attention(F32, 6), None, 3 * B * H * S * 6 * 4 + B * H * S * S * 4),
    "plain-double": (lambda: attention(F64), None, 3 * B * H * S * D * 8 + B * H * S * S * 8),
    "plain-transposed-mask": (
        lambda: attention(F32, mask=(F32, S, S), across=True),
        None,
        3 * B * H * S * D * 4 + B * H * S * S * 4,
    ),
    "layer-norm": (lambda: F.layer_norm(leaf(S, D), (D,), leaf(D), leaf(D)), None, S * D * 4 + 2 * D * 4 + 2 * S * 4),
    "layer-norm-autocast": (
        lambda: F.layer_norm(leaf(S, D, dtype=BF16), (D,), leaf(D), leaf(D)),
        BF16,
        S * D * 4 + 2 * D * 4 + 2 * S * 4,
    ),
    "softmax-autocast": (lambda: leaf(S, D, dtype=BF16).softmax(-1), BF16, S * D * 4),
    "softmax-half-autocast": (lambda: leaf(S, D, dtype=F16).softmax(-1), F16, S * D * 4),
    "rms-norm": (lambda: F.rms_norm(leaf(S, D), (D,), leaf(D)), None, S * D * 4 + D * 4 + S * 4),
    "linear-autocast": (lambda: F.linear(leaf(S, D), leaf(D, D), leaf(D)), BF16, S * D * 2 + D * D * 2),
    "batch-norm": (
        lambda: F.batch_norm(leaf(B, D, S), None, None, leaf(D), leaf(D), True),
        None,
        B * D * S * 4 + D * 4 + 2 * D * 4,
    ),
}


@pytest.mark.parametrize("case", KEPT)
def test_what_autograd_keeps(case: str) -> None:
    function, amp, expected = KEPT[case]
    with on_cuda(amp):
        assert saved_bytes(function) == expected


def x(dtype: torch.dtype = BF16, *shape: int) -> Tensor:
    return torch.ones(shape or (4, 4), dtype=dtype)


# The type of the result under bfloat16 autocast on CUDA.
TYPES: dict[str, tuple[Callable[[], Tensor], torch.dtype]] = {
    "layer_norm": (lambda: F.layer_norm(x(), (4,)), F32),
    "group_norm": (lambda: F.group_norm(x(), 2), F32),
    "softmax": (lambda: x().softmax(0), F32),
    "softmax-asked": (lambda: x().softmax(0, dtype=BF16), BF16),
    "log_softmax": (lambda: x().log_softmax(0), F32),
    "exp": (lambda: x().exp(), F32),
    "pow": (lambda: x() ** 2, F32),
    "rsqrt": (lambda: x().rsqrt(), F32),
    "softplus": (lambda: F.softplus(x()), F32),
    "sum": (lambda: x().sum(), F32),
    "sum-of-a-dimension": (lambda: x().sum(0), F32),
    "sum-of-integers": (lambda: x(torch.int32).sum(), torch.int64),
    "cumsum": (lambda: x().cumsum(0), F32),
    "prod": (lambda: x().prod(), F32),
    "norm": (lambda: torch.ops.aten.norm.Scalar(x()), F32),
    "norm-of-a-dimension": (lambda: torch.ops.aten.norm.ScalarOpt_dim(x(), 2, [0]), F32),
    "vector_norm": (lambda: torch.linalg.vector_norm(x()), F32),
    "mse_loss": (lambda: F.mse_loss(x(), x()), F32),
    "cross_entropy": (lambda: F.cross_entropy(x(), torch.zeros(4, dtype=torch.int64)), F32),
    "interpolate": (lambda: F.interpolate(x(BF16, 1, 1, 4, 4), scale_factor=2), F32),
    "double": (lambda: x(F64).exp(), F64),
    "addcmul": (lambda: torch.addcmul(x(), x(), x()), BF16),
    "atan2-mixed": (lambda: torch.atan2(x(), x(F32)), F32),
    "scatter_add-mixed": (lambda: x().scatter_add(0, torch.zeros(4, 4, dtype=torch.int64), x(F32)), F32),
    "linear": (lambda: F.linear(x(F32), x(F32)), BF16),
    "einsum": (lambda: torch.einsum("ij,jk->ik", x(F32), x(F32)), BF16),
    "mv": (lambda: torch.mv(x(F32), x(F32, 4)), BF16),
    "relu": (lambda: x().relu(), BF16),
    "mean": (lambda: x().mean(), BF16),
    "batch_norm": (lambda: F.batch_norm(x(), None, None, training=True), BF16),
    "cat": (lambda: torch.cat([x(), x()]), BF16),
    "stack": (lambda: torch.stack([x(), x(F32)]), F32),
    "avg_pool3d": (lambda: F.avg_pool3d(x(BF16, 1, 1, 2, 2, 2), 2), BF16),
    "replication_pad": (lambda: F.pad(x(BF16, 1, 4, 4), (1, 1), mode="replicate"), BF16),
}


@pytest.mark.parametrize("case", TYPES)
def test_types_under_autocast(case: str) -> None:
    function, expected = TYPES[case]
    with on_cuda(BF16):
        assert function().dtype is expected


def test_autocast_casts_a_weight_once() -> None:
    with on_cuda(BF16):
        source, weight = torch.zeros(S, D), leaf(D, D)
        once = saved_bytes(lambda: F.linear(source, weight))
        twice = saved_bytes(lambda: F.linear(F.linear(source, weight), weight))
    assert twice == once + D * D * 2 + S * D * 2  # the second product keeps both its sources, the weight as cast before


def test_what_attention_takes_in_its_backward() -> None:
    flash = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
    q, narrow = torch.empty(B, H, 100, 40, dtype=BF16), torch.empty(B, 1, S, 40, dtype=BF16)
    taken = Scratch()
    rows = B * H * 128 * 4  # blocks of 128, a float32 for each
    assert taken.lookup(flash, (q, q, q, q), {}).bytes == rows * 64 + rows
    assert taken.lookup(flash, (q, q, narrow, narrow), {}).bytes == rows * 64 + rows + 2 * B * H * S * 40 * 2
    assert taken.lookup(efficient, (q, q.float(), q.float()), {}).bytes == B * H * 100 * 4
    assert taken.lookup(efficient, (q, q, q), {}).bytes == B * H * 4 * (100 + 128 * 40)
    assert taken.lookup(torch.ops.aten.add.Tensor, (q, q), {}).bytes == 0
    assert not taken.probe()


def tables() -> dict[str, str]:
    """The dispatcher's own account of the operators that are substituted, and of Python's registrations."""
    names = [f"aten::{name}" for name, _ in _kernels() if hasattr(torch.ops.aten, name.partition(".")[0])]
    return {name: torch._C._dispatch_dump_table(name) for name in names if torch._C._dispatch_has_kernel(name)}


@pytest.mark.parametrize("failing", [False, True], ids=["left", "raised"])
def test_nothing_is_left(failing: bool) -> None:
    before = tables()
    devices = optimizer_devices()
    with pytest.raises(ZeroDivisionError) if failing else on_cuda(), as_cuda(), as_cuda():
        assert tables() != before
        if failing:
            raise ZeroDivisionError
    assert tables() == before
    assert optimizer_devices() == devices
    torch.manual_seed(0)
    with torch.autocast("cpu", BF16):
        assert F.layer_norm(x(), (4,)).dtype is BF16
        assert torch.cat([x(), x(F32)]).dtype is F32
    assert torch.isfinite(attention(F32, dropout_p=0.1)).all()


def optimizer_devices() -> Any:
    return sys.modules["torch.optim.optimizer"]._get_foreach_kernels_supported_devices()


def test_other_threads_go_on_as_they_were() -> None:
    found: list[Any] = []

    def work() -> None:
        with torch.autocast("cpu", BF16):
            found.append(F.layer_norm(x(), (4,)).dtype)
            found.append(torch.stft(x(BF16, 8), 4, window=torch.ones(4), return_complex=True))
        found.extend([attention(F32, is_causal=True), F.dropout(leaf(S, D), 0.5)])

    with as_cuda():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    kind, spectrum, values, dropped = found
    assert (kind, spectrum.dtype) == (BF16, torch.complex64)
    assert torch.isfinite(values).all()
    assert set(dropped.unique().tolist()) == {0.0}


def test_the_rules_name_operators_of_autocast() -> None:
    known = autocast_operators("cpu") | autocast_operators("cuda")
    assert {name for name, key in _kernels() if key == "AutocastCPU"} <= known


class Encoder(nn.Module):
    """Two small encoder layers with dropout, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(3))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


def encoder() -> tuple[Encoder, Inputs]:
    torch.manual_seed(0)
    return Encoder(), Inputs((torch.randn(16, 64, 16),), {})


@pytest.mark.parametrize("amp", [None, BF16, F16], ids=["float32", "bf16", "fp16"])
def test_a_step_is_simulated(amp: torch.dtype | None) -> None:
    module, inputs = encoder()
    plain = Step("train", optimizer_factory("adamw"), None, amp)
    planned = Step("train", optimizer_factory("adamw"), None, amp, target=CUDA_FROM_CPU)
    ours = simulate(module, inputs, planned)
    assert ours.peak < simulate(module, inputs, plain).peak  # no scores of every row and column
    assert sum(ours.categories.values()) == ours.peak
    assert predict(module, inputs, planned) == ours
    assert run_tracked(copy.deepcopy(module), inputs, planned) == run_tracked(copy.deepcopy(module), inputs, plain)


def test_the_optimizer_holds_temporaries_of_all_parameters() -> None:
    module = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
    inputs = Inputs((torch.zeros(1, 64),), {})
    peaks = [
        simulate(module, inputs, Step("train", optimizer_factory("adamw"), target=target)).peak_of_optimizer
        for target in (EAGER, CUDA_FROM_CPU)
    ]
    assert peaks[1] - peaks[0] >= 4 * 4 * 64 * 64


def test_effects_are_those_of_cuda() -> None:
    graph_module = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(D, D), nn.Dropout(0.5)))
    plain, ours = (observe(graph_module, [torch.zeros(S, D)], target=target) for target in (EAGER, CUDA_FROM_CPU))
    dropout = next(node for node in graph_module.graph.nodes if node.target == "1")
    kept = [sum(each.storages[key].bytes for key in each.of[dropout].saved) for each in (plain, ours)]
    assert kept == [512, math.ceil(S * D / 512) * 512]
    assert ours.of[dropout].random


def test_workspaces() -> None:
    cpu = torch.device("cpu")
    assert EAGER.workspace_bytes(cpu, None, "train") == 0
    assert CUDA_FROM_CPU.workspace_bytes(cpu, None, "train") == library_bytes("train") == 66 * 2**20
    assert CUDA_FROM_CPU.workspace_bytes(cpu, None, "inference") == 33 * 2**20


def test_a_step_that_reads_values_is_refused() -> None:
    class Branch(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.sum() > 0 else x

    with pytest.raises(DataDependentError):
        predict(Branch(4, 4), Inputs((torch.ones(1, 4),), {}), Step(target=CUDA_FROM_CPU))


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without CUDA, wherever the tests run."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


@pytest.mark.usefixtures("no_cuda")
def test_optimize_for_cuda_on_the_cpu() -> None:
    module, inputs = encoder()
    peak = simulate(module, inputs, Step("train", optimizer_factory("adamw"), target=CUDA_FROM_CPU)).peak
    budget = library_bytes("train") + peak * 3 // 4
    result = memrewrite.optimize(module, inputs.args, device="cuda", budget=budget)
    report = result.report
    assert report.device == "cuda"
    assert report.equivalent
    assert report.segments
    assert report.predicted_before.peak == peak + library_bytes("train")
    assert report.predicted_after.peak <= budget
    assert (report.measured_before, report.measured_after) == (None, None)
    assert any(STATED_ERROR in note for note in report.notes)
    assert result(*inputs.args).shape == (16, 4)


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize(("device", "word"), [("gpu", "is unknown"), ("meta", "move it and its inputs")])
def test_other_devices_are_refused(device: str, word: str) -> None:
    with pytest.raises(UsageError, match=word):
        memrewrite.optimize(nn.Linear(4, 4), torch.zeros(1, 4), device=device)


def test_with_cuda_the_model_has_to_lie_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UsageError, match="The model is on cpu, not on cuda"):
        memrewrite.optimize(nn.Linear(4, 4), torch.zeros(1, 4), device="cuda")


NET = """
from torch import nn
import torch

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 64), nn.SiLU(), nn.Dropout(0.1), nn.Linear(64, 4))

def get_inputs(batch_size=256):
    return torch.randn(batch_size, 8)
"""


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize("options", [[], ["--check", "--budget", "1GB"], ["-o", "out"]], ids=["plan", "check", "save"])
def test_the_command_line_plans_for_cuda(
    options: list[str], tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cuda_net.py").write_text(NET)
    assert cli.run(["optimize", "cuda_net.py", "--device", "cuda", "-q", *options]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "predicted peak" in said
    assert ("step on cuda" in said and STATED_ERROR in said) == (options[:1] != ["--check"])


@pytest.mark.parametrize(
    ("rows", "columns", "dtype", "taken"),
    [  # measured on an H200, PyTorch 2.11: the peak of one sum over dimension 0 beyond its result
        (25216, 768, BF16, 138_412_544),
        (12608, 768, torch.float32, 77_464_064),
        (12608, 3072, torch.float32, 138_412_544),
        (12608, 2304, torch.float32, 139_198_976),
        (128, 197 * 768, torch.float32, 0),
        (64, 4, torch.float32, 0),
    ],
)
def test_what_sums_of_rows_take_while_they_run(rows: int, columns: int, dtype: torch.dtype, taken: int) -> None:
    with FakeTensorMode():
        tensor = torch.empty(rows, columns, dtype=dtype)
        lookup = functools.partial(Scratch().lookup, torch.ops.aten.sum.dim_IntList)
        assert lookup((tensor, [0]), {}).bytes == lookup((tensor, [0], True), {}).bytes == taken
        assert lookup((tensor.view(rows // 2, 2, columns), [0, 1]), {}).bytes == taken
        assert lookup((tensor, [1]), {}).bytes == 0  # along rows no memory is needed
