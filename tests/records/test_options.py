"""The grammar of budgets and how bytes are printed."""

import numpy
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from memrewrite.records.errors import UsageError
from memrewrite.records.options import Budget, format_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("8GB", 8 * 10**9),
        ("8GiB", 8 * 2**30),
        ("7.5GiB", 15 * 2**29),
        ("900MB", 900 * 10**6),
        ("512 KiB", 512 * 2**10),
        ("1.001KB", 1001),
        ("1.5kB", 1500),
        ("1TB", 10**12),
        ("1TiB", 2**40),
        ("17B", 17),
        (" 8GB ", 8 * 10**9),
    ],
)
def test_text_in_bytes(text: str, count: int) -> None:
    assert Budget.parse(text) == Budget(bytes=count)


@pytest.mark.parametrize(
    ("value", "parsed"),
    [
        ("60%", Budget(share=0.6)),
        ("100 %", Budget(share=1.0)),
        ("0.5%", Budget(share=0.005)),
        ("min", Budget(minimum=True)),
        (1234, Budget(bytes=1234)),
        (numpy.int64(1234), Budget(bytes=1234)),
        (Budget(bytes=7), Budget(bytes=7)),
    ],
    ids=["percent", "whole", "fraction", "min", "int", "NumPy's", "budget"],
)
def test_other_forms(value: str | int | Budget, parsed: Budget) -> None:
    assert Budget.parse(value) == parsed


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("8", "no known unit"),
        ("8Gb", "no known unit"),
        ("8gb", "no known unit"),
        ("8G", "no known unit"),
        ("GB", "no known unit"),
        ("", "no known unit"),
        ("-8GB", "must be more than zero"),
        ("1e9B", "no known unit"),
        ("8GB 2MB", "no known unit"),
        ("MIN", "no known unit"),
        ("0GB", "more than zero"),
        ("9" * 400 + "GB", "more than any device has"),
        (2**63, "more than any device has"),
        ("0.1B", "more than zero"),
        ("0%", "not a share"),
        ("101%", "not a share"),
        (0, "more than zero"),
        (-5, "more than zero"),
        (True, "not text"),
        (8.5, "not text"),
        (None, "not text"),
    ],
)
def test_refused(value: object, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        Budget.parse(value)  # type: ignore[arg-type]


@given(st.integers(min_value=1, max_value=2**45))
@example(3_412_345)
@example(999_999_999)
def test_what_is_rounded_up_is_enough_when_it_is_given_back(count: int) -> None:
    decimal, _, binary = format_bytes(count, up=True).removesuffix(")").partition(" (")
    budgets = [Budget.parse(text).bytes or 0 for text in (decimal, binary) if text]
    assert all(0 <= budget - count <= 0.1 * max(count, 10**6) for budget in budgets)


@given(st.text(max_size=12))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        budget = Budget.parse(text)
    except UsageError:
        return
    assert [budget.bytes is not None, budget.share is not None, budget.minimum].count(True) == 1


@given(st.integers(1, 10**6), st.sampled_from(["KB", "MB", "GB", "KiB", "MiB", "GiB"]))
def test_decimals_are_exact(thousandths: int, unit: str) -> None:
    scale = {"K": 1, "M": 2, "G": 3}[unit[0]]
    factor = (1024 if "i" in unit else 1000) ** scale
    assert Budget.parse(f"{thousandths / 1000:.3f}{unit}").bytes == max(thousandths * factor // 1000, 1)


@pytest.mark.parametrize(
    ("budget", "limit"),
    [
        (Budget(bytes=500), 500),
        (Budget(share=0.6), 600),
        (Budget(minimum=True), None),
    ],
    ids=["bytes", "share", "min"],
)
def test_resolve_against_a_peak_of_1000(budget: Budget, limit: int | None) -> None:
    assert budget.resolve(1000) == limit


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (8 * 10**9, "8.00 GB (7.45 GiB)"),
        (2_500_000, "2.5 MB (2.4 MiB)"),
        (17, "17 B"),
        (999_999, "999999 B"),
    ],
)
def test_both_units(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [("8GB", "8.00 GB (7.45 GiB)"), ("60%", "60% of the original peak"), ("min", "min")],
)
def test_a_budget_prints_itself(text: str, shown: str) -> None:
    assert str(Budget.parse(text)) == shown
