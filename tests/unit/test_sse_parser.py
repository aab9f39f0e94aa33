from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import http_client

STREAM = (
    b': comment\n\ndata: {"a":1}\n\nevent: x\nid: 7\ndata:no space\n\n'
    b"data: two\ndata: lines\n\ndata:\n\ndata: [DONE]\n\n"
)
EVENTS = [b'{"a":1}', b"no space", b"two\nlines", b"", b"[DONE]"]


def test_events_are_joined_lines_of_data():
    assert list(http_client.SseParser().feed(STREAM)) == EVENTS


@given(st.lists(st.integers(0, len(STREAM) * 2), max_size=8), st.sampled_from([b"\n", b"\r\n", b"\r"]))
def test_the_pieces_do_not_matter(cuts: list[int], newline: bytes):
    text = STREAM.replace(b"\n", newline) + b":end" + newline
    parser = http_client.SseParser()
    found = []
    edges = sorted({0, len(text), *(cut % len(text) for cut in cuts)})
    for start, end in pairwise(edges):
        found += parser.feed(text[start:end])
    assert found == EVENTS


def test_an_event_without_its_empty_line_is_not_given_out():
    parser = http_client.SseParser()
    assert list(parser.feed(b"data: half\n")) == []
    assert list(parser.feed(b"\n")) == [b"half"]


def test_a_line_without_end_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http_client, "MAX_EVENT_BYTES", 100)
    parser = http_client.SseParser()
    assert list(parser.feed(b"data: " + b"x" * 90)) == []
    with pytest.raises(ValueError, match="100 bytes"):
        list(parser.feed(b"x" * 20))
