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
from transformers import Trainer

from memrewrite.api import OptimizedModule, optimize
from memrewrite.integrations.calls import first_call
from memrewrite.integrations.longest import Asked, largest_batch, planned_for
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
    dataset that streams, or whose lengths would take long to read, it is the first batch, and the report says so
    (``dynamic={"input_ids": {1: (2, 2048)}}`` names a length then). A loss that the trainer computes outside of the
    model (label smoothing, ``compute_loss_func``) is not in the step unless it is given as ``loss_fn``.
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
    usual, args = trainer.train_dataset, trainer.args
    reads_all = args.train_sampling_strategy in _READS_ALL
    asked = Asked(name, args.train_batch_size, longest, trainer.label_names, args.length_column_name, reads_all)
    with preserved_rng(trainer.model.parameters()):
        chosen, why = largest_batch(usual, asked)
    trainer.train_dataset = usual if chosen is None else chosen
    try:
        yield why
    finally:
        trainer.train_dataset = usual


def _loss(outputs: Any) -> Tensor:
    """The model's own, after what accelerate makes of its outputs under mixed precision: all of them in float32.

    Read in accelerate 1.15.0: ``Accelerator.prepare_model`` wraps ``model.forward`` in ``convert_outputs_to_fp32``.
    """
    return default_loss(convert_to_fp32(outputs))


def _step(trainer: Trainer) -> None:
    batches, items = trainer.get_batch_samples(iter(trainer.get_train_dataloader()), 1, trainer.args.device)
    trainer.training_step(trainer.model, batches[0], items)
