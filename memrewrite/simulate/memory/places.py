"""Which submodule the operator that runs now belongs to: whose forward runs, or in backward whose forward it undoes.

Calls of modules are followed by PyTorch's hooks for all modules: a hook on a module itself would keep an optimized
module from its rewritten forward, and layers of PyTorch's own from their fast path. Rewritten forwards call no
submodules; their generated code names the submodule at the end of each line. What forward notes for backward is known
again by autograd's own numbering.
"""

import linecache
import re
import sys
import threading
from ast import literal_eval
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from memrewrite.runtime.dropin import programs
from memrewrite.torch_internals.autograd_nodes import backward_number, next_backward_number

# What stands at the end of a line of generated code: a path, quoted where it is not made of plain names.
_COMMENT = re.compile(r"""  # ([\w.]+|'.*'|".*")$""")
_PLAIN = re.compile(r"[\w.]+")


def comment(path: str) -> str:
    """What the generator writes at the end of a line that belongs to the submodule at ``path``; nothing for "".

    The one place that generated text has for it: it travels as text alone, in pickles and artifacts too.
    """
    return f"  # {path if _PLAIN.fullmatch(path) else repr(path)}" if path else ""


def path_in(line: str) -> str:
    """The path that ``comment`` wrote at the end of a line, "" if it wrote none."""
    found = _COMMENT.search(line)
    text = found[1] if found else ""
    return literal_eval(text) if text[:1] in ("'", '"') else text


class Places:
    """Follows one module while ``followed()`` is open; ``now()`` is the place of the operator that runs."""

    def __init__(self, module: nn.Module) -> None:
        self._paths = {id(child): path for path, child in module.named_modules()}
        self._generated = {id(program.run.__globals__) for program in programs(module).values()}
        self._inside: list[str] = []
        self._made: dict[int, str] = {}  # the path by autograd's number of what forward noted for backward
        self._seen: dict[int, int] = {}  # by thread, as each has numbers of its own: the next one when last looked
        # By code, kept so that no other gets its id, and instruction: a line is looked for from the first one on.
        self._lines: dict[int, tuple[CodeType, dict[int, str]]] = {}
        self._outside: FrameType | None = None  # what follows it, whose callers are no code of the module

    @contextmanager
    def followed(self) -> Iterator["Places"]:
        """Keep track of which module is called."""
        enter = register_module_forward_pre_hook(self._enter)
        leave = register_module_forward_hook(self._leave, always_call=True)
        self._outside = sys._getframe(2)
        try:
            yield self
        finally:
            self._outside = None
            enter.remove()
            leave.remove()

    def now(self) -> str | None:
        """The path of the innermost submodule, "" for the module's own forward, None outside of it (the loss, say)."""
        path = (self._in_generated_code() if self._generated else None) or self._called()
        if path is None and (undone := backward_number()) is not None:
            path = self._made.get(undone)
        thread, number = threading.get_ident(), next_backward_number()
        if path is not None:
            self._made.update(dict.fromkeys(range(self._seen.get(thread, number - 1), number), path))
        self._seen[thread] = number
        return path

    def _called(self) -> str | None:
        return self._inside[-1] if self._inside else None

    def _enter(self, module: nn.Module, args: Any) -> None:
        path = self._paths.get(id(module))
        if path is not None:
            self._inside.append(path)

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        if id(module) in self._paths:
            self._inside.pop()

    def _in_generated_code(self) -> str | None:
        """The path at the innermost line of generated code that has one; "" where none of its lines does."""
        frame: FrameType | None = sys._getframe(2)
        outside, generated = self._outside, self._generated
        path = None
        while frame is not outside and frame is not None:
            if id(frame.f_globals) in generated:
                path = self._named(frame)
                if path:
                    break
            frame = frame.f_back
        return path

    def _named(self, frame: FrameType) -> str:
        code = frame.f_code
        if (known := self._lines.get(id(code))) is None:
            known = self._lines[id(code)] = code, {}
        paths, instruction = known[1], frame.f_lasti
        if (path := paths.get(instruction)) is None:
            path = path_in(linecache.getline(code.co_filename, frame.f_lineno).rstrip("\n"))
            paths[instruction] = path
        return path
