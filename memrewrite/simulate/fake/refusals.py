"""Sentences for what only tensors with data can run."""

from memrewrite.records.lines import line_of
from memrewrite.torch_internals.fake_tensors import (
    FAKE_TENSOR_ERRORS,
    asks_for_memory,
    asks_for_numbers,
    has_no_storage,
    higher_order,
    lacks_fake_rule,
)


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
    if has_no_storage(error):
        return (
            f"{name} computes with a sparse or a nested tensor (at {place}), whose memory nothing tells before it is "
            "there; compute with the tensors that it is made of, by index_select and index_add say."
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
