"""Foreign text and figures as a report shows them, wherever it is shown."""

NOT_MEASURED = "not measured"
DOES_NOT_FIT = "does not fit"
_UNITS = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


def plain(text: str) -> str:
    """``text`` with control characters spelled out, so that a layer's name cannot steer the terminal."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def short_bytes(count: int) -> str:
    """Decimal units alone, e.g. ``8.00 GB`` or ``12.5 MB``; exact bytes below 1000."""
    for size, unit in _UNITS:
        if abs(count) >= size:
            return f"{count / size:.2f} {unit}" if unit in ("TB", "GB") else f"{count / size:.1f} {unit}"
    return f"{count} B"


def change(before: float, after: float) -> str:
    """By how much per cent ``after`` is more or less than ``before``; "" where there is nothing to compare with."""
    if before == after:
        return "0 %"
    return f"{100 * (after - before) / before:+.1f} %".replace("-", "\N{MINUS SIGN}") if before else ""


def module_name(path: str | None) -> str:
    """A submodule's path as it is shown; that of the model itself, and None, have names of their own."""
    if path is None:
        return "outside the model"
    return path if path not in ("", "(root)") else "the model itself"


def operator_name(operator: str) -> str:
    """An operator without its library and overload: ``add`` for ``aten.add.Tensor``."""
    parts = operator.split(".")
    return parts[1] if len(parts) == 3 else operator
