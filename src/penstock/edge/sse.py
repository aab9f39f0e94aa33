"""Server-sent events (WHATWG HTML, section 9.2): one JSON value each, and an id that says where the stream stands.

The id of an event of an answer is ``<choice>:<tokens>``: so many tokens of that choice are told with it, whatever the
batches were they came in.  Knows nothing about what the values mean.
"""

from __future__ import annotations

DONE = b"id: done\ndata: [DONE]\n\n"

HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would keep events back
)


def event(identity: str, data: bytes) -> bytes:
    """One event.  ``data`` is JSON, which has no line breaks."""
    return b"id: %b\ndata: %b\n\n" % (identity.encode(), data)


def failure(data: bytes) -> bytes:
    """An error, after which nothing comes.  It has no id: the last one stays that of what was told."""
    return b"data: %b\n\n" % data
