"""JSON schemas as the grammar library can follow them to the letter.

What it takes but cannot hold is refused here; what it refuses though it makes no difference, or is another way to say
what it knows, is rewritten.  Everything else is the library's own to take or refuse.  Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from itertools import combinations
from typing import Any

OPTIONS = "x-guidance"

STANDARD_FORMATS = frozenset(
    {
        *("date-time", "time", "date", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6"),
        *("uri", "uri-reference", "iri", "iri-reference", "uri-template", "uuid", "json-pointer"),
        *("relative-json-pointer", "regex"),
    }
)
"""JSON Schema's own.  Any other format is a remark (Draft 2020-12, 7.2.3) and holds nobody to anything."""

MAX_ALTERNATIVES = 64
"""Of a ``oneOf`` whose pairs are compared."""

DATA = frozenset({"const", "enum", "default", "examples"})
"""Keywords whose values are data, not schemas."""

NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose values are schemas by name."""

_CONTROLS = frozenset(map(chr, range(0x20))) - set("\b\f\n\r\t") | {"\x7f"}

YEAR = "^(000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})-"
"""Dates begin with the year 1, as calendars of most languages do."""

INWARD = 1e-6

_DATED = ("date", "date-time")
_EXCLUSIVE = {"exclusiveMinimum": "minimum", "exclusiveMaximum": "maximum"}
_LARGEST = 1e9

_CLASS = re.compile(r"(\\.)|\[\^|\[(?:\\x00|\\u0000|\\0)-", re.DOTALL)

_MAX_STEPS = 16
"""Of references that lead to references."""


def followable(schema: object) -> object:
    """The same schema in the library's words.  Raises ValueError with keyword and reason."""
    rewritten = _rewritten(schema, lambda reference: _resolved(schema, reference))
    return apart(rewritten)


Resolve = Callable[[object], object]


def _rewritten(schema: object, resolve: Resolve) -> object:
    if isinstance(schema, list):
        return [_rewritten(item, resolve) for item in schema]
    if not isinstance(schema, dict):
        return schema
    _refuse(schema)
    result: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in DATA:
            result[keyword] = value
        elif keyword in NAMED and isinstance(value, dict):
            result[keyword] = {name: _rewritten(below, resolve) for name, below in value.items()}
        else:
            result[keyword] = _rewritten(value, resolve)
    return _simplified(result, resolve)


def _refuse(schema: dict[str, Any]) -> None:
    if OPTIONS in schema:
        raise ValueError(f"'{OPTIONS}' is not accepted: options of the grammar library are this server's")
    least, required = schema.get("minProperties"), schema.get("required")
    if isinstance(least, int | float) and least > (len(required) if isinstance(required, list) else 0):
        # A key that is written twice counts once when the answer is read.
        raise ValueError("'minProperties' can be kept only where 'required' names as many properties")
    named = [schema.get("const"), schema.get("enum"), list(schema.get("properties") or ()), required]
    if _has_controls(named):
        raise ValueError("a control character in a constant or a name cannot be written")


def _has_controls(value: object) -> bool:
    """Characters that JSON can only spell by number, which is not allowed here (``sources``)."""
    if isinstance(value, str):
        return not _CONTROLS.isdisjoint(value)
    if isinstance(value, dict):
        return any(_has_controls(item) for item in (*value, *value.values()))
    return isinstance(value, list) and any(map(_has_controls, value))


def without_nul(pattern: str) -> str:
    """The same expression with no class that has all control characters.

    To such a class the library adds quotation mark and backslash, be they in it or not.  NUL cannot be written anyway.
    """
    return _CLASS.sub(lambda found: found[1] or ("[^\\x00" if found[0] == "[^" else "[\\x01-"), pattern)


