"""Closes the objects of a JSON schema: an object has the properties that its schema names and no others, where the
schema does not say otherwise.

JSON Schema leaves such objects open, and a model that may add keys may add them without end.  ``additionalProperties``,
whatever it says, is taken as it is.  Properties that several schemas name for one object (``allOf``, ``$ref`` or
``anyOf`` beside ``properties``) are closed together.  Objects without ``properties`` stay open.  Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.grammar.json_schema import DATA, NAMED, pointed

MAX_VISITS = 20_000
"""Of schemas that describe one object together; objects that are looked at after that stay open."""

_SAYS = ("additionalProperties", "unevaluatedProperties")


def close_objects(schema: object) -> object:
    """The same schema with its objects closed."""
    closing = _Closing(schema)
    closing.find_parts()
    return closing.rewritten(schema)


class _Closing:
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
        if keyword in DATA:
            return value
        if keyword in NAMED and isinstance(value, dict):
            return {name: self.rewritten(item) for name, item in value.items()}
        return self.rewritten(value)

    def _added(self, schema: dict[str, Any]) -> list[str] | None:
        """What a closed object may have beside its own properties; None where it is not closed, or not here."""
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
        them; None where it says itself what an object may have, or nobody can tell."""
        self._visits += 1
        if not isinstance(schema, dict) or id(schema) in above:
            return {}
        if self._visits > MAX_VISITS or any(says in schema for says in _SAYS):
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
        """Schemas beside its own keywords that describe the same object: each of ``allOf``, what it refers to (None:
        that is not here), alternatives together."""
        members = schema.get("allOf")
        found: list[Sequence[object]] = [[member] for member in members] if isinstance(members, list) else []
        if "$ref" in schema:
            found.append([pointed(self._root, schema["$ref"])])
        return found + [schema[key] for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list)]


def _strings(value: object, kind: type[dict[Any, Any] | list[Any]]) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, kind) else []
