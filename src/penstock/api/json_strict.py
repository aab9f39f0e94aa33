"""JSON as RFC 8259 has it, and nothing more.

The standard library's parser reads UTF-16, a byte order mark, NaN, 1e999, the last of two equal keys and lone
surrogates; each of them lets two programs read two things in one body, so here each is refused.  Depth, length of
numbers and the number of values are bounded.  Knows nothing about requests.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any, NoReturn

from penstock.errors import BadJson

MAX_NUMBER_CHARS = 64
# A string without an end counts as one up to the end, or each quote in it would be tried anew.
_BRACKETS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?+|([\[{])|[\]}]', re.DOTALL)
_STRUCTURE = re.compile(rb'[^"\[{,]*+(?:"[^"\\]*+"[^"\[{,]*+)*+(["\[{,]?)')
"""Up to the next bracket that opens or comma outside of strings, or into a string with an escape."""

_ESCAPES = re.compile(rb'(?:[^"\\]*+\\.){0,65536}+[^"\\]*+("?)', re.DOTALL)
"""From within a string to its end, or past 65,536 escapes, to bound the time of one call."""

_VALUE_BYTES = 64
_CONTAINER_BYTES = 256
"""What a value, and an array or object with its place and its first member, takes as Python's object."""

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def estimated_bytes(raw: bytes, *, max_values: int, max_containers: int) -> int:
    """An upper bound, roughly, of the bytes that the values in ``raw`` will take, without its texts.

    ``max_values`` counts members of arrays and objects, ``max_containers`` arrays and objects themselves.  Raises
    BadJson where there are more.  May be called on a thread, as ``parse_json``.
    """
    containers = raw.count(b"[") + raw.count(b"{")  # and those in texts
    values = raw.count(b",") + containers
    if values > min(_COUNTED_EXACTLY, max_values) or containers > max_containers:
        values, containers = _count(raw, max_values, max_containers)
    if containers > max_containers:
        raise BadJson(f"The body has more than {max_containers} arrays and objects (max_json_containers).")
    if values > max_values:
        raise BadJson(f"The body has more than {max_values} values (max_json_values).")
    return values * _VALUE_BYTES + containers * _CONTAINER_BYTES


_COUNTED_EXACTLY = 1 << 16
"""Fewer values than that may be commas and brackets of a text as well: looking would take longer than it is worth."""


def _count(raw: bytes, max_values: int, max_containers: int) -> tuple[int, int]:
    """(values, containers), as soon as one of them is too large."""
    commas = containers = at = 0
    while containers <= max_containers and commas + containers <= max_values:
        match = _STRUCTURE.match(raw, at)
        assert match is not None, "it matches nothing, too"
        at = match.end()
        if match[1] == b",":
            commas += 1
        elif match[1] == b'"':
            at = _end_of_string(raw, at)
        elif match[1]:
            containers += 1
        else:
            break
    return commas + containers, containers


def _end_of_string(raw: bytes, at: int) -> int:
    """Behind its closing quote; where it has none, behind everything."""
    while (match := _ESCAPES.match(raw, at)) is not None and match.end() > at:
        at = match.end()
        if match[1]:
            return at
    return len(raw)


def parse_json(raw: bytes, *, max_depth: int = 64) -> Any:
    """The value in ``raw``: None, bool, int, float, str, list or dict.  Raises BadJson.

    May be called on a thread: it lets others run between any two numbers or objects.
    """
    if raw.count(b"[") + raw.count(b"{") > max_depth:
        _check_depth(raw, max_depth)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadJson(f"The body is not UTF-8: {error.reason} at byte {error.start}.") from error
    if text.startswith("\ufeff"):
        raise BadJson("The body begins with a byte order mark; JSON has none.")
    try:
        value = _DECODER.decode(text)
    except RecursionError as error:
        raise BadJson("The body is nested too deeply.") from error
    except json.JSONDecodeError as error:
        raise BadJson(f"The body is not JSON: {error.msg} (line {error.lineno}, column {error.colno}).") from error
    if _SURROGATE.search(raw):
        _check_surrogates(value)
    return value


def _check_depth(raw: bytes, max_depth: int) -> None:
    depth = 0
    for match in _BRACKETS.finditer(raw):
        if match[1] is not None:
            depth += 1
            if depth > max_depth:
                raise BadJson(f"The body is nested deeper than the limit of {max_depth}.")
        elif not match[0].startswith(b'"'):
            depth -= 1


def _check_surrogates(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadJson("A string in the body has a lone surrogate, which no text can have.") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise BadJson(f"The body has the key '{key[:64]}' twice in one object.")
            seen.add(key)
    return members


def _integer(text: str) -> int:
    if len(text) > MAX_NUMBER_CHARS:
        raise BadJson(f"The body has a number of more than {MAX_NUMBER_CHARS} characters.")
    return int(text)


def _finite(text: str) -> float:
    value = float(text) if len(text) <= MAX_NUMBER_CHARS else math.inf
    if not math.isfinite(value):
        raise BadJson(f"The body has a number that does not fit: {text[:MAX_NUMBER_CHARS]}.")
    return value


def _no_constant(text: str) -> NoReturn:
    raise BadJson(f"The body has {text}, which JSON does not have.")


def _decoder(integer: Callable[[str], int]) -> json.JSONDecoder:
    return json.JSONDecoder(
        object_pairs_hook=_unique, parse_int=integer, parse_float=_finite, parse_constant=_no_constant
    )


_DECODER = _decoder(_integer)
