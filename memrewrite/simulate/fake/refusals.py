"""Sentences for what only tensors with data can run."""

import traceback

import torch.distributions.distribution

from memrewrite.records.errors import first_line
from memrewrite.records.lines import line_of
from memrewrite.torch_internals.fake_tensors import (
    FAKE_TENSOR_ERRORS,
    asks_for_memory,
    asks_for_numbers,
    has_no_storage,
    higher_order,
    is_bare,
    is_of_a_class,
    lacks_fake_rule,
)

_ON_TENSORS = (
    "compute it with tensors (torch.where, masks), in a small submodule, which stays a call, or outside forward"
)


def failed(name: str, error: Exception) -> str:
    """Why the model called ``name`` does not run on tensors without data, which raised ``error``."""
    if sentence := refusal(name, error):
        return sentence
    line = line_of(error)
    place = f" at {line}" if line else ""
    if isinstance(error, FAKE_TENSOR_ERRORS):
        return decides(name, place, first_line(error), _instead(error))
    return f"{name} does not run on the example inputs{place}: {type(error).__name__}: {first_line(error)}."


def decides(name: str, place: str, what: str, instead: str = _ON_TENSORS) -> str:
    """That values decide in the model called ``name``: ``place`` is "" or " at" where, ``what`` what they are asked."""
    return (
        f"{name} lets the values of a tensor decide what Python does{place} ({what}), which no graph can hold; "
        f"{instead}."
    )


def _instead(error: Exception) -> str:
    files = {frame.filename for frame in traceback.extract_tb(error.__traceback__)}
    if torch.distributions.distribution.__file__ in files:
        return "give its distributions validate_args=False, so that they do not look at what they are given"
    return _ON_TENSORS


def refusal(name: str, error: Exception) -> str:
    """What nothing can be told of the model called ``name`` for, if that is why ``error`` was raised, else ""."""
    return counts_nothing(name, error) or needs_data(name, error)


def needs_data(name: str, error: Exception) -> str:
    """Why the model called ``name`` does not run on fake tensors, if that is why ``error`` was raised, else ""."""
    place = line_of(error) or "no line of its own"
    if asks_for_memory(error):
        return (
            f"{name} hands the memory of a tensor to code that is not PyTorch's (at {place}), which no graph can hold; "
            "call that in a custom autograd.Function, which stays a call."
        )
    if asks_for_numbers(error):
        return (
            f"{name} makes an index of the numbers in a tensor, taken one by one (at {place}), which no graph can "
            "hold; index with the tensor itself."
        )
    if is_bare(error):
        return (
            f"{name} takes derivatives forward (torch.func.jvp, jacfwd, hessian), through which backward does not go "
            "on tensors without data; take them backward (jacrev of jacrev in place of hessian)."
        )
    if has_no_storage(error):
        return (
            f"{name} computes with a sparse or a nested tensor (at {place}), whose memory nothing tells before it is "
            "there; compute with the tensors that it is made of, by index_select and index_add say."
        )
    if kind := is_of_a_class(error):
        return (
            f"{name} makes a {kind} of a tensor (at {place}), which one without data cannot be; compute with plain "
            "tensors, with is_causal=True or a mask in place of a CausalBias say."
        )
    if operator := lacks_fake_rule(error):
        return (
            f"{name} calls the operator {operator} (at {place}), which has no rule for tensors without data; "
            "give it one (torch.library.register_fake), and it stays a call."
        )
    return ""


def counts_nothing(name: str, error: Exception) -> str:
    """Why nothing tells what the model called ``name`` takes, if that is why ``error`` was raised, else ""."""
    if operator := higher_order(error):
        place = line_of(error) or "no line of its own"
        return (
            f"{name} calls the higher-order operator {operator} (at {place}), and what that runs inside cannot be "
            "counted; compute without it, with scaled_dot_product_attention or torch.where say."
        )
    return ""


def takes_data(error: Exception) -> bool:
    """Whether ``error`` was raised because only tensors with data can run what was run."""
    return isinstance(error, FAKE_TENSOR_ERRORS) or bool(needs_data("", error))
