"""A ``Trainer`` that pads each batch to its longest text: the plan is for the largest batch, and the rest run in it."""

import importlib.util
import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
import torch
from torch.utils.data import IterableDataset

import memrewrite
from memrewrite.integrations.longest import READ, Asked, largest, largest_batch, lengthened, lengths
from memrewrite.records.errors import UsageError
from memrewrite.simulate.memory.tracker import Tracker
from tests.capture.test_lengths import Text
from tests.zoo.models import declare_operators

# Lengths


def test_the_lengths_are_those_of_rows_of_whole_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    example = {
        "input_ids": [1, 2, 3],
        "labels": torch.tensor([1, 2]),
        "mask": numpy.ones(3, dtype=numpy.int8),
        "text": "four",
        "class": 3,
        "pixels": torch.zeros(3),
        "scores": [0.5],
        "boxes": torch.zeros(2, 4, dtype=torch.int64),
    }
    assert lengths(example) == {"input_ids": 3, "labels": 2, "mask": 3}
    assert lengths([1, 2]) == {}


def test_a_dataset_of_texts_is_told_from_others() -> None:
    asked = Asked("input_ids", 2)
    found, why = largest_batch([{"input_ids": [1] * size} for size in (2, 4, 3)], asked)
    assert [len(each["input_ids"]) for each in found or ()] == [4, 3]
    assert why == "the longest texts of the dataset"
    others: tuple[Any, ...] = ([], [{"pixel_values": [1.0]}], [[1]], None, iter([{"input_ids": [1]}]))
    for other in others:
        assert largest_batch(other, asked) == (None, "the first batch; give longest= if others are longer")


@pytest.mark.parametrize(
    ("inputs", "labels", "count", "chosen"),
    [
        ([3, 9, 4, 7], [1, 1, 1, 1], 2, [1, 0]),
        ([3, 9, 4, 7], [1, 1, 5, 1], 3, [1, 2, 3]),
        ([3, 9, 4, 7], [1, 1, 5, 1], 1, [1]),
        ([3, 9], [1, 1], 4, [1, 0]),
    ],
    ids=["one field", "two fields", "one row", "fewer than a batch"],
)
def test_the_largest_batch_has_the_longest_of_each_field(
    inputs: list[int], labels: list[int], count: int, chosen: list[int]
) -> None:
    found = [{"input_ids": n, "labels": m} for n, m in zip(inputs, labels, strict=True)]
    assert largest(found, count, "input_ids")[: len(chosen)] == chosen
    assert len(largest(found, count, "input_ids")) == min(count, len(inputs))


def test_a_text_is_made_longer_with_all_that_each_token_has() -> None:
    example = {
        "input_ids": [1, 2, 3],
        "mask": torch.ones(3, dtype=torch.int64),
        "labels": (7,),
        "kind": 4,
        "sizes": [2, 2],
    }
    longer = lengthened(example, 7, "input_ids", ["labels"])
    assert longer["input_ids"] == [1, 2, 3, 1, 2, 3, 1]
    assert longer["mask"].tolist() == [1] * 7
    assert longer["labels"] == [7] * 7
    assert (longer["kind"], longer["sizes"]) == (4, [2, 2])
    assert lengthened(example, 2, "input_ids")["input_ids"] == [1, 2]
    for other in cast("tuple[Any, ...]", ({"pixel_values": 3}, None, {"input_ids": []})):
        with pytest.raises(UsageError, match="longest= is for texts; the examples have no tokens as 'input_ids'"):
            lengthened(other, 7, "input_ids")


# With the library


SHORTEST, LONGEST, TEXTS, BATCH, WORDS = 5, 40, 44, 4, 64


@pytest.fixture(scope="module")
def transformers() -> ModuleType:
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    declare_operators()
    return importlib.import_module("transformers")


def texts(count: int = TEXTS, longest: int = LONGEST) -> list[dict[str, Any]]:
    """Of random lengths, of which only one in the middle is the longest."""
    draw = torch.Generator().manual_seed(3)
    sizes = torch.randint(SHORTEST, longest, (count,), generator=draw).tolist()
    sizes[count // 2] = longest
    return [{"input_ids": torch.randint(1, WORDS, (size,), generator=draw).tolist()} for size in sizes]


def collator(transformers: ModuleType, multiple: int | None = None) -> Any:
    """Pads to the longest text of the batch and makes labels of the tokens."""
    tokenizers = importlib.import_module("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w1"))  # noqa: S106
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0")  # noqa: S106
    return transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False, pad_to_multiple_of=multiple)


