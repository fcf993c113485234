"""The random state that code shares: Python's, NumPy's where it is imported, PyTorch's on every device in use."""

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class RandomState:
    """The random state of Python, NumPy, the CPU and the CUDA ``devices`` as it is when this is made."""

    def __init__(self, devices: Iterable[torch.device] = ()) -> None:
        self.torch = {"cpu": torch.get_rng_state()}
        self.torch |= {str(device): torch.cuda.get_rng_state(device) for device in devices}
        self.python = random.getstate()
        numpy = sys.modules.get("numpy")
        self.numpy: Any = None if numpy is None else numpy.random.get_state(legacy=False)

    def restore(self) -> None:
        """Make this the random state again."""
        for device, state in self.torch.items():
            if device == "cpu":
                torch.set_rng_state(state)
            else:
                torch.cuda.set_rng_state(state, device)
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)


@contextmanager
def preserved_rng(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Put the random state back afterwards, on the CUDA devices that ``tensors`` lie on, too."""
    with _preserved(tensor.device for tensor in tensors if tensor.is_cuda):
        yield


@contextmanager
def preserved_everywhere() -> Iterator[None]:
    """Put the random state back afterwards, on every CUDA device that may be in use."""
    count = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
    with _preserved(torch.device("cuda", index) for index in range(count)):
        yield


@contextmanager
def _preserved(devices: Iterable[torch.device]) -> Iterator[None]:
    state = RandomState(dict.fromkeys(devices))
    try:
        yield
    finally:
        state.restore()


def draws() -> list[Any]:
    """The state of what Python code draws from on the CPU, as values that compare."""
    state = RandomState()
    return [state.python, str(state.numpy), state.torch["cpu"].tolist()]


def seed_all(seed: int, devices: Iterable[torch.device]) -> None:
    """Seed Python, NumPy where it is imported, and PyTorch on these devices: ``torch.manual_seed`` touches all."""
    torch.default_generator.manual_seed(seed)
    for device in devices:
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)
