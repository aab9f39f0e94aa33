"""Ids of a stream's events: how far each choice is told with an event, so that a client can ask for what comes after.

::

    0:17                      17 tokens of choice 0 are told (a request without an idempotency key)
    0:17/8c1f0a6e22d94b07     the same, with a mark that proves that it was given out for this request
    1:9;0:17+/8c1f0a…         choice 1 stands at 9; choice 0 at 17, and what was held back of its text is told, too
    0:end;1:end/8c1f0a…       both have ended
    usage/8c1f0a…             so is the usage told
    done                      nothing is left to tell

A mark is a keyed hash of the id and of what was asked (tenant, key, body, model): a client can name no event that it
was not told of, and so cannot have an answer that nobody counts.

Text that may become part of a stop string, or of a character, is held back until the answer ends: "17" and "17+" tell
which of the two a client has.  Knows nothing about tokens, JSON or HTTP.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

from penstock.errors import KeyReused, RequestError

MOST_CHOICES = 64
"""An event's id tells of so many choices at most.  A stream with more of them cannot be resumed."""

MAX_ID_BYTES = 4096

MARK_BYTES = 8

_PLACE: Final = r"\d{1,4}:(?:\d{1,9}\+?|end)"
_ID: Final = re.compile(rf"(?P<places>{_PLACE}(?:;{_PLACE}){{0,{MOST_CHOICES - 1}}}|usage)/(?P<mark>[0-9a-f]{{16}})")


@dataclass(frozen=True, slots=True)
class Place:
    """How far one choice is told."""

    tokens: int
    closed: bool = False  # what was held back is told, too
    ended: bool = False  # so is the end


class EventMarks:
    """The marks of one request's events.  ``key`` is known to every gateway and to no client."""

    def __init__(self, key: bytes, request: bytes) -> None:
        """``request``: what was asked, and by whom."""
        self._begun = blake2b(request, digest_size=MARK_BYTES, key=key, person=b"penstock event")

    def of(self, places: str) -> str:
        """Of the event with this id."""
        mark = self._begun.copy()
        mark.update(places.encode())
        return mark.hexdigest()


@dataclass(frozen=True, slots=True)
class After:
    """Where a stream goes on.  Without places it begins."""

    places: Mapping[int, Place] = field(default_factory=dict[int, Place])
    complete: bool = False  # nothing is left but the last word

    @classmethod
    def parse(cls, raw: bytes, marks: EventMarks) -> After:
        """What a client says it has.  Raises RequestError for what is no id of ours, KeyReused for another mark."""
        text = raw[: MAX_ID_BYTES + 1].decode("latin-1").strip()
        if text == "done":
            return cls(complete=True)
        match = _ID.fullmatch(text) if len(raw) <= MAX_ID_BYTES else None
        if match is None:
            raise RequestError(
                f"The header Last-Event-ID has {text[:80]!r}, which is not the id of an event of a request with an "
                "idempotency key. Send the request without it to get the answer from its beginning.",
                code="invalid_last_event_id",
            )
        if not hmac.compare_digest(match["mark"], marks.of(match["places"])):
            raise KeyReused(
                "The event named in Last-Event-ID belongs to another request body, Idempotency-Key or version of the "
                "model, or to another service, so its stream cannot go on here. Send a new request with another "
                "Idempotency-Key."
            )
        if match["places"] == "usage":
            return cls(complete=True)
        return cls(dict(map(_place, match["places"].split(";"))))


def _place(text: str) -> tuple[int, Place]:
    choice, _, told = text.partition(":")
    if told == "end":
        return int(choice), Place(0, closed=True, ended=True)
    return int(choice), Place(int(told.rstrip("+")), closed=told.endswith("+"))


class EventIds:
    """The ids of one stream.  With ``marks`` each tells of all choices, so that any of them can be resumed from."""

    __slots__ = ("_marks", "_told")

    def __init__(self, marks: EventMarks | None = None, after: After | None = None) -> None:
        self._marks = marks
        self._told: dict[int, str] = {}
        for choice, place in (after.places if after is not None else {}).items():
            self._told[choice] = "end" if place.ended else f"{place.tokens}{'+' if place.closed else ''}"

    def begun(self, choice: int) -> str:
        """Of the event before a choice's first text."""
        return self._id(choice, "0")

    def told(self, choice: int, tokens: int, *, last: bool) -> str:
        """Of one with text.  ``last``: with what was held back."""
        return self._id(choice, f"{tokens}+" if last and self._marks is not None else str(tokens))

    def ended(self, choice: int) -> str:
        """Of the one with the reason of the end."""
        return self._id(choice, "end")

    def usage(self) -> str:
        """Of the one with the figures."""
        return "usage" if self._marks is None else f"usage/{self._marks.of('usage')}"

    def _id(self, choice: int, place: str) -> str:
        if self._marks is None:
            return f"{choice}:{place}"
        self._told[choice] = place
        if len(self._told) > MOST_CHOICES:
            return f"{choice}:{place}"
        others = "".join(f";{other}:{told}" for other, told in self._told.items() if other != choice)
        places = f"{choice}:{place}{others}"
        return f"{places}/{self._marks.of(places)}"
