"""A second start plans nothing and trains the same; whatever is not the same is planned anew."""

import copy
import json
import os
import pickle
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import memrewrite
from memrewrite import cli
from memrewrite.cache import environment as environments
from memrewrite.cache.description import Description
from memrewrite.cache.store import Entry, Store
from memrewrite.optimizing import run
from memrewrite.records.errors import BudgetInfeasibleError
from memrewrite.runtime.dropin import programs
from memrewrite.runtime.promise import BeyondPlanWarning, FallbackWarning
from tests.api.test_optimize import assert_untouched, state
from tests.support.dropins import ConvNet, conv_net, image
from tests.support.verification import steps_taken

BITS, KNOWN = (
    "one step was verified again, bit for bit",
    "one step was verified again, no farther from the original than float64 allowed at first",
)


class Swishes(nn.Module):
    """Layers whose rewritten arithmetic has other last bits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.rate = 0.5

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = layer(x)
            x = y * torch.sigmoid(y)
        return x * self.rate


def swishes() -> Swishes:
    torch.manual_seed(0)
    return Swishes()


@pytest.fixture
def plans(tmp_path: Path) -> Path:
    return tmp_path / "plans"


@pytest.fixture
def optimize(plans: Path) -> Callable[..., Any]:
    """``memrewrite.optimize`` that keeps plans."""

    def kept(model: nn.Module, inputs: Any, **options: Any) -> Any:
        return memrewrite.optimize(model, inputs, **{"cache": plans, "budget": "min", "optimizer": "sgd", **options})

    return kept


class _Planned(Exception):  # noqa: N818  (no error: it tells that what must not run does)
    pass


@pytest.fixture
def no_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing be simulated, captured, rewritten, planned or proved in full."""

    def never(*args: Any, **kwargs: Any) -> Any:
        raise _Planned

    for name in ("original_simulated", "find", "rewritten", "fit_to_budget", "prove", "report_on"):
        monkeypatch.setattr(run, name, never)


def found(result: Any) -> bool:
    return any("comes from the cache" in note for note in memrewrite.report_of(result).notes)


