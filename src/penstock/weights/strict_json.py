"""Small JSON files of a checkpoint (configuration, index, header), read strictly.

RFC 8259 in UTF-8; duplicate keys, NaN and Infinity are refused, since two readers would understand them differently.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

from penstock.errors import ModelError

MAX_CONFIG_BYTES = 64 << 20
"""Cap on config.json and on an index of shards; the largest known index has about 10 MB."""


def parse_object(raw: bytes, where: str) -> dict[str, Any]:
    """The JSON object in ``raw``.  Raises ModelError, beginning with ``where``, for anything else."""
    value = _parse(raw, where)
    if not isinstance(value, dict):
        raise ModelError(f"{where}: expected a JSON object, got {type(value).__name__}")
    return value


def parse_objects(raw: bytes, where: str) -> list[dict[str, Any]]:
    """The JSON array of objects in ``raw``; as ``parse_object``."""
    value = _parse(raw, where)
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ModelError(f"{where}: expected a JSON array of objects")
    return value


def _parse(raw: bytes, where: str) -> Any:
    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{where}: not valid JSON ({error})") from error


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file.  Raises ModelError if it cannot be read, is too large or is not an object."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror or error})") from error
    if len(raw) > MAX_CONFIG_BYTES:
        raise ModelError(f"{path}: larger than {MAX_CONFIG_BYTES} bytes, which no such file is")
    return parse_object(raw, str(path))


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {key!r} stands twice")
        result[key] = value
    return result


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
