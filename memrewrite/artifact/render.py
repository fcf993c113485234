"""The text of ``memrewrite_model.py``: the runtime's own sources, the generated program, and ``apply``."""

import ast
import inspect
import sys
from collections.abc import Mapping
from types import ModuleType

from memrewrite.artifact.manifest import CONSTANTS
from memrewrite.runtime import (
    assembled,
    code_inside,
    copies,
    dict_versions,
    differences,
    dropin,
    guards,
    kernel_files,
    kernels,
    lazy_tensor,
    likeness,
    matching,
    named_code,
    named_rows,
    operations,
    output_rows,
    output_source,
    parameters,
    plain_values,
    promise,
    recorders,
    results,
    row_expressions,
    rows,
    texts,
)
from memrewrite.runtime.likeness import Likeness
from memrewrite.version import __version__

# Each file after those that it needs.
_OPERATIONS = (
    sys.modules[each.__module__] for each in (*operations.AROUND_NODES.values(), *operations.IN_GRAPHS.values())
)
_RUNTIME: tuple[ModuleType, ...] = (
    code_inside,
    kernel_files,
    kernels,
    row_expressions,
    output_rows,
    output_source,
    lazy_tensor,
    *dict.fromkeys(_OPERATIONS),
    operations,
    dict_versions,
    differences,
    recorders,
    rows,
    plain_values,
    named_code,
    named_rows,
    guards,
    parameters,
    matching,
    promise,
    texts,
    copies,
    results,
    dropin,
    assembled,
    likeness,
)
_HEAD = '''"""A rewritten forward for one model; needs torch only. Written by memrewrite {version}.

    from memrewrite_model import apply
    model = apply(model)    # before DistributedDataParallel, torch.compile and the like

The result shares every parameter and buffer with the model and is an instance of its class. It pickles wherever this
file can be imported under the same name.
"""

{imports}

# The runtime, the same in every artifact.


'''
_PROGRAM = """# {what}

{source}

PROGRAM.source = {path!r}
_PROGRAMS[PROGRAM.source] = PROGRAM  # what a pickle or a deep copy of the result finds
"""
_APPLY = '''
# What the model must look like.
MODEL = {expected}

# Tensors in {file}, and whether each lies on the device of the parameters.
CONSTANTS = {moving}

# Plain values that forward read, by the submodule that a program stands for.
CAPTURED = {captured}


def apply(model: nn.Module) -> nn.Module:
    """A drop-in for ``model``; raises ``WrongModelError`` when this was not generated for it."""
    refuse_other(model, MODEL)
    constants = read_constants(Path(__file__).with_name({file!r}), CONSTANTS, model)
    return assembled(model, {{p: (_PROGRAMS[p], constants[p]) for p in {paths}}}, CAPTURED)
'''


def render(
    sources: dict[str, str], expected: Likeness, moving: dict[str, dict[str, bool]], captured: dict[str, list[object]]
) -> str:
    """The artifact's Python.

    ``sources`` are those of the programs by the path of their submodule, ``moving`` says of each program's constants
    whether they follow the parameters, ``captured`` are the plain values of its guards, ``expected`` is the model's
    likeness.
    """
    imports: dict[str, set[str]] = {"from pathlib": {"Path"}}
    runtime = [_without_imports(inspect.getsource(module), imports) for module in _RUNTIME]
    programs = [
        _PROGRAM.format(
            what=f"The forward of {path}." if path else "The model's own forward.",
            source=_without_imports(source, imports),
            path=path,
        )
        for path, source in sources.items()
    ]
    tables = {"expected": _table(expected), "moving": _table(moving), "captured": _table(captured)}
    end = _APPLY.format(**tables, file=CONSTANTS, paths=list(sources))
    head = _HEAD.format(version=__version__, imports=_import_lines(imports))
    text = head + "\n\n\n".join([*runtime, *programs, end.lstrip("\n")])
    ast.parse(text)
    return text


def _without_imports(text: str, imports: dict[str, set[str]]) -> str:
    """``text`` without its docstring and imports; those of other packages are added to ``imports``."""
    lines = text.splitlines()
    body = ast.parse(text).body
    docstring = [node for node in body[:1] if isinstance(node, ast.Expr)]
    for node in [*docstring, *(node for node in body if isinstance(node, ast.Import | ast.ImportFrom))]:
        if isinstance(node, ast.ImportFrom) and not str(node.module).startswith("memrewrite"):
            imports.setdefault(f"from {node.module}", set()).update(ast.unparse(name) for name in node.names)
        elif isinstance(node, ast.Import):
            for name in node.names:
                imports.setdefault(f"import {ast.unparse(name)}", set())
        lines[node.lineno - 1 : node.end_lineno] = [""] * ((node.end_lineno or node.lineno) - node.lineno + 1)
    return "\n".join(lines).strip()


def _import_lines(imports: dict[str, set[str]]) -> str:
    """Import statements, the standard library's before torch's."""
    plain = sorted(text for text, names in imports.items() if not names)
    lines = plain + [f"{text} import {', '.join(sorted(names))}" for text, names in sorted(imports.items()) if names]
    groups = ([line for line in lines if (line.split()[1].startswith("torch")) == torch] for torch in (False, True))
    return "\n\n".join("\n".join(group) for group in groups)


def _table(values: Mapping[str, object]) -> str:
    rows = [f"    {name!r}: {value!r},\n" for name, value in values.items()]
    return "".join(["{\n", *rows, "}"]) if rows else "{}"
