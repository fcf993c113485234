"""Arithmetic on sizes that vary, remembered: a traced model asks for the same sums and products at every layer.

PyTorch computes with such sizes in Python, on expressions, for every tensor that is made: whether it is contiguous, how
many bytes it takes, whether two shapes agree. What comes of it depends on the expressions alone. Read in PyTorch 2.11
to 2.15.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from memrewrite.torch_internals.patches import process_wide
from memrewrite.torch_internals.versions import private_imports

with private_imports():
    from torch.fx.experimental.proxy_tensor import get_proxy_mode
    from torch.fx.experimental.sym_node import SymNode

_BINARY = ("add", "sub", "mul", "eq", "ne", "gt", "lt", "le", "ge", "sym_max", "sym_min", "and_", "or_")
_PLAIN = (int, bool, float, type(None))


@process_wide
@contextlib.contextmanager
def sizes_remembered() -> Iterator[None]:
    """Let arithmetic on sizes that vary be done once for the same numbers and expressions meanwhile.

    Where operators become nodes of a graph, arithmetic does, too, and is done.
    """
    with contextlib.ExitStack() as stack:
        for name in _BINARY:
            stack.enter_context(mock.patch.object(SymNode, name, _remembered(getattr(SymNode, name))))
        stack.enter_context(mock.patch.object(SymNode, "wrap_int", _number(SymNode.wrap_int)))
        stack.enter_context(mock.patch.object(SymNode, "maybe_as_int", _settled(SymNode.maybe_as_int)))
        yield


def replaced(environment: Any) -> Any:
    """What is another as soon as an expression has come to stand for another one: how often that was.

    PyTorch counts it since 2.12; before, it is how many do, and the count by which PyTorch drops what it remembers.
    """
    if hasattr(environment, "_replacements_version_counter"):
        return environment._replacements_version_counter
    return len(environment.replacements), environment._version_counter


def _remembered(compute: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """The same operation, which is done once for each two operands."""
    known: dict[Any, Any] = {}

    def operation(one: Any, other: Any) -> Any:
        environment = one.shape_env
        if environment is None or get_proxy_mode() is not None:
            return compute(one, other)
        a, b, hint, other_hint = one._expr, other._expr, one._hint, other._hint
        if type(hint) not in _PLAIN or type(other_hint) not in _PLAIN:
            return compute(one, other)
        about = one.pytype, hint, one._optimized_summation, other.pytype, other_hint, other._optimized_summation
        key = id(a), id(b), id(environment), replaced(environment), about
        found = known.get(key)
        if found is None:
            found = known[key] = compute(one, other), a, b, environment  # which keeps their ids theirs
        return another(found[0])

    return operation


def _number(wrap: Callable[[Any, int], Any]) -> Callable[[Any, int], Any]:
    """What makes an operand of a number, once for each."""
    known: dict[Any, Any] = {}

    def wrapped(node: Any, number: int) -> Any:
        key = id(node.shape_env), type(number), number
        found = known.get(key)
        if found is None:
            found = known[key] = wrap(node, number), node.shape_env
        return another(found[0])

    return wrapped


def _settled(ask: Callable[[Any], int | None]) -> Callable[[Any], int | None]:
    """What says which number a size is if it does not vary, asked once for each expression."""
    known: dict[Any, Any] = {}

    def asked(node: Any) -> int | None:
        environment, expression = node.shape_env, node._expr
        if environment is None:
            return ask(node)
        key = id(expression), id(environment), replaced(environment)
        found = known.get(key)
        if found is None:
            found = known[key] = ask(node), expression, environment
        number: int | None = found[0]
        return number

    return asked


def another(node: Any) -> Any:
    """The same number as an object of its own: the tracer knows by the object which node of the graph gave it."""
    copied = _new(SymNode)
    copied.__dict__.update(node.__dict__)
    return copied


_new = object.__new__
