"""The published schema of what memrewrite answers as JSON, and whether an answer is what it says: no more, no less."""

import json
from importlib.resources import files
from typing import Any

from jsonschema import Draft202012Validator

SCHEMA = json.loads((files("memrewrite.report") / "schema.json").read_text(encoding="utf-8"))
VALIDATOR = Draft202012Validator(SCHEMA)


def assert_answer(command: str, data: dict[str, Any]) -> None:
    """``data`` is an answer of ``command`` by the schema, and with a field more it is none."""
    VALIDATOR.evolve(schema={**SCHEMA["$defs"][command], "$defs": SCHEMA["$defs"]}).validate(data)
    assert VALIDATOR.is_valid(data)
    assert not VALIDATOR.is_valid({**data, "surprise": 1})
