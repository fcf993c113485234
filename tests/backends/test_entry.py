"""``torch.compile(model, backend="memrewrite")``: options, errors, what lives besides a graph, Inductor's caches."""

import gc
import os
import subprocess
import sys
import tomllib
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from memrewrite.backends import entry, resident
from memrewrite.backends.asked import Asked
from memrewrite.backends.observed import Seen
from memrewrite.backends.partition import Partition
from memrewrite.backends.resident import Resident, optimizer_bytes
from memrewrite.backends.steps import key_of
from memrewrite.records.errors import BudgetInfeasibleError, MemrewriteError, UsageError
from memrewrite.runtime.promise import BeyondPlanWarning
from memrewrite.simulate.memory.tracker import Tracker
from memrewrite.targets.allocator import rounded
from memrewrite.torch_internals.fake_tensors import FakeTensorMode
from tests.backends.test_partition import mlp

ROOT = Path(__file__).resolve().parents[2]
MIB = 2**20
WEIGHTS = 8 * (32 * 32 * 4 + 512)  # bytes, each storage rounded up


def run(model: nn.Module, x: Tensor, **options: Any) -> Any:
    loss = torch.compile(model, backend=entry.memrewrite, options=options)(x)
    loss.backward()
    return loss


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"budget": "8Gb"}, "Budget '8Gb' has no known unit"),
        ({"budget": "8GB", "optimizer": "adamx"}, "Optimizer 'adamx' is unknown"),
        ({"budget": "8GB", "optimizer": 3}, "Option optimizer=3 is no name"),
        ({"budget": "8GB", "optimizer": torch.optim.SGD([torch.ones(1)])}, "Option optimizer=SGD is no name"),
        (
            {"budget": "8GB", "optimizer": "torch.optim:LBFGS"},
            "What optimizer 'torch.optim:LBFGS' keeps cannot be counted (TypeError: LBFGS.step() missing",
        ),
        ({"budget": "8GB", "loop": "prefetch"}, "Option loop='prefetch' has habits of which only 'drop-output' counts"),
        ({"budget": "8GB", "reserve": "10%"}, "Option reserve='10%' is no number of bytes"),
        ({"budget": "8GB", "reserve": -5}, "Option reserve=-5 is no number of bytes"),
        ({"budget": "8GB", "reserve": 0.5}, "Option reserve=0.5 is no number of bytes"),
        ({"budget": "8GB", "loss": "much"}, "Option loss='much' is no number of bytes"),
        ({"budget": "8GB", "exact": 1}, "Option exact=1 is neither True nor False"),
        ({"budget": "8GB", "verify": "yes"}, "Option verify='yes' is neither True nor False"),
        ({"bugdet": "8GB"}, "Unexpected optimization option bugdet; memrewrite's options are budget, optimizer"),
        ({"custom_partitioner_fn": 1}, "torch._inductor.config.custom_partitioner_fn is set, and chooses what is kept"),
        ({"budget": "8GB", "mode": "fast"}, "Unrecognized mode=fast, should be one of: default"),
    ],
    ids=lambda value: None if isinstance(value, str) else " ".join(f"{k}={v}" for k, v in value.items()),
)
def test_a_wrong_option_is_one_sentence(options: dict[str, Any], words: str) -> None:
    torch._dynamo.reset()
    with pytest.raises(UsageError) as caught:
        run(mlp(1), torch.ones(2, 32), **options)
    assert str(caught.value).startswith(words)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("options", [{"budget": "8GB", 3: 4}, [("budget", "8GB")]], ids=["key", "list"])
def test_options_without_names_are_one_sentence(options: Any) -> None:
    torch._dynamo.reset()
    with pytest.raises(UsageError, match=r"^Options .* are no dict with names as keys; write e\.g\. {'budget"):
        torch.compile(mlp(1), backend=entry.memrewrite, options=options)(torch.ones(2, 32))


def test_nothing_of_the_loop_is_kept(partitions: list[Partition]) -> None:
    """Its variables were, as they had been when a graph was compiled, such as the output of the step before."""
    x = torch.randn(8, 32)
    model = torch.compile(mlp(), backend=entry.memrewrite, options={"budget": "100%"}, dynamic=False)
    output = model(x)
    before = weakref.ref(output)
    output = model(x[:4])
    assert len(partitions) == 2
    assert before() is None
    assert output.isfinite()


