"""Is a model the one its code was generated for? Torch only; part of every artifact.

Generated code holds strides, eps, dropout rates and branches as they were, so equal parameter names are not enough:
classes, plain attributes, the source of the user's own classes and what their forward names must be the same too.
"""

import ast
import functools
import hashlib
import inspect
import re
import textwrap
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from memrewrite.runtime.named_code import named_by_forward

Likeness = dict[str, dict[str, str]]
_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype)
_LABEL = re.compile(r"name|path|^_memrewrite")  # where a model came from, not what it computes
_OF_A_PROCESS = re.compile("path|rank", re.IGNORECASE)  # of globals: where, and which of several, it is
_STRICT = ("class", "tensor", "code", "forward")  # of the others, versions of PyTorch add and drop some
_BY_NAME = ("function ", "global ")  # neither is the name of a module, which has no space


class WrongModelError(ValueError):
    """The code was generated for another model."""


def describe(model: nn.Module) -> Likeness:
    """What generated code relies on: each module's class and plain attributes, each tensor, the user's class sources.

    So are the sources of functions that forward names, and plain values that it finds in its file.
    A drop-in looks like the model it was made from.
    """
    found: Likeness = {}
    kinds: dict[type, None] = {}
    for path, module in model.named_modules():
        kind = _kind(module)
        kinds |= dict.fromkeys(base for base in kind.__mro__ if _foreign(base))
        found[path] = {"class": kind.__qualname__, **_attributes(module)}
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                found[f"{path}.{name}".lstrip(".")] = {"tensor": _tensor(value)}
    owners: dict[int, str] = {}
    parameters = model.named_parameters(remove_duplicate=False)
    for name, tensor in [*parameters, *model.named_buffers(remove_duplicate=False)]:
        owner = owners.setdefault(id(tensor), name)
        found[name] = {"tensor": _tensor(tensor) if owner == name else f"tied to {owner}"}
    for kind in kinds:  # two classes may have one name
        code = found.setdefault(f"class {kind.__qualname__}", {"code": ""})
        code["code"] += _code(kind)
    functions, values = named_by_forward(kinds, (value for each in model.modules() for value in vars(each).values()))
    for function in functions:
        code = found.setdefault(f"function {function.__qualname__}", {"code": ""})
        code["code"] += _code(function)
    for name, value in values:
        if _OF_A_PROCESS.search(name):
            continue
        if not isinstance(value, list) and (text := _text(value)) is not None:  # a list may be what code fills
            known = found.setdefault(f"global {name}", {"value": text})
            known["value"] += "" if known["value"] == text else f", {text}"
    return found


def refuse_other(model: nn.Module, expected: Likeness) -> None:
    """Raise ``WrongModelError`` naming the first difference between ``model`` and what ``describe`` once found."""
    if any("_memrewrite" in vars(type(module)) for module in model.modules()):
        raise WrongModelError("The model is a rewritten one already; apply the artifact to the original.")
    here = describe(model)
    differences = [_difference(name, here.get(name), facts) for name, facts in expected.items()]
    new = (name for name in here if name not in expected and not name.startswith(_BY_NAME))
    differences += [f"it has {name}, which is new" for name in new]
    for difference in filter(None, differences):
        inner = getattr(model, "module", getattr(model, "_orig_mod", None))
        wrapped = type(inner).__qualname__ == expected[""]["class"]
        made_for = "the model inside, before that is wrapped" if wrapped else "the model it was made for"
        raise WrongModelError(
            f"The artifact is for another model: {difference}; apply it to {made_for}, or optimize this one."
        )


def read_constants(file: Path, moving: dict[str, dict[str, bool]], model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """The tensors in ``file`` by program; ``moving`` says which of them lie on the device of the model's parameters."""
    if not any(moving.values()):
        return {path: {} for path in moving}
    tensors = torch.load(file, map_location="cpu", weights_only=True)
    weight = next(model.parameters(), None)
    device = torch.device("cpu") if weight is None else weight.device
    return {
        path: {name: tensors[path][name].to(device if moves else "cpu") for name, moves in names.items()}
        for path, names in moving.items()
    }


def _kind(module: nn.Module) -> type:
    kind = type(module)
    return kind.__mro__[1] if "_memrewrite" in vars(kind) else kind


def _foreign(kind: type) -> bool:
    return kind.__module__.partition(".")[0] not in ("torch", "builtins", "typing", "abc")


def _attributes(module: nn.Module) -> dict[str, str]:
    own = vars(nn.Module())  # training flags are compared at each call, hooks apart
    kept = {k: v for k, v in vars(module).items() if k not in own and not _LABEL.search(k)}
    replaced = getattr(vars(type(module)).get("_memrewrite_own"), "replaced", None)
    kept |= {"forward": replaced} if replaced is not None else {}
    texts = {name: _text(value) for name, value in kept.items()}
    return {name: text for name, text in texts.items() if text is not None}


def _text(value: Any) -> str | None:
    """A value as text that is the same in every process, None for objects that have no such text."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, tuple | list):
        parts = [_text(part) for part in value]
        return None if None in parts else f"({', '.join(part or '' for part in parts)})"
    if isinstance(value, functools.partial):
        return _text(("partial", value.func, value.args, tuple(sorted(value.keywords.items()))))
    name = getattr(value, "__qualname__", None)  # a function, such as an activation
    return name if isinstance(name, str) else None


def _tensor(tensor: Tensor) -> str:
    if is_lazy(tensor):  # it has no shape yet
        return "not initialized"
    return f"{tensor.dtype} {tuple(tensor.shape)}"


def _code(kind: type | FunctionType) -> str:
    """A hash of the class's or function's source without comments and layout, empty where there is no source."""
    try:
        text = inspect.getsource(kind)
    except (OSError, TypeError):
        return ""
    try:
        text = ast.unparse(ast.parse(textwrap.dedent(text)))
    except SyntaxError:  # text at the left margin, inside a string, keeps a nested class from being dedented
        text = text.strip()
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _difference(name: str, here: dict[str, str] | None, facts: dict[str, str]) -> str:
    """One phrase, empty where there is none."""
    if here is None:  # what code names may be there later
        return "" if name.startswith(_BY_NAME) else f"it has no {name}"
    for key in dict.fromkeys([*facts, "forward"]):
        value = facts.get(key)
        found = here.get(key, None if key in _STRICT else value)
        if key == "code" and found and value and found != value:
            return f"the source of {name} is another"
        if key != "code" and found != value:
            place = name or "the model"
            return f"{place if key in ('class', 'tensor', 'value') else f'{place}.{key}'} is {found}, not {value}"
    return ""
