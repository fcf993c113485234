"""The loops of training libraries, as habits: read from their code, at the versions that are named."""

from dataclasses import replace

from memrewrite.records.loop import Loop

# transformers 5.23.0, trainer.py. `compute_loss` returns the loss alone, so that the outputs it got are gone before
# `training_step` calls `accelerator.backward`; `model.zero_grad()` comes after `optimizer.step()`. `get_batch_samples`
# takes all batches of an accumulated step from the loader at once, on their device: of n, n - 1 wait (`trainer_loop`).
# `DataLoaderShard.__iter__` of accelerate 1.15.0 fetches one batch ahead, but sends it to the device in its turn. What
# is kept besides are scalars, such as the sum of the losses.
_TRAINER = Loop(keeps_output=False)

# Lightning 2.6.6, loops/optimization/automatic.py. `Closure.closure` runs `training_step`, with
# which its locals end, the output among them unless it is returned; then `zero_grad`, then backward: the gradients of
# the last step are there while forward runs. `_TrainingEpochLoop.advance` calls `batch_to_device` for the batch in work
# alone; what `_PrefetchDataFetcher` fetches ahead lies where the loader made it.
LIGHTNING = Loop(keeps_output=False, zero_grad="before backward")

# timm's train.py, which its package does not hold. In `train_one_epoch` the output is a local of `_forward`,
# `optimizer.zero_grad()` comes after the step, `model_ema.update` last. `PrefetchLoader.__iter__` (timm 1.0.31,
# data/loader.py), the script's default, sends the next batch to the device before it yields the one in work.
TIMM = Loop(keeps_output=False, ahead=1)


def trainer_loop(batches: int, scaler: bool) -> Loop:
    """The loop of transformers' ``Trainer`` that accumulates gradients over ``batches`` batches."""
    return replace(_TRAINER, ahead=batches - 1, scaler=scaler)
