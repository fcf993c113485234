"""The examples are what their names say, train, are targets of the command line, and can be optimized."""

import importlib
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch

from memrewrite.api import optimize
from memrewrite.artifact.save import save
from memrewrite.measurement.measuring import measure
from memrewrite.workload import target
from memrewrite.workload.step import Inputs, Step

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PARAMETERS = {
    "seed_mlp": 136_314_881,
    "efficientnet": 5_288_548,
    "resnet50": 25_557_032,
    "gpt2": 124_439_808,
    "unet": 31_037_698,
}
# The article's table: MiB in use after data, forward, loss, backward and step, at width 2**19 and batch 128.
SEED_TABLE = [524, 1552, 1552, 1044, 1044, 1044, 2072, 2072, 1044, 1044]


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module(name)


@pytest.fixture(params=PARAMETERS)
def example(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    torch.manual_seed(0)
    return load(request.param, monkeypatch)


def test_full_model_has_the_known_number_of_parameters(example: ModuleType) -> None:
    with torch.device("meta"):
        model = example.get_model()
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[example.__name__]


def test_full_inputs_take_a_batch_size(example: ModuleType) -> None:
    assert {tensor.shape[0] for tensor in example.get_inputs(batch_size=3)} == {3}


def test_small_model_trains_a_step(example: ModuleType) -> None:
    model = example.get_small_model()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    step = Step(optimizer=partial(torch.optim.SGD, lr=0.1))
    loss = step.run(model, Inputs(example.get_small_inputs(), {}), step.make_optimizer(model))
    assert loss is not None
    assert loss.isfinite()
    assert any(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_small_model_is_a_target(example: ModuleType) -> None:
    loaded = target.load(f"{EXAMPLES / example.__name__}.py:get_small_model", batch_size=2)
    assert {tensor.shape[0] for tensor in loaded.inputs.tensors()} == {2}


def test_small_model_is_optimized(example: ModuleType) -> None:
    model = example.get_small_model()
    optimized = optimize(model, example.get_small_inputs(), budget="min", optimizer="sgd")
    report = optimized.report
    assert report.equivalent, report.verdict
    assert report.changed
    assert report.predicted_after.peak < report.predicted_before.peak
    assert isinstance(optimized, type(model))
    assert optimized.state_dict().keys() == model.state_dict().keys()


def test_efficientnet_with_drop_path_is_optimized(monkeypatch: pytest.MonkeyPatch) -> None:
    efficientnet = load("efficientnet", monkeypatch)
    stages = (efficientnet.Stage(1, 3, 1, 8, 2),)
    model = efficientnet.EfficientNet(stages, stem=8, head=16, classes=10, drop_path=0.2)
    optimized = optimize(model, efficientnet.get_small_inputs(), budget="min", optimizer="sgd")
    report = optimized.report
    assert report.equivalent, report.verdict


def test_seed_table(monkeypatch: pytest.MonkeyPatch) -> None:
    seed_mlp = load("seed_mlp", monkeypatch)
    scale = 2**8
    inputs = Inputs(seed_mlp.get_inputs(128), {})
    step = Step(optimizer=seed_mlp.optimizer)
    measured = measure(seed_mlp.get_model(seed_mlp.WIDTH // scale), inputs, step)
    extra = inputs.tensors()[0].nbytes
    small_tensors = 16 * 512
    for (_, used), table in zip(measured.phases, SEED_TABLE, strict=True):
        assert 0 <= used - extra - table * 2**20 // scale <= small_tensors


def test_artifact_is_applied_in_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    efficientnet = load("efficientnet", monkeypatch)
    example = load("train_with_artifact", monkeypatch)
    optimized = optimize(efficientnet.get_small_model(), torch.randn(4, 3, 32, 32), budget="min", verify=False)
    save(optimized, tmp_path / "out")
    monkeypatch.setattr(example, "get_model", efficientnet.get_small_model)
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path / "out"), "--batch-size=4", "--size=32", "--steps=2"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    example.main()  # a fall-back to the original forward would warn, and warnings are errors here
    assert capsys.readouterr().out.count(": loss ") == 2


def test_the_page_on_the_peak_says_what_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    example = load("plot_peak", monkeypatch)
    variants = example.models()
    by_batch = {batch: example.timelines(variants, batch) for batch in example.BATCHES}
    page = example.PAGE.read_text(encoding="utf-8")
    assert example.fill(page, example.figures(variants, by_batch)) == page


def test_the_page_on_the_peak_quotes_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    example = load("plot_peak", monkeypatch)
    assert list(example.ARTICLE) == SEED_TABLE
    record = (EXAMPLES.parent / "tests" / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    for batch, measured in example.MEASURED.items():
        assert f"| {batch} | {' | '.join(map(str, measured.values()))} |" in record


def test_pictures_are_small() -> None:
    pictures = list((EXAMPLES / "pictures").iterdir())
    assert pictures
    assert all(picture.stat().st_size < 150_000 for picture in pictures)
