"""Are two tensors the same to the bit, NaN and negative zero included?"""

import hashlib

import torch
from torch import Tensor
from torch.nn import functional

_WORDS = 2**22  # at once
_MIXING = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether they have one type, one shape and the same bits."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bytes(a), _bytes(b))


def fingerprint(tensor: Tensor) -> bytes:
    """What tensors share that have one type, one shape and the same bits, and nearly never do else."""
    digest = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=16)
    data = _bytes(tensor)
    digest.update(mixed(data).to_bytes(8, "big") if tensor.is_cuda else data.cpu().numpy().data)
    return digest.digest()


def mixed(data: Tensor) -> int:
    """A sum of 64 bits over bytes, eight at a time and mixed with their place, made where they lie.

    Mixing is the finalizer of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators").
    """
    words = functional.pad(data, (0, -data.numel() % 8)).view(torch.int64)
    total = 0
    for number, part in enumerate(words.split(_WORDS)):
        start = number * _WORDS
        places = torch.arange(start, start + part.numel(), device=part.device)
        total += int(_mix(part ^ _mix(places)).sum())
    return total % 2**64


def _mix(x: Tensor) -> Tensor:
    for shift, factor in _MIXING:
        x = (x ^ (x >> shift)) * factor
    return x ^ (x >> 31)


def _bytes(tensor: Tensor) -> Tensor:
    whole = tensor.contiguous()  # of one element or none, it may still have any stride
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)
