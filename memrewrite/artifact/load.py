"""Load a saved artifact and apply it to a model.

``import memrewrite_model`` does the same without checks and without memrewrite. Loading an artifact runs its code, as
any import does: the hashes find damage and edits by accident, not a forged manifest.
"""

import hashlib
import os
import sys
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

from memrewrite.artifact import manifest
from memrewrite.records.errors import UsageError


def load(directory: str | os.PathLike[str], model: nn.Module) -> nn.Module:
    """The drop-in for ``model`` that the artifact in ``directory`` holds; parameters and buffers are shared.

    It pickles as long as the reading process has loaded the same artifact.
    Raises ``UsageError`` for a folder that is not as written, or for a model that the artifact was not made for.
    """
    module = import_artifact(Path(directory))
    try:
        result: nn.Module = module.apply(model)
    except module.WrongModelError as error:
        raise UsageError(f"{directory} cannot be applied. {error}") from error
    return result


def import_artifact(folder: Path) -> ModuleType:
    """The artifact's Python module, imported under a name made from its contents.

    Raises ``UsageError`` when the folder is not as written or needs a newer PyTorch.
    """
    facts = manifest.read(folder)
    minimum = facts.get("torch", {}).get("minimum", manifest.TORCH_MINIMUM)
    if torch.__version__ < minimum:
        raise UsageError(f"{folder} needs PyTorch {minimum} or newer, and this is {torch.__version__}.")
    file = (folder / manifest.MODEL).resolve()
    text = file.read_bytes()  # run as read, so that no cached bytecode stands in for what was checked
    if hashlib.sha256(text).hexdigest() != facts["files"][manifest.MODEL]:
        raise UsageError(f"{file} changed while it was loaded; make the artifact again.")
    contents = "".join(facts["files"].get(name, "") for name in (manifest.MODEL, manifest.CONSTANTS))
    name = f"memrewrite_model_{hashlib.sha256(contents.encode()).hexdigest()[:12]}"
    module = sys.modules.get(name)
    if module is None:
        module = ModuleType(name)
        module.__file__ = str(file)
        sys.modules[name] = module  # classes and pickles look their module up here
        try:
            exec(compile(text, str(file), "exec"), module.__dict__)  # noqa: S102  (as import does)
        except BaseException:
            del sys.modules[name]
            raise
    module.__file__ = str(file)
    return module
