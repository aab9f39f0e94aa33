"""Log lines on stderr: short text for people, or one JSON object a line for machines.

A line is a fixed message plus fields (``request_id``, ``worker``, numbers).  What a client wrote or was answered never
goes into either: fields are identifiers and figures, strings are cut to ``MAX_FIELD_CHARS``.  Built on ``logging``, so
that a host application can send the lines elsewhere.  Knows nothing about what happens in the service.
"""

from __future__ import annotations

import logging
import re
import sys
from datetime import UTC, datetime
from typing import TextIO

import msgspec

ROOT = "penstock"
"""Parent of all our loggers."""

MAX_FIELD_CHARS = 200

Field = str | int | float | bool | None

_PLAIN = re.compile(r"[\w.:/@+%-]+")
_LETTERS = {logging.DEBUG: "D", logging.INFO: "I", logging.WARNING: "W", logging.ERROR: "E", logging.CRITICAL: "C"}


def log_event(log: logging.Logger, level: int, message: str, **fields: Field) -> None:
    """Write one line.  ``message`` is a constant; everything that varies is a field."""
    if log.isEnabledFor(level):
        log.log(level, message, extra={"fields": fields})


def configure_logging(
    process: str, *, as_json: bool = False, level: int = logging.INFO, to: TextIO | None = None
) -> None:
    """Send all our lines to ``to`` (stderr), marked with this process's name.  May be called again after a fork."""
    handler = logging.StreamHandler(to if to is not None else sys.stderr)
    handler.setFormatter(JsonLines(process) if as_json else TextLines(process))
    root = logging.getLogger(ROOT)
    root.handlers = [handler]
    root.setLevel(level)
    root.propagate = False


class TextLines(logging.Formatter):
    """``12:30:01.250 W gateway  worker is down  worker=decode-0 requests=3``; local time."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created).strftime("%H:%M:%S.%f")[:-3]
        line = f"{when} {_LETTERS.get(record.levelno, 'I')} {self._process}  {_one_line(record.getMessage())}"
        fields = " ".join(f"{name}={_shown(value)}" for name, value in _fields(record).items())
        if fields:
            line += f"  {fields}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonLines(logging.Formatter):
    """``{"time": …, "level": …, "process": …, "logger": …, "message": …, <fields>}``; UTC, RFC 3339."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Field] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name, value in _fields(record).items():
            line.setdefault(name, value[:MAX_FIELD_CHARS] if isinstance(value, str) else value)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def _fields(record: logging.LogRecord) -> dict[str, Field]:
    fields = getattr(record, "fields", None)
    return fields if isinstance(fields, dict) else {}


def _shown(value: Field) -> str:
    """A field as text: quoted unless it is one plain word, so that no value can look like another field or line."""
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)[:MAX_FIELD_CHARS]
    return text if _PLAIN.fullmatch(text) else msgspec.json.encode(text).decode()


def _one_line(text: str) -> str:
    return text.replace("\r", " ").replace("\n", " ")
