"""``optimize``: capture, observe, rewrite, plan, verify, measure; the last two stages also by themselves."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from memrewrite.cache.place import Asked
from memrewrite.cache.store import store_in
from memrewrite.equivalence import verifying
from memrewrite.equivalence.verdict import Verdict
from memrewrite.measurement import measuring
from memrewrite.optimizing.ranks import Planned, planned
from memrewrite.optimizing.request import Request
from memrewrite.process.turns import one_at_a_time
from memrewrite.records.attached import attach
from memrewrite.records.errors import UsageError
from memrewrite.records.loop import TUTORIAL, Loop
from memrewrite.records.mesh import Mesh
from memrewrite.records.options import Budget, check_seed, pass_names
from memrewrite.records.outcomes import Measured
from memrewrite.records.ranges import Ranges
from memrewrite.records.report import Report
from memrewrite.targets.compiled import CompiledTarget
from memrewrite.workload.sharding import unwrapped, wrapped_like
from memrewrite.workload.step import Step
from memrewrite.workload.stepping import How, let_step, stepping
from memrewrite.workload.workload import Optimizer, refuse_meta, workload

_NOT_COMPILED = "The model was compiled in place, and the result is not: call its compile() as well."


class OptimizedModule(nn.Module):
    """The type of what ``optimize`` returns: a module of the user's own class that carries ``report``."""

    report: Report


@one_at_a_time
def optimize(
    model: nn.Module,
    example_inputs: Any = (),
    *,
    example_kwargs: dict[str, Any] | None = None,
    budget: str | int | Budget | None = None,
    reserved: bool = False,
    optimizer: Optimizer = "adamw",
    optimizer_step: How = "whole",
    loss_fn: Callable[[Any], Tensor] | None = None,
    amp: str | torch.dtype | None = None,
    mode: Literal["train", "inference"] | None = None,
    micro_batches: int = 1,
    loop: str | Loop = TUTORIAL,
    mesh: str | Mesh | None = None,
    device: str | torch.device | None = None,
    regions: Sequence[str] | None = None,
    passes: Iterable[str] | None = None,
    exact: bool = False,
    compiled: bool = False,
    verify: bool = True,
    strict: bool = False,
    seed: int = 0,
    dynamic: Ranges | None = None,
    returns: Literal["all", "lazy", "loss"] = "all",
    progress: Callable[[str], None] = lambda stage: None,
    cache: Asked = None,
) -> "OptimizedModule":
    """A drop-in for ``model`` whose training step peaks within ``budget`` bytes, proved equivalent to it.

    ``example_inputs`` is a tensor, a tuple or none; ``budget`` is text as ``"8GB"``, ``"60%"`` or ``"min"``, an int of
    bytes or a ``Budget``, for all that a steady step holds, or what CUDA's caching allocator holds, if ``reserved``.
    ``optimizer`` is ``"none"``, ``"sgd"``, ``"sgd-momentum"``, ``"adam"``, ``"adamw"``, either with ``-fused`` or
    ``-grouped``, one to copy, or a list, a factory, or None; ``optimizer_step`` as by ``step_in_groups`` and the like.
    ``loss_fn(output)`` gives a scalar; what it holds counts as targets. ``amp`` is ``"bf16"`` or ``"fp16"``; gradients
    of ``micro_batches`` add up. ``loop`` names habits of yours, ``mesh="ddp=8"`` bounds each of so many processes.
    ``device="cuda"`` plans for CUDA where there is none. ``regions`` are patterns of paths (``"layers.*"``) to capture
    one by one; ``passes`` names those allowed ("all": on request, too). ``exact`` keeps the forward bit-equal,
    ``verify=False`` skips the proof, ``strict`` raises for a warning, ``dynamic`` has what varies (``records.ranges``),
    ``returns="lazy"`` makes logits when read, ``"loss"`` never, ``compiled`` is for ``torch.compile``, ``cache`` keeps
    plans (False: not). The result shares every Parameter and buffer with ``model``, is of its class, has its hooks and
    ``.report``, or is ``model``, where nothing is gained. ``progress`` is told stages. Raises ``MemrewriteError``s.
    """
    bare, on = unwrapped(model, mesh, together=True)
    names = pass_names(passes)
    asked = Request(budget, reserved, device, regions, names, exact, compiled, verify, strict, seed, dynamic, returns)
    asked.check(bare)
    work = workload(bare, example_inputs, example_kwargs, optimizer, loss_fn, amp, mode, micro_batches, loop, on, model)
    work = replace(work, step=stepping(work.step, bare, optimizer_step))
    return _given(planned(work, asked, store_in(cache), progress, given=model), model, optimizer, work.step)


