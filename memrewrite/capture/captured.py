"""The data of a capture: a graph over the model's own parameters, and what a call must look like to run it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx

from memrewrite.records.graph_calls import LazyCall
from memrewrite.records.ranges import Range
from memrewrite.runtime.dropin import Returns
from memrewrite.runtime.guards import Reads
from memrewrite.torch_internals.pytrees import TreeSpec, tree_unflatten

IN_CONDITIONS = frozenset({"max", "min", "math", "float"})
"""The names in conditions that are none of sizes."""


Assigned = tuple[str, str, str]
"""The path of a module, the name of an attribute, and an expression over named sizes and numbers that it is set to."""


@dataclass(frozen=True)
class TensorSpec:
    """What a tensor input must be. ``shape`` holds ints for fixed sizes and names for sizes that may vary (``"s0"``).

    The same name in two places means the same size; a named size was captured for values of at least 2.
    """

    dtype: torch.dtype
    device_type: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class NumberSpec:
    """A number that may vary: one of the example's type, in conditions and as a placeholder by this name.

    Where the name is that of a size, the number has to be that size.
    """

    name: str
    example: float


@dataclass(frozen=True)
class InputSpec:
    """What a call must look like.

    ``parameters`` are the names in the signature of ``forward`` that the example call filled, in order, and of what it
    gave beside these; ``tree`` is the structure of their values; ``leaves`` has one entry per leaf: a TensorSpec
    (each is one placeholder of the graph, in this order), a NumberSpec (a placeholder after those) or the constant that
    was captured.
    ``conditions`` are Python expressions over the named sizes (``"(s0 % 2) == 0"``): what the path through forward
    that was captured takes for granted. ``example`` has those sizes as they were. ``shared`` are the pairs of leaves
    that have to be one tensor, where forward asks for that, else None. ``ranges`` are those of named sizes that were
    asked for.
    """

    parameters: tuple[str, ...]
    tree: TreeSpec
    leaves: tuple[Any, ...]
    conditions: tuple[str, ...] = ()
    example: tuple[tuple[str, int], ...] = ()
    shared: tuple[tuple[int, int], ...] | None = None
    ranges: tuple[tuple[str, Range], ...] = ()

    @property
    def numbers(self) -> tuple[NumberSpec, ...]:
        """Those that may vary, in the order of their placeholders."""
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, NumberSpec))

    @property
    def asked(self) -> tuple[Range, ...]:
        """The ranges that the user named."""
        return tuple(each for _, each in self.ranges if not each.implied)

    @property
    def bounds(self) -> dict[str, tuple[str, int, int]]:
        """What each size with a range is, and from where to where it varies: where it has several, the narrowest."""
        ordered = sorted(self.ranges, key=lambda pair: (pair[1].least, not pair[1].implied))
        return {size: (each.words, max(2, each.least), each.most) for size, each in ordered}


@dataclass(frozen=True)
class Captured:
    """A captured model.

    ``graph_module`` shares every Parameter and buffer with the model. Its graph has placeholders (inputs),
    ``get_attr`` nodes (dotted paths into the model, or ``constants``), ``call_function`` / ``call_method`` nodes and
    one output whose argument is the flat tuple of outputs in the order of ``output_tree``; ``origin`` says where a node
    comes from. ``constants`` are tensors the model made from Python values while it was traced. ``training`` maps each
    submodule path to its training flag at capture, ``differentiable`` says whether calls may record for backward;
    ``dtype`` is that of the model's first parameter, None if it has none. ``exact`` is False where the model, on some
    values, takes a way of its own to the same result and the graph the way that fits any values, so that their bits may
    differ; those may be of the example, or of other calls and smaller sizes alone. ``checkpoints`` says that forward
    calls ``torch.utils.checkpoint``, which the graph does not. ``autocast`` is "any", or where the model does something
    else with autocast than without, what it was captured under: the type, None for without. ``reads`` are the
    attributes of modules that forward reads, ``looks`` the same as expressions. ``gradients`` are None, or where the
    model does something else when other tensors need gradients, those of ``gradients_now`` at capture; ``layouts``
    likewise are those of ``layouts_now`` where it asks how tensors lie in memory. ``returns`` is "loss" where the
    program returns that alone, "lazy" where it makes outputs when they are read: ``lazy`` says how by their numbers, of
    the value that is in their place. With ``loss_in_rows`` the loss is made of such outputs, by cross-entropy some rows
    of them at a time, and in the place of each is a tuple of its value and weights. ``divided`` is the name of a
    parameter of which this process has a part alone, "" if it has all. ``tied`` are names, several to a tensor of the
    model, of those that the graph reads by one of them. ``assigned`` is what forward sets attributes to, ``held`` the
    attributes that it leaves tensors in: then ``output_tree`` is of a pair, what the model returns and what these get.
    ``types`` says that it asks for the types of tensors.
    """

    graph_module: fx.GraphModule
    inputs: InputSpec
    output_tree: TreeSpec
    constants: dict[str, torch.Tensor]
    training: dict[str, bool]
    differentiable: bool
    front_end: str
    dtype: torch.dtype | None = None
    notes: tuple[str, ...] = ()
    exact: bool = True
    checkpoints: bool = False
    autocast: torch.dtype | Literal["any"] | None = "any"
    reads: Reads = ()
    looks: tuple[str, ...] = ()
    gradients: tuple[bool, ...] | None = None
    layouts: tuple[tuple[int, ...], ...] | None = None
    returns: Returns = "all"
    lazy: Mapping[int, LazyCall] = field(default_factory=dict)
    loss_in_rows: bool = False
    divided: str = ""
    tied: tuple[tuple[str, ...], ...] = ()
    assigned: tuple[Assigned, ...] = ()
    held: tuple[tuple[str, str], ...] = ()
    types: bool = False

    @property
    def results(self) -> int:
        """How many outputs, the first ones, are what the model returns."""
        return self.output_tree.children()[0].num_leaves if self.held else self.output_tree.num_leaves

    def restored(self, leaves: Sequence[Any]) -> Any:
        """What the model returns, of what the graph does; outputs that only others than the loss read are not made."""
        made = dict(enumerate(leaves))
        for number, call in (self.lazy if self.loss_in_rows else {}).items():
            made[number] = call.output(*made[number])
        return self.returned([*made.values()])

    def returned(self, leaves: Sequence[Any]) -> Any:
        """What the model returns, where these are the outputs."""
        whole = tree_unflatten([*leaves], self.output_tree)
        return whole[0] if self.held else whole
