"""Triton's kernels on fake tensors: a launch stands for an operator that writes what the kernel would.

    kernel[grid](x, out, n, BLOCK=1024)      ->      memrewrite.launch([out], [x], [], -1)

A launch tells autograd nothing, and neither does the operator.
"""

from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from memrewrite.process.thread import apart
from memrewrite.records.errors import CaptureError
from memrewrite.records.tensor_like import TensorLike
from memrewrite.torch_internals.fake_tensors import is_fake
from memrewrite.torch_internals.pytrees import tensors_in, tree_map
from memrewrite.torch_internals.tracing import size_at, value_at
from memrewrite.torch_internals.triton_kernels import Arguments, Launch, Variant, written_by

_LIBRARY = torch.library.Library("memrewrite", "FRAGMENT")
_LIBRARY.define("launch(Tensor(a!)[] written, Tensor[] read, Scalar[] sizes, int number) -> ()")
_LIBRARY.impl("launch", torch.library.fallthrough_kernel, "Autograd")

# By kernel and arguments, what is written.
_WRITTEN: WeakKeyDictionary[Any, dict[Any, set[str]]] = WeakKeyDictionary()


@torch.library.register_fake("memrewrite::launch", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _on_fakes(written: list[Tensor], read: list[Tensor], sizes: list[Any], number: int) -> None:
    """Nothing is made."""


def launched_on_fakes(launch: Launch) -> bool:
    """Whether a launch is of fake tensors, which the operator has then been called on."""
    if not is_of_fakes(launch):
        return False
    torch.ops.memrewrite.launch(*parted(launch), [], -1)
    return True


def is_of_fakes(launch: Launch) -> bool:
    """Whether it is given a fake tensor."""
    return any(map(is_fake, tensors_in((launch.args, launch.kwargs))))


def parted(launch: Launch) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that are written, and those that are not, each once.

    Raises ``CaptureError`` where sizes vary and which these are depends on them.
    """
    arguments = next(launch.variants())[1]
    names = _written(launch, 0)
    vary = any(isinstance(size, torch.SymInt) for each in tensors_in(arguments) for size in each.shape)
    if vary and _written(launch, 1) != names:
        raise CaptureError(f"The Triton kernel {launch.function.__name__} writes other tensors at other sizes.")
    written = {id(each): each for name, value in arguments.items() if name in names for each in tensors_in(value)}
    read = {id(each): each for each in tensors_in(arguments) if id(each) not in written}
    return [*written.values()], [*read.values()]


def grid_for(launch: Launch, arguments: Arguments) -> tuple[Any, ...]:
    """The grid that it has for these arguments."""
    return tuple(launch.grid(arguments) if callable(launch.grid) else launch.grid)


def _written(launch: Launch, step: int) -> set[str]:
    """The names of what is written where sizes that vary are those they were traced with (0), or others (1)."""
    variants: list[Variant] = [
        tree_map(partial(_in_words, step), (grid_for(launch, arguments), arguments))
        for _, arguments in launch.variants()
    ]
    key = tuple((grid, tuple(arguments.items())) for grid, arguments in variants)
    known = _WRITTEN.setdefault(launch.kernel, {})
    try:
        hash(key)
    except TypeError:  # an argument that nothing can be remembered for
        return apart(lambda: written_by(launch.kernel, variants))
    if key not in known:
        known[key] = apart(lambda: written_by(launch.kernel, variants))
    return known[key]


def _in_words(step: int, leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return value_at(leaf, step)
    shape, stride = (tuple(size_at(size, step) for size in sizes) for sizes in (leaf.shape, leaf.stride()))
    return TensorLike(shape, stride, leaf.dtype, leaf.device)
