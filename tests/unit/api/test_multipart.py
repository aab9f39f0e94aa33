"""Forms with files: strictly what RFC 7578 says, whatever the bytes are."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.api.multipart import MAX_PARTS, boundary_of, encode_form, parse_multipart
from penstock.errors import RequestError, WrongMediaType

BOUNDARY = b"xyz"


def part(head: bytes, data: bytes) -> bytes:
    return b"--xyz\r\nContent-Disposition: form-data; " + head + b"\r\n\r\n" + data + b"\r\n"


END = b"--xyz--\r\n"


@settings(max_examples=40, deadline=None)
@given(st.binary(max_size=300), st.text(max_size=20))
def test_files_and_fields_come_out_as_they_went_in(data: bytes, word: str) -> None:
    data = data.replace(b"--xyz", b"")
    raw = part(b'name="file"; filename="a.wav"', data) + part(b'name="model"', word.encode()) * 2 + END
    form = parse_multipart(raw, BOUNDARY)
    assert (form.files, form.fields) == ({"file": data}, {"model": [word, word]})
    body, kind = encode_form(form)
    assert parse_multipart(body, boundary_of(kind)) == form


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"", "last boundary is missing"),
        (b"hello", "no form"),
        (part(b'name="a"', b"x"), "last boundary is missing"),
        (part(b'filename="a"', b"x") + END, "has no name"),
        (b"--xyz\r\nContent-Type: text/plain\r\n\r\nx\r\n" + END, "has no name"),
        (part(b'name="a"', b"\xff") + END, "is not UTF-8"),
        (part(b'name="a"', b"x" * 70_000) + END, "more than 65536 bytes"),
        (part(b'name="a"; filename="b"', b"x") * 2 + END, "two files"),
        (part(b'name="a"', b"x") * (MAX_PARTS + 1) + END, "more than 64 parts"),
        (part(b'name="' + b"a" * 5_000 + b'"', b"x") + END, "no form"),
    ],
)
def test_what_is_no_form_is_refused(raw: bytes, why: str) -> None:
    with pytest.raises(RequestError, match=why) as refused:
        parse_multipart(raw, BOUNDARY)
    assert refused.value.code == "invalid_form"


@pytest.mark.parametrize(
    "kind",
    [None, b"", b"application/json", b"multipart/form-data", b"multipart/form-data; boundary=" + b"x" * 71],
)
def test_another_type_is_refused(kind: bytes | None) -> None:
    with pytest.raises(WrongMediaType, match="multipart/form-data"):
        boundary_of(kind)


def test_the_boundary_may_be_quoted() -> None:
    assert boundary_of(b'multipart/form-data; boundary="x y"') == b"x y"
