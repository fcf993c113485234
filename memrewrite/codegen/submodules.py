"""Which submodules generated code gives a name of their own, so that each is looked up once per call.

    self_layer1_0 = getattr(self.layer1, '0')
    self_layer1_0_bn1 = self_layer1_0.bn1
    ... self_layer1_0_bn1.weight, self_layer1_0_bn1.bias, self_layer1_0_bn1.running_mean ...

A module finds its submodules by Python code of ``nn.Module``, and a path from the top takes that at every level, for
every parameter: of ResNet-50's forward on tiny inputs, a tenth. Modules are named, never tensors: what a call computes
with is still looked up where the model itself would.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from memrewrite.capture.expressions import attribute_of


class Submodules:
    """The names of submodules by their paths, and the lines that give them in the function that is being written.

    ``paths`` are those of the tensors that the code refers to, once for each time; ``name`` makes of an identifier one
    that is free.
    """

    def __init__(self, paths: Iterable[str], name: Callable[[str], str]) -> None:
        shared = sorted(_referred_to_twice(paths))
        self._names = {"": "self"} | {path: name(f"self_{path}") for path in shared}
        self._given: dict[str, str] = {"": ""}  # the line that gives it by path, empty once it is written

    @contextmanager
    def function(self) -> Iterator[None]:
        """A function of its own, in which no submodule has a name yet."""
        outer, self._given = self._given, {"": ""}
        yield
        self._given = outer

    def lines(self) -> list[str]:
        """The lines to write before an expression, asked for once it is made."""
        found = [line for line in self._given.values() if line]
        self._given = dict.fromkeys(self._given, "")
        return found

    def attribute(self, path: str) -> str:
        """An expression for what lies at a dotted path."""
        owner, _, name = path.rpartition(".")
        return attribute_of(self._module(owner), name)

    def _module(self, path: str) -> str:
        if path not in self._names:
            return self.attribute(path)
        if path not in self._given:
            line = f"{self._names[path]} = {self.attribute(path)}"
            self._given[path] = line  # after those of the modules it lies in
        return self._names[path]


def _referred_to_twice(paths: Iterable[str]) -> set[str]:
    """The submodules that more than one expression starts from, those that name submodules among them."""
    references = Counter(path.rpartition(".")[0] for path in paths)
    modules = {owner[:end] for owner in references for end in _ends(owner)}
    for path in sorted(modules, key=lambda path: -path.count(".")):
        references[path.rpartition(".")[0]] += min(references[path], 1)
    return {path for path in modules if references[path] > 1}


def _ends(path: str) -> Iterator[int]:
    """Where each prefix of a dotted path ends; none for the empty one."""
    return (at for at in range(1, len(path) + 1) if at == len(path) or path[at] == ".")
