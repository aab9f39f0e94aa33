"""Reads SentencePiece's model file: a protocol buffer of pieces, and a few settings.

Only the fields that encoding needs are looked at (google/sentencepiece, ``sentencepiece_model.proto``); the rest is
skipped by its wire type.  Sizes are checked before they are used.  Knows nothing about encoding.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum

import msgspec

from penstock.errors import ModelError

MAX_PIECES = 1 << 20
_MAX_VARINT_BYTES = 10


class Kind(IntEnum):
    """What a piece is for."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Method(IntEnum):
    """How pieces are chosen."""

    UNIGRAM = 1
    BPE = 2
    WORD = 3
    CHAR = 4


class Piece(msgspec.Struct, frozen=True):
    """One entry of the vocabulary; its id is its place."""

    text: str
    score: float
    kind: Kind


class SpmModel(msgspec.Struct, frozen=True, kw_only=True):
    """What a model file says, with the defaults of the format."""

    pieces: tuple[Piece, ...]
    method: Method
    byte_fallback: bool
    suffix_blanks: bool  # blanks stand behind words
    charsmap: bytes  # normalization rules, compiled; empty for none
    dummy_prefix: bool  # a blank is put before a text
    squeeze_blanks: bool  # blanks at the ends go, several become one


def parse_model(raw: bytes, *, where: str) -> SpmModel:
    """Raises ModelError for anything that is no such file."""
    pieces: list[Piece] = []
    trainer: dict[int, int | bytes] = {}
    normalizer: dict[int, int | bytes] = {}
    try:
        for number, value in _fields(raw):
            if number == 1 and isinstance(value, bytes):
                pieces.append(_piece(value))
            elif number == 2 and isinstance(value, bytes):
                trainer = dict(_fields(value))
            elif number == 3 and isinstance(value, bytes):
                normalizer = dict(_fields(value))
            if len(pieces) > MAX_PIECES:
                raise ValueError(f"more than {MAX_PIECES} pieces")
        charsmap = normalizer.get(2, b"")
        if not pieces or not isinstance(charsmap, bytes):
            raise ValueError("no pieces")
        return SpmModel(
            pieces=tuple(pieces),
            method=Method(int(trainer.get(3, Method.UNIGRAM))),
            byte_fallback=bool(trainer.get(35, False)),
            suffix_blanks=bool(trainer.get(24, False)),
            charsmap=charsmap,
            dummy_prefix=bool(normalizer.get(3, True)),
            squeeze_blanks=bool(normalizer.get(4, True)),
        )
    except (ValueError, struct.error, IndexError) as error:
        raise ModelError(f"{where} is no SentencePiece model: {error}") from error


def _piece(raw: bytes) -> Piece:
    fields = dict(_fields(raw))
    text, score = fields.get(1, b""), fields.get(2, b"\0\0\0\0")
    if not isinstance(text, bytes) or not isinstance(score, bytes) or len(score) != 4:
        raise ValueError("a piece with a wrong type")
    return Piece(text.decode(), struct.unpack("<f", score)[0], Kind(int(fields.get(3, Kind.NORMAL))))


def _fields(raw: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of every field: an integer, or the bytes of anything else."""
    at = 0
    while at < len(raw):
        key, at = _varint(raw, at)
        wire = key & 7
        if wire == 0:
            value, at = _varint(raw, at)
            yield key >> 3, value
            continue
        size = {1: 8, 5: 4}.get(wire)
        if wire == 2:
            size, at = _varint(raw, at)
        if size is None or at + size > len(raw):
            raise ValueError("the file ends within a field" if size is not None else f"wire type {wire}")
        yield key >> 3, raw[at : at + size]
        at += size


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    value = 0
    for i in range(_MAX_VARINT_BYTES):
        byte = raw[at + i]
        value |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            return value, at + i + 1
    raise ValueError("a number without end")
