"""What the back end did for a compiled model, found again: each graph is noted at the back end that compiled it.

Dynamo shares what it compiled between calls of ``torch.compile`` that are equal, so that the graphs of an equal back
end count, too, where they are of the same model. A graph that Dynamo has dropped is no longer told of.
"""

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from memrewrite.backends.partition import Partition
from memrewrite.backends.resident import parts
from memrewrite.records.compiled import CompiledGraph, CompiledReport
from memrewrite.records.errors import UsageError
from memrewrite.torch_internals.compiling import backend_of, backend_of_frame, module_of_frame, reference

_KEY = "_memrewrite_graphs"
_BACKENDS: list["weakref.ref[Any]"] = []  # those with graphs
_NUMBERS = itertools.count()


@dataclass
class Noted:
    """A graph: what divided it, whose it is and the how manieth; ``there`` gives None once Dynamo has dropped it."""

    number: int
    partition: Partition
    name: str
    module: Callable[[], nn.Module | None]
    cached: bool
    there: Callable[[], object]

    def told(self) -> CompiledGraph:
        """The graph as it is reported."""
        partition, foreseen = self.partition, self.partition.foreseen
        resident = dict(parts(partition.lives))
        choice = partition.choice
        if self.cached and partition.has_plans:
            choice = "no budget" if partition.asked.budget is None else "from cache"
        if foreseen is None:
            peak = partition.observed if partition.alone is None else partition.alone
            seen: dict[str, Any] = {"measured": partition.measured, "unseen": partition.unseen}
            return CompiledGraph(self.name, choice, resident, peak, verified=partition.verified, **seen)
        return CompiledGraph(
            name=self.name,
            choice=choice,
            resident=resident,
            peak=partition.peak,
            peak_before=foreseen.before,
            measured=partition.measured,
            kept=foreseen.kept,
            kept_before=foreseen.kept_before,
            kept_by=foreseen.kept_by,
            reruns=foreseen.reruns,
            regions=foreseen.regions,
            rerun_ms=foreseen.ms,
            unseen=partition.unseen,
            verified=partition.verified,
        )


class _Graphs(list[Noted]):
    """The graphs of a back end. A copy of it, or what was pickled, has compiled none."""

    def __reduce__(self) -> tuple[type["_Graphs"], tuple[()]]:
        return _Graphs, ()


def note(partition: Partition, made: Callable[..., Any], cached: bool) -> None:
    """Let ``report`` tell of what was compiled just now, while Dynamo is still at it."""
    backend = backend_of_frame()
    if backend is None:
        return
    module = module_of_frame()
    whose: Callable[[], nn.Module | None] = (lambda: None) if module is None else weakref.ref(module)
    name = "a function" if module is None else type(module).__name__
    graphs: list[Noted] = vars(backend).setdefault(_KEY, _Graphs())
    graphs.append(Noted(next(_NUMBERS), partition, name, whose, cached, reference(made)))
    _BACKENDS[:] = [each for each in _BACKENDS if (there := each()) is not None and there is not backend]
    _BACKENDS.append(weakref.ref(backend))


def forget() -> None:
    """Dynamo was reset: what was compiled is no longer used."""
    for backend in (each() for each in _BACKENDS):
        if backend is not None:
            vars(backend).pop(_KEY, None)
    _BACKENDS.clear()


def report(made: Any) -> CompiledReport | None:
    """What was done for what ``torch.compile`` returned, or a module that was compiled in place; None for others.

    Of a module whose parts are compiled it is what was done for these. Raises ``UsageError`` where nothing was compiled
    yet, and where another back end compiles it.
    """
    backends = _backends(made)
    if not backends:
        return None
    model = getattr(made, "_orig_mod", made)
    name = type(model).__name__ if isinstance(model, nn.Module) else getattr(model, "__name__", "a function")
    ours = [each for each in backends if _is_ours(each)]
    if not ours:
        other = getattr(backends[0], "compiler_name", type(backends[0]).__name__)
        raise UsageError(f"This {name} is compiled by backend {other!r}, of which there is no report.")
    noted = (each for backend in ours for each in _of(backend, model))
    found = {each.number: each for each in noted if each.there() is not None and not each.partition.replaced}
    graphs = [found[number] for number in sorted(found)]
    if not graphs:
        raise UsageError(
            f"This {name} has not run yet, or Dynamo compiles nothing of it, as where a loop breaks the graph, or took "
            "what it had compiled for another model with the same options; ask after the first step."
        )
    asked = graphs[0].partition.asked
    return CompiledReport(
        model=name,
        budget="" if asked.budget is None else str(asked.budget),
        optimizer=asked.optimizer,
        reserve=asked.reserve,
        loss=asked.loss,
        exact=asked.exact,
        graphs=tuple(each.told() for each in graphs),
    )


def _backends(made: Any) -> list[Any]:
    """The back end of what was compiled, else those of its parts."""
    if (backend := backend_of(made)) is not None:
        return [backend]
    parts_of = made.modules() if isinstance(made, nn.Module) else ()
    return [backend for each in parts_of if (backend := backend_of(each)) is not None]


def _is_ours(backend: Any) -> bool:
    return getattr(getattr(backend, "compiler_fn", None), "__module__", "") == "memrewrite.backends.entry"


def _of(backend: Any, model: Any) -> list[Noted]:
    """The graphs of a back end, and those of equal ones that are of parts of the same model."""
    modules = {id(each) for each in model.modules()} if isinstance(model, nn.Module) else set()
    found: list[Noted] = list(vars(backend).get(_KEY, ()))
    for other in (each() for each in _BACKENDS):
        if other is not None and other is not backend and other == backend:
            found += [each for each in vars(other)[_KEY] if id(each.module()) in modules]
    return found
