"""transformers: the model of a ``Trainer``.

    trainer = Trainer(model=model, args=args, train_dataset=data)
    optimize_trainer(trainer, budget="8GB")
    trainer.train()

Optimizing the model before the ``Trainer`` is made works as well, where the example has all that the ``Trainer`` will
pass: to most causal language models also ``num_items_in_batch``, which is of no type that one would guess.
"""

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from inspect import signature
from typing import Any, cast

from accelerate.utils import convert_to_fp32
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from memrewrite.api import OptimizedModule, optimize
from memrewrite.integrations.calls import first_call
from memrewrite.integrations.longest import Asked, largest_batch, planned_for
from memrewrite.integrations.loops import trainer_loop
from memrewrite.integrations.told import note, tell_of_calls
from memrewrite.measurement.passes import Waiting
from memrewrite.records.attached import report_of
from memrewrite.records.errors import UsageError
from memrewrite.records.mesh import Ddp
from memrewrite.runtime.dropin import programs
from memrewrite.state.attributes import Attributes
from memrewrite.state.containers import contents, is_container, put_back
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
    model (label smoothing, ``compute_loss_func``) is that of the step, on the labels of that batch. What a
    ``compute_loss`` of its class does is not, unless it is given as ``loss_fn``, and the report says so.
    Where processes train together, all of them call this. Under DDP the budget is that of each, buckets included. Under
    FSDP2 (``fsdp_config={"version": 2}``) the model is optimized as ``train`` begins, when it is sharded, and what is
    returned carries its report from then on.
    Raises ``UsageError`` for a trainer that makes its model itself, changes it when it trains (by
    ``gradient_checkpointing``, ``neftune_noise_alpha``) or shards it by FSDP1, and what ``memrewrite.optimize`` raises.
    """
    if trainer.model_init is not None:
        raise UsageError("The Trainer makes a new model when it trains, by its model_init; give it model= instead.")
    if trainer.is_fsdp_enabled:
        if not trainer.accelerator.is_fsdp2:
            raise UsageError('The Trainer shards its model by FSDP1; give fsdp_config={"version": 2}, which is FSDP2.')
        trainer.add_callback(_WhenSharded(trainer, longest, options))
        return cast(OptimizedModule, trainer.model)
    _refuse_changes(trainer)
    if trainer.optimizer is None:
        trainer.create_optimizer()
    result = _optimized(trainer, longest, options)
    trainer.model = trainer.model_wrapped = result
    return result


def _refuse_changes(trainer: Trainer) -> None:
    """Raise ``UsageError`` where ``train`` would change the model so that it runs its original forward from then on.

    Read in transformers 5.23: ``activation_checkpointing`` is the newer name of ``gradient_checkpointing``.
    """
    args = trainer.args
    if getattr(args, "activation_checkpointing", False) or args.gradient_checkpointing:
        raise UsageError(
            "The Trainer checkpoints the layers of its model when it trains, by gradient_checkpointing, and would undo "
            "the plan, which says what runs again; set gradient_checkpointing=False (trl's trainers have True)."
        )
    if trainer.neftune_noise_alpha is not None:
        raise UsageError(
            "The Trainer hangs a hook on the model's embeddings when it trains, by neftune_noise_alpha, and would undo "
            "the plan; leave that out."
        )


class _WhenSharded(TrainerCallback):  # type: ignore[misc]  # transformers is not there while types are checked
    """Optimizes the model where it lies, once it is sharded: in which units is known then, and who shares weights."""

    def __init__(self, trainer: Trainer, longest: int | None, options: dict[str, Any]) -> None:
        self._trainer, self._longest, self._options = trainer, longest, options

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Optimize, unless that was done when the trainer trained before."""
        with contextlib.suppress(UsageError):
            report_of(self._trainer.model)
            return
        self._trainer.model.train()
        _optimized(self._trainer, self._longest, self._options)


