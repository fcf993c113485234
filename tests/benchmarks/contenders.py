"""Who trains a workload in ``pareto.py``: the model itself, its peers, and memrewrite at several budgets.

``ours`` and ``ours+compile`` are followed by a budget: ``min``, ``block`` (the peak that block checkpointing takes) or
a share of the bytes that eager training takes beyond parameters, gradients, optimizer state and inputs. ``compile`` may
be followed by PyTorch's own ``activation_memory_budget``; ``=0.5`` is the peak that ``compile 0.5`` takes, and
``=liger`` that of ``liger``, which puts Liger's kernels into a language model. ``chunked`` takes its loss in chunks;
``+block`` is block checkpointing besides. ``ours+backend`` is the back end of ``torch.compile``, in a language model
with its loss in chunks. In ``outside`` and ``ours+outside`` the loop computes a language model's loss from the logits
that it returns, which are made when they are used (``returns="lazy"``) in the latter.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, cast
from unittest import mock

import torch
import torch._functorch.config as functorch
from torch import nn

from memrewrite.api import optimize
from memrewrite.backends import entry
from memrewrite.optimizing import run as optimizing
from memrewrite.records.attached import report_of
from memrewrite.records.compiled import CompiledReport
from memrewrite.records.errors import BudgetInfeasibleError
from memrewrite.records.options import Budget
from memrewrite.workload.step import Inputs, Step
from tests.benchmarks.language import base_of, loss_apart
from tests.benchmarks.models import sqrt_segments
from tests.benchmarks.rows import ParetoRow
from tests.benchmarks.workload import Workload

EAGER, BLOCK, SQRT, OURS, COMPILE, BOTH = "eager", "block", "sqrt", "ours", "compile", "ours+compile"
LIGER = "liger", "liger+block"
CHUNKED = "chunked", "chunked+block"
BACKEND = "ours+backend"
OUTSIDE, OURS_OUTSIDE = ("outside", "outside+block"), "ours+outside"
PLANNED = OURS, OURS_OUTSIDE, BOTH, BACKEND
COMPILED_BLOCK = "compile+block"
MINIMUM = f"{OURS} min"
_OURS = [f"{OURS} {budget}" for budget in ("min", "block", "80%", "65%", "50%", "40%", "33%", "27%")]
_RATIOS = ("0.8", "0.5", "0.3", "0.2", "0.1", "0")
_COMPILED = [f"{COMPILE} {ratio}" for ratio in _RATIOS]
_BOTH = [f"{BOTH} {budget}" for budget in ("min", "27%", "33%", "40%", "50%", "65%", "80%")]
_MATCHED = [f"{BOTH} ={ratio}" for ratio in _RATIOS]
_BY_BACKEND = [f"{BACKEND} {budget}" for budget in ("min", "block", "50%", "80%")]
_AS_LIGER = [f"{each} ={peer}" for each in (OURS, BOTH, BACKEND) for peer in LIGER]
_LOSS = ("linear_cross_entropy", "tied_embeddings")
_PLAIN = [EAGER, BLOCK, SQRT, *LIGER, *CHUNKED, *OUTSIDE]
_AS_OUTSIDE = [f"{OURS_OUTSIDE} {budget}" for budget in ("min", *(f"={peer}" for peer in LIGER))]
_OF_COMPILE = [COMPILE, COMPILED_BLOCK, *_COMPILED, *_BOTH, *_MATCHED, *_BY_BACKEND]
CONTENDERS = [*_PLAIN, *_OURS, *_OF_COMPILE, *_AS_LIGER, *_AS_OUTSIDE]

Rows = Mapping[str, ParetoRow]
"""What is known of a workload already, by contender."""


@dataclass(frozen=True)
class Ready:
    """A contender about to train: its module, and what memrewrite said about it (bytes).

    ``inputs`` and ``step`` are given where they are not those of the workload.
    """

    module: nn.Module
    budget: int | None = None
    predicted: int | None = None
    segments: int | None = None
    note: str = ""
    by_backend: bool = False
    inputs: Inputs | None = None
    step: Step | None = None

    def told(self) -> int | None:
        """What memrewrite says of the peak, by the back end once the step is compiled."""
        return cast(CompiledReport, report_of(self.module)).peak if self.by_backend else self.predicted


def kind(contender: str) -> str:
    """The contender's name without its budget."""
    return contender.split()[0]


def phase(contender: str) -> int:
    """When it runs: after those whose peaks it may have as its budget."""
    return {OURS: 1, OURS_OUTSIDE: 1, COMPILE: 1, COMPILED_BLOCK: 1, BOTH: 2, BACKEND: 2}.get(kind(contender), 0)


def is_compiled(contender: str) -> bool:
    """Whether it runs under ``torch.compile``."""
    return kind(contender) in (COMPILE, COMPILED_BLOCK, BOTH, BACKEND)


def bound(contender: str, rows: Rows) -> int | None:
    """The budget in bytes, None for the lowest reachable; ``ValueError`` while the peak it refers to is unknown."""
    text = contender.split()[1]
    if text == "min":
        return None
    whose = BLOCK if text == "block" else text[1:] if text.startswith("=") else EAGER
    whose = f"{COMPILE} {whose}" if whose in _RATIOS else whose
    reference = rows.get(whose)
    if reference is None or reference.peak is None or reference.fixed is None:
        raise ValueError(f"the peak of {whose} is not known")
    if whose != EAGER:
        return reference.peak
    return reference.fixed + int(float(text.rstrip("%")) / 100 * (reference.peak - reference.fixed))


