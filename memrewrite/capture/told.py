"""What models that ask about autocast are told while they are captured, which happens outside of it.

A graph is captured without autocast, which works on it as it runs. But code that asks and then, say, switches autocast
off for what needs float32 (transformers' rotary embeddings do) has to take the way it takes in the step.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

_OURS = ("torch", "memrewrite")
# The questions by name, with the device that those are about that are not told one.
_QUESTIONS = {"is_autocast_enabled": "cuda", "is_autocast_cpu_enabled": "cpu", "get_autocast_dtype": ""}
_QUESTIONS |= {"get_autocast_gpu_dtype": "cuda", "get_autocast_cpu_dtype": "cpu"}


@contextmanager
def autocast_told(amp: torch.dtype | None, device_type: str) -> Iterator[list[str]]:
    """Answer everybody but PyTorch as in a step under autocast to ``amp``, None for without, on ``device_type``.

    Gives the names of the modules that asked. Code that has imported a question by name gets the truth.
    """
    importlib.import_module("torch._dynamo")  # as it is imported it notes these functions, to know them again
    asked: list[str] = []
    with ExitStack() as stack:
        for name, device in _QUESTIONS.items():
            told = amp if name.startswith("get") else amp is not None
            stack.enter_context(mock.patch.object(torch, name, _answer(name, device, told, device_type, asked)))
        yield asked


def _answer(name: str, about: str, told: Any, device_type: str, asked: list[str]) -> Callable[..., Any]:
    truth = getattr(torch, name)

    def answer(*args: Any) -> Any:
        asking = str(sys._getframe(1).f_globals.get("__name__"))
        if asking.partition(".")[0] in _OURS:
            return truth(*args)
        asked.append(asking)
        here = (args[0] if args else about) == device_type
        return told if here and told is not None else truth(*args)

    return answer
