"""Which kernels compute what is compared."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from memrewrite.equivalence.case import Case
from memrewrite.equivalence.sizes import cut_down, varying
from memrewrite.runtime.dropin import programs
from memrewrite.runtime.fused import uncompiled
from memrewrite.workload.step import Inputs

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_ATTENTION = ("scaled_dot_product", "attention_in_pieces")  # in a program, of what computes it in the original


@contextlib.contextmanager
def without_fused(families: set[str]) -> Iterator[None]:
    """Without those fused operators that draw numbers of which nothing is seen, by family."""
    math = sdpa_kernel(SDPBackend.MATH) if "attention" in families else contextlib.nullcontext()
    with _without_cudnn("_rnn" in families), math:
        yield


@contextlib.contextmanager
def without_other_kernels(case: Case, full: Inputs) -> Iterator[list[str]]:
    """At smaller sizes, kernels are made only where the user named these, or where they are not yet verified.

    Else the program alone is in question there: its kernels were verified as they are for the full size, and others
    would be compiled, and convolutions and attention planned by cuDNN, for sizes that nobody asked for. Gives what was
    left out therefore, once it was.
    """
    spared = list[str]()
    if any(place.named for place in varying(case.rewritten, full)) or cut_down(case.inputs, full):
        yield spared
        return
    convolutions, attention = _plans_convolutions(case), _plans_attention(case)
    with uncompiled() as chains, _without_cudnn(convolutions, attention):
        yield spared
    cudnn = "cuDNN" if convolutions else "cuDNN's attention"
    spared += [word for word, there in (("compiled kernels", chains), (cudnn, convolutions or attention)) if there]


def _plans_convolutions(case: Case) -> bool:
    """Whether cuDNN plans convolutions, and computes no recurrent network, of which PyTorch's own way is another."""
    if not (case.devices and torch.backends.cudnn.enabled and torch.backends.cudnn.is_available()):
        return False
    modules = [*case.original.modules()]
    convolves, recurs = (any(isinstance(each, kinds) for each in modules) for kinds in (_CONVOLUTIONS, nn.RNNBase))
    return convolves and not recurs


def _plans_attention(case: Case) -> bool:
    """Whether cuDNN may plan attention, which other kernels may compute as well."""
    flags = torch.backends.cuda
    if not (case.devices and flags.cudnn_sdp_enabled() and torch.backends.cudnn.is_available()):
        return False
    others = flags.flash_sdp_enabled() or flags.mem_efficient_sdp_enabled() or flags.math_sdp_enabled()
    sources = [program.source for program in programs(case.rewritten).values()]
    return others and any(word in source for word in _ATTENTION for source in sources)


@contextlib.contextmanager
def _without_cudnn(layers: bool, attention: bool = False) -> Iterator[None]:
    """Convolutions and recurrent networks, or attention, are not computed by cuDNN meanwhile."""
    enabled, attends = torch.backends.cudnn.enabled, torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cudnn.enabled = enabled and not layers
        torch.backends.cuda.enable_cudnn_sdp(attends and not attention)
        yield
    finally:
        torch.backends.cudnn.enabled = enabled
        torch.backends.cuda.enable_cudnn_sdp(attends)
