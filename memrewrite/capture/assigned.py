"""What forward sets attributes to: plain values, also those that follow from sizes and numbers that it is given.

    self.height, self.width = x.shape[-2:]     # which another method reads later

No graph holds that. The program sets them as each call ends; those that forward reads before it sets them decide what
it does, and are looked at in each call instead.
"""

import ast
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from memrewrite.capture.captured import IN_CONDITIONS, Assigned, Captured
from memrewrite.capture.expressions import is_literal, literal
from memrewrite.records.errors import CaptureError
from memrewrite.runtime.differences import joined
from memrewrite.runtime.guards import Reads
from memrewrite.runtime.recorders import INSTALLED
from memrewrite.state.attributes import Attributes
from memrewrite.torch_internals.pytrees import tree_leaves
from memrewrite.torch_internals.tracing import follows_from_sizes, size_text


@dataclass
class Assignments:
    """The paths of attributes that ``model`` set while it was traced, and what to."""

    model: nn.Module
    found: Sequence[tuple[str, Any]] = ()

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note what its forward sets meanwhile, and put that back."""
        before = Attributes(self.model)

        def note(*call: Any) -> None:
            self.found = [*before.changed()]

        hook = self.model.register_forward_hook(note)
        try:
            yield
        finally:
            hook.remove()
            before.restore()

    def added_to(self, captured: Captured) -> Captured:
        """A capture with those that are attributes of modules; of others that are set to sizes it has a note."""
        modules, sizes = {path for path, _ in self.model.named_modules()}, _sizes(captured)
        found, lost = [], []
        for path, value in self.found:
            owner, _, name = path.rpartition(".")
            if name == INSTALLED:  # which says that there are hooks
                continue
            text = _text(value) if owner in modules else ""
            if text and _names(text) <= {*sizes, *_KNOWN}:
                found.append((owner, name, text))
            elif any(map(follows_from_sizes, tree_leaves(value))):
                lost.append(_LOST.format(name=type(self.model).__name__, path=path))
        return replace(captured, assigned=tuple(found), notes=(*captured.notes, *lost))


def not_read(name: str, captured: Captured, reads: Reads) -> tuple[Assigned, ...]:
    """What forward sets without having read it before.

    Raises ``CaptureError`` where it reads first what then follows from its inputs: its first call decides for all.
    """
    read = {(holder, attribute) for names, holders in reads for attribute in names for holder in holders}
    for owner, attribute, text in captured.assigned:
        if (owner, attribute) in read and _names(text) & _sizes(captured):
            raise CaptureError(
                f"{name} sets self.{joined(owner, attribute)} from sizes where it was not set before, so that the "
                "first call decides for all; call the model first, or set it outside forward."
            )
    return tuple(each for each in captured.assigned if each[:2] not in read)


_LOST = "{name} sets self.{path} from sizes in forward, which the program does not; return that instead."
_KNOWN = {*IN_CONDITIONS, "torch", "tuple", "list"}


def _text(value: Any) -> str:
    """A value as an expression, "" where it has none."""
    if follows_from_sizes(value):
        return size_text(value)
    if isinstance(value, torch.Size) or type(value) in (tuple, list):
        parts = [*map(_text, value)]
        kind = "torch.Size" if isinstance(value, torch.Size) else type(value).__name__
        return f"{kind}(({''.join(f'{part}, ' for part in parts)}))" if all(parts) else ""
    return literal(value) if is_literal(value) else ""


def _sizes(captured: Captured) -> set[str]:
    return {*dict(captured.inputs.example), *(number.name for number in captured.inputs.numbers)}


def _names(text: str) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
