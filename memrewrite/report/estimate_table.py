"""What a step takes as text for a terminal of 80 columns.

Names of modules come from foreign code, so they are printed without markup and without control characters.
"""

from collections.abc import Iterable, Iterator

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from memrewrite.records.estimate import Estimate, Largest, ModuleShare
from memrewrite.records.options import format_bytes, short_bytes
from memrewrite.report.option_table import option_table
from memrewrite.report.printed import printed
from memrewrite.report.tables import habit_costs
from memrewrite.report.text import plain

_TOP = 10  # modules, where no depth is asked for
_SMALL = 0.001  # of the peak; smaller differences share a line
_WHOLE = "(the model itself)"


def show(estimate: Estimate, console: Console, *, depth: int | None = None) -> None:
    """Print the estimate: with ``depth`` the tree of modules so many levels deep, else those that keep most."""
    console.print(Group(*_parts(estimate, depth)), markup=False, highlight=False, emoji=False)


def text(estimate: Estimate) -> str:
    """The same, as text."""
    return printed(_parts(estimate, None))


def _parts(estimate: Estimate, depth: int | None) -> Iterator[RenderableType]:
    batch = f", batch {estimate.batch_size}" if estimate.batch_size else ""
    mesh = f", each process of {estimate.mesh}" if estimate.mesh else ""
    yield Text(plain(f"{estimate.model}: {estimate.mode} step on {estimate.device}{batch}{mesh}"), style="bold")
    yield Text(plain(f"Predicted peak: {format_bytes(estimate.peak.bytes)}, {_place(estimate)}"))
    yield _categories(estimate)
    yield from habit_costs(estimate.habits, estimate.loop)
    if estimate.device == "cuda":
        yield Text(f"Reserved by the caching allocator: {format_bytes(estimate.peak.reserved)}")
    if estimate.mode == "train" and estimate.inference_peak is not None:
        yield Text(f"Inference with the same inputs, under no_grad: {format_bytes(estimate.inference_peak)}")
    yield Text()
    yield from _modules(estimate, depth)
    yield Text()
    yield from _textbook(estimate)
    if estimate.device_memory is not None:
        yield Text()
        yield from _memory(estimate, estimate.device_memory)
    for note in estimate.notes:
        yield Text(plain(f"Note: {note}"))


def _place(estimate: Estimate) -> str:
    """Where the peak is, in words."""
    peak = estimate.peak
    where = {None: "outside of the model", "": "in the model's own forward"}.get(peak.module, f"at {peak.module}")
    return f"in {peak.phase} {where}" + (f" ({peak.operator})" if peak.operator else "")


def _categories(estimate: Estimate) -> Table:
    table = _table("at the peak", "bytes", "share")
    for name, size in sorted(estimate.peak.categories.items(), key=lambda item: -item[1]):
        table.add_row(name, format_bytes(size), f"{100 * size / estimate.peak.bytes:.1f} %")
    return table


def _modules(estimate: Estimate, depth: int | None) -> Iterator[RenderableType]:
    train = estimate.mode == "train"
    tree = depth is not None
    whole = f"batch {estimate.batch_size}" if estimate.batch_size else "in all"
    title = ("keeps for backward", "a sample") if train else ("uses at the peak",)
    table = _table(*title, whole, "parameters")
    chosen = _tree(estimate.modules, depth or 0) if tree else _most(estimate.modules, train)
    for name, share in chosen:
        alone = share.kept if tree else share.kept_alone
        one = "" if share.kept_per_sample is None else short_bytes(share.kept_per_sample)
        figures = (one, short_bytes(alone)) if train else (short_bytes(share.at_peak),)
        table.add_row(Text(plain(name)), *figures, short_bytes(share.parameters))
    yield table


def _most(modules: Iterable[ModuleShare], train: bool) -> Iterator[tuple[str, ModuleShare]]:
    """The modules that keep most themselves (in inference, that use most), without those that keep nothing."""
    sizes = [(share.kept_alone if train else share.at_peak, share) for share in modules if train or share.path]
    for size, share in sorted(sizes, key=lambda item: -item[0])[:_TOP]:
        if size:
            yield f"{share.path or _WHOLE} ({share.kind})", share


def _tree(modules: Iterable[ModuleShare], depth: int) -> Iterator[tuple[str, ModuleShare]]:
    for share in modules:
        level = share.path.count(".") + 1 if share.path else 0
        if level <= depth:
            name = share.path.rpartition(".")[2] or _WHOLE
            yield f"{'  ' * level}{name} ({share.kind})", share


def _textbook(estimate: Estimate) -> Iterator[RenderableType]:
    rule = estimate.textbook
    errors = f" x {rule.errors}" if rule.errors > 1 else ""
    copies = f" x {rule.copies}" if rule.copies > 1 else ""
    terms = (
        f"{rule.parameters:,} parameters{copies} + ({_number(rule.activations)} activations{errors} + "
        f"{_number(rule.inputs)} inputs) x {rule.batch_size}, 4 bytes each"
    )
    yield Text(f"Textbook: {terms}: {rule.as_written:.2f} MB of 2^20 bytes by hand")
    table = _table("bytes", "from the textbook to the prediction", right=(0,))
    table.add_row(short_bytes(rule.bytes), "textbook")
    small = 0
    for difference in estimate.differences:
        if abs(difference.bytes) < estimate.peak.bytes * _SMALL:
            small += difference.bytes
        else:
            table.add_row(_signed(difference.bytes), Text(plain(difference.why)))
    if small:
        table.add_row(_signed(small), "all else: granules of 512 bytes, and what is small")
    table.add_row(short_bytes(estimate.peak.bytes), "predicted peak")
    yield table


def _signed(count: int) -> str:
    return f"{'-' if count < 0 else '+'}{short_bytes(abs(count))}"


def _memory(estimate: Estimate, memory: int) -> Iterator[RenderableType]:
    over = estimate.peak.bytes - memory
    if estimate.fits:
        yield Text(f"Device memory {format_bytes(memory)}: fits, {format_bytes(-over)} to spare", style="green")
    else:
        yield Text(f"Device memory {format_bytes(memory)}: does not fit, over by {format_bytes(over)}", style="red")
    for size in estimate.largest:
        yield Text(f"Largest batch, {size.mode}: {_largest(size)}")
    if estimate.options:
        yield Text()
        yield option_table(estimate.options)


def _largest(size: Largest) -> str:
    looked = ", ".join(str(batch) for batch, _ in size.simulated)
    looked = f" (simulated: {looked})" if looked else ""
    if size.peak is None:
        return f"{size.why}{looked}"
    return f"{size.batch_size}, {format_bytes(size.peak)}{looked}"


def _number(count: float) -> str:
    return f"{count:,.0f}" if count == int(count) else f"{count:,.1f}"


def _table(*columns: str, right: tuple[int, ...] | None = None) -> Table:
    """A table of a name and figures, or with the columns named in ``right`` set to the right."""
    table = Table(box=None, pad_edge=False, show_edge=False)
    for index, column in enumerate(columns):
        figures = index > 0 if right is None else index in right
        table.add_column(column, justify="right" if figures else "left", overflow="fold", no_wrap=figures)
    return table
