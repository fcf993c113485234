"""FSDP2's ``CPUOffloadPolicy`` where a step for CUDA is simulated on the CPU, so that host and device are one there.

Units copy what they have of a parameter to the device before they gather it, and its reduced gradient to the host:
copies that are none between tensors of one device. Read in PyTorch 2.11 to 2.15.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, Protocol
from unittest import mock

from torch import Tensor

from memrewrite.torch_internals.patches import process_wide


class Observer(Protocol):
    """What counts storages."""

    def moved_out(self, tensors: Iterable[Tensor]) -> None:
        """Take notice that these lie on the host from here on."""


@process_wide
@contextlib.contextmanager
def copies_seen(observer: Observer) -> Iterator[None]:
    """Let what is gathered be copied before, and tell ``observer`` of gradients that go to the host."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group

    kind, groups = _fsdp_param.FSDPParam, _fsdp_param_group
    here: Any = _fsdp_param.ShardedState.SHARDED
    given, reduce = vars(kind)["all_gather_inputs"].fget, vars(groups)["foreach_reduce"]

    def copied(record: Any) -> Any:
        kept = record._sharded_param_data
        if not record.offload_to_cpu or record.sharded_state != here:
            return given(record)
        record._sharded_param_data = kept.clone()
        try:
            return given(record)
        finally:
            record._sharded_param_data = kept

    def reduced(records: Any, *args: Any, **kwargs: Any) -> Any:
        result = reduce(records, *args, **kwargs)
        moved = [record.sharded_param for record in records if record.offload_to_cpu]
        observer.moved_out([parameter.grad for parameter in moved if parameter.grad is not None])
        return result

    with (
        mock.patch.object(kind, "all_gather_inputs", property(copied)),
        mock.patch.object(groups, "foreach_reduce", reduced),
    ):
        yield
