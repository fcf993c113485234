"""Copies on the CPU are those that were begun, or new ones."""

import gc

import pytest
import torch
from torch import nn

from memrewrite.measurement import ahead

on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@on_cuda
def test_what_was_begun_is_what_is_given() -> None:
    linear = nn.Linear(1024, 1024).cuda()
    storage = linear.weight.untyped_storage()
    with ahead.copied_ahead(linear):
        copied = ahead.on_cpu(storage)
        with torch.no_grad():
            linear.weight.zero_()
        assert ahead.on_cpu(storage) is copied
    assert copied.device.type == "cpu"
    assert torch.empty(0).set_(copied).count_nonzero() > 0
    assert not torch.empty(0).set_(ahead.on_cpu(storage)).count_nonzero()


@on_cuda
def test_memory_that_is_replaced_ends_and_its_successor_is_copied_when_asked() -> None:
    linear = nn.Linear(1024, 1024).cuda()
    gc.collect()  # of what tests before this one left
    before = torch.cuda.memory_allocated()
    with ahead.copied_ahead(linear):
        ahead.on_cpu(linear.bias.untyped_storage())  # the last
        linear.weight.data = torch.ones_like(linear.weight)
        gc.collect()
        assert torch.cuda.memory_allocated() == before
        assert torch.empty(0).set_(ahead.on_cpu(linear.weight.untyped_storage())).eq(1).all()


def test_copies_lie_on_the_cpu_where_new_tensors_do_not() -> None:
    with torch.device("meta"):
        copied = ahead.on_cpu(torch.ones(4, device="cpu").untyped_storage())
    assert torch.empty(0).set_(copied).tolist() == [1, 1, 1, 1]
