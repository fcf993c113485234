"""Which submodules stay calls in the graph of the whole model: those that have hooks, and those that no graph can hold.

    encoder.0.act (ReLU) has a forward hook        -> x = self.encoder.0.act(x), between nodes of one graph
    encoder.3.router (Router) branches on values   -> x = self.encoder.3.router(x)

The smaller they are, the more is left to plan: of what cannot be captured, these are the innermost.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping

import torch
from torch import nn

from memrewrite.capture.at_sight import refuse_weight_hooks
from memrewrite.capture.normal import is_below
from memrewrite.records.errors import CaptureError, FixedSizeError, UnfitCallError
from memrewrite.runtime.differences import HOOKS, joined
from memrewrite.runtime.guards import hooks_of
from memrewrite.torch_internals.spread import spreads

_FUSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)

Refusal = Callable[[str, nn.Module], str | None]
"""Why a submodule cannot be captured, "" if it can, None for one that is not called."""


def hooked(model: nn.Module) -> dict[str, str]:
    """The submodules without submodules that have hooks, and that they do."""
    leaves = [(path, module) for path, module in model.named_modules() if path and is_leaf(module)]
    return {path: why for path, module in leaves if (why := _of_hooks(path, module))}


def fused(model: nn.Module, amp: torch.dtype | None) -> dict[str, str]:
    """The outermost submodules that PyTorch may run by one kernel where there are no gradients, and that it does.

    No front end sees that kernel: it is shown what runs where there are gradients. Under autocast there is none.
    """
    found: dict[str, str] = {}
    for path, module in model.named_modules() if amp is None else ():
        if path and _by_one_kernel(module, model.training) and not any(is_below(path, above) for above in found):
            found[path] = "PyTorch may run it by one kernel in eval mode."
    return found


def _by_one_kernel(module: nn.Module, train: bool) -> bool:
    """Whether that may be so of a layer, of those whose batch comes first; ``train`` says whether its model trains."""
    if type(module) not in _FUSED or module.training or not torch.backends.mha.get_fastpath_enabled():
        return False
    first = any(isinstance(each, nn.MultiheadAttention) and each.batch_first for each in module.modules())
    return first and not (train and any(parameter.requires_grad for parameter in module.parameters()))


def hooked_around(model: nn.Module, regions: Collection[str]) -> dict[str, str]:
    """The outermost submodules that have hooks, and that they do, to stay calls in one graph of the whole model.

    None where they have more inside than no one of ``regions`` has: these are better then, between the hooks.
    """
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        if path and not any(is_below(path, above) for above in found) and (why := _of_hooks(path, module)):
            found[path] = why
    leaves = [path for path, module in model.named_modules() if is_leaf(module)]
    inside, planned = (
        sum(any(is_below(leaf, above) for above in paths) for leaf in leaves) for paths in (found, regions)
    )
    return found if inside <= len(leaves) - planned else {}


def _of_hooks(path: str, module: nn.Module) -> str:
    try:
        refuse_weight_hooks(module, path)
    except CaptureError as error:  # which says what to use instead
        return str(error)
    hooks = [*hooks_of(module)]
    if hooks and all(map(spreads, hooks)):
        return "it is tensor parallel."
    kinds = [kind.strip("_").replace("_", " ") for kind in HOOKS if vars(module)[kind]]
    return f"it has {' and '.join(kinds)}." if kinds else ""


def other_calls(model: nn.Module, refusal: FixedSizeError | UnfitCallError, odd: Mapping[str, str]) -> dict[str, str]:
    """The submodules to stay calls where the graph with the ``odd`` ones was refused, none inside another, and why."""
    return _with_fixing(model, refusal, odd) if isinstance(refusal, FixedSizeError) else _around(model, refusal, odd)


def _with_fixing(model: nn.Module, refusal: FixedSizeError, odd: Mapping[str, str]) -> dict[str, str]:
    """The ``odd`` submodules and those of the classes that fix a size.

    The first of a class settles a size for all; that the others would have, too, is not seen again.
    """
    classes = {type(model.get_submodule(path)) for path in refusal.fixing if path}
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        if path and type(module) in classes and not any(is_below(path, above) for above in (*odd, *found)):
            found[path] = refusal.told
    return beside(odd, found)


def _around(model: nn.Module, refusal: UnfitCallError, odd: Mapping[str, str]) -> dict[str, str]:
    """The ``odd`` submodules with, for the unfit one and those of its class, what each is inside of."""
    unfit = type(model.get_submodule(refusal.path))
    found = {path: why for path, why in odd.items() if type(model.get_submodule(path)) is not unfit}
    for path, why in odd.items():
        if path not in found and not any(is_below(path, above) for above in found):
            found = beside(found, {_called_above(model, path) or path: why})
    return found


def _called_above(model: nn.Module, path: str) -> str:
    """The closest submodule with a forward of its own, which lists have not, that has ``path`` inside; "" for none."""
    while path := path.rpartition(".")[0]:
        if type(model.get_submodule(path)).forward is not nn.Module.forward:
            return path
    return ""


def beside(odd: Mapping[str, str], calls: Mapping[str, str]) -> dict[str, str]:
    """The ``calls``, and those ``odd`` submodules that lie in none of them, and why."""
    return {path: why for path, why in odd.items() if not any(is_below(path, above) for above in calls)} | dict(calls)


def told(model: nn.Module, odd: Mapping[str, str]) -> list[str]:
    """A sentence for each reason, of all submodules of a class that stay calls for it."""
    alike: dict[tuple[str, str], list[str]] = defaultdict(list)
    for path, why in odd.items():
        alike[type(model.get_submodule(path)).__name__, why].append(path)
    return [
        f"{paths[0]} ({kind}){_stays(len(paths) - 1)} that the model makes: {why}"
        for (kind, why), paths in alike.items()
    ]


def _stays(more: int) -> str:
    return f" and {more} more stay calls" if more else " stays a call"


def once_of_a_class(refusal: Refusal) -> Refusal:
    """``refusal``, asked of one submodule of each class that is called, and told of all."""
    of_class: dict[type, str] = {}

    def known(path: str, module: nn.Module) -> str | None:
        if type(module) not in of_class and (said := refusal(path, module)) is not None:
            of_class[type(module)] = said
        return of_class.get(type(module))

    return known


def innermost(
    model: nn.Module, failing: Mapping[str, str], regions: Collection[str], refusal: Refusal
) -> dict[str, str]:
    """The submodules because of which the ``failing`` ones cannot be captured, none inside another, and why.

    ``regions`` are those that can be. What has one inside is not among them, as it would be lost there. ``refusal``
    tells of a submodule without submodules.
    """
    found: dict[str, str] = {}
    for path, why in failing.items():
        elsewhere = [other for other in (*failing, *regions) if other != path and is_below(other, path)]
        named = ((joined(path, name), leaf) for name, leaf in model.get_submodule(path).named_modules() if name)
        leaves = [(name, leaf) for name, leaf in named if not any(is_below(name, other) for other in elsewhere)]
        asked = {name: refusal(name, leaf) for name, leaf in leaves if is_leaf(leaf) and _is_own(leaf)}
        blamed = {name: said for name, said in asked.items() if said}
        found |= blamed or ({path: why} if path and not elsewhere else {})
    return found


def is_leaf(module: nn.Module) -> bool:
    """Whether a module has no submodules."""
    return next(module.children(), None) is None


def _is_own(module: nn.Module) -> bool:
    """Whether its class is no layer of PyTorch's, which can all be captured."""
    return not type(module).__module__.startswith("torch.nn.")
