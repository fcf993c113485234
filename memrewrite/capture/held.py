"""Tensors that forward leaves in attributes of modules, where others find them after the call.

    self.scores = scores.detach()       # to be looked at
    self.penalty = self.balance(gates)  # for the loss to add

While it is captured forward returns them beside its result, so that a graph has them; the program sets them as each
call ends. One that forward reads before it sets it carries something from call to call, which no graph does.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from memrewrite.runtime.guards import Reads
from memrewrite.state.attributes import Attributes
from memrewrite.torch_internals.pytrees import tree_leaves

Held = tuple[str, str]
"""The path of a module and the name of an attribute."""
_GONE = object()
_NESTS = (Tensor, tuple, list, dict)  # what a program can be written to give


def held(module: nn.Module, before: Attributes, reads: Reads) -> tuple[Held, ...]:
    """Of what a forward has changed since ``before``, the attributes that it set to tensors and had not read."""
    read = {(holder, name) for names, holders in reads for name in names for holder in holders}
    owners, found = dict(module.named_modules()), []
    for path, value in before.changed():
        owner, _, name = path.rpartition(".")
        own = owner in owners and vars(owners[owner]).get(name, _GONE) is value
        if own and (owner, name) not in read and _consists_of_tensors(value):
            found.append((owner, name))
    return tuple(found)


def _consists_of_tensors(value: Any) -> bool:
    leaves = tree_leaves(value) if isinstance(value, _NESTS) else []
    return bool(leaves) and all(isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter) for leaf in leaves)


@contextmanager
def returning(model: nn.Module, attributes: Sequence[Held]) -> Iterator[None]:
    """Meanwhile forward returns a pair, its result and what it left in ``attributes``, which stay as they were."""
    if not attributes:
        yield
        return
    own, original = vars(model).get("forward"), model.forward
    owners = [(model.get_submodule(path), name) for path, name in attributes]

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        before = [getattr(owner, name, _GONE) for owner, name in owners]
        result = original(*args, **kwargs)
        left = tuple(getattr(owner, name) for owner, name in owners)
        for (owner, name), value in zip(owners, before, strict=True):
            if value is _GONE:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
        return result, left

    vars(model)["forward"] = forward
    try:
        yield
    finally:
        del vars(model)["forward"]
        if own is not None:
            vars(model)["forward"] = own