def prepare(
    contender: str, workload: Workload, model: nn.Module, inputs: Inputs, rows: Rows, *, verify: bool = False
) -> Ready:
    """Make ``model`` the contender; it may be changed in place.

    Raises ``BudgetInfeasibleError``, at once where the lowest reachable peak is known already, and what the contender
    itself raises.
    """
    if kind(contender) in (OURS, BOTH):
        ready = _optimized(contender, workload, model, inputs, rows, verify)
        if kind(contender) == OURS:
            return ready
        compiled = cast(nn.Module, torch.compile(ready.module, fullgraph=True))
        return Ready(compiled, ready.budget, ready.predicted, ready.segments)
    if kind(contender) == BACKEND:
        return _by_backend(contender, workload, model, inputs, rows)
    if kind(contender) == COMPILE:
        functorch.activation_memory_budget = float((*contender.split(), "1.0")[1])
        return Ready(cast(nn.Module, torch.compile(model)))
    if kind(contender) in (*OUTSIDE, OURS_OUTSIDE):
        return _outside(contender, workload, model, inputs, rows)
    if contender in LIGER:
        _with_liger(model)
    if contender in CHUNKED:
        if workload.chunk_loss is None:
            raise ValueError("the model is no causal language model")
        workload.chunk_loss(model)
    if contender in (BLOCK, LIGER[1], CHUNKED[1], COMPILED_BLOCK):
        workload.checkpoint_blocks(model)
    if contender == COMPILED_BLOCK:
        return Ready(cast(nn.Module, torch.compile(model)))
    if contender == SQRT:
        return Ready(model, note=f"{sqrt_segments(model, workload.blocks)} segments")
    return Ready(model)


def _with_liger(model: nn.Module) -> None:
    """Put Liger's kernels into a model of transformers' that it knows, and into its class, for good."""
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    inner = base_of(model)
    kind_of = inner.config.model_type
    if kind_of not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ValueError(f"Liger has no kernels for {kind_of}")
    MODEL_TYPE_TO_APPLY_LIGER_FN[kind_of](model=inner)


def _optimized(contender: str, workload: Workload, model: nn.Module, inputs: Inputs, rows: Rows, verify: bool) -> Ready:
    budget, lowest = bound(contender, rows), rows.get(MINIMUM)
    if kind(contender) == OURS and budget is not None and lowest is not None and budget < (lowest.peak or 0):
        raise BudgetInfeasibleError(f"The lowest peak, measured, is {lowest.peak} bytes.", lowest=lowest.peak or 0)
    asked: dict[str, Any] = {"verify": verify, "compiled": is_compiled(contender), "returns": workload.returns}
    return rewritten(budget, workload.step(), model, inputs, **asked)


def _outside(contender: str, workload: Workload, model: nn.Module, inputs: Inputs, rows: Rows) -> Ready:
    given, loss_fn = loss_apart(inputs)
    step = replace(workload.step(), loss_fn=loss_fn)
    if contender == OUTSIDE[1]:
        workload.checkpoint_blocks(model)
    if contender in OUTSIDE:
        return Ready(model, inputs=given, step=step)
    ready = rewritten(bound(contender, rows), step, model, given, returns="lazy")
    return replace(ready, inputs=given, step=step)


def _by_backend(contender: str, workload: Workload, model: nn.Module, inputs: Inputs, rows: Rows) -> Ready:
    budget, step = bound(contender, rows), workload.step()
    if workload.returns == "loss":
        about: dict[str, Any] = {"optimizer": step.optimizer, "amp": step.amp, "verify": False, "cache": False}
        about |= {"example_kwargs": inputs.kwargs, "returns": "loss", "compiled": True}
        model = optimize(model, inputs.args, passes=_LOSS, **about)
    options: Any = {"budget": "min" if budget is None else budget, "optimizer": workload.optimizer}
    module = torch.compile(model, backend=entry.memrewrite, options=options)
    return Ready(cast(nn.Module, module), budget, by_backend=True)


def _infeasible(line: object, limit: Budget, budget: int, lowest: int, original: int) -> BudgetInfeasibleError:
    """The error without what else would fit, which takes several plans to say."""
    lowest = min(lowest, original)
    return BudgetInfeasibleError(f"The lowest peak is {lowest} bytes, not {budget}.", lowest)


def rewritten(
    budget: int | None,
    step: Step,
    model: nn.Module,
    inputs: Inputs,
    *,
    verify: bool = False,
    compiled: bool = False,
    reserved: bool = False,
    returns: Literal["all", "lazy", "loss"] = "all",
    device: str | None = None,
) -> Ready:
    """``model`` within ``budget`` bytes (``reserved``: of what is reserved), or at its lowest peak.

    Raises what ``optimize`` raises.
    """
    with mock.patch.object(optimizing, "infeasible", _infeasible):
        optimized = optimize(
            model,
            inputs.args,
            example_kwargs=inputs.kwargs,
            budget="min" if budget is None else budget,
            loss_fn=step.loss_fn,
            optimizer=step.optimizer,
            optimizer_step="in_backward" if step.in_backward else "whole",
            amp=step.amp,
            mesh=step.mesh,
            compiled=compiled,
            verify=verify,
            reserved=reserved,
            returns=returns,
            passes=None if returns == "all" else "all",
            device=device,
            cache=False,
        )
    report = optimized.report
    note = report.verdict if verify else ""
    return Ready(optimized, budget, report.predicted_after.peak, len(report.segments), note)
