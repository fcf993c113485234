"""``torch.compile(model, backend="memrewrite", options={"budget": "8GB", "optimizer": "adamw"})``.

Found by its entry point, without an import. Dynamo gives the graphs and Inductor makes the kernels, as ever; what is
kept for backward and what runs again is chosen here, so that the training step stays within ``budget``.
Bytes are foreseen by what Inductor is expected to fuse, and it is let fuse what stays within these, or for a budget in
that (``memrewrite.torch_internals.fusions``). What its code really takes is read off that, before it runs
(``memrewrite.backends.observed``): where it is more than a budget in bytes, or much more than was foreseen of the
lowest peak, the graph is compiled again by other plans (``memrewrite.backends.tries``).

Options: ``budget`` (``"8GB"``, ``"60%"`` of what the stock partitioner's step takes, ``"min"``), ``optimizer`` (its
name as for ``memrewrite.optimize``, ``"adamw"`` by default, ``"none"`` where its state does not count), ``reserve``
(bytes to leave for what is not seen from here, such as gradients that are accumulated, or other models), ``loss``
(bytes that a loss which is not compiled takes, while all lives that is kept for backward: without it, steps on a GPU
that take more than a budget in bytes show it, and all is compiled again), ``loop`` (``"drop-output"`` where the outputs
of a step are let go of before the next one, as PyTorch's tutorials do not), ``exact`` (what runs again rounds as what
is kept would), ``verify`` (the first call of each graph is compared with the stock partitioner's and with eager, in
more memory than the budget: see ``memrewrite.backends.proof``), ``mode`` (as torch.compile's own, which it takes
without options only). All others are Inductor's.

Backward may write over what is kept for it. Where it is to run twice (``retain_graph=True``), set
``torch._functorch.config.donated_buffer = False`` before the first call: all is compiled by then. What a graph is given
and what it gives may be kept, more often than by PyTorch itself: where code that is not compiled, or after a break,
writes into that in place before backward, PyTorch raises an error that says so.
"""

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import Any

from torch import fx, nn

from memrewrite.backends import accumulated, measured, sizes, steps, told
from memrewrite.backends.asked import OWN, Asked
from memrewrite.backends.known import made_by
from memrewrite.backends.observed import seen
from memrewrite.backends.partition import Partition
from memrewrite.backends.proof import Proof
from memrewrite.backends.resident import resident
from memrewrite.backends.steps import Step, key_of, step_of
from memrewrite.backends.told import note
from memrewrite.process.frames import in_one_chunk
from memrewrite.records.compiled import CHOICES
from memrewrite.records.errors import BudgetInfeasibleError, MemrewriteError, UsageError
from memrewrite.runtime.promise import BeyondPlanWarning
from memrewrite.torch_internals import compiling
from memrewrite.torch_internals.compiled_code import compiled_codes
from memrewrite.torch_internals.compiling import (
    Partitioner,
    at_limit_of,
    cache_hits,
    code_of_frame,
    donates,
    inductor,
    let_through,
    model_of_frame,
    name_of_frame,
    rival_of,
)

_EXACT = {"emulate_precision_casts": True}
# A buffer that waits for another use lives on meanwhile; where Inductor thinks there is room for it, libraries need it.
_LEAN = {"allow_buffer_reuse": False}
_VERIFIED = {"fallback_random": True}  # random numbers as eager draws them


