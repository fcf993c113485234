"""Where forward is divided: the places where few bytes cross from one node to the next."""

from itertools import accumulate

from memrewrite.backends.facts import Facts

_REGIONS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)
_LIGHT = 1.25  # of the bytes that cross at the lightest quarter of the places where few do
_WINDOW = 0.5  # of a region's bytes: around where it would end, a lighter place is looked for


def divisions(facts: Facts) -> list[tuple[int, ...]]:
    """The nodes that regions begin at, for several numbers of regions, each where few bytes cross.

    Then those that begin wherever much fewer bytes cross than on either side, as between the halves of a transformer's
    blocks, and every other and every fourth of these; and of these places the lightest, where adapters add more.
    """
    across = _crossing(facts)
    made = list(accumulate(sum(facts.bytes[s] for s in facts.makes[i]) * facts.forward[i] for i in range(len(across))))
    total = made[-1] if made else 0
    places = [i for i in range(1, len(across)) if may_cut(facts, i)]
    found: list[tuple[int, ...]] = []
    for count in _REGIONS:
        cuts = []
        for number in range(1, count):
            low, high = ((number + shift) * total / count for shift in (-_WINDOW, _WINDOW))
            inside = [i for i in places if low < made[i - 1] <= high]
            if inside:
                cuts.append(min(inside, key=lambda i: (across[i], i)))
        found.append(tuple(sorted({*cuts})))
    valleys = _valleys(places, across)
    least = sorted(across[i] for i in valleys)[len(valleys) // 4] if valleys else 0
    light = tuple(i for i in valleys if across[i] <= _LIGHT * least)
    spaced = (_every(step, valleys, across) for step in (1, 2, 4))
    return [*dict.fromkeys([*found, *spaced, light, light[::2], light[1::2]])]


def _every(step: int, places: tuple[int, ...], across: list[int]) -> tuple[int, ...]:
    """Every so many of the places, those of them where fewer bytes cross."""
    return min((places[first::step] for first in range(step)), key=lambda each: sum(across[i] for i in each))


def _valleys(places: list[int], across: list[int]) -> tuple[int, ...]:
    """The places where so few bytes cross that on either side twice as many do before it is fewer."""
    sizes = [across[i] for i in places]
    before, after = _highest(sizes), _highest(sizes[::-1])[::-1]
    return tuple(
        i
        for number, (i, left) in enumerate(zip(places, sizes, strict=True))
        if number and sizes[number - 1] > left and min(before[number], after[number]) >= max(2 * left, 1)
    )


def _highest(sizes: list[int]) -> list[int]:
    """For each size the largest one since the last that is smaller than it, itself included."""
    found, rising = [], list[tuple[int, int]]()
    for size in sizes:
        highest = size
        while rising and rising[-1][0] >= size:
            highest = max(highest, rising.pop()[1])
        rising.append((size, highest))
        found.append(highest)
    return found


def may_cut(facts: Facts, node: int) -> bool:
    """Whether a region may begin at a node."""
    return facts.place[node] == node and node not in facts.given and node not in facts.views


def _crossing(facts: Facts) -> list[int]:
    """For each node, the bytes made before it that it or a later node of forward reads."""
    last: dict[int, int] = {}
    born: dict[int, int] = {}
    for node, place in enumerate(facts.place):
        if place != node or not facts.forward[node]:
            continue
        for storage in facts.makes[node]:
            born[storage] = node
        for source in facts.inputs[node]:
            last |= dict.fromkeys(facts.holds[source], node)
    steps = [0] * (len(facts.nodes) + 2)
    for storage, node in born.items():
        if storage in last:
            steps[node + 1] += facts.bytes[storage]
            steps[last[storage] + 1] -= facts.bytes[storage]
    return list(accumulate(steps))[: len(facts.nodes)]
