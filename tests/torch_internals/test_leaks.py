"""Private API of PyTorch is used in ``torch_internals`` alone, and in the runtime, whose text is part of artifacts.

The tables of a module (``_parameters``, ``_buffers``, ``_modules``, its hooks) are not asked for here: PyTorch's own
documentation of subclasses of ``nn.Module`` and of parametrizations names them.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import memrewrite

ROOT = Path(memrewrite.__file__).parent
FILES = {
    file.relative_to(ROOT).as_posix(): file
    for file in [*ROOT.rglob("*.py"), *(ROOT / "passes").glob("*.py")]
    if file.relative_to(ROOT).parts[0] not in ("torch_internals", "runtime")
}
# Attributes that only objects of PyTorch have, whatever they are called here.
ATTRIBUTES = {"_schema", "_overloadname", "_forward_cls", "_sequence_nr", "_is_view"}


def is_private(name: str) -> bool:
    """Whether a dotted name under ``torch`` has a private part; operators are public whatever they are called."""
    parts = name.split(".")
    own = (part for part in parts if part.startswith("_") and not part.endswith("__"))
    return parts[0] == "torch" and parts[1:2] != ["ops"] and any(own)


def dotted(node: ast.AST) -> str:
    """The name that an expression spells, "" where it spells none."""
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value)
        return owner and f"{owner}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def leaks(tree: ast.AST) -> Iterator[str]:
    """The private names of PyTorch that are imported or used."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if is_private(alias.name))
        elif isinstance(node, ast.ImportFrom):
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name for name in names if is_private(name))
        elif isinstance(node, ast.Attribute) and node.attr in ATTRIBUTES:
            yield node.attr
        elif isinstance(node, ast.Attribute) and is_private(dotted(node)):
            yield dotted(node)


@pytest.mark.parametrize("file", FILES)
def test_no_private_name_of_torch_is_used(file: str) -> None:
    assert [*leaks(ast.parse(FILES[file].read_text(encoding="utf-8")))] == []


@pytest.mark.parametrize(
    "code",
    [
        "import torch._dynamo",
        "from torch._ops import OpOverload",
        "from torch.utils._pytree import tree_map",
        "from torch import _C",
        "def f():\n    return torch._C._get_tracing_state()",
        "operator._schema.arguments",
    ],
)
def test_a_leak_is_found(code: str) -> None:
    assert [*leaks(ast.parse(code))]


def test_what_is_public_is_none() -> None:
    assert not [
        *leaks(ast.parse("torch.ops.aten._softmax.default, torch.__version__, module._parameters, self._torch"))
    ]
