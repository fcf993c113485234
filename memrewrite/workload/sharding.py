"""Models that are spread over several processes: those are refused in a sentence, and what DDP will add is told.

A budget is that of one device whose model is whole. What wraps or shards a model has hooks and buffers of its own.
"""

import sys

import torch.distributed
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from memrewrite.records.errors import UsageError
from memrewrite.records.options import format_bytes

_FSDP, _TENSOR = "torch.distributed.fsdp", "torch.distributed.tensor"  # not imported for a model that has none of it
_BUCKETS = (
    "If the result is wrapped in DistributedDataParallel, its buckets take up to {size} more than is predicted, a copy "
    "of every gradient; with gradient_as_bucket_view=True they are the gradients, which are then never freed."
)


def refuse_sharded(model: nn.Module) -> None:
    """Raise ``UsageError`` for a model that FSDP or DTensor shards, or that is wrapped to run on several devices."""
    for path, module in model.named_modules():
        where = f"{path} ({type(module).__name__})" if path else type(module).__name__
        if isinstance(module, DistributedDataParallel | DataParallel):
            inner = ".".join(filter(None, [path, "module"]))
            raise UsageError(
                f"{where} is a wrapper that runs its model on several devices; optimize the model inside (.{inner}) "
                "and wrap the result."
            )
        if _is_a(module, _FSDP, "FSDPModule"):
            raise UsageError(f"{where} was sharded by fully_shard (FSDP2), {_UNSUPPORTED} fully_shard.")
        if _is_a(module, _FSDP, "FullyShardedDataParallel"):
            raise UsageError(f"{where} is a FullyShardedDataParallel (FSDP1), {_UNSUPPORTED} wrapping it.")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if _is_a(tensor, _TENSOR, "DTensor"):
            raise UsageError(f"{name} is a DTensor, {_UNSUPPORTED} distributing it.")


_UNSUPPORTED = "which is not supported yet: a budget is that of one device; leave such a model as it is, or plan before"


def bucket_notes(model: nn.Module) -> tuple[str, ...]:
    """What DDP's buckets would add to the step, where several processes train; nothing to say elsewhere."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
        return ()
    size = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    return (_BUCKETS.format(size=format_bytes(size)),) if size else ()


def _is_a(value: object, module: str, name: str) -> bool:
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(value, kind)
