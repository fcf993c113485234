"""Compiled kernels on disk, beside what Inductor keeps there: another process calls them without Dynamo.

Inductor keeps code by the graph that it was made of, and to make that graph again, by Dynamo and AOTAutograd, takes
most of the time. Here the same code is kept by what a function is: the code of it and of what it calls, the shapes,
strides and types that it was given, the device and PyTorch's settings and version. Torch only: this file's text is also
pasted into generated models.
"""

import contextlib
import functools
import hashlib
import json
import os
import types
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memrewrite.runtime.code_inside import names_inside

_KERNELS = "memrewrite"  # in Inductor's


class Order(NamedTuple):
    """How code is called: what it ``takes``, a number or what is given at a place; and which results are given."""

    takes: Sequence[tuple[int | None, int | None]]
    gives: Sequence[int]


class Code:
    """Inductor's code for what Dynamo saw, and what Inductor noted of it in its caches."""

    def __init__(self, graph: Any, inputs: Any) -> None:
        from torch.compiler._cache import CacheArtifactManager  # imported here: all this takes a while

        with CacheArtifactManager.with_fresh_cache():
            self._call = torch._dynamo.lookup_backend("inductor")(graph, inputs)
            self._noted = torch.compiler.save_cache_artifacts()

    def __call__(self, *args: Any) -> Sequence[Tensor]:
        """Run it."""
        results: Sequence[Tensor] = self._call(*args)
        return results

    def save(self, file: str) -> bool:
        """Write what another process needs to call it; False where that is not known."""
        from torch._inductor.standalone_compile import CacheCompiledArtifact

        if self._noted is None or len(self._noted[1].aot_autograd_artifacts) != 1:
            return False  # its graph has no key, or caches are off
        CacheCompiledArtifact(self._call, self._noted).save(path=file)
        return True


def file_of_code(said: str, look: tuple[Any, ...]) -> str:
    """Where the code is for a function of which that is ``said`` and what is given looks so."""
    from torch._functorch import config
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    settings = [each.save_config_portable() for each in (torch._dynamo.config, config, torch._inductor.config)]
    return os.path.join(cache_dir(), _KERNELS, said_of((said, look, _kernel_versions(), settings)))


def keep_code(code: Code, order: Order, file: str) -> None:
    """Write code, if it can be, and then how to call it."""
    own = f"{file}.{os.getpid()}"
    with contextlib.suppress(OSError):  # a full disk, say: another process compiles it again
        os.makedirs(os.path.dirname(file), exist_ok=True)
        if not code.save(file):
            return
        with open(own, "w") as to:
            json.dump(order, to)
        os.replace(own, f"{file}.json")


def is_kept(file: str) -> bool:
    """Whether there is code in a file, and how to call it."""
    return os.path.exists(f"{file}.json")


def code_kept(file: str) -> tuple[Any, Order] | None:
    """The code of a file and how to call it; None where there is none that can be read."""
    if torch._inductor.config.force_disable_caches or not is_kept(file):
        return None
    from torch._inductor.standalone_compile import CompiledArtifact

    try:
        with open(f"{file}.json") as of:
            takes, gives = json.load(of)
        return CompiledArtifact.load(path=file), Order([(i, n) for i, n in takes], gives)
    except Exception:  # whatever damaged files lead to: it is compiled anew
        return None


def said_of(value: Any) -> str:
    """What tells a value from another one, and a function from one that computes something else, in any process.

    That is its code and constants, and those of what it calls; names stand for what PyTorch has, for classes and for
    objects of these.
    """
    return hashlib.sha256("\n".join(_said(value, set())).encode()).hexdigest()


def _said(value: Any, seen: set[int]) -> Iterator[str]:
    if isinstance(value, types.CodeType):
        yield value.co_code.hex()
        yield from (*value.co_names, *value.co_varnames, *value.co_freevars)
        for constant in value.co_consts:
            yield from _said(constant, seen)
    elif isinstance(value, types.FunctionType) and not (value.__module__ or "").startswith("torch"):
        if id(value) in seen:
            return
        seen.add(id(value))
        yield from _said(value.__code__, seen)
        inside = [value.__defaults__, value.__kwdefaults__, *(cell.cell_contents for cell in value.__closure__ or ())]
        yield from _said((*inside, *(value.__globals__.get(name) for name in names_inside(value.__code__))), seen)
    elif isinstance(value, functools.partial):
        yield from _said((value.func, value.args, tuple(value.keywords.items())), seen)
    elif isinstance(value, tuple | list):
        yield f"{len(value)} in one"
        for each in value:
            yield from _said(each, seen)
    elif isinstance(value, set | frozenset):
        yield repr(sorted(map(repr, value)))
    elif isinstance(value, dict):
        yield from _said(sorted(value.items()), seen)
    elif isinstance(value, types.FunctionType | types.BuiltinFunctionType | type):
        yield f"{value.__module__}.{value.__qualname__}"
    elif isinstance(value, types.ModuleType):
        yield value.__name__
    elif isinstance(value, int | float | complex | str | bytes | None | torch.dtype | torch.device):
        yield repr(value)
    else:  # the name of the function is to say what an object does for it
        yield f"a {type(value).__qualname__}"


@functools.cache
def _kernel_versions() -> tuple[Any, ...]:
    """PyTorch's, and the kinds of devices there are: any of a kind runs what was compiled on another."""
    each = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    kinds = sorted({(device.name, device.major, device.minor) for device in each})
    return torch.__version__, torch.version.git_version, torch.version.cuda, torch.version.hip, kinds