def train(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Losses, then parameters and buffers, of three steps."""
    torch.manual_seed(3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(3):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(p.detach().clone() for p in model.parameters()), *(b.clone() for b in model.buffers())]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(map(torch.equal, ours, theirs)) and len(ours) == len(theirs)


@pytest.mark.parametrize(
    ("make", "x", "rule"),
    [(lambda: conv_net(0.3), image(8), BITS), (swishes, torch.randn(64, 16), KNOWN)],
    ids=["bit-equal", "other last bits"],
)
def test_a_second_start_plans_nothing_and_trains_the_same(
    make: Callable[[], nn.Module],
    x: Tensor,
    rule: str,
    optimize: Callable[..., Any],
    plans: Path,
    request: pytest.FixtureRequest,
) -> None:
    first = optimize(make(), x)
    assert not found(first)
    request.getfixturevalue("no_planning")
    stages: list[str] = []
    second = optimize(make(), x, progress=stages.append)
    assert stages == ["look up", "verify"]
    assert second.report.notes == (*first.report.notes, second.report.notes[-1])
    assert second.report.notes[-1].endswith(f"; {rule}.")
    assert {**second.report.to_json(), "notes": ()} == json.loads(
        json.dumps({**first.report.to_json(), "notes": ()}), object_hook=_tuples(second.report.to_json())
    )
    assert programs(second)[""].source == programs(first)[""].source
    assert same(train(second, x), train(first, x))
    assert os.listdir(plans) == [name for name in os.listdir(plans) if name.endswith(".plan")]


def test_a_second_start_takes_one_step_of_each_model_and_a_reference_only_where_float64_left_too_little(
    optimize: Callable[..., Any], plans: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(64, 16)
    optimize(swishes(), x)
    taken = steps_taken(monkeypatch, lambda module: "rewritten" if programs(module) else "original", "float64")
    assert found(optimize(swishes(), x))
    assert taken == ["original", "rewritten"]
    taken.clear()
    (file,) = plans.iterdir()
    store, key = Store(plans), file.stem
    entry = store.get(key)
    assert entry is not None
    entry.facts["room"] = [[*names, room / 1e6] for *names, room in entry.facts["room"]]
    store.put(key, entry)
    note = optimize(swishes(), x).report.notes[-1]
    assert note.endswith("; one step was verified again, against float64.")
    assert taken == ["original", "rewritten", "float64"]


def _tuples(like: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Lists of JSON as the tuples that they were."""

    def tupled(value: Any) -> Any:
        return tuple(map(tupled, value)) if isinstance(value, list) else value

    lists = {name for name, value in like["config"].items() if isinstance(value, list)}
    return lambda data: {key: value if key in lists else tupled(value) for key, value in data.items()}


def test_the_model_stays_as_it_is_and_the_result_copies_and_pickles(optimize: Callable[..., Any]) -> None:
    optimize(conv_net(), image(4))
    model = conv_net()
    seen: list[int] = []
    model.register_forward_hook(lambda *args: seen.append(1))
    before = state(model)
    result = optimize(model, image(4))
    assert found(result)
    assert_untouched(before, model)
    assert isinstance(result, ConvNet)
    assert result.first.weight is model.first.weight
    assert result.state_dict().keys() == model.state_dict().keys()
    assert memrewrite.verify(conv_net(), result, image(4), optimizer="sgd", exact=True).equivalent
    assert memrewrite.report_of(result).by_size is None
    twin, other = copy.deepcopy(result), pickle.loads(pickle.dumps(optimize(conv_net(), image(4))))
    assert same(train(twin, image(4)), train(other, image(4)))
    seen.clear()
    result(image(4))
    assert seen == [1]
    with pytest.warns(FallbackWarning):
        result(image(4)[:, :, :4])


def test_larger_inputs_are_told_as_by_a_fresh_plan(optimize: Callable[..., Any]) -> None:
    optimize(conv_net(), image(8), budget="90%")
    result = optimize(conv_net(), image(8), budget="90%")
    assert found(result)
    with pytest.warns(BeyondPlanWarning, match=r"A step on them takes"):
        result(image(32))


@pytest.mark.parametrize("trained", [False, True], ids=["at once", "after training"])
def test_weights_do_not_count(trained: bool, optimize: Callable[..., Any]) -> None:
    optimize(conv_net(), image(4))
    model = conv_net()
    if trained:
        train(model, image(4))
    for parameter in model.parameters():
        parameter.grad = None
        parameter.data.add_(0.01)
    assert found(optimize(model, image(4)))


def _drop_layer(model: Any) -> None:
    model.norm2 = nn.Identity()


def _own_forward(model: Any) -> None:
    model.forward = types.MethodType(lambda self, x: self.head(torch.tanh(self.first(x)).mean((2, 3))), model)


OTHER_MODELS: dict[str, Callable[[Any], Any]] = {
    "dropout": lambda model: setattr(model.dropout, "p", 0.25),
    "padding": lambda model: setattr(model.first, "padding_mode", "circular"),
    "eps": lambda model: setattr(model.norm, "eps", 1e-3),
    "momentum": lambda model: setattr(model.norm, "momentum", 0.2),
    "frozen": lambda model: model.first.weight.requires_grad_(False),
    "eval": lambda model: model.norm.eval(),
    "another layer": _drop_layer,
    "another forward": _own_forward,
    "channels last": lambda model: model.to(memory_format=torch.channels_last),
    "a hook inside": lambda model: model.norm.register_forward_hook(lambda *args: None),
}


@pytest.mark.usefixtures("no_planning")
def test_another_model_is_a_miss(optimize: Callable[..., Any]) -> None:
    keys = {"as it is": _key(optimize, conv_net(0.3), image(4))}
    for name, change in OTHER_MODELS.items():
        model = conv_net(0.3)
        change(model)
        keys[name] = _key(optimize, model, image(4))
    assert len({*keys.values()}) == len(keys)


OTHER_REQUESTS: dict[str, dict[str, Any]] = {
    "budget": {"budget": "90%"},
    "optimizer": {"optimizer": "adamw"},
    "momentum": {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)},
    "amp": {"amp": "bf16"},
    "micro-batches": {"micro_batches": 2},
    "loop": {"loop": "drop-output"},
    "passes": {"passes": ["checkpoint_segments"]},
    "exact": {"exact": True},
    "seed": {"seed": 1},
    "loss": {"loss_fn": lambda output: output.float().square().sum()},
    "device": {"device": "cuda"},
}


@pytest.mark.usefixtures("no_planning")
def test_another_request_is_a_miss(optimize: Callable[..., Any]) -> None:
    keys = {name: _key(optimize, conv_net(), image(4), **options) for name, options in OTHER_REQUESTS.items()}
    keys["as it is"] = _key(optimize, conv_net(), image(4))
    assert len({*keys.values()}) == len(keys)


