"""Which of a test's parameters are of the default tier; the others are long (``--long``, ``--exhaustive``)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def of_default(*values: Any, among: Iterable[Any]) -> list[Any]:
    """All of ``among`` as parameters; those that are none of ``values`` are marked long."""
    return _marked(among, lambda value: value in values)


def first_of(among: Collection[Any], count: int) -> list[Any]:
    """All of ``among`` as parameters; those behind the first ``count`` are marked long."""
    kept = list(among)[:count]
    return _marked(among, lambda value: value in kept)


def _marked(among: Iterable[Any], kept: Any) -> list[Any]:
    return [value if kept(value) else pytest.param(value, marks=pytest.mark.long) for value in among]
