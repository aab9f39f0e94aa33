"""Tokens of running responses that gateways save here, so that another gateway resumes from them when one dies.

Only responses with an idempotency key are saved (``router.saved_tokens``).  A name stands for all that the tokens
follow from, so whichever gateway sends them, they are the same, and any part from the first token on is a valid one.
Tokens that do not follow on those that are here are left out; tokens that contradict them end the saving of that
response.
What is lost or left out costs a recomputation, never a wrong token.  Pure: time is a parameter.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.wire.gateway_messages import MAX_SAVED_TOKENS, SavedPiece

MAX_ALL_SAVED_TOKENS = 1 << 22
"""Of all responses, four bytes each.  Beyond, the responses that were saved longest ago are forgotten."""

MAX_SAVED_RESPONSES = 65_536
"""Choices of responses; a few hundred bytes each in addition to their tokens."""

SAVED_S = 600.0
"""For which tokens are kept after the last message about their response."""


@dataclass(slots=True)
class _Saved:
    until: float
    tokens: array[int]


class SavedTokens:
    """By name, the response that was saved longest ago first."""

    def __init__(self, max_tokens: int = MAX_ALL_SAVED_TOKENS, max_responses: int = MAX_SAVED_RESPONSES) -> None:
        self._max_tokens = max_tokens
        self._max_responses = max_responses
        self._saved: OrderedDict[bytes, _Saved] = OrderedDict()
        self.tokens = 0  # of all

    def __len__(self) -> int:
        return len(self._saved)

    def save(self, pieces: Iterable[SavedPiece], now: float) -> None:
        """Takes a gateway's message."""
        for piece in pieces:
            self._save(piece, now)
        self._make_room(now)

    def find(self, names: Sequence[bytes], now: float) -> tuple[bytes, ...]:
        """The tokens of each of these from the first on, packed; empty: none is known."""
        self._make_room(now)
        found = (self._saved.get(name) for name in names)
        return tuple(b"" if saved is None else saved.tokens.tobytes() for saved in found)

    def _save(self, piece: SavedPiece, now: float) -> None:
        saved = self._saved.get(piece.name)
        if saved is None:
            if piece.start or not piece.tokens:
                return
            saved = self._saved[piece.name] = _Saved(now, array("I"))
        tokens = array("I", piece.tokens)
        known = len(saved.tokens) - piece.start
        if known < 0:  # those between were lost
            return
        if saved.tokens[piece.start : piece.start + len(tokens)] != tokens[:known]:
            self._drop(piece.name)
            return
        more = tokens[known : MAX_SAVED_TOKENS - piece.start]
        saved.tokens.extend(more)
        self.tokens += len(more)
        saved.until = now + SAVED_S
        self._saved.move_to_end(piece.name)

    def _make_room(self, now: float) -> None:
        while self._saved:
            name, oldest = next(iter(self._saved.items()))
            fits = self.tokens <= self._max_tokens and len(self._saved) <= self._max_responses
            if fits and oldest.until > now:
                return
            self._drop(name)

    def _drop(self, name: bytes) -> None:
        self.tokens -= len(self._saved.pop(name).tokens)