OTHER_INPUTS: dict[str, Any] = {
    "batch": image(6),
    "gradient": image(4).requires_grad_(),
    "strides": image(4).to(memory_format=torch.channels_last),
    "an argument": (image(4), 1),
    "another argument": (image(4), True),
}


@pytest.mark.usefixtures("no_planning")
def test_other_inputs_are_a_miss(optimize: Callable[..., Any]) -> None:
    keys = {name: _key(optimize, conv_net(), inputs) for name, inputs in OTHER_INPUTS.items()}
    keys["as it is"] = _key(optimize, conv_net(), image(4))
    assert len({*keys.values()}) == len(keys)
    assert _key(optimize, conv_net(), image(4) + 1) == keys["as it is"]


@pytest.mark.usefixtures("no_planning")
def test_another_setting_is_a_miss(optimize: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [_key(optimize, conv_net(), image(4))]
    before = torch.get_autocast_dtype("cpu")
    torch.set_autocast_dtype("cpu", torch.float16)
    keys.append(_key(optimize, conv_net(), image(4)))
    torch.set_autocast_dtype("cpu", before)
    monkeypatch.setattr(F, "multi_head_attention_forward", lambda *args: None)
    keys.append(_key(optimize, conv_net(), image(4)))
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    keys.append(_key(optimize, conv_net(), image(4)))
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)
    keys.append(_key(optimize, conv_net(), image(4)))
    monkeypatch.setattr(environments, "_own_code", lambda: "of another version")
    keys.append(_key(optimize, conv_net(), image(4)))
    assert len({*keys}) == len(keys)


def _key(optimize: Callable[..., Any], model: nn.Module, inputs: Any, **options: Any) -> str:
    """What an entry would be looked up by."""
    keys: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "get", lambda store, key: keys.append(key))
        with pytest.raises(_Planned):
            optimize(model, inputs, **options)
    return keys[0]


@pytest.mark.usefixtures("no_planning")
def test_the_learning_rate_does_not_count(optimize: Callable[..., Any]) -> None:
    model = conv_net()
    settings: list[dict[str, Any]] = [{"lr": 0.1}, {"lr": 0.2}, {"lr": torch.tensor(0.1)}, {"lr": 0.1, "amsgrad": True}]
    keys = [
        _key(optimize, model, image(4), optimizer=torch.optim.AdamW(model.parameters(), **each)) for each in settings
    ]
    assert keys[0] == keys[1]
    assert len({*keys}) == 3


@pytest.mark.usefixtures("no_planning")
def test_targets_of_the_loss_do_not_count_but_its_code_does(optimize: Callable[..., Any]) -> None:
    def key(values: int, smoothing: float = 0.0) -> str:
        target = torch.full((4,), values)
        return _key(optimize, conv_net(), image(4), loss_fn=lambda out: F.cross_entropy(out, target) + smoothing)

    assert key(1) == key(2) != key(1, 0.1)