def memrewrite(
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """What Dynamo calls for each graph; raises what else memrewrite raises, not wrapped in an error of Dynamo's."""
    try:
        asked, rest = Asked.parse(options or {})
        mode = rest.pop("mode", mode)
        _refuse_rival(asked, rest)
        rest = {**_settings(asked), **rest}
        model = model_of_frame()
        step = step_of(model, asked)
        divided = functools.partial(_divided, graph, inputs, mode, rest, model, step, asked)
        try:
            return divided()
        except BudgetInfeasibleError as error:
            if step is None or not step.restore():
                raise
            warnings.warn(
                f"{name_of_frame()} stays above its budget with what runs outside of it. {error}",
                BeyondPlanWarning,
                stacklevel=2,
            )
            return divided()
    except MemrewriteError as error:
        raise let_through(error) from None


def _divided(
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    mode: str | None,
    rest: dict[str, Any],
    model: nn.Module | None,
    step: Step | None,
    asked: Asked,
) -> Callable[..., Any]:
    """The graph within the budget, which is a part of ``step``."""
    lives, key = resident(graph, model, asked.optimizer), key_of(graph)
    known: dict[str, Any] = {}
    if step is not None:
        asked, known = step.asked, step.tells(key, lives)
    partition = Partition(asked, lives, **known)
    as_stock: dict[str, Any] = {"mode": mode, "options": rest, "partitioner": None, "cached": True, "room": None}
    stock = functools.partial(inductor, inputs=inputs, **as_stock)
    proof = Proof(graph, partition, stock) if asked.verify else None
    made, cached = _fitting(graph, inputs, mode, rest, partition)
    if proof is not None:
        made = proof.first(made)
    note(partition, made, cached)
    if asked.budget is not None:
        name = name_of_frame()
        _tell_limit(code_of_frame(), name)
        _tell_what_is_left(name, partition)
        for watched in (sizes.watched, accumulated.watched):
            made = watched(made, inputs, partition, asked.budget.bytes, name)
        made = measured.watched(made, inputs, partition, step, name)
    return made if step is None else step.add(key, partition, made)


def _refuse_rival(asked: Asked, rest: Mapping[str, Any]) -> None:
    """Raise ``UsageError`` where something else is set to choose what is kept for backward."""
    rival = rival_of(rest, keeps_less=asked.budget is not None)
    if rival is not None:
        raise UsageError(
            f"{rival} is set, and chooses what is kept for backward, as does this back end; use one of them."
        )


def _tell_limit(code: CodeType | None, name: str) -> None:
    """Warn where Dynamo will compile no other call of ``code``, so that such run outside of the budget."""
    times = None if code is None else at_limit_of(code)
    if times is not None:
        warnings.warn(
            f"{name} was compiled {times} times, for as many classes, sizes or settings; Dynamo runs calls "
            "of other ones as they are, outside of the budget, or with fullgraph=True refuses them. Raise "
            "torch._dynamo.config.recompile_limit for more.",
            BeyondPlanWarning,
            stacklevel=2,
        )


def _tell_what_is_left(name: str, partition: Partition) -> None:
    """Warn of a graph that is left to PyTorch, but where its code is known to take no more than a budget in bytes."""
    budget = partition.asked.budget
    if partition.choice == "not ours" and (partition.observed is None or budget is None or budget.bytes is None):
        warnings.warn(
            f"{name} is {CHOICES[partition.choice]}, so that the step may take more than its budget.",
            BeyondPlanWarning,
            stacklevel=2,
        )


def _settings(asked: Asked) -> dict[str, Any]:
    """Inductor's, where nobody says otherwise."""
    lean = {} if asked.budget is None else _LEAN
    return {**lean, **(_EXACT if asked.exact else {}), **(_VERIFIED if asked.verify else {})}


def _reset() -> None:
    """Dynamo was reset: what was compiled is no longer used."""
    told.forget()
    steps.forget()


memrewrite.reset = _reset  # type: ignore[attr-defined]  # called by torch.compiler.reset


@in_one_chunk
def _fitting(
    graph: fx.GraphModule, inputs: Sequence[Any], mode: str | None, options: dict[str, Any], partition: Partition
) -> tuple[Callable[..., Any], bool]:
    """What is compiled within the budget, and whether it comes from a cache."""
    tried = []
    while True:
        before, divisions = cache_hits(), partition.divisions
        with compiled_codes() as codes:
            made = _compiled(graph, inputs, mode, options, partition)
        partition.communicates = any(code.communicates for code in codes)
        cached = cache_hits() > before and partition.divisions == divisions  # what is measured there may be cached, too
        tried.append((made, cached))
        lives = partition.lives
        again = partition.observe(seen(codes, lives.kept, partition.held, lives.layout), cached)
        if partition.asked.lowest:
            ended = f"{key_of(graph)} {identity(partition)}"
            if not again:
                compiling.note(ended)
            again = again and not (cached and compiling.noted(ended) is not None)
        if not again:
            return tried[partition.settle()]


def _compiled(
    graph: fx.GraphModule, inputs: Sequence[Any], mode: str | None, options: dict[str, Any], partition: Partition
) -> Callable[..., Any]:
    divide = Partitioner(partition, identity(partition))
    try:
        cached = partition.known or not partition.tells_options
        return inductor(graph, inputs, mode, options, divide, cached=cached, room=partition.room)
    except ValueError as error:
        words = str(error).partition(", known options are")[0].partition(", supported modes are")[0]
        raise UsageError(
            f"{words}; memrewrite's options are {', '.join(OWN)} and mode, all others have to be Inductor's."
        ) from error


def identity(partition: Partition) -> str:
    """What tells the graphs of a partition from others in Inductor's cache: code, options, and the bytes there are."""
    whole = (
        partition.asked,
        partition.lives,
        partition.fused,
        partition.taken,
        partition.in_step,
        partition.base,
        partition.loss,
        partition.highest,
        donates(),
    )
    return f"{made_by()} {' '.join(map(str, whole))}"
