"""Typed access to the fields of a ``config.json``, with errors that name the file, the field and what would do."""

from __future__ import annotations

import math
from typing import Any, TypeVar

from penstock.errors import ModelError

T = TypeVar("T")

MAX_SIZE = 1 << 31
"""No size in a configuration is larger: indices are 32 bits."""


class Fields:
    """One JSON object.  A field that is null counts as absent."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def refuse(self, reason: str) -> ModelError:
        """The error to raise."""
        return ModelError(f"{self.where}: {reason}")

    def over(self, defaults: dict[str, Any]) -> Fields:
        """The same object with these values where it has none."""
        return Fields(defaults | {name: value for name, value in self.values.items() if value is not None}, self.where)

    def has(self, name: str) -> bool:
        """Is the field there and not null?"""
        return self.values.get(name) is not None

    def get(self, name: str, kind: type[T], default: T | None = None) -> T:
        """The field if it has exactly this type; the default if it is absent and there is one."""
        value = self.values.get(name)
        if value is None:
            if default is None:
                raise self.refuse(f"has no {name}")
            return default
        if type(value) is not kind:
            raise self.refuse(f"{name} must be {kind.__name__}, got {value!r}")
        return value

    def size(self, name: str, default: int | None = None) -> int:
        """An integer of at least 1."""
        value = self.get(name, int, default)
        if not 1 <= value < MAX_SIZE:
            raise self.refuse(f"{name} must be a positive integer, got {value}")
        return value

    def real(self, name: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.values.get(name)
        if value is None:
            value = default
        if value is None:
            raise self.refuse(f"has no {name}")
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self.refuse(f"{name} must be a positive number, got {value!r}")
        return float(value)

    def section(self, name: str) -> Fields | None:
        """A nested object, or None if it is absent."""
        if not self.has(name):
            return None
        return Fields(self.get(name, dict), f"{self.where}: {name}")

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One id or a list of ids, without repetition; empty if absent."""
        value = self.values.get(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(type(item) is int and 0 <= item < MAX_SIZE for item in ids):
            raise self.refuse(f"{name} must be a token id or a list of them, got {value!r}")
        return tuple(dict.fromkeys(ids))