def test_an_error_that_dynamo_is_told_to_suppress_leaves_the_model_as_it_is() -> None:
    torch._dynamo.reset()
    model = mlp(1)
    with torch._dynamo.config.patch(suppress_errors=True):
        loss = run(model, torch.ones(2, 32), budget="1B")
    assert torch.equal(loss, model(torch.ones(2, 32)))


def test_another_setting_that_chooses_what_is_kept_is_refused() -> None:
    torch._dynamo.reset()
    words = r"^torch\._functorch\.config\.activation_memory_budget is set, and chooses what is kept.*use one of them"
    with torch._functorch.config.patch(activation_memory_budget=0.5), pytest.raises(UsageError, match=words):
        run(mlp(1), torch.ones(2, 32), budget="8GB")


def test_what_dynamo_will_not_compile_any_more_is_told_of() -> None:
    torch._dynamo.reset()
    model = mlp(1)
    options: Any = {"budget": "8GB"}
    compiled: Any = torch.compile(model, backend=entry.memrewrite, options=options, dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=2):
        compiled(torch.ones(2, 32)).backward()
        with pytest.warns(BeyondPlanWarning, match=r"forward was compiled 2 times.*fullgraph=True refuses them"):
            compiled(torch.ones(3, 32)).backward()


def test_what_lives_besides_the_graph_counts(partitions: list[Partition]) -> None:
    x = torch.randn(256, 32)
    run(mlp(), x, budget="100%", optimizer="adamw", reserve="1MB")
    (partition,) = partitions
    lives = partition.lives
    assert (lives.model, lives.gradients, lives.others, lives.earlier) == (WEIGHTS, WEIGHTS, 0, 0)
    assert lives.inputs == x.nbytes
    assert 2 * WEIGHTS <= lives.state <= 2 * WEIGHTS + 16 * 512  # and the step's number for each parameter
    assert partition.base == lives.base + 10**6
    assert partition.foreseen is not None
    assert partition.foreseen.after > partition.base