def _given(found: Planned, model: nn.Module, optimizer: Optimizer, step: Step) -> OptimizedModule:
    """What was planned, in what ``model`` is wrapped in; the optimizer steps as asked from now on, or is told to."""
    told = let_step(optimizer, step)
    found = found if told is None else found.noted(told)
    result = wrapped_like(model, found.module)
    if model._compiled_call_impl is not None and result._compiled_call_impl is None:
        found = found.noted(_NOT_COMPILED)
    return cast(OptimizedModule, attach(found.report, found.module, result))


@one_at_a_time
def measure(
    model: nn.Module,
    example_inputs: Any = (),
    *,
    example_kwargs: dict[str, Any] | None = None,
    optimizer: Optimizer = "adamw",
    loss_fn: Callable[[Any], Tensor] | None = None,
    amp: str | torch.dtype | None = None,
    mode: Literal["train", "inference"] | None = None,
    micro_batches: int = 1,
    loop: str | Loop = TUTORIAL,
    mesh: str | Mesh | None = None,
    steps: int = 10,
    compiled: bool = False,
) -> Measured:
    """What a step of ``model`` really takes where it lies: peak bytes, bytes after each phase, milliseconds.

    The arguments are those of ``optimize``; ``model`` may be what that returned, or any module. Two steps are taken for
    the bytes and ``steps`` more for the time; afterwards everything is as it was. On the CPU every storage is tracked,
    on CUDA the allocator's own counters are read: there, what ran before in the process may have fragmented memory,
    which ``memrewrite measure`` avoids by a fresh process for each model. ``compiled=True`` measures what
    ``torch.compile`` makes of the model, which takes CUDA. In a ``mesh`` this process alone is measured: nothing is
    sent, and no time passes for that.
    Raises ``MeasurementError`` when memory runs out or compiling fails, ``UsageError`` for arguments that cannot be
    meant.
    """
    inner, of_mesh = unwrapped(model, mesh)
    work = workload(
        inner, example_inputs, example_kwargs, optimizer, loss_fn, amp, mode, micro_batches, loop, of_mesh, model
    )
    refuse_meta(work.inputs, inner)
    step = replace(work.step, target=CompiledTarget()) if compiled else work.step
    with work.context:
        return measuring.measure(inner, work.inputs, step, steps=steps)


@one_at_a_time
def verify(
    original: nn.Module,
    rewritten: nn.Module,
    example_inputs: Any = (),
    *,
    example_kwargs: dict[str, Any] | None = None,
    optimizer: Optimizer = "adamw",
    loss_fn: Callable[[Any], Tensor] | None = None,
    amp: str | torch.dtype | None = None,
    mode: Literal["train", "inference"] | None = None,
    micro_batches: int = 1,
    loop: str | Loop = TUTORIAL,
    exact: bool = False,
    steps: int = 3,
    seed: int = 0,
) -> Verdict:
    """Whether ``rewritten`` takes the same training steps as ``original``; a difference is a verdict, not an error.

    The arguments are those of ``optimize``. Over ``steps`` steps, outputs, loss, gradients, buffers, random state and
    flags are compared: with ``exact`` each must have the same bits, else its error against a float64 reference may be
    no larger than the original's own (``memrewrite.equivalence.compare`` has the rule). Afterwards both models are as
    they were. Raises ``MeasurementError`` when nothing could be verified, ``UsageError`` for arguments that cannot be
    meant, and what the original itself raises.
    """
    if original.training != rewritten.training:
        raise UsageError("One model is in train mode and the other is not; call train() or eval() on both.")
    check_seed(seed)
    work = workload(original, example_inputs, example_kwargs, optimizer, loss_fn, amp, mode, micro_batches, loop)
    refuse_meta(work.inputs, original, rewritten)
    with work.context:
        return verifying.verify(original, rewritten, work.inputs, work.step, exact=exact, steps=steps, seed=seed)
