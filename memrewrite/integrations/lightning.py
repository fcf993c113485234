"""Lightning: a module inside a ``LightningModule``, rewritten as the first training batch comes.

    class Classifier(LightningModule):
        def __init__(self):
            self.net = ...

    Trainer(callbacks=[Optimize("net", budget="8GB")]).fit(Classifier(), data)

A ``LightningModule`` whose own ``forward`` is called (``self(x)``) can be given to ``memrewrite.optimize`` itself and
the result to ``fit``.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from memrewrite.api import optimize
from memrewrite.integrations.calls import first_call
from memrewrite.integrations.longest import Asked, largest_batch, planned_for
from memrewrite.integrations.loops import LIGHTNING
from memrewrite.integrations.told import tell_of_calls
from memrewrite.measurement.passes import Waiting
from memrewrite.measurement.snapshot import State, cuda_devices
from memrewrite.records.attached import report_of
from memrewrite.records.errors import UsageError
from memrewrite.records.mesh import Ddp
from memrewrite.records.report import Report
from memrewrite.state.random_state import preserved_rng
from memrewrite.torch_internals.fsdp_states import is_sharded
from memrewrite.workload.optimizers import groups_in
from memrewrite.workload.sharding import mesh_of_wrapper
from memrewrite.workload.step import Inputs

_AMP = {"bf16-mixed": "bf16", "16-mixed": "fp16"}


class Optimize(Callback):  # type: ignore[misc]  # Lightning is not there while types are checked
    """Puts a rewritten module in the place of the ``LightningModule``'s submodule at ``path``, and sets ``report``.

    The step is the trainer's own: a batch, on its device, as ``training_step`` passes it on to the submodule, the
    optimizers that step it, the precision and ``accumulate_grad_batches``, in Lightning's loop. ``options`` are those
    of ``memrewrite.optimize``, and win. The batch is the first one, but of texts (dictionaries with ``input_ids``) what
    the loader's ``collate_fn`` makes of the longest, or of texts of ``longest`` tokens; the report says which. The loss
    is not known before it is computed: give ``loss_fn`` where it takes much memory. In a strategy of several processes
    the budget is that of each: under DDP with the buckets of the submodule, and under ``ModelParallelStrategy`` where
    ``configure_model`` calls ``fully_shard`` of the submodule, and of parts of it before.
    """

    def __init__(self, path: str, *, longest: int | None = None, **options: Any) -> None:
        self.path = path
        self.longest = longest
        self.options = options
        self.report: Report | None = None
        self._waiting: Waiting | None = None
        self._calls = 0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin anew: another fit may be of another module."""
        self.report = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Optimize before the first batch, once for each module.

        Raises ``UsageError`` for a path that is no submodule's or that ``training_step`` does not call, and what
        ``memrewrite.optimize`` raises.
        """
        if self.report is not None:
            return
        part = self._submodule(pl_module)
        with contextlib.suppress(UsageError):  # of what was not rewritten in an earlier fit
            self.report = report_of(part)
        if self.report is None:
            self._refuse_compiled(part)
            name = getattr(part, "main_input_name", "input_ids")
            with preserved_rng(part.parameters()):
                largest, why = self._largest(trainer, pl_module, name)
            given = batch if largest is None else largest
            with trainer.precision_plugin.train_step_context(), _put_back(pl_module, given):
                call = first_call(part, partial(pl_module.training_step, *_arguments(pl_module, given, batch_idx)))
            result = self._optimize(trainer, part, call, name, why)
            pl_module.set_submodule(self.path, result)
            self.report = report_of(result)
            self._waiting, self._calls = Waiting(result), 0

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Count the calls that backward is for."""
        if self._waiting is not None:
            self._calls = max(self._calls, len(self._waiting))
            self._waiting.begin()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Tell, after the first batch, where the step that was planned has fewer calls than this one had."""
        if self._waiting is None:
            return
        self._waiting.remove()
        self._waiting = None
        if self._calls > 1:
            result = self._submodule(pl_module)
            tell_of_calls(result, "training_step", self.path, self._calls)
            self.report = report_of(result)

    def _largest(self, trainer: Trainer, pl_module: LightningModule, name: str) -> tuple[Any, str]:
        """The largest batch of texts, as Lightning hands it on, None for the first batch; and in words what it is."""
        loader = trainer.train_dataloader
        count = getattr(loader, "batch_size", None)
        if count is None:  # batches of the user's own making
            return None, "the first batch"
        chosen, why = largest_batch(loader.dataset, Asked(name, count, self.longest))
        if chosen is None:
            return None, why
        batch = loader.collate_fn([chosen[position] for position in range(len(chosen))])
        batch = pl_module._on_before_batch_transfer(trainer.precision_plugin.convert_input(batch), 0)
        return trainer.strategy.batch_to_device(batch, dataloader_idx=0), why

    def _optimize(self, trainer: Trainer, part: nn.Module, call: Inputs, name: str, why: str) -> nn.Module:
        mine = [each for each in trainer.optimizers if any(groups_in([each], part))]
        optimizer = mine[0] if len(mine) == 1 else mine or None
        step: dict[str, Any] = {"optimizer": optimizer, "amp": _AMP.get(trainer.precision)}
        step["micro_batches"] = trainer.accumulate_grad_batches
        step["mesh"] = _mesh(trainer.strategy, part, self.path)
        step["loop"] = replace(LIGHTNING, scaler=step["amp"] == "fp16")
        result = optimize(part, call.args, example_kwargs=call.kwargs, **{**step, **self.options})
        planned_for(result, call, name, why)
        return result

    def _submodule(self, pl_module: LightningModule) -> nn.Module:
        name = type(pl_module).__name__
        if not self.path:
            raise UsageError(
                f"Optimize is for a submodule; give {name} itself to memrewrite.optimize, and the result to fit."
            )
        try:
            return pl_module.get_submodule(self.path)
        except AttributeError as error:
            raise UsageError(f"{name} has no submodule {self.path!r}; name one it has.") from error

    def _refuse_compiled(self, part: nn.Module) -> None:
        if "_orig_mod" in (*self.path.split("."), *part._modules) or part._compiled_call_impl is not None:
            raise UsageError(
                f"{self.path} is compiled, and what is compiled would go on without a plan; compile it with the back "
                'end "memrewrite" and leave Optimize out, or do not compile it.'
            )


def _arguments(pl_module: LightningModule, batch: Any, batch_idx: int) -> tuple[Any, ...]:
    """What Lightning gives ``training_step``. Read in Lightning 2.6.6: ``_TrainingEpochLoop._build_kwargs``.

    Raises ``UsageError`` where that is the iterator of the loader.
    """
    if is_param_in_hook_signature(pl_module.training_step, "dataloader_iter", explicit=True):
        raise UsageError("training_step takes batches from dataloader_iter itself; let it take a batch.")
    both = is_param_in_hook_signature(pl_module.training_step, "batch_idx", min_args=2)
    return (batch, batch_idx) if both else (batch,)


@contextlib.contextmanager
def _put_back(pl_module: LightningModule, batch: Any) -> Iterator[None]:
    """Put back what a part of a training step changes: of sharded modules buffers alone, as FSDP2 moves parameters."""
    sharded, inputs = any(map(is_sharded, pl_module.modules())), Inputs((batch,), {})
    devices = cuda_devices((pl_module,), inputs)
    state = State(() if sharded else (pl_module,), devices, [*inputs.tensors(), *pl_module.buffers()])
    state.clear_gradients()
    try:
        yield
    finally:
        state.restore()


def _mesh(strategy: Any, part: nn.Module, path: str) -> Ddp | None:
    """The mesh of the wrapper that a strategy put around the ``LightningModule``; None where ``part`` says its own.

    Raises ``UsageError`` for FSDP1, and where ``part`` is sharded as a part of what is around it.
    """
    if is_sharded(part):
        return None
    if isinstance(strategy, FSDPStrategy):
        raise UsageError(
            "FSDPStrategy shards by FSDP1; use ModelParallelStrategy and call fully_shard, which is FSDP2."
        )
    around = strategy.model
    if isinstance(strategy, ModelParallelStrategy) and any(is_sharded(module) for module in around.modules()):
        raise UsageError(
            f"{path} is not sharded itself, and what is around it or inside of it is; in configure_model call "
            f"fully_shard of {path}, after parts of it."
        )
    return mesh_of_wrapper(around) if isinstance(around, DistributedDataParallel) else None