def trainer(transformers: ModuleType, folder: Path, data: Any, multiple: int | None = None, **settings: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4
    )
    model = transformers.LlamaForCausalLM(config)
    common = {"save_strategy": "no", "report_to": [], "logging_steps": 1, "disable_tqdm": True, "use_cpu": True}
    common |= {"dataloader_pin_memory": False, "per_device_train_batch_size": BATCH}
    args = transformers.TrainingArguments(str(folder), **{**common, **settings})
    return transformers.Trainer(
        model=model, args=args, train_dataset=data, data_collator=collator(transformers, multiple)
    )


@dataclass
class Seen:
    """The loss of each step, the lengths of its batches, and the peak in bytes of all steps, really taken."""

    losses: list[float]
    lengths: set[int]
    peak: int


def trained(transformers: ModuleType, ours: Any) -> Seen:
    lengths: set[int] = set()
    steps = ExitStack()
    trackers: list[Tracker] = []

    class Watch(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            model, optimizer = given["model"], given["optimizer"]
            moments = [each for state in optimizer.state.values() for each in state.values() if torch.is_tensor(each)]
            trackers.append(Tracker("cpu"))
            trackers[-1].register([*model.parameters(), *model.buffers(), *moments], "there before")
            steps.enter_context(trackers[-1])

        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            steps.close()

    def meet(module: Any, args: Any, kwargs: Any) -> None:
        lengths.add(kwargs["input_ids"].shape[1])

    ours.add_callback(Watch())
    hook = ours.model.register_forward_pre_hook(meet, with_kwargs=True)
    ours.train()
    hook.remove()
    losses = [entry["loss"] for entry in ours.state.log_history if "loss" in entry]
    return Seen(losses, lengths, max(tracker.peak for tracker in trackers))


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("multiple", [None, 8])
@pytest.mark.parametrize("strategy", ["random", "group_by_length"])
def test_every_batch_of_several_epochs_is_within_the_plan(
    transformers: ModuleType, tmp_path: Path, strategy: str, multiple: int | None
) -> None:
    from memrewrite.integrations.transformers import optimize_trainer

    settings = {"num_train_epochs": 3, "train_sampling_strategy": strategy}
    usual = trained(transformers, trainer(transformers, tmp_path / "usual", texts(), multiple, **settings))
    ours = trainer(transformers, tmp_path / "ours", texts(), multiple, **settings)
    data = ours.train_dataset
    result = optimize_trainer(ours, budget="75%", verify=False)
    report = memrewrite.report_of(result)
    assert report.changed
    assert report.notes[-1] == "Planned for input_ids of (4, 40), the longest texts of the dataset."
    assert ours.train_dataset is data
    with warnings.catch_warnings():
        for told in (memrewrite.FallbackWarning, memrewrite.BeyondPlanWarning):
            warnings.simplefilter("error", told)
        seen = trained(transformers, ours)
    assert seen.losses == pytest.approx(usual.losses, rel=1e-5)
    assert len(seen.lengths) > 2
    assert max(seen.lengths) == LONGEST
    assert report.budget is not None
    assert 0.9 * report.budget < seen.peak <= report.budget < usual.peak


class Streamed(IterableDataset[dict[str, Any]]):
    def __iter__(self) -> Any:
        return iter(texts())


class Many(torch.utils.data.Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return READ + 1

    def __getitem__(self, position: int) -> dict[str, Any]:
        return {"input_ids": [1] * 12}


PLANS: dict[str, tuple[Any, dict[str, Any], dict[str, Any], str]] = {
    "as asked": (texts(), {"longest": 48}, {}, "(4, 48), texts as long as asked for."),
    "streaming": (Streamed(), {}, {"max_steps": 2}, "the first batch; give longest= if others are longer."),
    "streaming, as asked": (Streamed(), {"longest": 48}, {"max_steps": 2}, "(4, 48), texts as long as asked for."),
    "many": (Many(), {}, {}, "(4, 12), the first batch, as lengths of more than 50000 texts are not read; give"),
    "fewer than a batch": (texts(3), {}, {}, "(3, 40), the longest texts of the dataset."),
}


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("data", "options", "settings", "note"), PLANS.values(), ids=PLANS)
def test_the_report_says_what_was_planned_for(
    transformers: ModuleType, tmp_path: Path, data: Any, options: Any, settings: Any, note: str
) -> None:
    from memrewrite.integrations.transformers import optimize_trainer

    ours = trainer(transformers, tmp_path, data, **settings)
    before = torch.get_rng_state()
    result = optimize_trainer(ours, budget="min", verify=False, **options)
    assert torch.equal(torch.get_rng_state(), before)
    assert ours.train_dataset is data
    assert note in memrewrite.report_of(result).notes[-1]
    assert result.report is memrewrite.report_of(result)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("column", [True, False], ids=["with their lengths", "without"])
def test_the_library_of_datasets_is_read_too(transformers: ModuleType, tmp_path: Path, column: bool) -> None:
    datasets = pytest.importorskip("datasets")
    from memrewrite.integrations.transformers import optimize_trainer

    rows = [{**each, "comment": "?"} | ({"length": len(each["input_ids"])} if column else {}) for each in texts()]
    ours = trainer(transformers, tmp_path, datasets.Dataset.from_list(rows))
    result = optimize_trainer(ours, budget="min", verify=False)
    assert "of (4, 40), the longest texts" in memrewrite.report_of(result).notes[-1]


@pytest.mark.filterwarnings("default")
def test_longest_is_for_texts(transformers: ModuleType, tmp_path: Path) -> None:
    from memrewrite.integrations.transformers import optimize_trainer

    ours = trainer(transformers, tmp_path, [{"pixel_values": torch.zeros(3)}] * 8)
    with pytest.raises(UsageError, match="longest= is for texts"):
        optimize_trainer(ours, budget="min", longest=16)


@pytest.fixture(scope="module")
def lightning() -> ModuleType:
    if importlib.util.find_spec("lightning") is None:
        pytest.skip("lightning is not installed")
    declare_operators()
    return importlib.import_module("lightning.pytorch")


def padded(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows])
    return {"input_ids": ids % 50, "attention_mask": (ids > 0).long()}  # Text knows fifty words


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("longest", [None, 44])
def test_lightning_plans_for_the_longest_texts(lightning: ModuleType, longest: int | None) -> None:
    from memrewrite.integrations.lightning import Optimize

    met: list[int] = []

    class Reader(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = Text()

        def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
            met.append(batch["input_ids"].shape[1])
            loss: torch.Tensor = self.net(batch["input_ids"], batch["attention_mask"])
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    data: Any = texts()
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH, collate_fn=padded)
    callback = Optimize("net", budget="min", longest=longest, loss_fn=lambda loss: loss, verify=False)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    with warnings.catch_warnings():
        for told in (memrewrite.FallbackWarning, memrewrite.BeyondPlanWarning):
            warnings.simplefilter("error", told)
        lightning.Trainer(max_epochs=1, accelerator="cpu", callbacks=[callback], **quiet).fit(Reader(), loader)
    assert len(set(met)) > 3
    assert callback.report is not None
    which = "texts as long as asked for" if longest else "the longest texts of the dataset"
    assert callback.report.notes[-1] == f"Planned for input_ids of (4, {longest or LONGEST}), {which}."


@pytest.mark.filterwarnings("default")
def test_lightning_hands_the_longest_texts_on_as_any_batch(lightning: ModuleType) -> None:
    """By the hooks of the data module, to a ``training_step`` that may do without the batch's number."""
    from memrewrite.integrations.lightning import Optimize

    class Data(lightning.LightningDataModule):  # type: ignore[misc, name-defined]
        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(cast(Any, texts()), batch_size=BATCH, collate_fn=padded)

        def on_before_batch_transfer(self, batch: dict[str, torch.Tensor], dataloader_idx: int) -> Any:
            return batch["input_ids"], batch["attention_mask"]

    class Reader(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = Text()

        def training_step(self, batch: Any) -> torch.Tensor:
            loss: torch.Tensor = self.net(*batch)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    callback: Any = Optimize("net", budget="min", loss_fn=lambda loss: loss, verify=False)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    lightning.Trainer(max_epochs=1, accelerator="cpu", callbacks=[callback], **quiet).fit(Reader(), datamodule=Data())
    assert callback.report.notes[-1] == f"Planned for input_ids of (4, {LONGEST}), the longest texts of the dataset."
