"""Where a node of a captured graph comes from, which its copies and what replaces it keep."""

from dataclasses import dataclass, replace

from torch import fx

_KEY = "origin"  # in a node's meta, which graphs copy with the node


@dataclass(frozen=True)
class Origin:
    """The path of the submodule that called the node, and its source line, such as ``file.py:12``; "" if unknown."""

    path: str = ""
    line: str = ""

    def below(self, path: str) -> "Origin":
        """The same in a module that has this one's at ``path``."""
        return replace(self, path=f"{path}.{self.path}".rstrip("."))

    def __str__(self) -> str:
        path = self.path or "(root)"
        return f"{path} ({self.line})" if self.line else path


def origin(node: fx.Node) -> Origin:
    """Where a node comes from; the model itself, if nobody said."""
    found: Origin = node.meta.get(_KEY, Origin())
    return found


def set_origin(node: fx.Node, where: Origin) -> None:
    """Say where a node comes from."""
    node.meta[_KEY] = where
