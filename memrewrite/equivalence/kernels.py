"""Which kernels compute what is compared."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from memrewrite.equivalence.case import Case
from memrewrite.equivalence.sizes import cut_down, varying
from memrewrite.runtime.fused import uncompiled
from memrewrite.workload.step import Inputs

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


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
    would be compiled, and convolutions planned by cuDNN, for sizes that nobody asked for. Gives what was left out
    therefore, once it was.
    """
    spared = list[str]()
    if any(place.named for place in varying(case.rewritten, full)) or cut_down(case.inputs, full):
        yield spared
        return
    convolutions = _plans_convolutions(case)
    with uncompiled() as chains, _without_cudnn(convolutions):
        yield spared
    spared += [word for word, there in (("compiled kernels", chains), ("cuDNN", convolutions)) if there]


def _plans_convolutions(case: Case) -> bool:
    """Whether cuDNN plans convolutions, and computes no recurrent network, of which PyTorch's own way is another."""
    if not (case.devices and torch.backends.cudnn.enabled and torch.backends.cudnn.is_available()):
        return False
    modules = [*case.original.modules()]
    convolves, recurs = (any(isinstance(each, kinds) for each in modules) for kinds in (_CONVOLUTIONS, nn.RNNBase))
    return convolves and not recurs


@contextlib.contextmanager
def _without_cudnn(layers: bool) -> Iterator[None]:
    """Convolutions and recurrent networks are not computed by cuDNN meanwhile."""
    enabled = torch.backends.cudnn.enabled
    try:
        torch.backends.cudnn.enabled = enabled and not layers
        yield
    finally:
        torch.backends.cudnn.enabled = enabled
