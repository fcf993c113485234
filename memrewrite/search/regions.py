"""Regions: where a model cannot be captured whole, the largest submodules that can be. Python between them stays.

One real forward, without gradients where it can, shows what each submodule is called with. From the top down, each is
captured with inputs of that kind; where that fails, its children are tried. A submodule that is called more than once
in a step is left alone, because its calls may differ in what they need, and so is one that the model runs under a
checkpoint of its own.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from types import MappingProxyType
from typing import Any

from torch import nn

from memrewrite.capture import Captured, KeptCalls, TensorSpec
from memrewrite.capture.normal import bind, example_of, is_below
from memrewrite.capture.origin import origin, set_origin
from memrewrite.capture.shared import note_read_elsewhere
from memrewrite.capture.varying import length_left
from memrewrite.process.garbage import sought_seldom
from memrewrite.records.errors import CaptureError, FixedSizeError, UnfitCallError
from memrewrite.records.mesh import Fsdp
from memrewrite.records.ranges import Range
from memrewrite.search.calls import Call, record
from memrewrite.search.captured import captured_for
from memrewrite.search.forward_runs import watched
from memrewrite.search.kept import (
    Refusal,
    beside,
    fused,
    hooked,
    hooked_around,
    innermost,
    is_leaf,
    once_of_a_class,
    other_calls,
    told,
)
from memrewrite.torch_internals.pytrees import tree_leaves
from memrewrite.workload.gathered import as_gathered, cast_inputs, without_casts
from memrewrite.workload.step import Inputs, Step


@dataclass(frozen=True)
class Region:
    """A captured submodule at ``path`` ("" for the whole model); ``inputs`` makes inputs like those of its call.

    ``prefix`` is put before the names of its generated functions, so that one file can hold those of several regions.
    """

    path: str
    module: nn.Module
    captured: Captured
    inputs: Callable[[], Inputs]
    prefix: str = ""

    @property
    def example(self) -> list[Any]:
        """Tensors and numbers like those of the graph's placeholders, in order."""
        return example_of(self.captured, self.module, self.inputs())


@dataclass(frozen=True)
class Regions:
    """The regions in the order they run, what is told of them, a sentence each, and why what is ``left`` by path is.

    Those of them that ``failed`` are what no graph could hold.
    """

    found: tuple[Region, ...]
    notes: tuple[str, ...] = ()
    left: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


@sought_seldom()
def find(
    model: nn.Module,
    inputs: Inputs,
    step: Step,
    names: Sequence[str] | None = None,
    ranges: Sequence[Range] = (),
) -> Regions:
    """The whole model as one region, else its largest submodules; ``names`` are patterns of paths to use instead.

    With ``ranges``, which are of the model's own inputs, it is the whole model.
    Raises ``CaptureError`` when nothing can be captured, or not what ``names`` asks for.
    """
    regions = _found(model, inputs, step, names, ranges)
    for region in regions.found:
        note_read_elsewhere(region.captured.graph_module.graph, region.path, model)
    return regions


def _found(
    model: nn.Module, inputs: Inputs, step: Step, names: Sequence[str] | None, ranges: Sequence[Range]
) -> Regions:
    if names is not None:
        named = _named(model, inputs, step, names)
        return _around(model, inputs, step, named) if isinstance(step.mesh, Fsdp) else named
    odd = beside(hooked(model), fused(model, step.amp))
    try:
        return _whole(model, inputs, step, odd, ranges)
    except CaptureError as refusal:
        calls = record(model, inputs, step)
        refused = once_of_a_class(partial(_refusal, calls, step))
        tried = innermost(model, {"": str(refusal)}, (), refused)  # before what takes long where blocks repeat
        with suppress(CaptureError):  # which says the same as the first
            if tried:
                return _whole(model, inputs, step, {**odd, **tried}, ranges)
        regions = _largest(model, calls, step, str(refusal))
        failing, found = {**regions.failed, "": ""}, [region.path for region in regions.found]
        more = innermost(model, failing, found, refused)
        with suppress(CaptureError):
            if more and more.keys() != tried.keys():
                return _whole(model, inputs, step, {**odd, **more}, ranges)
        if around := hooked_around(model, found):
            with suppress(CaptureError):
                return _whole(model, inputs, step, {**odd, **around}, ranges)
        regions = _larger(model, calls, step, regions, refused)
        with suppress(CaptureError):
            if ranges or regions.found:
                between = _between(model, inputs, step, odd, regions, ranges)
                if ranges or not (_fixes_a_length(between, inputs) and _take_others(regions, calls)):
                    return between
        if ranges or not regions.found:
            raise
        return regions


def _around(model: nn.Module, inputs: Inputs, step: Step, units: Regions) -> Regions:
    """The model itself as a region, too, in which its ``units`` stay calls, as their hooks have to be called."""
    running = as_gathered(model, step.mesh)
    calls = beside(hooked(model), dict.fromkeys((region.path for region in units.found), "It is a unit."))
    bare = running if running is model else without_casts(running)
    try:
        (whole,) = _whole(bare, cast_inputs(inputs, step.mesh), step, calls, ()).found
    except CaptureError as error:
        told = f"What the model runs beside its units stays as it is: {error}"
        return replace(units, notes=(*units.notes, told), left={"": str(error)})
    root = replace(whole, module=model)
    return Regions((root, *units.found), (*units.notes, *whole.captured.notes))


