"""Server-sent events, read from bytes as they come (WHATWG HTML, section 9.2.6), for clients.

Gives the ``data`` of each event.  Knows nothing about sockets, JSON, event names or reconnecting.
"""

from __future__ import annotations

from collections.abc import Iterator

MAX_EVENT_BYTES = 16 << 20
"""A longer event is a fault of the server, not a reason to fill memory."""

DONE = b"[DONE]"
"""The data with which OpenAI ends a stream."""


class SseParser:
    """Feed it bytes in any pieces; it returns the data of the events that these bytes completed."""

    def __init__(self) -> None:
        self.last_id = ""  # of the last event that came whole
        self._rest = b""
        self._data: list[bytes] = []
        self._id = ""

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Data of each event that is complete now, ``last_id`` being its id; several data lines are joined with a
        newline.  What is not iterated over is lost.

        Raises ValueError when one line grows beyond ``MAX_EVENT_BYTES``.
        """
        text = self._rest + piece if self._rest else piece
        held = b""
        if b"\r" in text:
            if text.endswith(b"\r"):  # the line feed that belongs to it may come with the next piece
                text, held = text[:-1], b"\r"
            text = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        lines = text.split(b"\n")
        self._rest = lines.pop() + held
        if len(self._rest) > MAX_EVENT_BYTES:
            raise ValueError(f"an event of more than {MAX_EVENT_BYTES} bytes")
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[6:] if line[5:6] == b" " else line[5:])
            elif line.startswith(b"id:"):
                self._id = line[3:].strip().decode("latin-1")
            elif not line and self._data:
                data, self._data = b"\n".join(self._data), []
                self.last_id = self._id
                yield data
