"""JSON schemas rewritten so that the grammar library follows them exactly, and with closed objects.

What the library accepts but does not enforce is refused; what it refuses without need, or knows under another keyword,
is rewritten.  Everything else is left to it.

``close_objects`` limits an object to the properties that its schema names, unless the schema says otherwise: JSON
Schema leaves objects open, and a model that may add keys may add them without end.  An ``additionalProperties`` stays
as it is.  Properties that several schemas name for one object (``allOf``, ``$ref``, ``anyOf``) are closed together.
Objects without ``properties`` stay open.  Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
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
"""JSON Schema's own.  Any other format is an annotation (Draft 2020-12, 7.2.3) and constrains nothing."""

MAX_ALTERNATIVES = 64
"""Of a ``oneOf`` whose pairs are compared."""

DATA_KEYWORDS = frozenset({"const", "enum", "default", "examples"})
"""Keywords whose values are data, not schemas."""

SCHEMA_MAP_KEYWORDS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
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


def rewrite_schema(schema: object) -> object:
    """The same schema in the library's words.  Raises ValueError with keyword and reason."""
    rewritten = _rewritten(schema, lambda reference: _resolved(schema, reference))
    return separate_bounds(rewritten)


Resolve = Callable[[object], object]


def _rewritten(schema: object, resolve: Resolve) -> object:
    if isinstance(schema, list):
        return [_rewritten(item, resolve) for item in schema]
    if not isinstance(schema, dict):
        return schema
    _refuse(schema)
    result: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in DATA_KEYWORDS:
            result[keyword] = value
        elif keyword in SCHEMA_MAP_KEYWORDS and isinstance(value, dict):
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


def separate_bounds(schema: object) -> object:
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
    result = {
        keyword: value if keyword in DATA_KEYWORDS else _moved(value, fractions) for keyword, value in schema.items()
    }
    for exclusive, inclusive in _EXCLUSIVE.items():
        bound = schema.get(exclusive)
        if isinstance(bound, int | float) and abs(bound) < _LARGEST and bound == int(bound) and bound in fractions:
            del result[exclusive]
            nearer = bound + (INWARD if inclusive == "minimum" else -INWARD)
            other = schema.get(inclusive, nearer)
            result[inclusive] = max(other, nearer) if inclusive == "minimum" else min(other, nearer)
    return result


def _exclude_each_other(one: object, other: object, resolve: Resolve) -> bool:
    """Whether nothing can satisfy both.  Seen only where a required property tells them apart, as discriminators do."""
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
        schema = resolve_pointer(root, schema["$ref"])
    return schema


def resolve_pointer(root: object, reference: object) -> object:
    """The schema that a reference within ``root`` means; None if it is not there."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    place = root
    for part in reference.split("/")[1:]:
        place = place.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(place, dict) else None
    return place


MAX_VISITS = 20_000
"""Of schemas that describe one object together; objects that are looked at after that stay open."""

_ADDITIONAL_KEYWORDS = ("additionalProperties", "unevaluatedProperties")


def close_objects(schema: object) -> object:
    """The same schema with its objects closed."""
    closing = _ObjectCloser(schema)
    closing.find_parts()
    return closing.rewritten(schema)


class _ObjectCloser:
    def __init__(self, root: object) -> None:
        self._root = root
        self._parts: set[int] = set()  # identities of schemas that describe an object together with others
        self._visits = 0

    def find_parts(self) -> None:
        """A definition may stand before the schema that makes it one of several, so all are looked at twice."""
        self.rewritten(self._root)
        self._visits = 0

    def rewritten(self, schema: object) -> object:
        if isinstance(schema, list):
            return [self.rewritten(item) for item in schema]
        if not isinstance(schema, dict):
            return schema
        added = None if id(schema) in self._parts else self._added(schema)
        result = {keyword: self._below(keyword, value) for keyword, value in schema.items()}
        if added is None:
            return result
        own: Any = result.get("properties", {})
        return {**result, "properties": {**own, **dict.fromkeys(added, True)}, "additionalProperties": False}

    def _below(self, keyword: str, value: object) -> object:
        if keyword in DATA_KEYWORDS:
            return value
        if keyword in SCHEMA_MAP_KEYWORDS and isinstance(value, dict):
            return {name: self.rewritten(item) for name, item in value.items()}
        return self.rewritten(value)

    def _added(self, schema: dict[str, Any]) -> list[str] | None:
        """Further properties of a closed object; None where it is not closed, or not here."""
        own = isinstance(schema.get("properties"), dict)
        others = [source for source in self._sources(schema) if any(map(self._describes, source))]
        if own + len(others) < (1 if own else 2):
            return None
        for source in others:
            for part in source:
                self._join(part)
        names = self._names(schema, ())
        if names is None:
            return None
        added = [name for name in names if not own or name not in schema["properties"]]
        return None if added and "patternProperties" in schema else added

    def _join(self, part: object) -> None:
        """It describes an object together with others, and so does what it consists of."""
        if isinstance(part, dict) and id(part) not in self._parts:
            self._parts.add(id(part))
            for source in self._sources(part):
                for below in source:
                    self._join(below)

    def _describes(self, schema: object) -> bool:
        names = self._names(schema, ())
        return names is None or any(names.values())

    def _names(self, schema: object, above: tuple[int, ...]) -> dict[str, bool] | None:
        """Properties that an object may have by this schema, in order, and whether it describes them or only requires
        them; None where it has keywords for that, or it is unknown."""
        self._visits += 1
        if not isinstance(schema, dict) or id(schema) in above:
            return {}
        if self._visits > MAX_VISITS or any(says in schema for says in _ADDITIONAL_KEYWORDS):
            return None
        if above and "patternProperties" in schema:
            return None
        names = dict.fromkeys(_strings(schema.get("properties"), dict), True)
        for source in self._sources(schema):
            for part in source:
                found = None if part is None else self._names(part, (*above, id(schema)))
                if found is None:
                    return None
                names |= {name: names.get(name, False) or described for name, described in found.items()}
        return names | {name: False for name in _strings(schema.get("required"), list) if name not in names}

    def _sources(self, schema: dict[str, Any]) -> list[Sequence[object]]:
        """Other schemas that describe the same object: each of ``allOf``, what it refers to (None:
        that is not here), alternatives together."""
        members = schema.get("allOf")
        found: list[Sequence[object]] = [[member] for member in members] if isinstance(members, list) else []
        if "$ref" in schema:
            found.append([resolve_pointer(self._root, schema["$ref"])])
        return found + [schema[key] for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list)]


def _strings(value: object, kind: type[dict[Any, Any] | list[Any]]) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, kind) else []
