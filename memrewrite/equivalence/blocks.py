"""Repeated blocks that keep what they are given alone, and run again in backward, where a float64 step is too large.

    x = block(x)    -> x = checkpoint(block, x)    for the layers of a transformer, the stages of a network, ...

By ``torch.utils.checkpoint``: the arithmetic is the model's own, and so is what autograd makes of it. That a block
gives the same bits again is seen to each time. It may not change its buffers, attributes or inputs: that happens twice.
Attention in blocks is made in pieces.
"""

import contextlib
import functools
import io
import pickle
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from memrewrite.records.errors import MeasurementError
from memrewrite.runtime.attention import attention_in_pieces
from memrewrite.runtime.guards import hooks_of
from memrewrite.state.attributes import OPAQUE, Attributes
from memrewrite.state.bits import fingerprint
from memrewrite.torch_internals.pytrees import tensors_in

Again = Callable[[], contextlib.AbstractContextManager[None]]
"""What a block runs in when it runs again; made when it runs first."""
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class UnfitError(MeasurementError):
    """A block of class ``kind`` may not run twice."""

    def __init__(self, kind: type) -> None:
        super().__init__(f"A {kind.__name__} does not do the same when it runs again.")
        self.kind = kind


def repeated_blocks(model: nn.Module, unfit: Container[type] = ()) -> list[nn.Module]:
    """The members with submodules of the outermost lists that have two or more of their class, but for ``unfit`` ones.

    Nor those with hooks inside, which would be called twice.
    """
    members = _members(model)
    often = {kind for kind, count in Counter(map(type, members)).items() if count > 1 and isinstance(model, _LISTS)}
    found: dict[int, nn.Module] = {}
    for member in members:
        inside = [*member.modules()][1:]
        alike = type(member) in often and type(member) not in unfit and not isinstance(member, torch.jit.ScriptModule)
        if alike and inside and not any(hook for each in inside for hook in hooks_of(each)):
            found[id(member)] = member
        else:
            found |= {id(block): block for block in repeated_blocks(member, unfit)}
    return [*found.values()]


def _members(model: nn.Module) -> list[nn.Module]:
    """Its children; those of a list as often as they are in it."""
    if isinstance(model, nn.ModuleDict):
        return [*model.values()]
    return [*(model if isinstance(model, nn.ModuleList | nn.Sequential) else model.children())]


@contextlib.contextmanager
def run_again(blocks: Iterable[nn.Module], marked: Callable[[], Again]) -> Iterator[None]:
    """Have the blocks keep what they are given alone in steps taken meanwhile; each run starts with ``marked()``.

    In such a step ``UnfitError`` is raised where a block changes what is there, or does something else again.
    """
    before = [(vars(block), vars(block).get("forward")) for block in blocks]
    try:
        for block in blocks:
            vars(block)["forward"] = _checkpointed(block, block.forward, marked)
        yield
    finally:  # or each block would be in a cycle with its forward, and the model's memory wait for the collector
        for attributes, forward in before:
            attributes.pop("forward", None)
            if forward is not None:
                attributes["forward"] = forward


