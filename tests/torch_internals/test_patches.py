"""Patches of what all threads see: they are gone when the last one ends, in whichever order threads come and go."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from memrewrite.process.thread import apart
from memrewrite.torch_internals.custom_functions import function_calls
from memrewrite.torch_internals.fake_tensors import real_rules_on_fake_tensors
from memrewrite.torch_internals.patches import process_wide
from memrewrite.torch_internals.tracing import tracing_untold


class Seen:
    value = "original"


@process_wide
@contextmanager
def seen_as(value: str) -> Iterator[str]:
    """As ``mock.patch`` does it: what was there is put back at the end."""
    before, Seen.value = Seen.value, value
    try:
        yield value
    finally:
        Seen.value = before


def test_a_thread_waits_until_the_other_one_has_left() -> None:
    inside, order = threading.Event(), list[str]()

    def first() -> None:
        with seen_as("first"):
            inside.set()
            time.sleep(0.1)
            order.append(f"first sees {Seen.value}")

    def second() -> None:
        inside.wait()
        with seen_as("second"):
            order.append(f"second sees {Seen.value}")

    threads = [threading.Thread(target=each) for each in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert order == ["first sees first", "second sees second"]
    assert Seen.value == "original"


def test_one_thread_may_enter_several() -> None:
    before = torch.utils.swap_tensors, vars(torch.autograd.Function)["apply"], torch.compiler.is_compiling.__code__
    with real_rules_on_fake_tensors(), function_calls(), tracing_untold(), seen_as("inside"), seen_as("deeper"):
        assert Seen.value == "deeper"
        assert torch.utils.swap_tensors is not before[0]
        assert torch.compiler.is_compiling.__code__ is not before[2]
    after = torch.utils.swap_tensors, vars(torch.autograd.Function)["apply"], torch.compiler.is_compiling.__code__
    assert after == before
    assert Seen.value == "original"


def test_a_thread_that_is_waited_for_enters_as_the_one_that_waits() -> None:
    def inner() -> str:
        with seen_as("deeper") as value:
            return f"{value}, {Seen.value}"

    with seen_as("inside"):
        assert apart(inner) == "deeper, deeper"
        assert Seen.value == "inside"
    assert Seen.value == "original"