def _between(
    model: nn.Module, inputs: Inputs, step: Step, odd: Mapping[str, str], parts: Regions, ranges: Sequence[Range]
) -> Regions:
    """The model itself as a region, too, in which what failed stays calls, with the other regions in it.

    With ``ranges``, which these would not know, it is the only one.
    """
    failed = {
        path: why
        for path, why in parts.failed.items()
        if not any(other != path and is_below(other, path) for other in parts.failed)
    }
    calls = beside(odd, failed)
    root = _whole(model, inputs, step, calls, ranges)
    if ranges:
        return root
    inside = tuple(region for region in parts.found if any(is_below(region.path, path) for path in calls))
    left = {path: why for path, why in parts.left.items() if any(is_below(path, above) for above in calls)}
    return Regions((*root.found, *inside), (*root.notes, *_told(inside)), left, parts.failed)


def _fixes_a_length(between: Regions, inputs: Inputs) -> bool:
    """Whether the model itself, as a region, takes texts of one length."""
    (root,) = (region for region in between.found if not region.path)
    return bool(length_left(root.captured, root.module, inputs))


def _take_others(parts: Regions, calls: Mapping[nn.Module, Sequence[Call]]) -> bool:
    """Whether all regions take what they are given in a step with other sizes."""
    return all(_takes(region, calls[region.module][0].elsewhere) for region in parts.found)


def _takes(region: Region, elsewhere: Inputs | None) -> bool:
    if elsewhere is None:
        return False
    _, order = bind(region.module, region.inputs())
    given = tree_leaves((elsewhere.args, elsewhere.kwargs))
    pairs = [(spec, given[position]) for spec, position in zip(region.captured.inputs.leaves, order, strict=True)]
    shapes = [(spec.shape, other.shape) for spec, other in pairs if isinstance(spec, TensorSpec)]
    return all(isinstance(a, str) or a == b for spec, other in shapes for a, b in zip(spec, other, strict=True))


def _whole(model: nn.Module, inputs: Inputs, step: Step, odd: Mapping[str, str], ranges: Sequence[Range]) -> Regions:
    """The whole model as one region in which ``odd`` submodules stay calls, for a reason; raises ``CaptureError``.

    Those that fix a size with a range, in a loop over it, say, stay calls, too. Where the graph is to have ranges and
    can have no such call, what that is inside of is one.
    """
    try:
        kept: Mapping[str, KeptCalls] = watched(model, inputs, step, [*odd], ranges) if odd else {}
        odd = {path: why for path, why in odd.items() if kept[path].calls}
        captured = captured_for(model, inputs, step, kept, ranges)
    except (FixedSizeError, UnfitCallError) as refusal:
        calls = other_calls(model, refusal, odd)
        if not ranges or calls.keys() == odd.keys():
            raise
        try:
            return _whole(model, inputs, step, calls, ranges)
        except CaptureError as further:
            raise refusal from further
    left = "" if ranges else length_left(captured, model, inputs)
    notes = (*told(model, odd), *captured.notes, *([left] if left else []))
    return Regions((Region("", model, captured, lambda: inputs),), notes)


def _refusal(calls: Mapping[nn.Module, Sequence[Call]], step: Step, path: str, module: nn.Module) -> str | None:
    """Why a submodule cannot be captured, "" if it can, None for one that is not called."""
    if not calls[module]:
        return None
    try:
        _region(path, module, calls[module][0], step)
    except CaptureError as error:
        return str(error)
    return ""


def _named(model: nn.Module, inputs: Inputs, step: Step, names: Sequence[str]) -> Regions:
    running = as_gathered(model, step.mesh)
    calls = record(running, inputs, step)
    wanted = [p for p, _ in model.named_modules() if p and any(fnmatchcase(p, name) for name in names)]
    if not wanted:
        raise CaptureError(f"{type(model).__name__} has no submodule that {', '.join(names)} names.")
    found: list[Region] = []
    for path in wanted:
        if any(is_below(path, region.path) for region in found):
            continue
        module = running.get_submodule(path)
        if len(calls[module]) != 1:
            raise CaptureError(f"{path} is called {len(calls[module])} times in a step; a region is called once.")
        if reason := calls[module][0].unfit:
            raise CaptureError(f"{path} cannot be a region: {reason}.")
        bare = module if running is model else without_casts(module)
        inside = _inside(wanted, path) if isinstance(step.mesh, Fsdp) else {}
        region = _region(path, bare, calls[module][0], step, inside)
        found.append(replace(region, module=model.get_submodule(path)))
        calls[found[-1].module] = calls[module]
    return Regions(_ordered(found, calls), _told(found), {"": "Other regions were asked for."})


