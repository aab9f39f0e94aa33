"""Results as JSON lines: each measurement is written down as soon as it is there, so a run can be cut, split, resumed.

Knows nothing about what is measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ABOUT = "about"
"""The name under which a run says on what machine it was made."""


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One measure of one system in one round."""

    model: str
    round: int
    system: str
    measure: str
    figures: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    at: str = field(default_factory=now)

    @property
    def key(self) -> tuple[str, int, str, str]:
        return self.model, self.round, self.system, self.measure


class Records:
    """The records of one file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __iter__(self) -> Iterator[Record]:
        """Raises ValueError with the line's number for one that cannot be read, unless it is the last: a run was cut
        while it was written."""
        if not self._path.exists():
            return
        lines = self._path.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines, 1):
            try:
                yield Record(**json.loads(line))
            except (ValueError, TypeError) as error:
                if number < len(lines):
                    raise ValueError(f"{self._path}:{number}: {error}") from error

    def add(self, record: Record) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        torn = self._path.exists() and not self._path.read_bytes().endswith(b"\n") and self._path.stat().st_size > 0
        with self._path.open("a", encoding="utf-8") as file:
            file.write(("\n" if torn else "") + json.dumps(asdict(record)) + "\n")

    def done(self) -> set[tuple[str, int, str, str]]:
        """Keys of what need not be measured again."""
        return {record.key for record in self if record.error is None}