@pytest.mark.parametrize("inside", [False, True])
def test_buckets_of_gradients_count(inside: bool, partitions: list[Partition], tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = mlp()
        parallel = DistributedDataParallel(model, gradient_as_bucket_view=inside)
        run(parallel, torch.randn(256, 32), budget="100%", optimizer="sgd")
        lives = partitions[0].lives
        assert lives.model == WEIGHTS + sum(each.nbytes for each in model.parameters())
        assert lives.gradients == (0 if inside else WEIGHTS)
        del parallel
    finally:
        gc.collect()  # DDP goes first: it would wait for the group's threads while holding the interpreter's lock
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(("name", "copies"), [("none", 0), ("sgd", 0), ("sgd-momentum", 1), ("adamw", 2)])
def test_state_of_optimizers(name: str, copies: int) -> None:
    kept, transient = optimizer_bytes([nn.Parameter(torch.zeros(1024, 16))], name)
    state = sum(map(rounded, kept))
    assert state - copies * 2**16 in (0, 512)
    assert (transient > 0) == (name == "adamw")


def test_state_is_counted_once_for_all_graphs_and_as_in_eager() -> None:
    with FakeTensorMode():
        parameters = [nn.Parameter(torch.empty(1024, 17, device="cuda")) for _ in range(3)]
    found = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., Any]:
        found.append(optimizer_bytes(parameters, "adamw"))  # of which PyTorch 2.13 says that it is compiled
        return graph.forward

    def broken(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x * 2

    with mock.patch("memrewrite.backends.resident.Tracker", wraps=Tracker) as counted:
        torch.compile(lambda x: broken(x + 1), backend=backend)(torch.ones(2))
    each = 1024 * 17 * 4
    assert found == [((each,) * 6, 3 * each)] * 2
    assert counted.call_count == 1


def test_a_budget_that_nothing_fits_is_our_own_error(partitions: list[Partition]) -> None:
    with pytest.raises(BudgetInfeasibleError, match=r"optimizer state .*What else would fit:\n  - ") as caught:
        run(mlp(), torch.randn(256, 32), budget="300KB")
    assert caught.value.lowest > 300_000
    assert isinstance(caught.value, MemrewriteError)
    assert not any("symbolic_convert" in frame.path.name for frame in caught.traceback if isinstance(frame.path, Path))
    torch._dynamo.reset()
    run(mlp(), torch.randn(256, 32), budget=caught.value.lowest)


class WithLogits(nn.Module):
    """Returns its loss, and what that is of if it is asked to."""

    def __init__(self, alone: bool) -> None:
        super().__init__()
        self.alone, self.head = alone, nn.Linear(32, 512)

    def forward(self, x: Tensor) -> Any:
        logits = self.head(x)
        loss = logits.square().mean()
        return loss if self.alone else (loss, logits)


@pytest.mark.parametrize("alone", [False, True])
def test_what_a_loss_is_returned_with_is_told_where_nothing_fits(alone: bool) -> None:
    def refused(budget: str | int) -> BudgetInfeasibleError:
        torch._dynamo.reset()
        options: Any = {"budget": budget, "optimizer": "none"}
        with pytest.raises(BudgetInfeasibleError) as caught:
            torch.compile(WithLogits(alone), backend=entry.memrewrite, options=options)(torch.randn(1024, 32))
        return caught.value

    lowest = refused("100KB").lowest
    logits = 1024 * 512 * 4
    words = 'the loss alone from forward, as of memrewrite.optimize(..., returns="loss") first: what it returns besides'
    assert (words in str(refused(lowest - logits))) is not alone
    assert words not in str(refused("100KB"))  # what would not be enough


def test_a_last_batch_that_is_smaller_may_take_what_the_others_do(partitions: list[Partition]) -> None:
    """Of a step of its own, which is mostly weights, 80 % would be less than any plan takes."""
    options: Any = {"budget": "80%", "optimizer": "adamw"}
    compiled = torch.compile(mlp(), backend=entry.memrewrite, options=options, dynamic=False)
    for rows in (4096, 16):
        compiled(torch.randn(rows, 32)).backward()
    large, small = partitions
    assert large.peak is not None
    assert small.peak is not None
    assert small.foreseen is not None
    assert 0.8 * small.foreseen.before < small.peak < large.peak
    assert small.choice == "usual"


@pytest.mark.usefixtures("partitions")
def test_sizes_that_are_too_large_for_what_was_planned_are_told_of() -> None:
    options: Any = {"budget": "2MB", "optimizer": "none"}
    compiled = torch.compile(mlp(), backend=entry.memrewrite, options=options, dynamic=True)
    for rows in (256, 300, 16):
        compiled(torch.randn(rows, 32)).backward()
    told = r"forward is called with a larger size \(4096, planned for 256\).*of 2\.0 MB.*the largest inputs first"
    with pytest.warns(BeyondPlanWarning, match=told):
        compiled(torch.randn(4096, 32)).backward()
    compiled(torch.randn(4096, 32)).backward()


class Checkpointed(nn.Module):
    """Draws dropout again, where random numbers are eager's."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.part, x, use_reentrant=False).square().mean()
        return result


@pytest.mark.usefixtures("partitions")
def test_a_graph_that_is_left_to_pytorch_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bytes it is enough to know what its code takes, and not for a share of what PyTorch's own plans do."""

    def told(budget: str) -> list[str]:
        torch._dynamo.reset()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", BeyondPlanWarning)
            run(Checkpointed(), torch.ones(4, 32), budget=budget, fallback_random=True)
        return [str(each.message) for each in caught if each.category is BeyondPlanWarning]

    (words,) = told("8GB")
    assert "forward is left to PyTorch: its backward draws random numbers again" in words
    assert words.endswith("may take more than its budget.")
    monkeypatch.setattr(entry, "seen", lambda *_: Seen(1000, 0))
    assert told("8GB") == []
    assert told("60%") == told("min") == [words]


def test_a_graph_for_other_numbers_is_another() -> None:
    keys = set[str]()
    for dtype in (torch.float32, torch.bfloat16):
        torch._dynamo.reset()
        model = mlp(1).to(dtype)

        def noted(graph: Any, inputs: Any) -> Any:
            keys.add(key_of(graph))
            return graph.forward

        torch.compile(model, backend=noted)(torch.ones(2, 32, dtype=dtype))
    assert len(keys) == 2


class Broken(nn.Module):
    """Two graphs, and between them what is not compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Sequential(*mlp(4).parts), mlp(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        loss: Tensor = self.second(x)
        return loss


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo's own, where it resumes
def test_graphs_share_the_budget(partitions: list[Partition]) -> None:
    model, x = Broken(), torch.randn(256, 32)
    run(model, x, budget="10MB", optimizer="sgd")
    first, second = (partition.lives for partition in partitions)
    assert first.model == second.model == WEIGHTS
    assert (first.earlier, first.others) == (0, WEIGHTS // 2)
    kept = partitions[0].foreseen
    assert kept is not None
    assert second.inputs == x.nbytes  # which what the first one gives is as large as
    assert second.earlier == kept.kept + x.nbytes


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize(("make", "biases"), [(mlp, 2 * MIB), (Broken, 0)], ids=["alone", "of several"])
def test_what_is_held_for_biases_alone_is_not_told_where_none_is_added(
    make: Callable[[], nn.Module], biases: int, partitions: list[Partition], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other graphs may add some, or what is not compiled between them."""
    sizes = {True: 66 * MIB, False: 64 * MIB}
    monkeypatch.setattr(resident, "measured", lambda device, biases=True: sizes[biases])
    run(make(), torch.randn(256, 32), budget="1GB", optimizer="sgd")
    assert {(partition.lives.libraries, partition.lives.biases) for partition in partitions} == {(66 * MIB, biases)}
    partition = partitions[-1]
    observed = []
    for adds in (True, False):
        partition.observe(Seen(10 * MIB, 20 * MIB, adds))
        assert partition.observed is not None
        observed.append(partition.observed)
    assert observed[0] - observed[1] == biases


def test_without_a_budget_nothing_is_planned(partitions: list[Partition]) -> None:
    run(mlp(2), torch.randn(8, 32))
    assert partitions[0].foreseen is None


def test_identities_tell_options_and_bytes_apart() -> None:
    lives = Resident(1, 2, 3, 4, 5, 6, 7, 8, 9)
    asked = [Asked.parse(options)[0] for options in ({"budget": "1GB"}, {"budget": "2GB"}, {"budget": "1GB"})]
    found = [entry.identity(Partition(each, lives)) for each in asked]
    assert found[0] == found[2] != found[1]
    assert entry.identity(Partition(asked[0], Resident(2, 2, 3, 4, 5, 6, 7, 8, 9))) != found[0]
    second = Partition(asked[0], lives)
    second.taken.append(10)
    assert entry.identity(second) != found[0]
    with torch._functorch.config.patch(donated_buffer=False):  # code that writes over what is kept must not be found
        assert entry.identity(Partition(asked[0], lives)) != found[0]


def test_the_entry_point_leads_here() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["torch_dynamo_backends"] == {"memrewrite": "memrewrite.backends.entry:memrewrite"}


PROGRAM = """
import memrewrite, torch
from torch._dynamo.utils import counters
model = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(3)))  # products need no compiler
options = {"budget": BUDGET, "optimizer": "sgd"}
compiled = torch.compile(model, backend="memrewrite", options=options)
compiled(torch.ones(64, 8)).sum().backward()
found = counters["inductor"], counters["aot_autograd"]
print(found[0]["fxgraph_cache_hit"], found[0]["fxgraph_cache_miss"], found[1]["autograd_cache_hit"])
print(memrewrite.report_of(compiled).graphs[0].choice)
"""


def test_another_process_finds_the_graphs(tmp_path: Path) -> None:
    """By its entry point, as an installed package has it; the report says where they are from."""
    installed = tmp_path / "memrewrite-0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Name: memrewrite\nVersion: 0\n")
    (installed / "entry_points.txt").write_text(
        "[torch_dynamo_backends]\nmemrewrite = memrewrite.backends.entry:memrewrite\n"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    environment = os.environ | {"PYTHONPATH": path, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    found = []
    for budget in ("'1GB'", "'1GB'"):
        command = [sys.executable, "-c", PROGRAM.replace("BUDGET", budget)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        found.append(done.stdout.strip().split(maxsplit=3))
    assert [int(hits) + int(joint) > 0 for hits, _, joint, _ in found] == [False, True]
    assert [choice for *_, choice in found] == ["usual", "from cache"]
