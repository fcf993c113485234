"""transformers: the model of a ``Trainer``.

    trainer = Trainer(model=model, args=args, train_dataset=data)
    optimize_trainer(trainer, budget="8GB")
    trainer.train()

Optimizing the model before the ``Trainer`` is made works as well, where the example has all that the ``Trainer`` will
pass: to most causal language models also ``num_items_in_batch``, which is of no type that one would guess.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from accelerate.utils import convert_to_fp32
from torch import Tensor
from torch.utils.data import Subset
from transformers import Trainer

from memrewrite.api import OptimizedModule, optimize
from memrewrite.integrations.calls import first_call
from memrewrite.integrations.longest import READ, are_texts, largest, lengthened, lengths, planned_for
from memrewrite.integrations.loops import trainer_loop
from memrewrite.records.errors import UsageError
from memrewrite.state.random_state import preserved_rng
from memrewrite.workload.step import default_loss

_READS_ALL = ("group_by_length", "batch_rebalance")  # sampling strategies that look at every length, too


def optimize_trainer(trainer: Trainer, *, longest: int | None = None, **options: Any) -> OptimizedModule:
    """Put a rewritten model in place of ``trainer.model``, before ``trainer.train()``; returns it.

    The step is the trainer's own: a batch as its ``training_step`` passes it on, its optimizer, ``fp16`` or ``bf16``,
    ``gradient_accumulation_steps``, in its loop. ``options`` are those of ``memrewrite.optimize``, and win.
    Texts may be of any length, and the budget is kept to by batches that are no larger than the one planned for. That
    is what the trainer's collator makes of the longest texts of its dataset, or of texts of ``longest`` tokens; of a
    dataset that streams, or whose lengths would take long to read, it is the first batch, and the report says so.
    A loss that the trainer computes outside of the model (label smoothing, ``compute_loss_func``) is not in the step
    unless it is given as ``loss_fn``.
    Raises ``UsageError`` for a trainer that makes its model itself, and what ``memrewrite.optimize`` raises.
    """
    if trainer.model_init is not None:
        raise UsageError("The Trainer makes a new model when it trains, by its model_init; give it model= instead.")
    if trainer.optimizer is None:
        trainer.create_optimizer()
    name = getattr(trainer.model, "main_input_name", "input_ids")
    with _largest_batch(trainer, name, longest) as why:
        call = first_call(trainer.model, lambda: _step(trainer))
    amp = "bf16" if trainer.args.bf16 else "fp16" if trainer.args.fp16 else None
    parts = trainer.args.gradient_accumulation_steps
    loop = trainer_loop(parts, scaler=amp == "fp16")
    step = {"optimizer": trainer.optimizer, "amp": amp, "micro_batches": parts, "loop": loop, "loss_fn": _loss}
    if amp is None:
        del step["loss_fn"]
    step |= options
    result = optimize(trainer.model, call.args, example_kwargs=call.kwargs, **step)
    planned_for(result, call, name, why)
    trainer.model = trainer.model_wrapped = result
    return result


@contextlib.contextmanager
def _largest_batch(trainer: Trainer, name: str, longest: int | None) -> Iterator[str]:
    """Let the trainer's first batch be the largest one of its texts; gives what it is."""
    usual, count = trainer.train_dataset, trainer.args.train_batch_size
    with preserved_rng(trainer.model.parameters()):  # examples may be drawn
        if longest is not None:
            first = None if usual is None else next(iter(usual), None)
            trainer.train_dataset = [lengthened(first, longest, name, trainer.label_names)] * count
            why = "texts as long as was asked for"
        elif not are_texts(usual, name):
            why = "the first batch; give longest= if others are longer"
        elif (found := _lengths(trainer, name)) is not None:
            trainer.train_dataset = _chosen(usual, largest(found, count, name))
            why = "the longest texts of the dataset"
        else:
            why = f"the first batch, as lengths of more than {READ} texts are not read; give longest= for longer ones"
    try:
        yield why
    finally:
        trainer.train_dataset = usual


def _lengths(trainer: Trainer, name: str) -> list[dict[str, int]] | None:
    """The lengths of each example: of its column, where the dataset has one, else read unless there are too many."""
    dataset, column = trainer.train_dataset, trainer.args.length_column_name
    if column in (getattr(dataset, "column_names", None) or ()):
        return [{name: length} for length in dataset[column]]
    in_memory = isinstance(dataset, list | tuple)
    if not in_memory and len(dataset) > READ and trainer.args.train_sampling_strategy not in _READS_ALL:
        return None
    return [lengths(dataset[position]) for position in range(len(dataset))]


def _chosen(dataset: Any, positions: list[int]) -> Any:
    """These examples, as a dataset of the library ``datasets`` where they are one: its columns are looked at."""
    return dataset.select(positions) if hasattr(dataset, "select") else Subset(dataset, positions)


def _loss(outputs: Any) -> Tensor:
    """The model's own, after what accelerate makes of its outputs under mixed precision: all of them in float32.

    Read in accelerate 1.15.0: ``Accelerator.prepare_model`` wraps ``model.forward`` in ``convert_outputs_to_fp32``.
    """
    return default_loss(convert_to_fp32(outputs))


def _step(trainer: Trainer) -> None:
    batches, items = trainer.get_batch_samples(iter(trainer.get_train_dataloader()), 1, trainer.args.device)
    trainer.training_step(trainer.model, batches[0], items)
