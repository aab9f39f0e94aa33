"""The strict parser reads what the standard library reads, and takes nothing that RFC 8259 does not have."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pauses import longest_pause
from penstock.api.json_strict import _count, estimated_bytes, parse_json
from penstock.errors import BadJson

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**40), 10**40) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


@given(values, st.booleans(), st.sampled_from([None, 1]))
def test_what_json_writes_is_read_back(value: object, ascii_only: bool, indent: int | None):
    raw = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode()
    assert parse_json(raw) == value


@given(
    st.binary(max_size=40)
    | st.text(st.sampled_from('{}[]":,0123eE+-.\\un dbe8truefalsn\ufeff'), max_size=30).map(str.encode)
)
def test_anything_is_read_or_refused_and_never_read_otherwise(raw: bytes):
    try:
        value = parse_json(raw)
    except BadJson:
        return
    assert json.dumps(value, allow_nan=False) == json.dumps(json.loads(raw.decode()), allow_nan=False)


@pytest.mark.parametrize("depth", [1, 5, 64])
def test_depth_is_counted_to_the_letter(depth: int):
    assert parse_json(b"[" * depth + b"]" * depth, max_depth=depth) is not None
    with pytest.raises(BadJson, match="deeper"):
        parse_json(b"[" * (depth + 1) + b"]" * (depth + 1), max_depth=depth)


@given(st.text(st.sampled_from('[{"\\a'), max_size=30))
def test_what_is_in_strings_is_no_depth(text: str):
    assert parse_json(json.dumps([text] * 40).encode(), max_depth=1) == [text] * 40


def test_depth_is_checked_in_linear_time():
    raw = b'["' + b'\\\\"' * 5 + b"x" * 10 + b'", "' + b'\\"' * 300_000 + b"[[[[[" * 30_000
    began = time.process_time()
    with pytest.raises(BadJson):
        parse_json(raw, max_depth=64)
    assert time.process_time() - began < 1.0


def test_a_pair_of_surrogates_is_a_character():
    assert parse_json(b'"\\ud83e\\udd8a \\\\ud800"') == "🦊 \\ud800"


def test_others_run_while_a_large_body_is_parsed():
    raw = json.dumps(list(range(300_000))).encode()
    assert longest_pause(lambda: parse_json(raw), allowed_s=0.05) < 0.05


# --- how much there is, before it is made -----------------------------------------------------------------------------


def sizes(value: object) -> tuple[int, int]:
    """(members of arrays and objects, arrays and objects)."""
    if isinstance(value, dict | list):
        inner = [sizes(item) for item in (value.values() if isinstance(value, dict) else value)]
        return len(inner) + sum(a for a, _ in inner), 1 + sum(b for _, b in inner)
    return 0, 0


@given(values, st.booleans())
def test_values_are_counted(value: object, ascii_only: bool):
    """Never fewer values than there are, and no more than one too many for each empty container."""
    counted, containers = _count(json.dumps(value, ensure_ascii=ascii_only).encode(), 1 << 40, 1 << 40)
    assert containers == sizes(value)[1]
    assert sizes(value)[0] <= counted <= sizes(value)[0] + containers


@given(st.text(st.sampled_from('[{"\\a,'), max_size=30))
def test_what_is_in_strings_is_no_value(text: str):
    assert _count(json.dumps([text] * 40).encode(), 1 << 40, 1 << 40) == (40, 1)


@given(st.text(st.sampled_from('[{"\\a,'), max_size=30))
def test_counting_ends_whatever_it_reads(text: str):
    _count(text.encode(), 1 << 40, 1 << 40)


MANY = {
    "empty arrays": b"[" + b"[]," * 2000 + b"[]]",
    "empty objects": b"[" + b"{}," * 2000 + b"{}]",
    "numbers": b"[" + b"1," * 20_000 + b"1]",
    "members": b"{" + b",".join(b'"k%d":1' % i for i in range(20_000)) + b"}",
    "strings": b'["' + b'","'.join([b'[,\\"'] * 20_000) + b'"]',
}


@pytest.mark.parametrize("raw", MANY.values(), ids=MANY.keys())
def test_too_many_values_are_refused(raw: bytes):
    with pytest.raises(BadJson, match="more than"):
        estimated_bytes(raw, max_values=10_000, max_containers=1000)
    assert estimated_bytes(raw, max_values=1 << 20, max_containers=1 << 20) > len(raw)


def test_commas_and_brackets_of_a_text_are_no_values():
    raw = json.dumps({"prompt": '[{"a": 1}, ' * 100_000}).encode()
    assert estimated_bytes(raw, max_values=1000, max_containers=1000) < 10_000
