"""The largest batch that a memory holds, found by simulating steps."""

import math
from collections.abc import Callable

from memrewrite.records.estimate import Largest

MOST = 2**24  # samples; a step that fits with more of them has no bound that matters
_GUESSES = 6  # by straight lines; where they have not met the bound the interval is halved
_FARTHER = 8  # times, where more samples take no more memory


def largest(mode: str, memory: int, known: dict[int, int], peak: Callable[[int], int | None]) -> Largest:
    """The largest batch size whose ``peak`` (None where the step fails) is within ``memory`` bytes.

    ``known`` are peaks by batch size, two at least. Peaks are all but linear in the batch size, or two lines where
    small batches peak in the optimizer. So the next one to look at is where a straight line meets the memory: through
    the known ones on both sides of it, or, in turn, through the two above it.
    """
    peaks: dict[int, float] = dict(known)
    bounded = 0  # how often the bound was looked for between two known peaks
    while True:
        fits = max((size for size, bytes_ in peaks.items() if bytes_ <= memory), default=0)
        over = min((size for size, bytes_ in peaks.items() if bytes_ > memory and size > fits), default=None)
        if over == fits + 1 or fits >= MOST:
            break
        bounded += over is not None
        halve = bounded > _GUESSES and over is not None
        guess = (fits + (over or 0)) // 2 if halve else _line(peaks, fits, over, memory, above=bounded % 2 == 0)
        lowest, highest = fits + 1, MOST if over is None else over - 1
        if over is None and len(peaks) > _GUESSES:
            lowest = 2 * fits
        chosen = min(max(guess, lowest), highest)
        found = peak(chosen)
        peaks[chosen] = math.inf if found is None else found
    simulated = tuple((size, None if math.isinf(b) else int(b)) for size, b in sorted(peaks.items()))
    if fits >= MOST:
        return Largest(mode, None, None, simulated, f"more than {MOST} samples fit")
    if not fits:
        return Largest(mode, 0, None, simulated, "not even one sample fits")
    return Largest(mode, fits, int(peaks[fits]), simulated)


def _line(peaks: dict[int, float], fits: int, over: int | None, memory: int, above: bool) -> int:
    """Where the line through two known peaks meets the memory, or farther than is known where it never does."""
    finite = sorted(size for size, bytes_ in peaks.items() if math.isfinite(bytes_))
    higher = [size for size in finite if over is not None and size >= over]
    above = over is not None and (above or not fits)
    if over is not None and (over not in finite or (above and len(higher) < 2)):
        return (fits + over) // 2
    if over is None:
        left, right = finite[-2:]
    elif above:
        left, right = higher[:2]
    else:
        left, right = fits, over
    slope = (peaks[right] - peaks[left]) / (right - left)
    if slope <= 0:
        return _FARTHER * right
    return math.floor(left + (memory - peaks[left]) / slope)
