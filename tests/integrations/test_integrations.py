"""Training frameworks, with the libraries themselves: the examples run as scripts, and what could go wrong around them.

    pip install -e ".[lightning,timm,transformers]"
    python -m pytest tests/integrations/test_integrations.py

Where PyTorch has no CUDA, torchvision, which these import where it is installed, needs ``--no-deps``.
"""

import contextlib
import importlib.util
import json
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import memrewrite
from memrewrite.integrations.calls import first_call
from memrewrite.records.errors import UsageError
from memrewrite.simulate.memory.tracker import Tracker
from memrewrite.workload.optimizers import optimizers_like
from tests.zoo.models import declare_operators

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# As ``python examples/X.py``, after what torchvision's own binary would have declared.
SCRIPT = """
import runpy, sys
from tests.zoo.models import declare_operators
declare_operators()
sys.argv = sys.argv[1:]
sys.path.insert(0, "examples")
runpy.run_path(sys.argv[0], run_name="__main__")
"""
RUNS = {
    "plain": ("", ["--steps=2", "--batch-size=8"]),
    "plain, fp16 and GradScaler": ("", ["--steps=2", "--batch-size=8", "--amp=fp16"]),
    "compiled": ("", ["--steps=2"]),
    "transformers": ("transformers", []),
    "transformers, bf16": ("transformers", ["--amp=bf16"]),
    "transformers, smoothed labels": ("transformers", ["--label-smoothing=0.1"]),
    "lightning": ("lightning", []),
    "lightning, bf16": ("lightning", ["--amp=bf16"]),
    "timm": ("timm", []),
    "timm, bf16": ("timm", ["--amp=bf16"]),
}


def need(library: str) -> None:
    if library and importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")


@pytest.mark.parametrize("name", RUNS)
def test_example_trains_alike_in_less(name: str) -> None:
    library, arguments = RUNS[name]
    need(library)
    script = f"examples/train_{name.partition(',')[0]}.py"
    command = [sys.executable, "-c", SCRIPT, script, *arguments, "--budget=60%"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=EXAMPLES.parent)
    assert done.returncode == 0, done.stderr
    figures = re.search(r"(?:peak|kept for backward) ([\d.]+) MB, rewritten ([\d.]+) MB", done.stdout)
    assert figures, done.stdout
    before, after = map(float, figures.groups())
    assert after < 0.65 * before  # what a loop keeps besides the step (averages, a loss of its own) comes on top


class Called(nn.Module):
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        raise AssertionError("the call is looked at, not made")


def test_first_call_is_what_the_loop_passes() -> None:
    module = Called()
    x = torch.ones(2)
    inputs = first_call(module, lambda: module(x, scale=2.0))
    assert inputs.args == (x,)
    assert inputs.kwargs == {"scale": 2.0}
    assert not module._forward_pre_hooks


def test_first_call_leaves_the_random_state() -> None:
    module = Called()
    before = torch.get_rng_state()
    first_call(module, lambda: module(torch.randn(3)))
    assert torch.equal(torch.get_rng_state(), before)


class Doubles(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def without_gradients(module: nn.Module, x: torch.Tensor) -> Any:
    with torch.no_grad():
        return module(x)


def test_first_call_is_one_with_gradients() -> None:
    module, x = Doubles(), torch.ones(2)
    assert first_call(module, lambda: module(without_gradients(module, x))).args[0].tolist() == [2, 2]
    assert first_call(module, lambda: without_gradients(module, x)).args == (x,)
    assert first_call(module, lambda: without_gradients(module, x).missing).args == (x,)
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters())
    assert first_call(module, lambda: (without_gradients(module, x), optimizer.step(), module(x + 1))).args == (x,)


def test_an_optimizer_that_steps_before_the_call_is_not_tried() -> None:
    module, other = Called(), nn.Linear(2, 2)
    optimizer, before = torch.optim.SGD(other.parameters(), lr=1.0), other.weight.clone()
    other(torch.ones(2)).sum().backward()
    with pytest.raises(
        UsageError, match=r"steps an optimizer before it calls Called, .* optimize Called by memrewrite"
    ):
        first_call(module, lambda: (optimizer.step(), module(torch.ones(2))))
    assert torch.equal(other.weight, before)
    optimizer.step()  # which is let through from then on
    assert not torch.equal(other.weight, before)


