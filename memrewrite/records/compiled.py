"""The record of what the back end of ``torch.compile`` did, graph by graph."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from memrewrite.records.options import short_bytes

SCHEMA_VERSION = 1
CHOICES = {
    "usual": "what PyTorch keeps fits",
    "cheapest": "the cheapest plan found that fits",
    "lowest": "the lowest peak found",
    "first step": "leaves most to other graphs, until a first step shows what they take",
    "no budget": "left to PyTorch: no budget was given",
    "not ours": "left to PyTorch: its backward draws random numbers again, or takes what is no tensor",
    "no backward": "has no backward",
    "no gradients": "is for calls without gradients, which no budget is for",
    "from cache": "from Inductor's caches, which do not tell what was chosen when it was made",
}
"""How a graph was divided into forward and backward, in words."""


@dataclass(frozen=True)
class CompiledGraph:
    """What was done with one graph of Dynamo's; all sizes are bytes.

    ``choice`` is one of ``CHOICES``. ``resident`` is what lives besides what the graph makes, by kind. ``peak`` is the
    peak of the step while the graph runs or the optimizer does, read off the compiled code before that runs, or, for
    the reason in ``unseen``, as it was foreseen; ``peak_before`` is foreseen of the graph as PyTorch divides it.
    ``measured`` is the most that one of the first steps took on a GPU from one call of it to the next, as the allocator
    counts, without what is no part of the model.
    ``kept`` is handed from forward to backward (``kept_before`` by PyTorch), by operator in ``kept_by``. ``reruns`` has
    how many nodes of each operator run again, in ``regions`` parts of forward, which takes ``rerun_ms``. What follows
    ``resident`` is None or empty where nothing is known of it. ``verified`` says how the first call was compared, ""
    where it was not.
    """

    name: str
    choice: str
    resident: dict[str, int]
    peak: int | None = None
    peak_before: int | None = None
    measured: int | None = None
    kept: int | None = None
    kept_before: int | None = None
    kept_by: dict[str, int] = field(default_factory=dict)
    reruns: dict[str, int] = field(default_factory=dict)
    regions: int = 0
    rerun_ms: float = 0.0
    unseen: str = ""
    verified: str = ""


@dataclass(frozen=True)
class CompiledReport:
    """What ``torch.compile(model, backend="memrewrite")`` has made so far; ``str()`` of it is for people.

    ``budget`` is as it was asked for, "" without one. ``reserve`` and ``loss`` are the bytes that are left for what
    lives outside of graphs, all the time and between forward and backward. ``graphs`` come in the order they were
    compiled in: several where a graph breaks, and where lengths or other things differed so that Dynamo compiled again.
    """

    model: str
    budget: str
    optimizer: str
    reserve: int
    loss: int
    exact: bool
    graphs: tuple[CompiledGraph, ...]

    @property
    def peak(self) -> int | None:
        """The foreseen peak of the step in bytes, over all graphs with gradients; None where one with a backward is not
        foreseen."""
        of_step = [graph for graph in self.graphs if graph.choice != "no gradients"]
        known = [graph.peak for graph in of_step if graph.peak is not None]
        unknown = any(graph.peak is None and graph.choice != "no backward" for graph in of_step)
        return None if unknown else max(known, default=None)

    @property
    def measured(self) -> int | None:
        """The most that one of the first steps took on a GPU, in bytes; None where the allocator does not tell."""
        return max((graph.measured for graph in self.graphs if graph.measured is not None), default=None)

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``; carries ``schema_version``."""
        return {"schema_version": SCHEMA_VERSION, **asdict(self), "peak": self.peak, "measured": self.measured}

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def _lines(report: CompiledReport) -> Iterator[str]:
    asked = f"budget {report.budget}" if report.budget else "no budget"
    for size, what in ((report.loss, "for the loss"), (report.reserve, "in reserve")):
        asked += f", {short_bytes(size)} {what}" if size else ""
    known = f"foreseen peak {short_bytes(report.peak)}" if report.peak is not None else "peak not foreseen"
    if report.measured is not None:
        known += f", measured {short_bytes(report.measured)}"
    yield f"{report.model} by torch.compile: {asked}, optimizer {report.optimizer}, {known}"
    for number, graph in enumerate(report.graphs, 1):
        yield f"graph {number}, {graph.name}: {CHOICES[graph.choice]}"
        if graph.verified:
            yield f"  verified     {graph.verified}"
        if graph.resident:
            yield f"  resident     {_sizes(graph.resident)}"
        if graph.peak is not None:
            own = None if graph.choice == "usual" else graph.peak_before
            yield f"  peak         {_than(graph.peak, own, '' if graph.unseen else ' foreseen')}"
        if graph.unseen:
            yield f"               by the plan alone; of the compiled code it is not known: {graph.unseen}"
        if graph.kept is None:
            continue
        yield f"  kept         {_than(graph.kept, graph.kept_before)}: {_sizes(graph.kept_by) or 'nothing'}"
        if graph.reruns:
            yield f"  runs again   {_times(graph.reruns)}; {graph.regions} regions, {graph.rerun_ms:.2f} ms"


def _than(now: int, before: int | None, known: str = "") -> str:
    """A size, and what it is as PyTorch has it where that is another, and how that is known."""
    return short_bytes(now) + (f" (PyTorch {short_bytes(before)}{known})" if before not in (None, now) else "")


def _sizes(sizes: dict[str, int]) -> str:
    return ", ".join(f"{name} {short_bytes(size)}" for name, size in sizes.items())


def _times(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())
