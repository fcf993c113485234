"""Is a model the one its code was generated for? Torch only; part of every artifact.

Generated code holds strides, eps, dropout rates and branches as they were, so equal parameter names are not enough:
classes, plain attributes and the source of the user's own classes must be the same too.
"""

import ast
import hashlib
import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Likeness = dict[str, dict[str, str]]
_CONSTANT = re.compile(r"memrewrite_constant_\d+")
_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype)
_LABEL = re.compile(r"name|path")  # where a model came from, not what it computes
_STRICT = {"class", "tensor", "code"}  # PyTorch's own modules gain and lose attributes from version to version


class WrongModelError(ValueError):
    """The code was generated for another model."""


def describe(model: nn.Module) -> Likeness:
    """What generated code relies on: each module's class and plain attributes, each tensor, the user's class sources.

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
        if not _CONSTANT.fullmatch(name):
            owner = owners.setdefault(id(tensor), name)
            found[name] = {"tensor": _tensor(tensor) if owner == name else f"tied to {owner}"}
    return found | {f"class {kind.__qualname__}": {"code": _code(kind)} for kind in kinds}


def refuse_other(model: nn.Module, expected: Likeness) -> None:
    """Raise ``WrongModelError`` naming the first difference between ``model`` and what ``describe`` once found."""
    if hasattr(type(model), "_memrewrite"):
        raise WrongModelError("The model is a rewritten one already; apply the artifact to the original.")
    here = describe(model)
    differences = [_difference(name, here.get(name), facts) for name, facts in expected.items()]
    differences += [f"it has {name}" for name in here.keys() - expected.keys() if "class" not in here[name]]
    for difference in filter(None, differences):
        advice = "apply it to the model it was made for, or optimize this one"
        if getattr(getattr(model, "module", None), "__class__", type(None)).__qualname__ == expected[""]["class"]:
            advice = "apply it to the model inside, before that is wrapped"
        raise WrongModelError(f"The artifact is for another model: {difference}; {advice}.")


def read_constants(file: Path, moving: dict[str, bool], model: nn.Module) -> dict[str, Tensor]:
    """The tensors in ``file``; ``moving`` says which of them lie on the device of the model's parameters."""
    if not moving:
        return {}
    tensors = torch.load(file, map_location="cpu", weights_only=True)
    weight = next(model.parameters(), None)
    device = torch.device("cpu") if weight is None else weight.device
    return {name: tensors[name].to(device) if moves else tensors[name] for name, moves in moving.items()}


def _kind(module: nn.Module) -> type:
    kind = type(module)
    return kind.__mro__[1] if "_memrewrite" in vars(kind) else kind


def _foreign(kind: type) -> bool:
    return kind.__module__.partition(".")[0] not in ("torch", "builtins", "typing", "abc")


def _attributes(module: nn.Module) -> dict[str, str]:
    public = {k: v for k, v in vars(module).items() if not (k.startswith("_") or _LABEL.search(k) or k == "training")}
    texts = {name: _text(value) for name, value in public.items()}
    return {name: text for name, text in texts.items() if text is not None}


def _text(value: Any) -> str | None:
    """A value as text that is the same in every process, None for objects that have no such text."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, tuple | list):
        parts = [_text(part) for part in value]
        return None if None in parts else f"({', '.join(part or '' for part in parts)})"
    return getattr(value, "__qualname__", None)  # a function, such as an activation


def _tensor(tensor: Tensor) -> str:
    if isinstance(tensor, nn.parameter.UninitializedTensorMixin):
        return "not initialized"
    return f"{tensor.dtype} {tuple(tensor.shape)}"


def _code(kind: type) -> str:
    """A hash of the class's source without comments and layout, empty where there is no source."""
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
    if here is None:
        return f"it has no {name}"
    for key, value in facts.items():
        found = here.get(key, None if key in _STRICT else value)
        if key == "code":
            if found and value and found != value:
                return f"the code of {name} is not the same"
        elif found != value:
            place = name or "the model"
            return f"{place if key in _STRICT else f'{place}.{key}'} is {found}, not {value}"
    return ""
