"""What a translated body has that is passed over: one line in the log for each kind."""

from __future__ import annotations

import logging
from collections.abc import Iterable

log = logging.getLogger(__name__)

MAX_SKIPPED_KINDS = 1024
"""Remembered, so that each is logged once; later kinds are not logged."""


class SkippedKinds:
    """Logs each kind of thing that one API skips once."""

    def __init__(self, path: str) -> None:
        """``path``: of the API, for the log."""
        self._path = path
        self._seen: set[tuple[str, str]] = set()

    def note(self, what: str, kind: object) -> None:
        """``what``: a constant, as "tool"; ``kind``: the client's word for it."""
        name = str(kind)[:64]
        if (what, name) not in self._seen and len(self._seen) < MAX_SKIPPED_KINDS:
            self._seen.add((what, name))
            log.info("skipped in %s: %s %r (logged once)", self._path, what, name)

    def note_fields(self, what: str, given: Iterable[str], known: frozenset[str]) -> None:
        """The fields of an object that are not ``known``."""
        for name in given:
            if name not in known:
                self.note(what, name)
