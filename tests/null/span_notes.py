"""The in-memory double of ``telemetry.spans.Tracer``: keeps what it is told, and refuses what is not declared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.telemetry.spans import REQUEST, SpanAttribute, SpanFamily


@dataclass
class Note:
    """One span."""

    family: SpanFamily
    parent: str
    context: str
    begin: float
    name: str
    facts: dict[str, SpanAttribute] = field(default_factory=dict)
    events: list[tuple[str, float]] = field(default_factory=list)
    over: float | None = None
    error: str = ""

    def set_attributes(self, **facts: SpanAttribute) -> None:
        told = {name.replace("__", "."): value for name, value in facts.items()}
        assert set(told) <= set(self.family.facts), f"{self.family.name} has not declared {told}"
        assert self.over is None
        self.facts |= told

    def add_event(self, name: str, at: float, **facts: SpanAttribute) -> None:
        assert name in self.family.events
        assert self.over is None
        self.events.append((name, at))

    def end(self, at: float, error: str = "") -> None:
        assert self.over is None, f"{self.family.name} ends twice"
        self.over, self.error = at, error


class SpanNotes:
    """``Tracer``."""

    def __init__(self) -> None:
        self.notes: list[Note] = []
        self.callers: list[Mapping[str, str]] = []  # what requests said of theirs

    def root(self, caller: Mapping[str, str], name: str, at: float) -> Note:
        self.callers.append(caller)
        return self._open(REQUEST, caller.get("traceparent", ""), at, name)

    def begin(self, parent: str, family: SpanFamily, at: float) -> Note:
        return self._open(family, parent, at, family.name)

    def _open(self, family: SpanFamily, parent: str, at: float, name: str) -> Note:
        note = Note(family, parent, f"span-{len(self.notes)}", at, name)
        self.notes.append(note)
        return note

    def of(self, family: SpanFamily) -> list[Note]:
        """All of a kind."""
        return [note for note in self.notes if note.family is family]

    def facts(self, family: SpanFamily, name: str) -> list[Any]:
        """One fact of all of a kind that have it."""
        return [note.facts[f"penstock.{name}"] for note in self.of(family) if f"penstock.{name}" in note.facts]

    def assert_whole(self) -> None:
        """All are over, none before it began, and every part is inside the whole but for its very end."""
        by_context = {note.context: note for note in self.notes}
        for note in self.notes:
            assert note.over is not None, f"{note.family.name} is open"
            assert note.begin <= note.over
            parent = by_context.get(note.parent)
            assert parent is None or parent.begin <= note.begin
