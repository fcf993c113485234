"""What speaks against a capture before anything runs: hooks, and names that generated source cannot spell."""

import keyword
import re
from collections.abc import Iterable

from torch import fx, nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from memrewrite.capture.expressions import class_of
from memrewrite.records.errors import CaptureError
from memrewrite.runtime.differences import HOOKS
from memrewrite.torch_internals.autograd_nodes import has_global_module_hooks
from memrewrite.torch_internals.pytrees import tensors_in
from memrewrite.torch_internals.spread import is_sparse_or_nested


def refuse_hooks(model: nn.Module) -> None:
    """Raise ``CaptureError`` where a submodule has hooks, or is compiled."""
    advice = "would fire while tracing and never again; remove them before optimizing and register them afterwards."
    if has_global_module_hooks():
        raise CaptureError(f"Hooks for all modules are registered (torch.nn.modules.module), which {advice}")
    for path, module in model.named_modules():
        refuse_weight_hooks(module, path or type(model).__name__)
        if "_orig_mod" in module._modules or module._compiled_call_impl is not None:
            raise CaptureError(f"{path or type(model).__name__} is compiled; optimize first, then compile the result.")
        for name in HOOKS:
            if path and module.__dict__.get(name):
                kind = name.strip("_").replace("_", " ")
                raise CaptureError(f"{path} ({type(module).__name__}) has {kind}, which {advice}")


def refuse_weight_hooks(module: nn.Module, name: str) -> None:
    """Raise ``CaptureError`` where a hook of ``torch.nn.utils`` computes the weight of ``module`` before each call."""
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm | SpectralNorm):
            kind = "weight_norm" if isinstance(hook, WeightNorm) else "spectral_norm"
            raise CaptureError(
                f"{name} ({type(module).__name__}) has torch.nn.utils.{kind}, a hook that sets {hook.name} before each "
                f"call, which a graph loses; use torch.nn.utils.parametrizations.{kind}, which is captured."
            )


def refuse_names(model: nn.Module) -> None:
    """Both front ends write attributes as text, ``self.a.b`` or ``getattr(self.a, "b-c")``, and can spell no more.

    What a graph belongs to stands for the model, and has some names of its own (``code``, ``graph``, ``meta``).
    """
    itself = fx.GraphModule(nn.Module(), fx.Graph())
    taken = {*dir(itself)} - {*dir(nn.Module())}
    for path, _ in [*model.named_parameters(), *model.named_buffers()]:
        for part in path.split("."):
            if keyword.iskeyword(part) or re.search(r'["\\\n]', part):
                raise CaptureError(f"{path} goes through the name {part!r}, which no graph can spell; rename it.")
        if (part := path.partition(".")[0]) in taken:
            raise CaptureError(f"{path} goes through the name {part!r}, which every graph has itself; rename it.")


def refuse_unnamed(name: str, functions: Iterable[type]) -> None:
    """Raise ``CaptureError`` for a custom Function that no program can call, because no module has its class."""
    for kind in functions:
        if not class_of(kind):
            raise CaptureError(
                f"{name} uses the custom autograd.Function {kind.__name__}, whose backward a captured graph loses, and "
                f"{kind.__module__} has it under no name of its own, so that no program can call it; define the class "
                "at the top of a module."
            )


def refuse_unseen(graph: fx.Graph, name: str) -> None:
    """Raise ``CaptureError`` for a graph with sparse or nested tensors: nothing tells before it runs what they hold."""
    for node in graph.nodes:
        if any(map(is_sparse_or_nested, tensors_in(node.meta.get("val")))):
            what = f"a sparse or a nested tensor ({node.name})"
            raise CaptureError(f"{name} computes with {what}, which no plan can count.")
