"""Whether a launcher, torchrun say, started several processes of which this is one. Imports no PyTorch."""

import os


def processes() -> int:
    """How many a launcher started together."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "MASTER_ADDR" in os.environ else 1


def is_first() -> bool:
    """Whether this process is the one that answers."""
    return processes() == 1 or os.environ.get("RANK", "0") == "0"


def place() -> int:
    """The index of this process among those of its host."""
    return int(os.environ.get("LOCAL_RANK", "0")) if processes() > 1 else 0
