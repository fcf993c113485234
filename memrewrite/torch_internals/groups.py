"""A process group of any size without peers, beside the one that this process may be in. Read in PyTorch 2.11 to 2.15.

It is that of ``torch.testing._internal.distributed.fake_pg``, which PyTorch's own estimators are tested with: a
``DeviceMesh`` asks for registered groups, of which there is no public kind that needs no peers. What is registered is a
handful of tables of ``torch.distributed.distributed_c10d``, and a table of names in C++ where no name may be there
twice. The tables are set aside meanwhile and names are given that the other groups cannot have; nothing is sent to
peers, who need not take part.
"""

import contextlib
import inspect
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from memrewrite.torch_internals.patches import process_wide
from memrewrite.torch_internals.spread import local_part
from memrewrite.torch_internals.versions import require_module

_FAKE = "torch.testing._internal.distributed.fake_pg"
_TABLES = ("_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config", "_tags_to_pg", "_pg_to_tag")
_GIVEN_SINCE = (2, 13)  # by PyTorch itself
_FIRST_NAME = 1_000_000  # names of groups are numbers, counted up


@contextlib.contextmanager
def _parts_given() -> Iterator[None]:
    """Let real tensors that are reduced and scattered give this process its part of its own.

    Before PyTorch 2.13 what comes of them without peers is whatever lay in memory there, another time other bits.
    """
    if tuple(map(int, torch.__version__.split(".")[:2])) >= _GIVEN_SINCE:
        yield
        return
    from torch.distributed import _functional_collectives as functional

    both: Any = functional, dist
    name, (spread, into) = "reduce_scatter_tensor", (vars(each)["reduce_scatter_tensor"] for each in both)

    def spread_here(*args: Any, **kwargs: Any) -> Any:
        result, given = spread(*args, **kwargs), inspect.signature(spread).bind(*args, **kwargs).arguments
        _fill(local_part(result), given["self"], given["scatter_dim"])
        return result

    def into_here(*args: Any, **kwargs: Any) -> Any:
        result, given = into(*args, **kwargs), inspect.signature(into).bind(*args, **kwargs).arguments
        _fill(given["output"], given["input"], 0)
        return result

    with mock.patch.object(functional, name, spread_here), mock.patch.object(dist, name, into_here):
        yield


def _fill(part: Tensor, whole: Tensor, dim: int) -> None:
    whole = local_part(whole)
    if type(part) is Tensor and not part.is_meta:  # and none that is traced or stands for another
        with torch.no_grad():
            size = part.shape[dim] if part.dim() == whole.dim() else 0
            part.copy_(whole.narrow(dim, 0, size) if size else whole.flatten()[: part.numel()].view_as(part))


@process_wide
@contextlib.contextmanager
def alone_among(size: int, rank: int = 0) -> Iterator[None]:
    """Be one of ``size`` processes of which no other is there; afterwards all groups are as they were."""
    require_module(_FAKE)
    from torch.distributed import distributed_c10d as c10d
    from torch.testing._internal.distributed.fake_pg import FakeStore

    internals: Any = c10d
    tables: dict[str, Any] = {name: {} for name in _TABLES}
    world, backend, method = internals._world.default_pg, internals._backend, internals._default_pg_init_method
    count = max(_FIRST_NAME, internals._group_count)
    with (
        mock.patch.multiple(internals, **tables, _group_count=count),
        mock.patch.object(sys, "excepthook", sys.excepthook),  # which is replaced by one that names the rank
    ):
        internals._update_default_pg(None)
        try:
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
            with _parts_given():
                yield
        finally:
            for name in [*internals._pg_names.values()]:
                internals._unregister_process_group(name)
            internals._update_default_pg(world)
            internals._backend, internals._default_pg_init_method = backend, method
