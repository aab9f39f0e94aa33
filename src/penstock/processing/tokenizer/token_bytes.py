"""What each token adds to a text, as bytes: the tokenizer's own decoder, read once and applied token by token.

Knows nothing about streams or characters.  A text is the concatenation of its tokens' bytes, which is what makes
decoding incremental and linear.  Decoders whose output for one token depends on its neighbors are refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import msgspec

from penstock.errors import ModelError

Step = Callable[[str | bytes], str | bytes]
"""One step of a decoder on one token; bytes are final and pass through."""

_CLEANUPS = (
    *((" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m")),
    *((" do not", " don't"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re")),
)
"""What WordPiece's ``cleanup`` does to each token (huggingface/tokenizers, ``decoders/wordpiece.rs``)."""

_encode = msgspec.json.Encoder().encode

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenSource(Protocol):
    """The part of a tokenizer that this table reads."""

    def id_to_token(self, token: int) -> str | None: ...


def byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each of the 256 bytes, inverted (openai/gpt-2, ``bytes_to_unicode``)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def decoder_steps(spec: Mapping[str, Any]) -> list[Step]:
    """The steps of a ``decoder`` out of tokenizer.json, for a token in the middle of a text.

    Raises ModelError for a decoder that cannot be applied token by token.
    """
    kind = spec.get("type")
    if kind == "Sequence":
        return _sequence_steps(spec["decoders"])
    if kind == "ByteLevel":
        return [_byte_level]
    if kind == "ByteFallback":
        return [_byte_fallback]
    if kind == "Metaspace":
        return [_replacement(spec["replacement"], " ")]
    if kind == "Replace" and isinstance(spec["pattern"].get("String"), str):
        return [_replacement(spec["pattern"]["String"], spec["content"])]
    if kind == "WordPiece":
        return [_word_piece(spec["prefix"], cleanup=spec["cleanup"])]
    if kind == "Fuse":
        return []
    raise ModelError(
        f"This tokenizer's decoder '{kind}' cannot be applied token by token. "
        "ByteLevel, ByteFallback, Metaspace, Replace and WordPiece can."
    )


def _sequence_steps(specs: Iterable[Mapping[str, Any]]) -> list[Step]:
    steps: list[Step] = []
    fused = False
    for spec in specs:
        kind = spec.get("type")
        fused = fused or kind == "Fuse"
        if kind == "Strip":
            # After Fuse it concerns the two ends of a whole text only; an answer is never the start of one.
            if fused and spec["stop"] == 0:
                continue
            if not fused:
                steps.append(_strip(spec["content"], spec["start"], spec["stop"]))
                continue
        steps.extend(decoder_steps(spec))
    return steps


def _replacement(old: str, new: str) -> Step:
    return lambda piece: piece if isinstance(piece, bytes) else piece.replace(old, new)


def _strip(content: str, start: int, stop: int) -> Step:
    def step(piece: str | bytes) -> str | bytes:
        if isinstance(piece, bytes):
            return piece
        left = min(start, len(piece) - len(piece.lstrip(content)))
        right = min(stop, len(piece) - len(piece.rstrip(content)))
        return piece[left : len(piece) - right]

    return step


def _word_piece(prefix: str, *, cleanup: bool) -> Step:
    def step(piece: str | bytes) -> str | bytes:
        if isinstance(piece, bytes):
            return piece
        text = piece.removeprefix(prefix) if piece.startswith(prefix) else f" {piece}"
        if cleanup:
            for apart, joined in _CLEANUPS:
                text = text.replace(apart, joined)
        return text

    return step


def _byte_fallback(piece: str | bytes) -> str | bytes:
    match = _BYTE_TOKEN.fullmatch(piece) if isinstance(piece, str) else None
    return bytes([int(match[1], 16)]) if match else piece


_ALPHABET = byte_level_alphabet()


def _byte_level(piece: str | bytes) -> str | bytes:
    if isinstance(piece, bytes):
        return piece
    try:
        return bytes(map(_ALPHABET.__getitem__, piece))
    except KeyError:  # an added token, written as itself
        return piece


class TokenTable:
    """Bytes, and the text to show, of every token; worked out when first asked for."""

    def __init__(self, source: TokenSource, *, decoder: bytes | None, special: frozenset[int]) -> None:
        """``decoder`` is tokenizer.json's, as JSON; without one a token is its own text."""
        self.special = special
        self._source = source
        self._steps = [] if decoder is None else decoder_steps(json.loads(decoder))
        self._raw: dict[int, bytes] = {}
        self._text: dict[int, bytes] = {}
        self._plain: dict[int, tuple[str, bytes] | None] = {}
        self.escapes: dict[int, bytes] = {}  # the second part of what ``plain`` has given

    def raw(self, token: int) -> bytes:
        """The bytes that ``token`` stands for; none for an id without a token."""
        known = self._raw.get(token)
        if known is None:
            known = self._raw[token] = self._decode(token)
        return known

    def text_bytes(self, token: int) -> bytes:
        """The bytes that ``token`` adds to an answer: as ``raw``, but none for special tokens."""
        known = self._text.get(token)
        if known is None:
            known = self._text[token] = b"" if token in self.special else self.raw(token)
        return known

    def plain(self, token: int) -> tuple[str, bytes] | None:
        """What ``token`` adds to an answer, as text and as it stands inside a JSON string; None for part of a
        character."""
        try:
            return self._plain[token]
        except KeyError:
            pass
        try:
            text = self.text_bytes(token).decode()
        except UnicodeDecodeError:
            self._plain[token] = None
            return None
        self.escapes[token] = escaped = _encode(text)[1:-1]
        known = self._plain[token] = text, escaped
        return known

    def shown(self, token: int) -> tuple[str, bool]:
        """The token's text on its own, or its bytes as ``\\\\xe4\\\\xbd``; and whether it is part of a character."""
        raw = self.raw(token)
        try:
            return raw.decode(), False
        except UnicodeDecodeError:
            return "".join(f"\\x{byte:02x}" for byte in raw), True

    def _decode(self, token: int) -> bytes:
        piece: str | bytes | None = self._source.id_to_token(token)
        if piece is None:
            return b""
        for step in self._steps:
            piece = step(piece)
        return piece if isinstance(piece, bytes) else piece.encode()
