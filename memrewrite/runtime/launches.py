"""A Triton kernel that a program launches as the model did. This text is also part of every artifact: torch only.

The grid is a tuple. Where it depends on what the kernel is tuned to, it is a list of what may be chosen, each with the
grid that goes with it:

    launch(kernel, [({"BLOCK": 64}, (n // 64,)), ({"BLOCK": 128}, (n // 128,))], x, out, n)
"""

import contextlib
from typing import Any

import torch
from torch import Tensor


def launch(kernel: Any, grid: Any, /, *args: Any, **kwargs: Any) -> None:
    """``kernel[grid](*args, **kwargs)``, on the device that its tensors are on, as forward may have seen to.

    Raises ``RuntimeError`` for a kernel that is tuned to something else than there was to choose.
    """

    def chosen(meta: Any) -> Any:
        for choice, fitting in grid:
            if all(meta[name] == value for name, value in choice.items()):
                return fitting
        raise RuntimeError("A Triton kernel is tuned to what it could not be when the model was optimized.")

    with contextlib.nullcontext() if torch.compiler.is_compiling() else _device_of(*args, *kwargs.values()):
        kernel[chosen if isinstance(grid, list) else grid](*args, **kwargs)


def _device_of(*values: Any) -> Any:
    devices = {value.device.index for value in values if isinstance(value, Tensor) and value.is_cuda}
    other = devices and torch.cuda.is_initialized() and torch.cuda.current_device() not in devices
    return torch.cuda.device(devices.pop()) if other else contextlib.nullcontext()