def test_a_step_that_does_not_call_the_module_is_refused() -> None:
    with pytest.raises(UsageError, match="does not call Called"):
        first_call(Called(), lambda: None)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "adam, amsgrad": lambda parameters: torch.optim.Adam(parameters, amsgrad=True),
    "adamw": torch.optim.AdamW,
    "fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "adafactor": torch.optim.Adafactor,
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_an_optimizer_is_made_again(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.load_state_dict(first.state_dict())
    copied = make(first.parameters())
    made = optimizers_like(copied)(second.parameters())
    assert type(made) is type(copied)
    for module, optimizer in ((first, copied), (second, made)):
        for _ in range(2):
            module(torch.ones(2, 3)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(first.weight, second.weight)


class Named(torch.optim.SGD):
    def __init__(self, parameters: Any, name: str) -> None:
        super().__init__(parameters, lr=0.1)
        self.name = name


class HandingOn(torch.optim.Optimizer):
    """What accelerate makes of an optimizer: it is given that, and keeps nothing of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: Any = None) -> None:
        self.optimizer, self.param_groups, self.state = optimizer, optimizer.param_groups, optimizer.state
        self.defaults = optimizer.defaults


def test_of_an_optimizer_that_hands_on_to_another_that_one_is_made_again() -> None:
    adam = torch.optim.Adam(nn.Linear(2, 2).parameters(), lr=0.5, amsgrad=True)
    made = optimizers_like(HandingOn(HandingOn(adam)))(nn.Linear(2, 2).parameters())
    assert type(made) is torch.optim.Adam
    assert (made.defaults["lr"], made.defaults["amsgrad"]) == (0.5, True)


def test_the_optimizer_that_accelerate_prepared() -> None:
    need("accelerate")
    model = nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64))
    accelerate = importlib.import_module("accelerate")
    model, optimizer = accelerate.Accelerator(cpu=True).prepare(model, torch.optim.Adam(model.parameters()))
    report = memrewrite.report_of(memrewrite.optimize(model, torch.randn(4, 64), optimizer=optimizer, verify=False))
    assert report.predicted_before.categories["optimizer state"] >= 2 * 2 * 64 * 64 * 4


def test_a_model_that_accelerate_prepared_with_autocast_is_refused() -> None:
    """No plan frees what it runs there; prepared without, and before that, it is optimized."""
    need("accelerate")
    accelerate = importlib.import_module("accelerate")
    try:
        for precision in ("no", "bf16"):
            accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
            prepare = accelerate.Accelerator(cpu=True, mixed_precision=precision).prepare
            model, x = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)]), torch.randn(4, 8)
            amp = None if precision == "no" else precision
            expected = contextlib.nullcontext() if amp is None else pytest.raises(UsageError, match="before prepare")
            prepare(memrewrite.optimize(model, x, budget="min", amp=amp, verify=False))
            with expected:
                memrewrite.optimize(prepare(model), x, budget="min", amp=amp, verify=False)
    finally:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_an_optimizer_that_takes_more_is_refused() -> None:
    with pytest.raises(UsageError, match=r"Named cannot be made again from its settings .*'name'.*give a factory"):
        optimizers_like(Named(nn.Linear(2, 2).parameters(), "mine"))


def test_an_optimizer_given_to_optimize_counts_and_is_not_touched() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64))
    optimizer = torch.optim.Adam(model.parameters(), amsgrad=True)
    report = memrewrite.report_of(memrewrite.optimize(model, torch.randn(4, 64), optimizer=optimizer, verify=False))
    assert report.predicted_before.categories["optimizer state"] >= 3 * 2 * 64 * 64 * 4
    assert not optimizer.state


@pytest.fixture(scope="module")
def transformers() -> ModuleType:
    need("transformers")
    declare_operators()
    return importlib.import_module("transformers")


def trainer(transformers: ModuleType, folder: Path, words: int = 64, **given: Any) -> Any:
    config = transformers.GPT2Config(
        vocab_size=words, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    data = [{"input_ids": row, "labels": row} for row in torch.randint(64, (10, 16))]
    settings = {"num_train_epochs": 1, "gradient_accumulation_steps": 2, "save_strategy": "no", "report_to": []}
    args = transformers.TrainingArguments(folder, per_device_train_batch_size=4, use_cpu=True, **settings)
    model = {} if "model_init" in given else {"model": transformers.GPT2LMHeadModel(config)}
    return transformers.Trainer(**model, args=args, train_dataset=data, **given)


@pytest.mark.filterwarnings("default")
def test_a_rewritten_model_trains_on_every_batch_and_is_saved_under_its_own_name(
    transformers: ModuleType, tmp_path: Path
) -> None:
    from memrewrite.integrations.transformers import optimize_trainer

    ours = trainer(transformers, tmp_path / "runs")
    result = optimize_trainer(ours, budget="min", verify=False)
    assert ours.model is result
    assert memrewrite.report_of(result).changed
    assert memrewrite.report_of(result).config["micro_batches"] == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error", memrewrite.FallbackWarning)  # also for the last batch, of two rows
        ours.train()
    ours.save_model(str(tmp_path / "saved"))
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["architectures"] == ["GPT2LMHeadModel"]
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert all(torch.equal(again.state_dict()[name], value) for name, value in result.state_dict().items())


def of_logits(outputs: Any, labels: torch.Tensor, num_items_in_batch: int | None = None) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("loss", ["label_smoothing_factor", "compute_loss_func"])
def test_a_loss_that_the_trainer_computes_is_in_the_step(loss: str, transformers: ModuleType, tmp_path: Path) -> None:
    from memrewrite.integrations.transformers import optimize_trainer

    own = {"compute_loss_func": of_logits} if loss == "compute_loss_func" else {}
    ours = trainer(transformers, tmp_path, words=2000, **own)
    if loss == "label_smoothing_factor":
        ours.label_smoother = transformers.trainer_pt_utils.LabelSmoother(0.1)
    ours.args.num_train_epochs = 2  # the last step of an epoch is on fewer rows
    report = memrewrite.report_of(optimize_trainer(ours, budget="min"))
    assert report.verdict.endswith("also at smaller sizes")
    with Tracker("cpu") as tracker:
        tracker.register([*ours.model.parameters(), *ours.model.buffers()], "model")
        ours.train()
    assert tracker.peak == pytest.approx(report.predicted_after.peak, rel=0.01)


@pytest.mark.filterwarnings("default")
def test_a_loss_of_another_trainers_own_is_told(transformers: ModuleType, tmp_path: Path) -> None:
    from memrewrite.integrations.transformers import optimize_trainer

    class OwnLoss(transformers.Trainer):  # type: ignore[misc, name-defined]
        def compute_loss(self, model: Any, inputs: dict[str, Any], **given: Any) -> torch.Tensor:
            labels = inputs.pop("labels")
            return of_logits(model(**inputs), labels)

    given = trainer(transformers, tmp_path)
    ours = OwnLoss(given.model, given.args, train_dataset=given.train_dataset)
    told = memrewrite.report_of(optimize_trainer(ours, budget="min", verify=False)).notes
    assert told[-1] == (
        "OwnLoss.compute_loss gives the model no labels, and its loss is not in the step; give it as loss_fn."
    )


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("calls", [1, 2])
def test_a_loss_that_calls_the_model_twice_is_told(calls: int, transformers: ModuleType, tmp_path: Path) -> None:
    from memrewrite.integrations.transformers import optimize_trainer

    class Twice(transformers.Trainer):  # type: ignore[misc, name-defined]
        def compute_loss(self, model: Any, inputs: dict[str, Any], **given: Any) -> torch.Tensor:
            loss = torch.stack([model(**inputs).loss for _ in range(calls)]).sum()
            with torch.no_grad():
                model(**inputs)
            return loss

    given = trainer(transformers, tmp_path)
    ours = Twice(given.model, given.args, train_dataset=given.train_dataset)
    result = optimize_trainer(ours, budget="min", verify=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours.train()
    told = [str(each.message) for each in caught if each.category is memrewrite.BeyondPlanWarning]
    expected = "compute_loss calls GPT2LMHeadModel 2 times before backward, which takes more than the one call that was"
    assert [text.startswith(expected) for text in told] == [True] * (calls - 1)
    assert (told[-1:] == [memrewrite.report_of(result).notes[-1]]) == (calls == 2)
    assert not result._forward_hooks


@pytest.mark.filterwarnings("default")
def test_numbers_in_batches_vary_and_those_that_decide_sizes_are_told(transformers: ModuleType, tmp_path: Path) -> None:
    from memrewrite.integrations.transformers import optimize_trainer

    packed = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    ours = trainer(transformers, tmp_path, data_collator=packed)
    ours.train_dataset = [{"input_ids": torch.randint(64, (length,))} for length in range(5, 15)]
    assert "max_length" not in "".join(memrewrite.report_of(optimize_trainer(ours, budget="min")).notes)
    with warnings.catch_warnings():
        warnings.simplefilter("error", memrewrite.FallbackWarning)
        ours.train()

    class Longest(transformers.GPT2LMHeadModel):  # type: ignore[misc, name-defined]
        def forward(self, input_ids: Any, max_length_q: int, **given: Any) -> Any:
            result = super().forward(input_ids, **given)
            result.loss = result.loss * torch.ones(max_length_q).mean()
            return result

    model = Longest(ours.model.config)
    theirs = transformers.Trainer(model, ours.args, train_dataset=ours.train_dataset, data_collator=packed)
    told = memrewrite.report_of(optimize_trainer(theirs, verify=False))
    assert told.notes[-1].startswith("Batches in which max_length_q are other numbers run the original")


@pytest.mark.filterwarnings("default")
def test_a_trainer_that_generates_what_it_learns_from_is_planned_for_its_own_call(
    transformers: ModuleType, tmp_path: Path
) -> None:
    from memrewrite.integrations.transformers import optimize_trainer

    class Policy(transformers.Trainer):  # type: ignore[misc, name-defined]
        rewards: dict[str, list[float]]
        buffered: torch.Tensor | None = None

        def compute_loss(self, model: Any, inputs: dict[str, Any], **given: Any) -> torch.Tensor:
            self.buffered = without_gradients(model, inputs["input_ids"][:, :4]).logits.argmax(-1)
            self.rewards["train"].append(float(self.buffered.float().mean()) / self.current_gradient_accumulation_steps)
            loss: torch.Tensor = model(**inputs).loss
            return loss

    given = trainer(transformers, tmp_path)
    ours = Policy(given.model, given.args, train_dataset=given.train_dataset)
    ours.rewards = {"train": []}
    told = memrewrite.report_of(optimize_trainer(ours, budget="min", verify=False)).notes
    assert told[-1].startswith("Planned for input_ids of (4, 16)")
    assert (ours.rewards, ours.buffered) == ({"train": []}, None)


@pytest.mark.filterwarnings("default")
def test_a_trainer_that_makes_its_model_is_refused(transformers: ModuleType, tmp_path: Path) -> None:
    from memrewrite.integrations.transformers import optimize_trainer

    config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=2)
    ours = trainer(transformers, tmp_path, model_init=lambda: transformers.GPT2LMHeadModel(config))
    with pytest.raises(UsageError, match="model_init; give it model= instead"):
        optimize_trainer(ours, budget="min")


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("setting", [{"gradient_checkpointing": True}, {"neftune_noise_alpha": 5.0}], ids=list)
def test_a_trainer_that_changes_its_model_when_it_trains_is_refused(
    setting: dict[str, Any], transformers: ModuleType, tmp_path: Path
) -> None:
    from memrewrite.integrations.transformers import optimize_trainer

    given = trainer(transformers, tmp_path)
    args = transformers.TrainingArguments(tmp_path, use_cpu=True, report_to=[], **setting)
    ours = transformers.Trainer(given.model, args, train_dataset=given.train_dataset)
    with pytest.raises(UsageError, match=rf"^The Trainer .* when it trains, by {next(iter(setting))}"):
        optimize_trainer(ours, budget="min")


@pytest.mark.filterwarnings("default")
def test_a_trainer_of_fsdp1_is_refused(transformers: ModuleType, tmp_path: Path) -> None:
    from memrewrite.integrations.transformers import optimize_trainer

    ours = trainer(transformers, tmp_path)
    ours.is_fsdp_enabled = True
    with pytest.raises(UsageError, match=r'^The Trainer shards its model by FSDP1; give fsdp_config=\{"version": 2\}'):
        optimize_trainer(ours, budget="min")


@pytest.fixture(scope="module")
def lightning() -> ModuleType:
    need("lightning")
    declare_operators()
    return importlib.import_module("lightning.pytorch")


def lightning_module(lightning: ModuleType, optimizers: int = 1) -> Any:
    class Net(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.SiLU()) for _ in range(4)))
            self.idle = nn.Linear(2, 2)
            self.compiled = torch.compile(nn.Linear(2, 2))
            self.automatic_optimization = optimizers == 1

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self) -> list[torch.optim.Optimizer]:
            return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(optimizers)]

    return Net()


def fit(lightning: ModuleType, module: Any, callback: Any) -> None:
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(1024, 8)), batch_size=512)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    lightning.Trainer(max_epochs=1, accelerator="cpu", callbacks=[callback], **quiet).fit(module, data)


@pytest.mark.filterwarnings("default")
def test_lightning_submodules_are_replaced_once_each(lightning: ModuleType) -> None:
    from memrewrite.integrations.lightning import Optimize

    first, second, callback = lightning_module(lightning), lightning_module(lightning), Optimize("net", budget="min")
    fit(lightning, first, callback)
    rewritten = first.net
    assert memrewrite.report_of(rewritten).changed
    fit(lightning, first, callback)
    assert first.net is rewritten
    fit(lightning, second, callback)
    assert callback.report is memrewrite.report_of(second.net)


@pytest.mark.parametrize(
    ("path", "optimizers", "sentence"),
    [
        ("missing", 1, "has no submodule 'missing'; name one it has"),
        ("idle", 1, "The training step does not call Linear"),
        ("net", 2, "Two of the 2 optimizers step 0.0.weight; say optimizer=, one that a step takes."),
        ("", 1, "Optimize is for a submodule; give Net itself to memrewrite.optimize, and the result to fit."),
        ("compiled", 1, "compiled is compiled, and what is compiled would go on without a plan;"),
        ("compiled._orig_mod", 1, "compiled._orig_mod is compiled, and what is compiled would go on without a plan;"),
    ],
    ids=["no submodule", "not called", "two optimizers", "the module itself", "compiled", "inside what is compiled"],
)
@pytest.mark.filterwarnings("default")
def test_lightning_refusals(path: str, optimizers: int, sentence: str, lightning: ModuleType) -> None:
    from memrewrite.integrations.lightning import Optimize

    with pytest.raises(UsageError, match=re.escape(sentence)):
        fit(lightning, lightning_module(lightning, optimizers), Optimize(path, budget="min"))


class Writes(nn.Module):
    """What runs before the submodule: it draws no numbers, but writes to a buffer and to the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.runs = 0

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        found: torch.Tensor = self.norm(batch.mul_(2))
        return found


@pytest.mark.filterwarnings("default")
def test_a_training_step_that_is_tried_leaves_no_trace(lightning: ModuleType) -> None:
    from memrewrite.integrations.lightning import Optimize

    trained = []
    for callback in (lightning.Callback(), Optimize("net", budget="min", optimizer="sgd")):
        torch.manual_seed(0)
        module = lightning_module(lightning, optimizers=2)
        module.before = Writes()

        def step(batch: list[torch.Tensor], batch_idx: int, module: Any = module) -> None:
            first, _ = module.optimizers()
            module.toggle_optimizer(first)  # it freezes what only the other one steps
            loss = module.net(module.before(batch[0])).square().mean()
            first.zero_grad()
            module.manual_backward(loss)
            first.step()
            module.untoggle_optimizer(first)

        module.training_step = step
        of = (module.net, module.idle)
        module.configure_optimizers = lambda of=of: [torch.optim.SGD(each.parameters(), lr=0.1) for each in of]
        fit(lightning, module, callback)
        trained.append(module)
    plain, ours = trained
    assert ours.before.runs == plain.before.runs == 2
    assert all(parameter.requires_grad for parameter in ours.parameters())
    assert memrewrite.report_of(ours.net).changed
    torch.testing.assert_close(ours.state_dict(), plain.state_dict(), rtol=0, atol=0)


@pytest.mark.filterwarnings("default")
def test_a_training_step_that_takes_batches_itself_is_refused(lightning: ModuleType) -> None:
    from memrewrite.integrations.lightning import Optimize

    class Takes(type(lightning_module(lightning))):  # type: ignore[misc]
        def training_step(self, dataloader_iter: Any) -> torch.Tensor:
            found: torch.Tensor = super().training_step(next(dataloader_iter)[0], 0)
            return found

    with pytest.raises(
        UsageError, match="training_step takes batches from dataloader_iter itself; let it take a batch"
    ):
        fit(lightning, Takes(), Optimize("net", budget="min"))


@pytest.mark.filterwarnings("default")
def test_a_training_step_that_calls_the_submodule_twice_is_told(lightning: ModuleType) -> None:
    from memrewrite.integrations.lightning import Optimize

    module: Any = lightning_module(lightning)
    callback: Any = Optimize("net", budget="min")
    module.training_step = lambda batch, batch_idx: (module.net(batch[0]) * module.net(-batch[0])).mean()
    with pytest.warns(memrewrite.BeyondPlanWarning, match="^training_step calls net 2 times before backward"):
        fit(lightning, module, callback)
    assert callback.report is memrewrite.report_of(module.net)
    assert callback.report.notes[-1].startswith("training_step calls net 2 times before backward")
    assert not module.net._forward_hooks


@pytest.mark.filterwarnings("ignore")  # of a process group without peers
def test_what_lightning_shards_around_the_submodule_is_refused(lightning: ModuleType) -> None:
    from memrewrite.integrations.lightning import _mesh

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        module, mesh = lightning_module(lightning), init_device_mesh("cpu", (2,))
        strategy = lightning.strategies.ModelParallelStrategy()
        strategy._model = fully_shard(module, mesh=mesh)
        with pytest.raises(UsageError, match=r"^net is not sharded itself, .* call fully_shard of net, after parts"):
            _mesh(strategy, module.net, "net")
        part = nn.Linear(2, 2)
        fully_shard(part, mesh=mesh)
        assert _mesh(strategy, part, "net") is None
        with pytest.raises(UsageError, match=r"^FSDPStrategy shards by FSDP1; use ModelParallelStrategy"):
            _mesh(lightning.strategies.FSDPStrategy(), nn.Linear(2, 2), "net")
    finally:
        dist.destroy_process_group()


def language_model(transformers: ModuleType, family: str) -> Any:
    common = {"vocab_size": 100, "bos_token_id": 0, "eos_token_id": 0}
    if family == "llama":
        config = transformers.LlamaConfig(
            num_hidden_layers=3, hidden_size=64, num_attention_heads=4, intermediate_size=128, **common
        )
        return transformers.LlamaForCausalLM(config)
    dropout = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=3, n_embd=64, n_head=4, **common, **dropout))


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_language_model_compiles_as_one_graph(transformers: ModuleType, family: str) -> None:
    """What it returns is of a class of its own, whose structure the compiler finds made."""
    torch.manual_seed(0)
    model = language_model(transformers, family).train()
    model.config.use_cache = False
    ids = torch.randint(0, 100, (2, 64))
    given = {"input_ids": ids, "labels": ids}
    result: Any = memrewrite.optimize(
        model, (), example_kwargs=given, budget="60%", optimizer="sgd", verify=False, compiled=True
    )
    assert result.report.segments
    torch.compiler.reset()
    compiled: Any = torch.compile(result, backend="aot_eager", fullgraph=True)
    output: Any = compiled(**given)
    output.loss.backward()
    found = {name: p.grad for name, p in result.named_parameters()}
    result.zero_grad(set_to_none=True)
    expected = model(**given)
    expected.loss.backward()
    torch.compiler.reset()
    assert type(output) is type(expected)
    torch.testing.assert_close((output.loss, output.logits), (expected.loss, expected.logits))
    torch.testing.assert_close(found, {name: p.grad for name, p in model.named_parameters()})
