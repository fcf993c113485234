"""Which modules of a model tensor parallelism divides, and how: its plan, read from the model.

    tp_plan = {"layers.*.self_attn.q_proj": "colwise", "layers.*.self_attn.o_proj": "rowwise"}

Models of transformers have one (``model.tp_plan``, before that ``model._tp_plan``, which had the words of their
configuration, ``base_model_tp_plan``, in it). The words are not documented as an interface, so they are read here
alone. Read in transformers 4.57 and 5.23. A model of one's own may have a ``tp_plan`` of such words or of the styles
that ``parallelize_module`` takes.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from memrewrite.records.errors import UsageError

_REPLICATED = {"replicate", "replicated"}  # every process has all of it, as of what no plan names
HEADS = "replicated_with_grad_allreduce"  # likewise, for what works on the heads of this process alone
EXPERTS = "moe_tp_experts"  # which have a part of every expert each
LATENT = "mla_kv_a_proj"  # which gives what is divided later, and positions of keys that all heads take as they are
_LOCAL = "local_params"  # whose forward takes parts of parameters, as all does here
_OF_MODULES = {HEADS, EXPERTS, LATENT, _LOCAL}
_OF_PARAMETERS = {"colwise": -2, "packed_colwise": -2, "rowwise": -1, "packed_rowwise": -1}


@dataclass(frozen=True)
class Divided:
    """A parameter of which each process has a part along ``dim``, and nothing is sent where it is used."""

    dim: int


def plan_of(model: nn.Module) -> dict[str, Any]:
    """The style of each module that is divided, by path: one of PyTorch's, ``HEADS``, ``EXPERTS`` or ``LATENT``.

    Parameters that a plan names by themselves are ``Divided``.

    Raises ``UsageError`` where there is no plan, or one with a word for a part of the model that is not supported.
    """
    told = _told(model)
    if not told:
        raise UsageError(
            f"{type(model).__name__} has no tensor-parallel plan; give it one (model.tp_plan, of paths and styles as "
            "parallelize_module takes them), or call parallelize_module and leave out mesh."
        )
    found: dict[str, Any] = {}
    for pattern, style in told.items():
        for path, kind in _matching(model, pattern):
            if style not in _REPLICATED:
                found[path] = _styled(path, kind, style)
    if not found:
        raise UsageError(f"No module of {type(model).__name__} has a path that its tensor-parallel plan names.")
    return found | _tied(model, found)


def refuse_uneven_heads(model: nn.Module, size: int) -> None:
    """Raise ``UsageError`` where a configuration has a number of heads that ``size`` processes cannot share."""
    config = getattr(model, "config", None)
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % size:
            raise UsageError(f"{name}={heads} cannot be divided among tp={size}; give a divisor of {heads}.")


def rotary_width(model: nn.Module) -> int:
    """How many of the numbers that a ``LATENT`` module puts out are positions of keys; raises ``UsageError``."""
    config = getattr(model, "config", None)
    found = getattr(getattr(config, "get_text_config", lambda: config)(), "qk_rope_head_dim", None)
    if not isinstance(found, int):
        raise UsageError(
            f"The tensor-parallel plan of {type(model).__name__} has {LATENT!r}, for which its config must have "
            "qk_rope_head_dim."
        )
    return found


def _told(model: nn.Module) -> Mapping[str, Any]:
    plan = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    return plan if isinstance(plan, Mapping) else {}


def _matching(model: nn.Module, pattern: str) -> Iterator[tuple[str, Any]]:
    """What a pattern names, modules and parameters by path; ``*`` is a part of a path without dots."""
    fits = re.compile(re.escape(pattern).replace(r"\*", r"[^.]*")).fullmatch
    for path, part in [*model.named_modules(), *model.named_parameters()]:
        if path and fits(path):
            yield path, part


def _styled(path: str, part: Any, style: Any) -> Any:
    from torch.distributed.tensor.parallel import ParallelStyle

    module = isinstance(part, nn.Module)
    if isinstance(style, ParallelStyle) or (module and style in _OF_MODULES):
        return style
    if not module and style in _OF_PARAMETERS:
        return Divided(_OF_PARAMETERS[style] if part.dim() > 1 else -1)
    made = _styles().get(style) if module else None
    if made is None:
        raise UsageError(
            f"The tensor-parallel plan has {style!r} for {path}, which is not supported; call parallelize_module with "
            "styles of PyTorch's and leave out mesh."
        )
    if not isinstance(part, nn.Linear | nn.Embedding) and style != "sequence_parallel":
        raise UsageError(
            f"{path} is a {type(part).__name__}, and parallelize_module divides Linear and Embedding; leave it out of "
            "the tensor-parallel plan."
        )
    return made()


def _styles() -> dict[str, Callable[[], Any]]:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    def gathered() -> Any:
        return ColwiseParallel(output_layouts=Replicate())

    def split() -> Any:
        return RowwiseParallel(input_layouts=Replicate())

    return {
        "colwise": ColwiseParallel,
        "local_colwise": ColwiseParallel,
        "rowwise": RowwiseParallel,
        "local_rowwise": RowwiseParallel,
        **dict.fromkeys(("colwise_rep", "colwise_gather_output", "embedding_colwise"), gathered),
        **dict.fromkeys(("rowwise_rep", "rowwise_split_input", "embedding_rowwise"), split),
        "sequence_parallel": lambda: SequenceParallel(use_local_output=True),
    }


def _tied(model: nn.Module, planned: dict[str, Any]) -> dict[str, Any]:
    """Embeddings that the plan does not name but whose weight is that of a head which it does: divided alike."""
    modules = (model.get_submodule(path) for path, style in planned.items() if not isinstance(style, Divided))
    weights = {id(each.weight) for each in modules if hasattr(each, "weight")}
    others = {path: part for path, part in model.named_modules() if path not in planned}
    tied = [path for path, part in others.items() if isinstance(part, nn.Embedding) and id(part.weight) in weights]
    return {path: _styles()["embedding_rowwise"]() for path in tied}
