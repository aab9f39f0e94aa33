"""The small JSON files of a model: parsed strictly, with typed access to fields and errors that name file and field.

RFC 8259 in UTF-8; duplicate keys, NaN and Infinity are refused, because two readers would understand them differently.
``SamplingDefaults`` is what ``generation_config.json`` suggests.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import msgspec

from penstock.errors import ModelError

T = TypeVar("T")

MAX_SIZE = 1 << 31
"""No size in a configuration is larger: indices are 32 bits."""


class ConfigFields:
    """One JSON object.  A field that is null counts as absent."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def error(self, reason: str) -> ModelError:
        """The error to raise."""
        return ModelError(f"{self.where}: {reason}")

    def with_defaults(self, defaults: dict[str, Any]) -> ConfigFields:
        """The same object with these values where it has none."""
        return ConfigFields(
            defaults | {name: value for name, value in self.values.items() if value is not None}, self.where
        )

    def has(self, name: str) -> bool:
        """Whether the field exists and is not null."""
        return self.values.get(name) is not None

    def get(self, name: str, kind: type[T], default: T | None = None) -> T:
        """The field if it has exactly this type; the default if it is absent and there is one."""
        value = self.values.get(name)
        if value is None:
            if default is None:
                raise self.error(f"has no {name}")
            return default
        if type(value) is not kind:
            raise self.error(f"{name} must be {kind.__name__}, got {value!r}")
        return value

    def positive_int(self, name: str, default: int | None = None) -> int:
        """An integer of at least 1."""
        value = self.get(name, int, default)
        if not 1 <= value < MAX_SIZE:
            raise self.error(f"{name} must be a positive integer, got {value}")
        return value

    def positive_float(self, name: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.values.get(name)
        if value is None:
            value = default
        if value is None:
            raise self.error(f"has no {name}")
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self.error(f"{name} must be a positive number, got {value!r}")
        return float(value)

    def section(self, name: str) -> ConfigFields | None:
        """A nested object, or None if it is absent."""
        if not self.has(name):
            return None
        return ConfigFields(self.get(name, dict), f"{self.where}: {name}")

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One id or a list of ids, without repetition; empty if absent."""
        value = self.values.get(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(type(item) is int and 0 <= item < MAX_SIZE for item in ids):
            raise self.error(f"{name} must be a token id or a list of them, got {value!r}")
        return tuple(dict.fromkeys(ids))


MAX_CONFIG_BYTES = 64 << 20
"""Cap on config.json and on an index of shards; the largest known index has about 10 MB."""


def parse_json_object(raw: bytes, where: str) -> dict[str, Any]:
    """The JSON object in ``raw``.  Raises ModelError, beginning with ``where``, for anything else."""
    value = _parse(raw, where)
    if not isinstance(value, dict):
        raise ModelError(f"{where}: expected a JSON object, got {type(value).__name__}")
    return value


def parse_json_objects(raw: bytes, where: str) -> list[dict[str, Any]]:
    """The JSON array of objects in ``raw``; as ``parse_json_object``."""
    value = _parse(raw, where)
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ModelError(f"{where}: expected a JSON array of objects")
    return value


def _parse(raw: bytes, where: str) -> Any:
    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{where}: not valid JSON ({error})") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file.  Raises ModelError if it cannot be read, is too large or is not an object."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror or error})") from error
    if len(raw) > MAX_CONFIG_BYTES:
        raise ModelError(f"{path}: larger than {MAX_CONFIG_BYTES} bytes, which no such file is")
    return parse_json_object(raw, str(path))


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {key!r} stands twice")
        result[key] = value
    return result


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


LEAST_TEMPERATURE = 1e-4
"""Above 0, which is greedy: single precision can divide by it."""


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What the model's makers suggest; None: nothing.  Within what a request may ask for."""

    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)] | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(ge=0.01, le=2)] | None = None

    def words(self) -> str:
        """``temperature 0.7, top_p 0.9``; empty when nothing is suggested."""
        return ", ".join(
            f"{name} {value:g}" for name, value in msgspec.structs.asdict(self).items() if value is not None
        )


def sampling_defaults(values: Mapping[str, Any]) -> SamplingDefaults:
    """The sampling defaults in the file.  A value that no request may have is left out; with
    ``do_sample: false`` there are none."""
    if values.get("do_sample") is False:
        return SamplingDefaults()
    found: dict[str, Any] = {}
    for field in msgspec.structs.fields(SamplingDefaults):
        try:
            found[field.name] = msgspec.convert(values.get(field.name), field.type)
        except msgspec.ValidationError:
            continue
    if 0 < (found.get("temperature") or 0) < LEAST_TEMPERATURE:
        del found["temperature"]
    return SamplingDefaults(**found)