def test_a_plan_that_does_not_hold_is_replaced(
    optimize: Callable[..., Any], plans: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the key had missed something: the guards know the rate."""
    monkeypatch.setattr(Description, "digest", lambda found: "0" * 64)
    optimize(swishes(), torch.randn(32, 16), budget=None)
    slower = swishes()
    slower.rate = 0.25
    assert not found(optimize(slower, torch.randn(32, 16), budget=None))
    assert found(optimize(slower, torch.randn(32, 16), budget=None))
    assert os.listdir(plans) == [f"{'0' * 64}.plan"]


def test_a_step_that_differs_is_a_miss(
    optimize: Callable[..., Any], plans: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Description, "digest", lambda found: "0" * 64)
    optimize(swishes(), torch.randn(32, 16), budget=None)
    store = Store(plans)
    entry = store.get("0" * 64)
    assert entry is not None
    source = entry.facts["programs"][""]
    assert source.count("silu") > 0
    store.put("0" * 64, Entry({**entry.facts, "programs": {"": source.replace("silu", "relu")}}, entry.tensors))
    result = optimize(swishes(), torch.randn(32, 16), budget=None)
    assert not found(result)
    assert result.report.equivalent


class Hidden(nn.Module):
    """Multiplies by a number whose name no code spells."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.first(x)) * globals()["gain".upper()]
        return F.gelu(self.second(hidden))


GAIN = 2.0


@pytest.mark.parametrize("verify", [True, False])
def test_what_the_key_misses_is_no_wrong_number_without_a_proof_either(
    verify: bool, optimize: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, model = torch.randn(64, 16), Hidden()
    assert optimize(model, x, verify=verify).report.changed
    monkeypatch.setitem(globals(), "GAIN", 3.0)
    result = optimize(model, x, verify=verify)
    assert torch.equal(result(x), model(x))
    assert any("not kept for the next start" in note for note in result.report.notes) is not verify


def test_an_entry_that_lacks_something_is_a_miss(
    optimize: Callable[..., Any], plans: Path, request: pytest.FixtureRequest
) -> None:
    optimize(swishes(), torch.randn(32, 16), budget=None)
    (file,) = plans.iterdir()
    store, whole = Store(plans), file.read_bytes()
    entry = store.get(file.stem)
    assert entry is not None
    request.getfixturevalue("no_planning")
    for fact in ("programs", "plain", "report", "captured", "workspace", "bitwise", "about"):
        store.put(file.stem, Entry({name: value for name, value in entry.facts.items() if name != fact}, entry.tensors))
        with pytest.raises(_Planned):
            optimize(swishes(), torch.randn(32, 16), budget=None)
        assert not file.exists()
    file.write_bytes(whole[:-100])
    with pytest.raises(_Planned):
        optimize(swishes(), torch.randn(32, 16), budget=None)
    assert not file.exists()
    file.write_bytes(whole)
    assert found(optimize(swishes(), torch.randn(32, 16), budget=None))


class Listed(nn.Module):
    """Holds a tensor where it is no parameter, no buffer and no attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.tables = nn.Linear(16, 16), [torch.ones(16)]

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x) * self.tables[0]
        return y * torch.sigmoid(y) + torch.tensor([1.0, 2.0]).sum()


def test_a_program_that_holds_a_tensor_of_the_model_is_not_kept(optimize: Callable[..., Any], plans: Path) -> None:
    model = Listed()
    result = optimize(model, torch.randn(32, 16))
    kept = {tensor.data_ptr() for tensor in vars(type(result))["_memrewrite_own"].constants.values()}
    assert model.tables[0].data_ptr() in kept
    assert not plans.exists()
    assert "not kept for the next start: its program holds a tensor" in result.report.notes[-1]


def test_a_model_that_cannot_be_described_is_planned_as_ever(optimize: Callable[..., Any], plans: Path) -> None:
    model = swishes()
    model.rest = iter([1])  # type: ignore[assignment]
    result = optimize(model, torch.randn(32, 16), budget=None)
    assert result.report.equivalent
    assert "not kept for the next start: there is a builtins.list_iterator" in result.report.notes[-1]
    assert not plans.exists()


class Constants(Listed):
    def __init__(self) -> None:
        super().__init__()
        self.tables = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x) * torch.tensor([1.0, 2.0] * 8)
        return y * torch.sigmoid(y)


def test_constants_of_a_program_come_back(optimize: Callable[..., Any]) -> None:
    x = torch.randn(32, 16)
    torch.manual_seed(0)
    model = Constants()
    first = optimize(copy.deepcopy(model), x)
    assert first._memrewrite_own.constants
    second = optimize(copy.deepcopy(model), x)
    assert found(second)
    assert same(train(second, x), train(first, x))


class Branching(nn.Module):
    """Captured in parts: forward asks a value."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = nn.Sequential(nn.Linear(16, 16), nn.SiLU()), nn.Sequential(nn.Linear(16, 16), nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.body(x) if x.sum() > -1e9 else x


def test_a_plan_in_parts_comes_back(optimize: Callable[..., Any]) -> None:
    x = torch.randn(256, 16)
    torch.manual_seed(0)
    model = Branching()
    first, second = (optimize(copy.deepcopy(model), x) for _ in range(2))
    assert programs(first).keys() == {"stem", "body"} == programs(second).keys()
    assert found(second)
    assert same(train(second, x), train(first, x))


def test_a_model_that_was_returned_as_it_is_is_known(optimize: Callable[..., Any], request: Any) -> None:
    asked = {"budget": "1GB", "passes": ["checkpoint_segments"]}
    first = optimize(conv_net(), image(4), **asked)
    request.getfixturevalue("no_planning")
    model = conv_net()
    result = optimize(model, image(4), **asked)
    assert result is model
    assert found(result)
    assert not first.report.changed
    assert not memrewrite.report_of(result).changed


def test_what_is_infeasible_is_not_kept(optimize: Callable[..., Any], plans: Path) -> None:
    with pytest.raises(BudgetInfeasibleError):
        optimize(swishes(), torch.randn(32, 16), budget=1000)
    assert not plans.exists()


def test_ranges_of_sizes_and_inference_come_back(optimize: Callable[..., Any]) -> None:
    for _ in range(2):
        ranged = optimize(swishes(), torch.randn(8, 16), dynamic={"x": {0: (8, 64)}})
        still = optimize(swishes().eval(), torch.randn(64, 16), budget=None)
    assert found(ranged)
    assert found(still)
    ranged(torch.randn(33, 16))


def test_parts_that_were_optimized_before_are_planned_as_ever(optimize: Callable[..., Any], plans: Path) -> None:
    inner = optimize(swishes(), torch.randn(32, 16))
    before = os.listdir(plans)
    model = nn.Sequential(nn.Linear(16, 16), inner)
    try:
        optimize(model, torch.randn(32, 16))
    except memrewrite.MemrewriteError:
        return  # refused, as without plans
    assert os.listdir(plans) == before


def test_where_nothing_is_kept_nothing_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    memrewrite.optimize(swishes(), torch.randn(4, 16))  # off, as in all tests
    monkeypatch.delenv("MEMREWRITE_CACHE")
    memrewrite.optimize(swishes(), torch.randn(4, 16), cache=False)
    assert os.listdir(tmp_path) == []
    memrewrite.optimize(swishes(), torch.randn(4, 16))
    assert len(list(tmp_path.rglob("*.plan"))) == 1


TARGET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.head = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        y = self.fc(x)
        return self.head(y * torch.sigmoid(y)){more}

def get_inputs():
    return torch.randn(64, 8)
"""


def _run(folder: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    command = [sys.executable, "-m", "memrewrite", *arguments, "--cache", "plans", "--json", "-"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_the_command_line_finds_what_another_process_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ran(*command: str) -> tuple[Any, str]:
        sys.modules.pop("net", None)
        assert cli.run([*command, "--cache", "plans", "--json", "-"]) == 0
        said = capsys.readouterr()
        return json.loads(said.out), said.err

    def kept(*options: str) -> Any:
        return ran("cache", *options)[0]

    monkeypatch.chdir(tmp_path)
    optimize = ("optimize", "net.py", "--device", "cpu", "--no-measure", "-v", "--passes", "swish")
    (tmp_path / "net.py").write_text(TARGET.format(more=""))
    first, stages = _run(tmp_path, *optimize)
    assert "capture:" in stages
    assert not any("cache" in note for note in first["notes"])
    second, stages = _run(tmp_path, *optimize, "-o", "out", "--diff")  # of whose settings no other test has changed any
    assert "look up:" in stages
    assert "capture:" not in stages
    assert "plan:" not in stages
    assert any("comes from the cache" in note for note in second["notes"])
    assert second["diff"]
    assert (tmp_path / "out" / "report.json").exists()
    listed = kept()
    assert [each["model"] for each in listed["plans"]] == ["Net"]
    assert listed["bytes"] == listed["plans"][0]["bytes"] > 0
    (tmp_path / "net.py").write_text(TARGET.format(more=" + y"))
    changed, stages = ran(*optimize)
    assert "capture:" in stages
    assert not any("cache" in note for note in changed["notes"])
    assert len(kept()["plans"]) == 2
    assert kept("--clear")["removed"] == 2
    assert kept()["plans"] == []


def test_the_list_of_plans_on_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.run(["cache", "--cache", "none"]) == 0
    assert capsys.readouterr().out.strip() == f"{tmp_path / 'none'}: 0 plans, 0 B"
    assert not (tmp_path / "none").exists()
    assert cli.run(["cache"]) == 2
    assert "MEMREWRITE_CACHE says; name a folder" in capsys.readouterr().err
    memrewrite.optimize(swishes(), torch.randn(4, 16), cache=tmp_path / "plans")
    assert cli.run(["cache", "--cache", "plans"]) == 0
    head, columns, row = capsys.readouterr().out.rstrip().splitlines()
    assert head.startswith(f"{tmp_path / 'plans'}: 1 plan, ")
    assert columns.split() == ["plan", "of", "on", "budget", "made", "bytes"]
    assert row.split()[1:4] == ["Swishes", "cpu", "none"]
    assert cli.run(["cache", "--cache", "plans", "--clear"]) == 0
    assert capsys.readouterr().out.startswith("Removed 1 plan, ")


def test_a_wrong_cache_is_a_sentence_and_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "net.py").write_text(TARGET.format(more=""))
    for command in (["optimize", str(tmp_path / "net.py")], ["cache"]):
        assert cli.run([*command, "--cache", str(tmp_path / "file")]) == 2
        assert "which is not a folder" in capsys.readouterr().err
