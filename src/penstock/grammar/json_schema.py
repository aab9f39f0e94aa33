"""What a JSON schema may not say here, because an answer could break it unseen.

The grammar library refuses keywords that it does not know; this refuses what it takes but cannot hold.  Pure.
"""

from __future__ import annotations

from typing import Any

_DATA = frozenset({"const", "enum", "default", "examples"})
"""Keywords whose values are data, not schemas."""

_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose values are schemas by name."""

OPTIONS = "x-guidance"


def refuse_what_cannot_be_kept(schema: object) -> None:
    """Raises ValueError with keyword and reason."""
    if isinstance(schema, list):
        for item in schema:
            refuse_what_cannot_be_kept(item)
    if not isinstance(schema, dict):
        return
    _check_keywords(schema)
    for keyword, value in schema.items():
        if keyword in _DATA:
            continue
        if keyword in _NAMED and isinstance(value, dict):
            for below in value.values():
                refuse_what_cannot_be_kept(below)
        else:
            refuse_what_cannot_be_kept(value)


def _check_keywords(schema: dict[str, Any]) -> None:
    if OPTIONS in schema:
        raise ValueError(f"'{OPTIONS}' is not accepted: options of the grammar library are this server's")
    least = schema.get("minProperties")
    if isinstance(least, int | float) and least > len(schema.get("required", ())):
        # A key that is written twice counts once when the answer is read.
        raise ValueError("'minProperties' can be kept only where 'required' names as many properties")
