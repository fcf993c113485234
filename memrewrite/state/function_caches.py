"""What functions keep of calls on tensors without data is forgotten: a later call would be given these for real ones.

Those that keep results do, and those that an error has ended, as long as it is handled.

A forward may make positions or anchors in a function under ``functools.lru_cache`` (RT-DETR does), by sizes alone. Its
cache belongs to the process, so that other models of the class would meet what one of them kept.
"""

import functools
import gc
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

from torch import nn

from memrewrite.process.frames import let_go
from memrewrite.state.containers import in_closure
from memrewrite.torch_internals.fake_tensors import without_data
from memrewrite.torch_internals.pytrees import tree_iter


@contextmanager
def fakes_forgotten(model: nn.Module) -> Iterator[None]:
    """Have caches be empty afterwards that kept a fake tensor meanwhile, of functions that ``model`` knows by name.

    These are attributes of its parts, of their classes, and all in the modules that these classes are from. Frames of
    an error hold nothing afterwards.
    """
    before = {id(each): each.cache_info().misses for each in _caches(model)}
    try:
        yield
    except BaseException as error:
        let_go(error)
        raise
    finally:
        for each in _caches(model):
            if each.cache_info().misses != before.get(id(each), 0) and _keeps_fakes(each):
                each.cache_clear()


def _caches(model: nn.Module) -> list[Any]:
    parts = list(model.modules())
    classes = {base for kind in {type(part) for part in parts} for base in kind.__mro__}
    modules = {kind.__module__ for kind in classes if kind.__module__.partition(".")[0] not in ("torch", "builtins")}
    named = [value for name in modules for value in vars(sys.modules.get(name, nn)).values()]
    classes |= {value for value in named if isinstance(value, type) and value.__module__ in modules}
    known = [named, *(vars(part).values() for part in parts), *(vars(kind).values() for kind in classes)]
    return list({id(each): each for values in known for each in _among(values)}.values())


def _among(values: Iterable[Any]) -> Iterator[Any]:
    """Functions that keep results, also inside of methods without an object, and of what is around such a function."""
    for value in values:
        function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
        if isinstance(function, functools._lru_cache_wrapper):
            yield function
        elif isinstance(function, FunctionType):
            held = in_closure(function).values()
            yield from (each for each in held if isinstance(each, functools._lru_cache_wrapper))


def _keeps_fakes(cached: Any) -> bool:
    kept = gc.get_referents(cached)
    kept += [value for each in kept if isinstance(each, dict) for value in each.values()]  # of a cache without an end
    return any(without_data(leaf) for each in kept for leaf in tree_iter(each))
