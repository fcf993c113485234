"""A report read back from its JSON, every value of the type that the report declares for it."""

from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from memrewrite.records.report import Report


def report_from(data: dict[str, Any]) -> Report:
    """The inverse of ``Report.to_json``; what the JSON has besides is left out.

    Raises ``TypeError`` or ``ValueError`` for JSON that is no report.
    """
    report = _decoded(Report, data)
    if not isinstance(report, Report):
        raise TypeError("not a report")
    return report


def _decoded(kind: Any, data: Any) -> Any:
    if is_dataclass(kind) and isinstance(kind, type):
        hints = get_type_hints(kind)
        given = {field.name: data[field.name] for field in fields(kind) if field.name in data}
        return kind(**{name: _decoded(hints[name], value) for name, value in given.items()})
    origin, inner = get_origin(kind), get_args(kind)
    if origin is UnionType:
        (other,) = (each for each in inner if each is not type(None))
        return None if data is None else _decoded(other, data)
    if origin is tuple:
        kinds = [inner[0]] * len(data) if inner[-1] is Ellipsis else inner
        return tuple(_decoded(each, value) for each, value in zip(kinds, data, strict=True))
    if origin is dict:
        return {name: _decoded(inner[1], value) for name, value in data.items()}
    if kind is not Any and not isinstance(data, (int, float) if kind is float else kind):
        raise TypeError(f"{data!r} is no {kind.__name__}")
    return data
