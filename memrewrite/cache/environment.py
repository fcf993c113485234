"""What a plan depends on besides the model and the request: versions, the device, settings, memrewrite's own code."""

import functools
import hashlib
import os
import platform
import sys
from importlib import metadata
from pathlib import Path

import numpy as np
import torch

import memrewrite
from memrewrite.costs.table import environment as settings_of
from memrewrite.workload.sharding import processes

_ATTENTION = ("flash", "mem_efficient", "math", "cudnn")
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING")


def environment(device: torch.device) -> dict[str, str]:
    """Facts in words, those of ``device`` among them."""
    return {
        "memrewrite": _own_code(),
        "python": sys.version,
        "torch": f"{torch.__version__} {torch.version.git_version} {torch.version.cuda}",
        "cudnn": str(torch.backends.cudnn.version()),
        "numpy": np.__version__,
        "triton": _version_of("triton"),
        "platform": f"{platform.system()} {platform.machine()}",
        "settings": settings_of(device),
        "device": _device(device),
        "kernels": str([getattr(torch.backends.cuda, f"{kernel}_sdp_enabled")() for kernel in _ATTENTION]),
        "defaults": f"{torch.get_default_dtype()} {torch.get_default_device()}",
        "gradients": f"{torch.is_grad_enabled()} {torch.is_inference_mode_enabled()}",
        "autocast": str(torch.get_autocast_dtype(device.type)),
        "allocator": str([os.environ.get(name) for name in _ALLOCATOR]),
        "processes": str(processes()),
    }


def _version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _device(device: torch.device) -> str:
    if device.type != "cuda":
        return str(device)
    facts = torch.cuda.get_device_properties(device)
    return f"{facts.name} {facts.major}.{facts.minor} {facts.multi_processor_count} {facts.total_memory}"


@functools.cache
def _own_code() -> str:
    """A digest of every file of the package."""
    root = Path(memrewrite.__file__).parent
    digest = hashlib.sha256()
    for folder, _, names in sorted(os.walk(root, followlinks=True)):  # passes may be a link
        for name in sorted(name for name in names if name.endswith(".py")):
            file = Path(folder, name)
            digest.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes())
    return digest.hexdigest()
