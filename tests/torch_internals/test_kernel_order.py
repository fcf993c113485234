"""The bytes that live while kernels run one after the other, and with two of them as one: by numbers."""

import random

import pytest

from memrewrite.torch_internals.kernel_order import KernelOrder, Operation, Value


def operation(makes: str, reads: str, after: set[int], elementwise: bool = True) -> Operation:
    return Operation((makes,), frozenset(reads.split()), frozenset(after), elementwise)


def gated() -> KernelOrder:
    """A gate, which is the sum of two products, waits for the product of the other half of a gated MLP."""
    operations = [
        operation("base", "x", set(), False),
        operation("more", "x", set(), False),
        operation("gate", "base more", {0, 1}),
        operation("other", "x", set(), False),
        operation("both", "gate other", {2, 3}),
        operation("result", "both", {4}, False),
    ]
    sizes = {"x": 1, "base": 10, "more": 20, "gate": 10, "other": 10, "both": 10, "result": 1}
    return KernelOrder(operations, {name: Value(size, stays=name == "result") for name, size in sizes.items()})


def test_a_gate_is_made_in_the_place_of_a_product() -> None:
    assert gated().peak == 1 + 10 + 20
    assert gated().peak_between(3, 5) == 1 + 10 + 10


def test_a_kernel_that_waits_holds_what_it_reads() -> None:
    order = gated()
    found = order.fused(2, 4)
    assert found is not None
    assert found.peak == 1 + 10 + 20 + 10  # and the gate itself is never written
    order.fuse(2, 4)
    assert order.peak == found.peak
    assert [order.place(i) for i in range(6)] == [0, 1, 3, 2, 3, 5]


def test_kernels_that_need_each_other_are_never_one() -> None:
    order = gated()
    assert order.fused(2, 5) is None
    order.fuse(2, 5)
    assert order.place(2) != order.place(5)


@pytest.mark.parametrize(("kind", "peak"), [("bf16", 20), ("float32", 30)])
def test_only_what_is_of_a_kind_is_written_over(kind: str, peak: int) -> None:
    operations = [operation("a", "x", set()), operation("b", "a", {0}), operation("c", "b", {1})]
    values = {"x": Value(10, "bf16"), "a": Value(10, "bf16"), "b": Value(10, kind), "c": Value(10, "bf16", stays=True)}
    assert KernelOrder(operations, values).peak == max(peak - 10, 10)
    reduced = [each._replace(elementwise=False) for each in operations]
    assert KernelOrder(reduced, values).peak == 20


def test_only_what_an_operation_reads_itself_is_written_over() -> None:
    """In the kernel of the first two the last makes a value of the kind that dies there, which it does not read."""
    operations = [operation("a", "x", set()), operation("b", "a", {0})]
    values = {"x": Value(20, "wide"), "a": Value(10, "narrow", stays=True), "b": Value(20, "wide", stays=True)}
    order = KernelOrder(operations, values, [[0, 1]])
    assert order.peak == 20 + 10 + 20


def test_what_an_operation_takes_meanwhile_counts_for_it_alone() -> None:
    operations = [operation("a", "x", set())._replace(scratch=100), operation("b", "a", {0})]
    order = KernelOrder(operations, {"x": Value(1), "a": Value(2), "b": Value(4, stays=True)})
    assert (order.peak_between(0, 0), order.peak_between(1, 1)) == (103, 6)


def test_what_is_made_in_parts_is_there_from_the_first_on() -> None:
    operations = [
        operation("a", "x", set(), False),
        operation("both", "a", {0}),
        operation("b", "x", {0}, False),
        operation("both", "b", {2}),
        operation("end", "both", {1, 3}, False),
    ]
    sizes = {"x": 1, "a": 10, "both": 20, "b": 10, "end": 1}
    values = {name: Value(size, kind=name, stays=name in "x end") for name, size in sizes.items()}
    order = KernelOrder(operations, values)
    assert [order.peak_between(i, i) for i in range(5)] == [11, 31, 31, 31, 22]
    found = order.fused(1, 3)  # which waits for b, and holds a until then
    assert found is not None
    assert found.during == (21, 41)
    order.fuse(1, 3)
    assert order.peak == 41


def drawn(random_: random.Random) -> tuple[list[Operation], dict[str, Value]]:
    count = random_.randrange(2, 14)
    values = {"x": Value(random_.randrange(1, 9), 0), "y": Value(random_.randrange(1, 9), 0, stays=True)}
    operations: list[Operation] = []
    for i in range(count):
        sources = random_.sample(range(i), min(i, random_.randrange(0, 4)))
        reads = {f"v{source}" for source in sources} | ({random_.choice("xy")} if random_.random() < 0.4 else set())
        after = set(sources) | ({random_.randrange(i)} if i and random_.random() < 0.1 else set())
        elementwise, scratch = random_.random() < 0.7, random_.choice([0, 0, 5])
        operations.append(Operation((f"v{i}",), frozenset(reads), frozenset(after), elementwise, scratch))
        values[f"v{i}"] = Value(random_.randrange(1, 5), random_.randrange(2), random_.random() < 0.2)
    for _ in range(random_.randrange(3) if count > 3 else 0):  # of some values others make a part, before they are read
        whole = random_.randrange(2, count)
        part = random_.randrange(whole)
        operations[part] = operations[part]._replace(makes=(*operations[part].makes, f"v{whole}"))
        operations[whole] = operations[whole]._replace(after=operations[whole].after | {part})
    return operations, values


def test_what_is_counted_anew_after_each_fusion_is_the_same() -> None:
    random_, fused = random.Random(0), 0  # noqa: S311
    for _ in range(300):
        operations, values = drawn(random_)
        order = KernelOrder(operations, values)
        for _ in range(6):
            one, other = random_.sample(range(len(operations)), 2)
            if order.place(one) == order.place(other) or (found := order.fused(one, other)) is None:
                continue
            order.fuse(one, other)
            fused += 1
            groups: dict[int, list[int]] = {}
            for i in range(len(operations)):
                groups.setdefault(order.place(i), []).append(i)
            assert order.peak == KernelOrder(operations, values, [groups[p] for p in sorted(groups)]).peak
            first, last = groups[min(groups)][0], groups[max(groups)][0]
            assert order.peak == order.peak_between(first, last) >= found.peak
            for place, group in groups.items():
                assert all(order.place(source) <= place for i in group for source in operations[i].after)
    assert fused > 500
