"""What ``torch.compile`` does not run again with the rest of a segment. This text is also part of generated models.

Compiled, a segment is one call of ``checkpoint``; an operator in one of its own inside that is treated otherwise.
In there no node may have to run again: the compiler would keep what it reads.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts


def is_compiled() -> bool:
    """Whether a training step is being compiled."""
    return torch.compiler.is_compiling() and torch.is_grad_enabled()


def stays(operator: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``operator(*args, **kwargs)``, whose result stays; compiled only."""
    return checkpoint(operator, *args, use_reentrant=False, context_fn=_STAYS, **kwargs)


def may_stay(operator: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """``operator(*args)``, of which stays what would outside of segments; compiled only."""
    return checkpoint(operator, *args, use_reentrant=False, context_fn=_MAY_STAY)


def draw(operator: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``operator(*args, **kwargs)``, which draws so few numbers that they stay where it is compiled.

    To draw them again, compiled code would save the random state and set it, by way of the CPU.
    """
    return stays(operator, args, kwargs) if is_compiled() else operator(*args, **kwargs)


def _all_but_views(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_SAVE if getattr(operator, "is_view", False) else CheckpointPolicy.MUST_SAVE


def _compilers_choice(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_SAVE


_CONTEXTS = functools.partial(create_selective_checkpoint_contexts, allow_cache_entry_mutation=True)
_STAYS = functools.partial(_CONTEXTS, _all_but_views)
_MAY_STAY = functools.partial(_CONTEXTS, _compilers_choice)