def _simplified(schema: dict[str, Any], resolve: Resolve) -> dict[str, Any]:
    if isinstance(schema.get("pattern"), str):
        schema["pattern"] = without_nul(schema["pattern"])
    if schema.get("format") in _DATED:
        schema.setdefault("pattern", YEAR)
    if isinstance(schema.get("patternProperties"), dict):
        schema["patternProperties"] = {without_nul(key): value for key, value in schema["patternProperties"].items()}
    if schema.get("uniqueItems") is False:
        del schema["uniqueItems"]
    if isinstance(schema.get("format"), str) and schema["format"] not in STANDARD_FORMATS:
        del schema["format"]
    choices = schema.get("oneOf")
    if isinstance(choices, list) and "anyOf" not in schema and len(choices) <= MAX_ALTERNATIVES:
        known = [resolve(choice) for choice in choices]
        if all(_exclude_each_other(one, other, resolve) for one, other in combinations(known, 2)):
            del schema["oneOf"]
            schema["anyOf"] = choices
    return schema


def apart(schema: object) -> object:
    """The same schema with exclusive bounds that the library cannot hold moved inward by ``INWARD``.

    It admits the bound itself where that is a whole number and the other bound the fraction after it: 0 with above 0
    and up to 0.5.  Bounds of different places may be joined (``allOf``), so those of the whole schema are compared.
    """
    found: dict[str, set[float]] = {keyword: set() for keyword in (*_EXCLUSIVE, *_EXCLUSIVE.values())}
    _collect(schema, found)
    fractions = {int(bound) for bounds in found.values() for bound in bounds if bound != int(bound)}
    return _moved(schema, fractions) if fractions else schema


def _collect(schema: object, found: dict[str, set[float]]) -> None:
    if isinstance(schema, list | dict):
        for keyword, value in schema.items() if isinstance(schema, dict) else enumerate(schema):
            if keyword in found and isinstance(value, int | float) and abs(value) < _LARGEST:
                found[str(keyword)].add(float(value))
            _collect(value, found)


def _moved(schema: object, fractions: set[int]) -> object:
    if isinstance(schema, list):
        return [_moved(item, fractions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {keyword: value if keyword in DATA else _moved(value, fractions) for keyword, value in schema.items()}
    for exclusive, inclusive in _EXCLUSIVE.items():
        bound = schema.get(exclusive)
        if isinstance(bound, int | float) and abs(bound) < _LARGEST and bound == int(bound) and bound in fractions:
            del result[exclusive]
            nearer = bound + (INWARD if inclusive == "minimum" else -INWARD)
            other = schema.get(inclusive, nearer)
            result[inclusive] = max(other, nearer) if inclusive == "minimum" else min(other, nearer)
    return result


def _exclude_each_other(one: object, other: object, resolve: Resolve) -> bool:
    """Can nothing satisfy both?  Seen only where a required property tells them apart, as discriminators do."""
    if not (isinstance(one, dict) and isinstance(other, dict) and one.get("type") == other.get("type") == "object"):
        return False
    for name in _required(one) & _required(other):
        mine, theirs = (_values(_property(schema, name, resolve)) for schema in (one, other))
        if mine is not None and theirs is not None and mine.isdisjoint(theirs):
            return True
    return False


def _required(schema: dict[str, Any]) -> frozenset[str]:
    names = schema.get("required")
    return frozenset(name for name in names if isinstance(name, str)) if isinstance(names, list) else frozenset()


def _property(schema: dict[str, Any], name: str, resolve: Resolve) -> object:
    properties = schema.get("properties")
    return resolve(properties.get(name)) if isinstance(properties, dict) else None


def _values(schema: object) -> frozenset[str] | None:
    """The strings that satisfy it, when it names them."""
    if not isinstance(schema, dict):
        return None
    values: Iterable[object] | None = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        return None
    return frozenset(values)


def _resolved(root: object, schema: object) -> object:
    """What a schema that only refers to another place of ``root`` stands for."""
    for _ in range(_MAX_STEPS):
        if not (isinstance(schema, dict) and isinstance(schema.get("$ref"), str) and schema["$ref"].startswith("#/")):
            return schema
        schema = pointed(root, schema["$ref"])
    return schema


def pointed(root: object, reference: object) -> object:
    """The schema that a reference within ``root`` means; None if it is not there."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    place = root
    for part in reference.split("/")[1:]:
        place = place.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(place, dict) else None
    return place
