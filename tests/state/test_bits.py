"""What tells bits apart, on the CPU and, by sums of words that are mixed with their places, anywhere."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memrewrite.state import bits


@given(st.binary(min_size=1, max_size=100), st.data())
def test_sums_differ_with_a_byte_and_with_its_place(content: bytes, data: st.DataObject) -> None:
    def mixed(content: bytes) -> int:
        return bits.mixed(torch.tensor([*content], dtype=torch.uint8))

    at = data.draw(st.integers(0, len(content) - 1))
    other = data.draw(st.integers(0, 255).filter(lambda byte: byte != content[at]))
    whole = mixed(content)
    assert whole == mixed(bytes(content))
    assert 0 <= whole < 2**64
    assert whole != mixed(content[:at] + bytes([other]) + content[at + 1 :])
    turned = content[8:] + content[:8]
    assert (whole == mixed(turned)) == (content == turned)


def test_sums_are_of_all_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    data = torch.arange(1000).to(torch.uint8)
    whole = bits.mixed(data)
    monkeypatch.setattr(bits, "_WORDS", 7)
    assert bits.mixed(data) == whole


def test_fingerprints_tell_types_shapes_and_bits_apart() -> None:
    tensor = torch.tensor([0.0, 1.0, torch.nan])
    same = bits.fingerprint(tensor)
    assert bits.fingerprint(torch.stack([tensor, tensor])[1]) == same
    for other in (-tensor, tensor.view(torch.int32), tensor[None], tensor.double()):
        assert bits.fingerprint(other) != same
