"""Which kernels optimizers choose for fake parameters, and what users hooked to them. Read in PyTorch 2.11 to 2.15.

They decide by lists of types and devices, and by whether they are compiled, which have no public way in; hooks can be
added, and not be asked for.
"""

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch
import torch.optim.optimizer as optimizer_module

from memrewrite.torch_internals.fake_tensors import FakeTensor
from memrewrite.torch_internals.patches import process_wide
from memrewrite.torch_internals.versions import private_imports, require

with private_imports():
    from torch.optim.optimizer import _foreach_supported_types as _foreach_types
    from torch.optim.optimizer import _global_optimizer_post_hooks as _after_all
    from torch.optim.optimizer import _global_optimizer_pre_hooks as _before_all
    from torch.utils._foreach_utils import _get_foreach_kernels_supported_devices as _foreach_devices

require("compiler._is_compiling_flag")


@process_wide
@contextlib.contextmanager
def foreach_on_fake_tensors(on_cpu: bool = False) -> Iterator[None]:
    """Let optimizers choose their foreach kernels for fake CUDA parameters, as they do for real ones.

    They decide by the exact type of a parameter, which for a fake one is FakeTensor. Foreach steps hold a
    temporary for every parameter at once, so the choice can decide the peak. ``on_cpu`` lets them choose so for
    fake parameters on the CPU, too.
    """
    devices = _foreach_devices()
    allowed = [*devices, "cpu"] if on_cpu else devices
    chosen = mock.patch.object(
        optimizer_module, "_get_foreach_kernels_supported_devices", autospec=True, return_value=allowed
    )
    _foreach_types.append(FakeTensor)
    try:
        with chosen:
            yield
    finally:
        _foreach_types.remove(FakeTensor)


@process_wide
@contextlib.contextmanager
def not_compiling() -> Iterator[None]:
    """Let optimizers step as they do in eager, while Dynamo compiles something else.

    From PyTorch 2.13 on they are told that they are compiled all the time that Dynamo works, and then count in tensors.
    """
    with mock.patch.object(torch.compiler, "_is_compiling_flag", False):
        yield


def has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether something is called before or after its steps."""
    own = vars(optimizer)
    places = own.get("_optimizer_step_pre_hooks"), own.get("_optimizer_step_post_hooks"), _before_all, _after_all
    return any(places)
