"""Forms with files (multipart/form-data, RFC 7578), parsed strictly from a whole body.

Knows nothing about the fields' meaning.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from penstock.errors import RequestError, WrongMediaType
from penstock.interfaces import MultipartForm

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

FORM_BYTES = 64 << 10
"""Of a form without its file."""

MAX_PARTS = 64
MAX_FIELD_BYTES = 64 << 10
MAX_HEADERS = 8  # of a part
MAX_HEADER_BYTES = 4 << 10
MAX_BOUNDARY_BYTES = 70  # RFC 2046, section 5.1.1


def boundary_of(content_type: bytes | None) -> bytes:
    """The boundary of the form.  Raises WrongMediaType for other bodies."""
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not 1 <= len(boundary) <= MAX_BOUNDARY_BYTES:
        raise WrongMediaType(
            "Send a form: the header 'Content-Type: multipart/form-data; boundary=...'.", code="unsupported_media_type"
        )
    return boundary


def parse_multipart(raw: bytes, boundary: bytes) -> MultipartForm:
    """Raises RequestError for a body that is no form, or has more in it than forms here have."""
    parts = _Parts()
    try:
        parser = MultipartParser(
            boundary, parts.callbacks(), max_header_count=MAX_HEADERS, max_header_size=MAX_HEADER_BYTES
        )
        parser.write(raw)
        parser.finalize()
    except FormParserError as error:
        raise _bad_form(f"The body is no form: {error}.") from None
    if not parts.ended:
        raise _bad_form("The body is no whole form: its last boundary is missing.")
    return parts.form


def encode_form(form: MultipartForm) -> tuple[bytes, bytes]:
    """A body with these parts, and its type."""
    boundary = secrets.token_hex(16).encode()  # stands in no file
    parts: list[bytes] = []
    for name, values in form.fields.items():
        parts += [_part(boundary, name, b"") + value.encode() + b"\r\n" for value in values]
    for name, data in form.files.items():
        parts += [_part(boundary, name, b'; filename="file"'), data, b"\r\n"]
    body = b"".join((*parts, b"--" + boundary + b"--\r\n"))
    return body, b"multipart/form-data; boundary=" + boundary


def _part(boundary: bytes, name: str, more: bytes) -> bytes:
    quoted = name.encode().translate(None, b'"\\\r\n')
    return b'--%b\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n' % (boundary, quoted, more)


class _Parts:
    """Collects the parts of a form."""

    def __init__(self) -> None:
        self.ended = False
        self.form = MultipartForm(fields={}, files={})
        self._fields: dict[str, list[str]] = {}
        self._files: dict[str, bytes] = {}
        self._count = 0
        self._begin()

    def callbacks(self) -> MultipartCallbacks:
        """The parser's callbacks."""
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._header_field,
            "on_header_value": self._header_value,
            "on_header_end": self._header_end,
            "on_part_data": self._more,
            "on_part_end": self._end_part,
            "on_end": self._end,
        }

    def _begin(self) -> None:
        self._header: tuple[bytes, bytes] = (b"", b"")
        self._disposition = b""
        self._data: list[bytes] = []

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        name, value = self._header
        self._header = (name + data[start:end], value)

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        name, value = self._header
        self._header = (name, value + data[start:end])

    def _header_end(self) -> None:
        name, value = self._header
        if name.lower() == b"content-disposition":
            self._disposition = value
        self._header = (b"", b"")

    def _more(self, data: bytes, start: int, end: int) -> None:
        self._data.append(data[start:end])

    def _end_part(self) -> None:
        self._count += 1
        if self._count > MAX_PARTS:
            raise _bad_form(f"The form has more than {MAX_PARTS} parts.")
        kind, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"").decode("utf-8", "replace")
        if kind != b"form-data" or not name:
            raise _bad_form("A part of the form has no name.")
        data = b"".join(self._data)
        if b"filename" in options:
            if name in self._files:
                raise _bad_form(f"The form has two files '{name[:64]}'.", name)
            self._files[name] = data
            return
        if len(data) > MAX_FIELD_BYTES:
            raise _bad_form(f"'{name[:64]}' has more than {MAX_FIELD_BYTES} bytes.", name)
        try:
            self._fields.setdefault(name, []).append(data.decode())
        except UnicodeDecodeError:
            raise _bad_form(f"'{name[:64]}' is not UTF-8.", name) from None

    def _end(self) -> None:
        self.ended = True
        self.form = MultipartForm(fields=self._fields, files=self._files)


def _bad_form(message: str, param: str | None = None) -> RequestError:
    return RequestError(message, param=None if param is None else param[:64], code="invalid_form")