class _Calls(TrainerCallback):  # type: ignore[misc]  # as above
    """Tells, as the first batch has been taken, where the model was called more often than was planned."""

    def __init__(self, result: OptimizedModule) -> None:
        self._result = result
        self._waiting: Waiting | None = None
        self._calls = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Count from here on; what is compiled calls no hooks that it could see."""
        if not self._calls and not args.torch_compile:
            self._waiting = Waiting(self._result)

    def on_substep_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """The first of several batches has been taken."""
        self._tell()

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """The first batch has been taken."""
        self._tell()

    def _tell(self) -> None:
        if self._waiting is None:
            return
        self._calls = self._waiting.most
        self._waiting.remove()
        self._waiting = None
        if self._calls > 1:
            tell_of_calls(self._result, "compute_loss", type(self._result).__name__, self._calls)


def _optimized(trainer: Trainer, longest: int | None, options: dict[str, Any]) -> OptimizedModule:
    name = getattr(trainer.model, "main_input_name", "input_ids")
    batches: list[tuple[Any, Any]] = []
    with _largest_batch(trainer, name, longest) as why, _put_back(trainer):
        call = first_call(trainer.model, lambda: _step(trainer, batches))
    step = {**_step_of(trainer), **_loss_outside(trainer, *batches[0]), **options}
    result = optimize(trainer.model, call.args, example_kwargs=call.kwargs, **step)
    planned_for(result, call, name, why)
    batch = batches[0][0] if isinstance(batches[0][0], Mapping) else ()
    if numbers := [key for key in _fixed(result, call.kwargs) if key in batch]:
        told = (
            f"Batches in which {', '.join(numbers)} are other numbers run the original forward; let the collator leave "
        )
        note(result, f"{told}them out where forward does not need them.")
    if "loss_fn" not in options and _computes_another(trainer) and not {*trainer.label_names} & {*call.kwargs}:
        told = f"{type(trainer).__name__}.compute_loss gives the model no labels, and its loss is not in the step; "
        note(result, f"{told}give it as loss_fn.")
    trainer.add_callback(_Calls(result))
    return result


def _fixed(result: OptimizedModule, given: Mapping[str, Any]) -> list[str]:
    """The names of numbers that the program is for as they are."""
    program = programs(result).get("")
    names = [name for name, value in given.items() if type(value) is int]
    if program is None or len(program.names) != len(program.leaves):
        return names
    leaves = dict(zip(program.names, program.leaves, strict=True))
    return [name for name in names if leaves[name][0] == "constant"]


def _computes_another(trainer: Trainer) -> bool:
    return type(trainer).compute_loss is not Trainer.compute_loss


def _loss_outside(trainer: Trainer, batch: Any, items: Any) -> dict[str, Any]:
    """The ``loss_fn`` that the trainer has outside of the model; it holds labels, and nothing of the trainer.

    Read in transformers 5.17: ``Trainer.compute_loss`` takes the labels out of the batch where it has one.
    """
    given, smoother = trainer.compute_loss_func, trainer.label_smoother
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if _computes_another(trainer) or (given is None and (smoother is None or labels is None)):
        return {}
    if given is not None:
        loss = partial(given, num_items_in_batch=items)
    else:
        model = trainer.accelerator.unwrap_model(trainer.model)
        model = model.get_base_model() if hasattr(model, "get_base_model") else model  # that of peft
        shift = type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        counted = {"num_items_in_batch": items} if "num_items_in_batch" in signature(smoother).parameters else {}
        loss = partial(smoother, shift_labels=shift, **counted)
    mixed = (trainer.args.bf16 or trainer.args.fp16) and not trainer.is_fsdp_enabled

    def of_outputs(outputs: Any) -> Tensor:
        found: Tensor = loss(convert_to_fp32(outputs) if mixed else outputs, labels=_of_as_many(labels, outputs))
        return found

    return {"loss_fn": of_outputs}


def _of_as_many(labels: Any, outputs: Any) -> Any:
    """The labels of as many texts and tokens as there are logits: fewer, where smaller sizes are proved."""
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else outputs[0]
    if not (isinstance(labels, Tensor) and isinstance(logits, Tensor)):
        return labels
    return labels[tuple(map(slice, logits.shape[: min(labels.dim(), logits.dim() - 1)]))]


def _step_of(trainer: Trainer) -> dict[str, Any]:
    """What ``memrewrite.optimize`` is told of the step, by its arguments.

    A sharded model runs in the types that ``fully_shard`` was told, without autocast, and says so itself.
    """
    kind = "bf16" if trainer.args.bf16 else "fp16" if trainer.args.fp16 else None
    parts = trainer.args.gradient_accumulation_steps
    loop = trainer_loop(parts, scaler=kind == "fp16")
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # that which accelerate wraps
    step: dict[str, Any] = {"optimizer": optimizer, "micro_batches": parts, "loop": loop}
    if not trainer.is_fsdp_enabled:
        step |= {"mesh": _ddp(trainer)} | ({} if kind is None else {"amp": kind, "loss_fn": _loss})
    return step


def _ddp(trainer: Trainer) -> Ddp | None:
    """The mesh that the trainer will wrap its model in, None where there is none or the model says its own.

    Read in accelerate 1.15.0: ``Accelerator.prepare_model`` hands what ``ddp_handler`` has to the wrapper.
    """
    accelerator, model = trainer.accelerator, trainer.model
    alone = not accelerator.distributed_type.value.startswith("MULTI_") or accelerator.num_processes == 1
    if alone or isinstance(model, nn.parallel.DistributedDataParallel):
        return None
    told = accelerator.ddp_handler
    return Ddp(
        accelerator.num_processes,
        told.bucket_cap_mb,
        told.gradient_as_bucket_view,
        told.static_graph,
        told.find_unused_parameters,
        told.broadcast_buffers,
    )


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


@contextlib.contextmanager
def _put_back(trainer: Trainer) -> Iterator[None]:
    """Put back what a trainer counts and collects before it calls the model, as the rewards of what that generated."""
    data, collected = (trainer.train_dataset, trainer.eval_dataset), nn.Module()
    found = {n: each for n, each in vars(trainer).items() if is_container(each) and not any(each is d for d in data)}
    vars(collected).update(found)
    before, attributes = contents(vars(trainer)), Attributes(collected)
    try:
        yield
    finally:
        put_back(vars(trainer), before)
        attributes.restore()


def _loss(outputs: Any) -> Tensor:
    """The model's own, after what accelerate makes of its outputs under mixed precision: all of them in float32.

    Read in accelerate 1.15.0: ``Accelerator.prepare_model`` wraps ``model.forward`` in ``convert_outputs_to_fp32``.
    """
    return default_loss(convert_to_fp32(outputs))


def _step(trainer: Trainer, taken: list[tuple[Any, Any]]) -> None:
    batches, items = trainer.get_batch_samples(iter(trainer.get_train_dataloader()), 1, trainer.args.device)
    taken.append((batches[0], items))
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps  # as train() sets it
    trainer.training_step(trainer.model, batches[0], items)
