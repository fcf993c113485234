"""A number that changes whenever a dictionary does. Torch only; part of every artifact.

Private API: PyTorch's compiler keeps such numbers for guards of its own, from the tags that dictionaries had until
Python 3.11 and by watching them since. Python has no public way. Where it is gone, ``version_of`` is None, and guards
compare everything in each call, which takes about twice as long.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch

version_of: Callable[[dict[str, Any]], int] | None
version_of = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "dict_version", None)
if sys.version_info[:3] == (3, 13, 0):  # whose watchers miss what is set on objects (python/cpython issue 125608)
    version_of = None
