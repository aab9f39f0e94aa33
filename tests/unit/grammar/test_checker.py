"""The checker: a process of its own, in which the kernel holds the limits, whatever a grammar does."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import psutil
import pytest

from grammar_world import BYTES, grammar_of, schema_grammar
from penstock.errors import GrammarRefused, QueueFull
from penstock.grammar.checker_client import CheckerProcess, GrammarChecker
from penstock.grammar.checker_process import CheckLimits, GrammarVerdict
from penstock.types import Grammar, GrammarKind

LIMITS = CheckLimits(cpu_s=0.4, memory_bytes=512 << 20)
QUICK = CheckLimits(cpu_s=0.05, memory_bytes=512 << 20)
WIDE = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(4000)}}
PATIENCE_S = 40.0
"""On a machine with other work a little of a processor's time takes long."""

AMBIGUOUS = 'start: s\ns: s s | s s s s s s s s | "a" | "b" | ""\n'


def nested(depth: int) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def doubling(depth: int) -> Any:
    """2^depth schemas, if anybody writes them all out."""
    defs = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]} for i in range(depth)}
    return {"$defs": {**defs, f"d{depth}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


HOSTILE: dict[str, Grammar] = {
    "deep object": schema_grammar(nested(60)),
    "references that double": schema_grammar(doubling(40)),
    "a reference to itself": schema_grammar({"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}),
    "huge enumeration": schema_grammar({"enum": [f"{i} {i * 7919 % 10007}" for i in range(5000)]}),
    "a billion items": schema_grammar({"type": "array", "minItems": 1_000_000_000}),
    "a long string": schema_grammar({"type": "string", "minLength": 100_000_000}),
    "many alternatives": schema_grammar({"anyOf": [nested(i % 20) for i in range(400)]}),
    "nested repetition": grammar_of("regex", "((((a{1,100}){1,100}){1,100}){1,100})"),
    "exponential automaton": grammar_of("regex", "(a|b)*a(a|b){30}"),
    "large repetition": grammar_of("regex", "(ab?c?){1000,1000000}"),
    "nested quantifiers": grammar_of("regex", "((a+)+)+b"),
    "brackets": grammar_of("regex", "(" * 4000 + ")" * 4000),
    "ambiguous rules": grammar_of("lark", AMBIGUOUS),
    "left recursion": grammar_of("lark", 'start: a\na: a a | a "x" | "x"\n'),
    "brackets in rules": grammar_of("lark", "start: " + "(" * 4000 + '"a"' + ")" * 4000),
    "brackets in EBNF": grammar_of("ebnf", "root ::= " + "(" * 4000 + '"a"' + ")" * 4000),
}


@pytest.fixture
async def checks() -> AsyncIterator[GrammarChecker]:
    made = GrammarChecker(lambda: BYTES, LIMITS, max_waiting=2)
    yield made
    made.close()


async def test_a_grammar_is_checked_once(checks: GrammarChecker, monkeypatch: pytest.MonkeyPatch):
    grammar = schema_grammar({"type": "object"})
    assert await checks.check(grammar) == grammar
    with monkeypatch.context() as nobody_is_asked:
        nobody_is_asked.setattr(checks, "_ask", None)
        for _ in range(100):
            assert await checks.check(schema_grammar({"type": "object"})) == grammar
    with pytest.raises(GrammarRefused, match="Invalid type: objekt"):
        await checks.check(schema_grammar({"type": "objekt"}))


async def test_ebnf_travels_as_lark(checks: GrammarChecker):
    travels = await checks.check(grammar_of("ebnf", 'root ::= "a" [0-9]+'))
    assert travels.kind is GrammarKind.LARK
    assert "::=" not in travels.text
    assert await checks.check(travels) == travels


async def test_hostile_grammars_are_bounded_and_the_next_one_is_served(checks: GrammarChecker):
    """Each is refused with a reason, or followed within the limits; none takes the loop or the checker with it."""
    verdicts: dict[str, str] = {}
    for name, grammar in HOSTILE.items():
        begin = time.perf_counter()
        try:
            await checks.check(grammar)
            verdicts[name] = ""
        except GrammarRefused as refused:
            verdicts[name] = str(refused)
        assert time.perf_counter() - begin < PATIENCE_S, name
    assert all(len(reason) <= 300 for reason in verdicts.values())
    for name in ("a reference to itself", "nested repetition", "brackets", "brackets in rules", "brackets in EBNF"):
        assert verdicts[name], name
    assert await checks.check(schema_grammar({"type": "null"}))


async def test_cpu_time_is_a_limit_that_holds():
    checks = GrammarChecker(lambda: BYTES, QUICK, max_waiting=2)
    for _ in range(2):  # and the process that comes after it does its work
        with pytest.raises(GrammarRefused, match=r"more than 0\.05 s"):
            await checks.check(schema_grammar(WIDE))
        assert await checks.check(schema_grammar({"type": "null"}))
    checks.close()


async def test_memory_is_a_limit_that_holds():
    checks = GrammarChecker(lambda: BYTES, CheckLimits(cpu_s=5.0, memory_bytes=4 << 20), max_waiting=2)
    with pytest.raises(GrammarRefused, match="more than 4 MiB"):
        await checks.check(schema_grammar(WIDE))
    checks.close()


async def test_the_loop_goes_on_meanwhile_and_the_queue_is_bounded():
    checks = GrammarChecker(lambda: BYTES, CheckLimits(cpu_s=0.2, memory_bytes=512 << 20), max_waiting=2)
    slow = [asyncio.create_task(checks.check(schema_grammar({**WIDE, "title": str(i)}))) for i in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull, match="2 grammars wait"):
        await checks.check(schema_grammar({"type": "null"}))
    turns = 0
    while not all(task.done() for task in slow):
        await asyncio.sleep(0.001)
        turns += 1
    assert turns > 5
    assert all(isinstance(one, GrammarRefused) for one in await asyncio.gather(*slow, return_exceptions=True))
    checks.close()


def test_a_checker_ends_with_its_parents_pipe():
    before = set(psutil.Process().children())
    checker = CheckerProcess(BYTES, LIMITS)
    (process,) = set(psutil.Process().children()) - before
    assert checker.ask(schema_grammar({})).refused is None
    checker._in.close()
    assert process.wait(timeout=PATIENCE_S) == 0
    checker.close()


def test_one_that_was_killed_from_outside_is_replaced():
    checks = GrammarChecker(lambda: BYTES, LIMITS, max_waiting=2)
    before = set(psutil.Process().children())
    asyncio.run(checks.check(schema_grammar({"title": "a"})))
    (process,) = set(psutil.Process().children()) - before
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=PATIENCE_S)
    assert asyncio.run(checks.check(schema_grammar({"title": "b"})))
    checks.close()
    assert set(psutil.Process().children()) - before == set()


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_closing_does_not_wait_for_a_check():
    checks = GrammarChecker(lambda: BYTES, CheckLimits(cpu_s=3600.0, memory_bytes=512 << 20), max_waiting=2)
    asyncio.run(checks.check(schema_grammar({})))
    refused: list[BaseException] = []

    def check() -> None:
        try:
            asyncio.run(checks.check(schema_grammar({**WIDE, "title": json.dumps(WIDE)})))
        except (GrammarRefused, QueueFull) as error:
            refused.append(error)

    thread = in_thread(check)
    while checks.waiting == 0:
        time.sleep(0.001)
    checks.close()
    thread.join(timeout=PATIENCE_S)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('x ::= "a"', "No 'root' rule found"),
        ("root ::= y", "Rule 'y' not found"),
        ('root ::= "\\', "ends in the middle"),
    ],
)
async def test_ebnf_that_is_none_is_refused_in_its_own_words_by_the_same_process(
    checks: GrammarChecker, text: str, reason: str
):
    with pytest.raises(GrammarRefused, match=reason):
        await checks.check(grammar_of("ebnf", text))
    process = checks._checker
    with pytest.raises(GrammarRefused, match="Rule 'nothing' not found"):
        await checks.check(grammar_of("ebnf", "root ::= nothing"))
    assert checks._checker is process


class Slow:
    """A checker that answers when it is let."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, checks: GrammarChecker) -> None:
        self.asked: list[str] = []
        self.go_on = threading.Semaphore(0)
        monkeypatch.setattr(checks, "_ask", self._ask)

    def _ask(self, grammar: Grammar) -> GrammarVerdict:
        self.asked.append(grammar.text)
        assert self.go_on.acquire(timeout=PATIENCE_S)
        return GrammarVerdict(grammar=grammar)


async def test_no_tenant_waits_for_all_grammars_of_another(monkeypatch: pytest.MonkeyPatch):
    checks = GrammarChecker(lambda: BYTES, LIMITS, max_waiting=64)
    slow = Slow(monkeypatch, checks)
    many = [asyncio.create_task(checks.check(grammar_of("regex", f"a{n}"), "many")) for n in range(20)]
    await asyncio.sleep(0)
    few = asyncio.create_task(checks.check(grammar_of("regex", "b"), "few"))
    same = asyncio.create_task(checks.check(grammar_of("regex", "b"), "few"))
    await asyncio.sleep(0)
    for _ in range(2):
        slow.go_on.release()
    assert await few == await same
    assert slow.asked[:2] == ["a0", "b"]
    for task in many[5:]:
        task.cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert checks.waiting == 4, "who has left waits no more"
    for _ in many:
        slow.go_on.release()
    await asyncio.gather(*many[:5])
    assert len(slow.asked) == 6
    checks.close()


async def test_a_full_queue_has_room_for_a_tenant_that_has_little_in_it(monkeypatch: pytest.MonkeyPatch):
    checks = GrammarChecker(lambda: BYTES, LIMITS, max_waiting=4)
    slow = Slow(monkeypatch, checks)
    many = [asyncio.create_task(checks.check(grammar_of("regex", f"a{n}"), "many")) for n in range(4)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await checks.check(grammar_of("regex", "a9"), "many")
    few = asyncio.create_task(checks.check(grammar_of("regex", "b"), "few"))
    for _ in range(5):
        slow.go_on.release()
    await few
    told = await asyncio.gather(*many, return_exceptions=True)
    assert [isinstance(one, QueueFull) for one in told] == [False, False, False, True], "the last of many gave way"
    checks.close()


async def test_texts_that_are_remembered_are_bounded_in_sum(monkeypatch: pytest.MonkeyPatch):
    checks = GrammarChecker(lambda: BYTES, LIMITS, max_waiting=4, max_remembered_bytes=4000)
    slow = Slow(monkeypatch, checks)
    for number in range(20):
        slow.go_on.release()
        await checks.check(grammar_of("regex", f"{number:02}" * 100))
    assert checks._known_bytes == 5 * 800 == sum(4 * len(one.grammar.text) for one in checks._known.values())
    checks.close()
