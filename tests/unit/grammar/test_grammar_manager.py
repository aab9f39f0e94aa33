"""The grammars of a worker: what is held is there, what nobody waits for is not compiled, and all of it is bounded."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from grammar_world import BYTES, admits, grammar_of
from penstock.errors import GrammarRefused, QueueFull
from penstock.grammar import manager
from penstock.grammar.manager import GrammarHandle, GrammarManager
from penstock.grammar.matcher import CompiledGrammar, GrammarVocabulary, compiled_bytes
from penstock.types import Grammar

PATIENCE_S = 60.0


def texts(count: int) -> list[Grammar]:
    return [grammar_of("regex", f"text number {number}") for number in range(count)]


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class Gate:
    """A vocabulary that is not read before it is opened, and counts what is compiled."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.compiled: list[str] = []
        plain = CompiledGrammar

        def counted(grammar: Grammar, *rest: object) -> CompiledGrammar:
            self.compiled.append(grammar.text)
            return plain(grammar, *rest)  # type: ignore[arg-type]

        monkeypatch.setattr(manager, "CompiledGrammar", counted)

    def load(self) -> GrammarVocabulary:
        assert self.open.wait(PATIENCE_S)
        return BYTES


def test_however_many_are_wanted_at_once_each_is_compiled_once_and_all_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = Gate(monkeypatch)
    grammars = GrammarManager(gate.load)
    handles = [grammars.get_or_compile(grammar) for grammar in texts(150)]
    gate.open.set()
    until(lambda: all(handle.ready() for handle in handles))
    assert all(handle.ready() for handle in handles)
    again = [grammars.get_or_compile(grammar) for grammar in texts(150)]
    assert again == handles
    assert sorted(gate.compiled) == sorted(grammar.text for grammar in texts(150))
    grammars.close()


def test_what_nobody_waits_for_any_more_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    grammars = GrammarManager(gate.load)
    handles = [grammars.get_or_compile(grammar) for grammar in texts(100)]
    until(handles[0]._future.running)
    del handles[1:]
    assert grammars.bytes == compiled_bytes(handles[0].grammar)
    last = grammars.get_or_compile(grammar_of("regex", "the last"))
    gate.open.set()
    until(last.ready)
    assert gate.compiled == ["text number 0", "the last"]
    grammars.close()


def test_memory_is_bounded_by_forgetting_and_then_by_refusing(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    gate.open.set()
    one, two, three, four = texts(4)
    grammars = GrammarManager(gate.load, max_bytes=3 * compiled_bytes(one) + 1000)
    held: list[GrammarHandle] = [grammars.get_or_compile(grammar) for grammar in (one, two, three)]
    until(lambda: all(handle.ready() for handle in held))
    with pytest.raises(QueueFull):
        grammars.get_or_compile(four)
    del held[0]
    held.append(grammars.get_or_compile(four))  # the one that nobody holds gives way
    until(held[-1].ready)
    assert grammars.bytes <= 3 * compiled_bytes(one) + 1000
    held.clear()
    until(grammars.get_or_compile(two).ready)
    assert gate.compiled.count(two.text) == 1, "it was kept for others"
    grammars.close()


def test_so_many_wait_to_be_compiled_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    grammars = GrammarManager(gate.load, max_compiling=2)
    one, two, three = texts(3)
    held = [grammars.get_or_compile(one), grammars.get_or_compile(two)]
    with pytest.raises(QueueFull):
        grammars.get_or_compile(three)
    gate.open.set()
    until(lambda: all(handle.ready() for handle in held))
    until(grammars.get_or_compile(three).ready)
    grammars.close()


def test_a_grammar_that_cannot_be_compiled_is_refused_each_time() -> None:
    grammars = GrammarManager(lambda: BYTES)
    bad, good = grammar_of("regex", "("), grammar_of("regex", "ok")
    for _ in range(2):
        handle = grammars.get_or_compile(bad)
        until(handle._future.done)
        with pytest.raises(GrammarRefused):
            handle.ready()
    assert admits(grammars.get_or_compile(good), "ok")  # type: ignore[arg-type]
    grammars.close()