def _checkpointed(block: nn.Module, forward: Callable[..., Any], marked: Callable[[], Again]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        call = _Call(block, _in_pieces(forward), marked(), args, kwargs)
        # Up to its results, which are compared; random numbers are not drawn but given.
        result = checkpoint(call, *call.tensors(), use_reentrant=False, preserve_rng_state=False, early_stop=False)
        call.raise_again()
        return result

    return run


class _Call:
    """One call of a block, as a function of the tensors that it is given, which are not held here once it has run."""

    def __init__(self, block: nn.Module, forward: Callable[..., Any], again: Again, args: Any, kwargs: Any) -> None:
        self._block, self._forward, self._again = block, forward, again
        self._first: Any = args, kwargs
        self._made: list[bytes] = []
        self._error: BaseException | None = None
        try:
            self._text, self._parts = _taken_apart(self._first)
        except Exception as error:  # whatever objects say that cannot be copied
            raise UnfitError(type(block)) from error

    def tensors(self) -> list[Tensor]:
        """Those that it is given."""
        return [part for part in self._parts if isinstance(part, Tensor)]

    def raise_again(self) -> None:
        """Raise what the first run has raised: PyTorch 2.11 keeps its hooks for as long as an error is held."""
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None

    def __call__(self, *tensors: Tensor) -> Any:
        """What the block gives. What it writes to lists or caches the second time goes to copies."""
        if self._first is not None:
            try:
                return self._run_first(tensors)
            except BaseException as error:
                self._error = error
                return None
        given = iter(tensors)
        args, kwargs = _put_together(self._text, [next(given) if part is None else part for part in self._parts])
        try:
            with self._again():
                result = self._forward(*args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # which it did not raise the first time
            raise UnfitError(type(self._block)) from error
        if _fingerprints(result) != self._made:
            raise UnfitError(type(self._block))
        return result

    def _run_first(self, tensors: Sequence[Tensor]) -> Any:
        (args, kwargs), self._first = self._first, None
        self._parts = [None if isinstance(part, Tensor) else part for part in self._parts]
        there = [t for t in (*self._block.parameters(), *self._block.buffers(), *tensors) if not t.is_inference()]
        attributes, versions = Attributes(self._block), [t._version for t in there]
        result = self._forward(*args, **kwargs)
        changed = next(attributes.changed(), None) or next(attributes.written(), None)
        self._made = _fingerprints(result)
        if changed or versions != [t._version for t in there] or not self._made:
            raise UnfitError(type(self._block))
        return result


@torch.no_grad()
def _fingerprints(result: Any) -> list[bytes]:
    return [fingerprint(tensor.detach()) for tensor in tensors_in(result)]


class _Pickler(pickle.Pickler):
    """Leaves out tensors, modules and functions, which are ``parts``, each once."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.parts: list[Any] = []
        self._places: dict[int, int] = {}

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, OPAQUE):
            return None
        if id(value) not in self._places:
            self._places[id(value)] = len(self.parts)
            self.parts.append(value)
        return self._places[id(value)]


class _Unpickler(pickle.Unpickler):
    """Puts them back."""

    def __init__(self, file: io.BytesIO, parts: Sequence[Any]) -> None:
        super().__init__(file)
        self._parts = parts

    def persistent_load(self, place: int) -> Any:
        return self._parts[place]


def _taken_apart(given: Any) -> tuple[bytes, list[Any]]:
    """The structure of arguments, copied as it is now, and the tensors, modules and functions in it."""
    pickler = _Pickler(file := io.BytesIO())
    pickler.dump(given)
    return file.getvalue(), pickler.parts


def _put_together(text: bytes, parts: Sequence[Any]) -> Any:
    return _Unpickler(io.BytesIO(text), parts).load()


def _in_pieces(forward: Callable[..., Any]) -> Callable[..., Any]:
    """With a mode of each run's own: backward, in which a block runs again, is called without any."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with _AttentionInPieces():
            return forward(*args, **kwargs)

    return run


class _AttentionInPieces(TorchFunctionMode):
    """Attention of one text or of the heads of one key at a time: on CUDA none of float64 does without all scores."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, or what stands for it."""
        return (_attend if func is functional.scaled_dot_product_attention else func)(*args, **(kwargs or {}))


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """``functional.scaled_dot_product_attention``, in pieces where there is no other arithmetic in these."""
    alike = query.dim() == key.dim() == value.dim() == 4 and len(query) == len(key) == len(value)
    if dropout_p or not alike or query.shape[1] % key.shape[1] or (attn_mask is not None and attn_mask.requires_grad):
        how: Any = attn_mask, dropout_p, is_causal
        return functional.scaled_dot_product_attention(query, key, value, *how, **options)
    pieces = max(len(query), key.shape[1])
    return attention_in_pieces(query, key, value, attn_mask, pieces, is_causal, **options)
