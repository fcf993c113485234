"""Runs generated texts, of which many end alike. Torch only; part of every artifact.

Candidates for one model differ in their functions, and say the same of the calls they are right for: that is most of
the text of a large model, and takes most of the time to compile.
"""

import functools
import hashlib
import linecache
from types import CodeType
from typing import Any

_LAST = "\nPROGRAM = "


def run_text(source: str, namespace: dict[str, Any]) -> None:
    """Run generated text, which shows in tracebacks and to the debugger."""
    file = f"<memrewrite {hashlib.sha256(source.encode()).hexdigest()[:12]}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    start = source.rfind(_LAST) + 1
    functions, statement = source[:start], source[start:]
    for code in (compile(functions, file, "exec"), _further_down(_code_of(statement), file, functions.count("\n"))):
        exec(code, namespace)  # noqa: S102  (our own generated text)


@functools.lru_cache(maxsize=8)
def _code_of(statement: str) -> CodeType:
    return compile(statement, "", "exec")


def _further_down(code: CodeType, file: str, lines: int) -> CodeType:
    """Code that stands so many ``lines`` further down, in ``file``."""
    inner = tuple(_further_down(each, file, lines) if isinstance(each, CodeType) else each for each in code.co_consts)
    return code.replace(co_consts=inner, co_filename=file, co_firstlineno=code.co_firstlineno + lines)