def _largest(model: nn.Module, calls: dict[nn.Module, list[Call]], step: Step, refusal: str) -> Regions:
    found: list[Region] = []
    left, failed = {"": refusal}, {}
    for path, module in _candidates(model, lambda path: any(is_below(path, region.path) for region in found)):
        if not calls[module]:
            continue
        if reason := _unfit(calls[module]):
            if not any(path.startswith(f"{above}.") and left[above] == reason for above in left):
                left[path] = reason
            continue
        try:
            found.append(_region(path, module, calls[module][0], step))
        except CaptureError as error:
            left[path] = failed[path] = str(error)
    return _of_parts(found, left, failed, calls)


def _larger(
    model: nn.Module, calls: dict[nn.Module, list[Call]], step: Step, parts: Regions, refused: Refusal
) -> Regions:
    """The regions with what failed only for submodules inside of it, the largest first, in which those stay calls."""
    found, left, failed = [*parts.found], {**parts.left}, {**parts.failed}
    for path, module in ((path, model.get_submodule(path)) for path in parts.failed):
        below = {other: why for other, why in failed.items() if is_below(other, path)}
        inside = innermost(model, below, [region.path for region in found], refused)
        if not inside or any(is_below(path, other) for other in (*inside, *(region.path for region in found))):
            continue
        with suppress(CaptureError):
            odd = {name.removeprefix(f"{path}."): why for name, why in inside.items()}
            region = _region(path, module, calls[module][0], step, odd=odd)
            found = [each for each in found if not is_below(each.path, path)] + [region]
            left, failed = ({p: why for p, why in of.items() if not is_below(p, path)} for of in (left, failed))
    return _of_parts(found, left, failed, calls) if failed != parts.failed else parts


def _of_parts(
    found: Sequence[Region], left: dict[str, str], failed: dict[str, str], calls: dict[nn.Module, list[Call]]
) -> Regions:
    alone = [(path, why) for path, why in left.items() if path and path not in failed]
    notes = [f"Rewritten by regions, because: {left['']}"]
    notes += [f"{those} {verb} left alone: {reason}." for those, verb, reason in _alike(alone)]
    notes += [f"{those} {verb} not captured whole: {reason}" for those, verb, reason in _alike(failed.items())]
    return Regions(_ordered(found, calls), (*notes, *_told(found)), left, failed)


def _alike(said: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str, str]]:
    """For each that is said of paths, once: the first of these and how many more, and the verb for them."""
    paths: dict[str, list[str]] = defaultdict(list)
    for path, each in said:
        paths[each].append(path)
    for each, (first, *more) in paths.items():
        yield (f"{first} and {len(more)} more", "are", each) if more else (first, "is", each)


def _unfit(calls: list[Call]) -> str:
    """Why a submodule that is called like this can be no region, "" if it can."""
    return f"it is called {len(calls)} times in a step" if len(calls) > 1 else calls[0].unfit


def _told(found: Sequence[Region]) -> tuple[str, ...]:
    notes = ((region.path, note) for region in found for note in region.captured.notes)
    return tuple(f"{those}: {note}" for those, _, note in _alike(notes))


def _candidates(model: nn.Module, inside: Callable[[str], bool]) -> Iterator[tuple[str, nn.Module]]:
    """Submodules that have submodules, parents first, but none that lies inside a region."""
    for path, module in model.named_modules():
        if path and not is_leaf(module) and not inside(path):
            yield path, module


def _ordered(found: Sequence[Region], calls: dict[nn.Module, list[Call]]) -> tuple[Region, ...]:
    ordered = sorted(found, key=lambda region: calls[region.module][0].number)
    return tuple(replace(region, prefix=f"part_{i}_") for i, region in enumerate(ordered))


def _inside(units: Sequence[str], path: str) -> dict[str, str]:
    """The outermost units inside of another one, whose hooks gather what they have, by their paths from there."""
    found: dict[str, str] = {}
    for unit in units:
        name = unit.removeprefix(f"{path}.")
        if name != unit and not any(is_below(name, above) for above in found):
            found[name] = "It is a unit."
    return found


def _region(
    path: str,
    module: nn.Module,
    call: Call,
    step: Step,
    units: Mapping[str, str] = MappingProxyType({}),
    odd: Mapping[str, str] = MappingProxyType({}),
) -> Region:
    """Capture a submodule on inputs like those it is called with.

    What is ``odd`` inside stays calls, and so do ``units``, which run once.
    """
    grad = step.mode == "train"
    inputs = call.inputs(grad)
    calls = beside(hooked_around(module, ()), units) if isinstance(step.mesh, Fsdp) else odd
    kept = watched(module, inputs, step, [*calls], ()) if calls else {}
    captured = captured_for(module, inputs, step, kept, elsewhere=call.elsewhere, once=units)
    if not step.divides_layers:
        captured = replace(captured, notes=(*told(module, calls), *captured.notes))
    for node in captured.graph_module.graph.nodes:
        set_origin(node, origin(node).below(path))
    return Region(path, module, captured, lambda: call.inputs(grad))
