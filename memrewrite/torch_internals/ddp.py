"""``DistributedDataParallel`` in one process, on fake tensors too: its own reducer at work, in a group without peers.

What DDP takes is observed: the buckets that its reducer makes, fills and makes anew after the first backward are
counted as any other tensor. Every collective is over as it is asked for and leaves its tensors as they are, so that
nothing waits for another process. (``torch.testing._internal.distributed.fake_pg`` does the same but gives the reducer
no tensors back, and has to be the process's one group, where the user's own may be.) The reducer reads its own small
integer tensors, the order of the buckets and which parameters are used, so these have data among fake ones.
Read in PyTorch 2.11 to 2.15.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from memrewrite.records.errors import UsageError
from memrewrite.records.mesh import Ddp
from memrewrite.torch_internals.dispatch_modes import Layer
from memrewrite.torch_internals.fake_tensors import FakeTensor, in_place_of_modes
from memrewrite.torch_internals.versions import private_imports

with private_imports():
    from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]

_MAKERS = (torch.ops.aten.empty.memory_format, torch.ops.aten.zeros.default)
Listener = Callable[[list[Tensor]], None]


class Replica:
    """A module as one of the processes of ``mesh`` has it; ``on_collective`` is told the tensors of each collective.

    Raises ``UsageError`` for a communication hook whose state is of an unknown kind.
    """

    def __init__(self, module: nn.Module, mesh: Ddp, on_collective: Listener) -> None:
        self._group = group = _Alone(mesh.size, on_collective)
        fake = any(isinstance(parameter, FakeTensor) for parameter in module.parameters())
        self._with_data = _WithData() if fake else None
        self._reads_used = fake and (mesh.static_graph or mesh.find_unused_parameters)
        with self._making():
            self._ddp = wrapped(module, mesh, group, init_sync=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, as DDP runs it."""
        return self._ddp(*args, **kwargs)

    def end_step(self) -> None:
        """Let buckets be made anew in the order of use, which the next forward would do first, with any other tensors.

        It happens once, and is none of what further steps ask for.
        """
        with self._making():
            self._ddp.reducer._rebuild_buckets()

    @contextlib.contextmanager
    def around(self, last: bool) -> Iterator[None]:
        """Around forward and backward of a micro-batch, of which the ``last`` one reduces gradients."""
        with (
            # In a static graph all of them do: its first pass has to.
            contextlib.nullcontext() if last or self._ddp.static_graph else self._ddp.no_sync(),
            self._with_data if self._reads_used and self._with_data is not None else contextlib.nullcontext(),
        ):
            yield
        self._group.under_way.clear()

    @contextlib.contextmanager
    def _making(self) -> Iterator[None]:
        if self._with_data is None:
            yield
            return
        with contextlib.ExitStack() as stack:
            self._with_data.making = True
            if not self._with_data.active:
                stack.enter_context(self._with_data)
            try:
                yield
            finally:
                self._with_data.making = False


def wrapped(module: nn.Module, mesh: Ddp, group: Any, *, init_sync: bool) -> DistributedDataParallel:
    """The module in DDP as ``mesh`` says; raises what ``Replica`` raises."""
    found = DistributedDataParallel(
        module,
        process_group=group,
        init_sync=init_sync,
        bucket_cap_mb=mesh.bucket_cap_mb,
        gradient_as_bucket_view=mesh.gradient_as_bucket_view,
        static_graph=mesh.static_graph,
        find_unused_parameters=mesh.find_unused_parameters,
    )
    found.broadcast_buffers = mesh.buffers
    if mesh.hook is not None:
        found.register_comm_hook(_own_group(mesh.hook, group), mesh.hook[1])
    return found


def buckets_of(module: nn.Module) -> tuple[int, bool]:
    """The bytes of the buckets that DDP keeps for the gradients of a module, and whether these lie in the buckets."""
    found = [each for each in module.modules() if isinstance(each, DistributedDataParallel)]
    told = (str(each._get_ddp_logging_data().get("bucket_sizes", "")) for each in found)
    total = sum(int(size) for sizes in told for size in sizes.split(",") if size.strip())
    return total, bool(found) and all(each.gradient_as_bucket_view for each in found)


def _own_group(hook: tuple[Any, Callable[..., Any]], group: Any) -> Any:
    """The state of a communication hook for ``group``."""
    state = hook[0]
    if state is not None and not isinstance(state, dist.ProcessGroup):
        name = getattr(hook[1], "__qualname__", type(hook[1]).__name__)
        raise UsageError(
            f"The communication hook {name} has a {type(state).__name__} as its state, and what such a hook takes is "
            "not known; optimize the model before it is wrapped, and leave room for what the hook keeps."
        )
    return group  # which hooks take None for the default one


class _Alone(dist.ProcessGroup):
    """A group of ``size`` processes, of which this is the first and no other is there."""

    def __init__(self, size: int, on_collective: Listener) -> None:
        super().__init__(0, size)  # type: ignore[call-arg]
        self._on_collective = on_collective
        self.under_way: list[Tensor] = []  # sent, and held by whoever sends them until that is over

    def getBackendName(self) -> str:  # noqa: N802 - its name in PyTorch
        return "alone"

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        self.under_way += tensors
        return self._over(tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        return self._over(tensors)

    def _over(self, tensors: list[Tensor]) -> Any:
        self._on_collective(tensors)
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(tensors)
        return _create_work_from_future(future)


class _WithData(Layer):
    """While ``making``, new tensors of 32-bit integers are real; operators on such tensors run on them, on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.making = self.active = False
        self._storages: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __enter__(self) -> "_WithData":
        self.active = True
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.active = False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.making and func in _MAKERS and kwargs.get("dtype") is torch.int32:
            with in_place_of_modes():
                made: Tensor = func(*args, **{**kwargs, "device": "cpu", "pin_memory": False})
            self._storages.add(made.untyped_storage())
            return made
        if any(self._has_data(value) for value in args):
            with in_place_of_modes():
                return func(*args, **kwargs)
        return self.below(func, types, args, kwargs)

    def _has_data(self, value: Any) -> bool:
        """Whether this is one of those tensors, or a list of them."""
        if isinstance(value, list | tuple):
            return bool(value) and self._has_data(value[0])
        return isinstance(value, Tensor) and value.dtype is torch.int32 and value.untyped_storage() in self._storages
