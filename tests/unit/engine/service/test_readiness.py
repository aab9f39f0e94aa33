"""Requests whose grammar is being compiled: nothing overtakes them, nothing of theirs is lost, nobody else waits."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import replace

from penstock.engine.core.events import AddRequest, CancelRequest, CreditGranted, EngineEvent, PagesArrived
from penstock.engine.service.readiness import (
    MAX_CHECKED_PER_TURN,
    NoAdapters,
    NoPrefetch,
    ReadinessGate,
    ReadinessSources,
)
from penstock.errors import AdapterRefused, GrammarRefused, QueueFull
from penstock.grammar.matcher import GrammarMatcher
from penstock.types import (
    AdapterRef,
    BlockHash,
    Grammar,
    GrammarKind,
    PlacedImage,
    RequestId,
    RequestStage,
    SamplingParams,
)

SLOW = Grammar(kind=GrammarKind.REGEX, text="slow")
NEVER = Grammar(kind=GrammarKind.REGEX, text="never")


class Compiling:
    """One of its grammars."""

    def __init__(self, compiler: Compiler, grammar: Grammar) -> None:
        self.compiler, self.grammar = compiler, grammar

    def ready(self) -> bool:
        if self.grammar is NEVER:
            raise GrammarRefused("no")
        return self.grammar in self.compiler.done

    def matcher(self) -> GrammarMatcher:
        raise NotImplementedError


class Compiler:
    """Ready when told so."""

    def __init__(self) -> None:
        self.done: set[Grammar] = set()
        self.full = False

    def get_or_compile(self, grammar: Grammar) -> Compiling:
        if self.full:
            raise QueueFull("no room")
        return Compiling(self, grammar)


def arrive(name: str, grammar: Grammar | None = None, epoch: int = 0, adapter: AdapterRef | None = None) -> AddRequest:
    sampling = SamplingParams(seed=1, max_tokens=4, grammar=grammar)
    return AddRequest(
        id=RequestId(name), epoch=epoch, stage=RequestStage.PREFILL, prompt=(1,), sampling=sampling, arrival=0.0,
        root=BlockHash(bytes(32)), adapter=adapter,
    )  # fmt: skip


def granted(name: str, epoch: int = 0) -> EngineEvent:
    return CreditGranted(id=RequestId(name), epoch=epoch)


def test_who_follows_no_grammar_passes():
    held = ReadinessGate(ReadinessSources(Compiler()), lambda event, reason: None)
    events = [arrive("a"), granted("a"), PagesArrived(id=RequestId("x"), epoch=0, computed=3)]
    assert held.release_ready(events) == events
    assert not held


def test_what_is_said_of_a_request_waits_with_it_in_order():
    """A credit that came before its request would be lost, and the request would wait for it for ever."""
    compiler = Compiler()
    held = ReadinessGate(ReadinessSources(compiler), lambda event, reason: None)
    slow, credit, other = arrive("a", SLOW), granted("a"), arrive("b")
    assert held.release_ready([slow, other]) == [other]
    assert held.release_ready([credit, granted("b")]) == [granted("b")]
    assert held.holds(RequestId("a"))
    assert not held.holds(RequestId("b"))
    compiler.done.add(SLOW)
    assert held.release_ready([]) == [slow, credit]
    assert not held


def test_who_leaves_while_waiting_never_arrives():
    held = ReadinessGate(ReadinessSources(Compiler()), lambda event, reason: None)
    cancelled = CancelRequest(id=RequestId("a"), epoch=0)
    assert held.release_ready([arrive("a", SLOW), granted("a")]) == []
    assert held.release_ready([cancelled]) == [cancelled]
    assert not held


def test_a_later_epoch_stays_when_an_earlier_one_is_cancelled():
    compiler = Compiler()
    held = ReadinessGate(ReadinessSources(compiler), lambda event, reason: None)
    later = arrive("a", SLOW, epoch=2)
    held.release_ready([arrive("a", SLOW, epoch=1), later])
    held.release_ready([CancelRequest(id=RequestId("a"), epoch=1)])
    compiler.done.add(SLOW)
    assert held.release_ready([]) == [later]


def test_a_refused_grammar_is_told_and_its_request_never_arrives():
    told: list[tuple[str, str]] = []
    held = ReadinessGate(ReadinessSources(Compiler()), lambda event, reason: told.append((event.id, reason)))
    assert held.release_ready([arrive("a", NEVER), arrive("b")]) == [arrive("b")]
    assert told == [("a", "grammar: no")]
    assert not held


def test_images_of_a_model_that_reads_text_are_refused():
    told: list[str] = []
    held = ReadinessGate(ReadinessSources(), lambda event, reason: told.append(reason))
    shown = replace(arrive("a"), images=(PlacedImage(bytes(32), 0, 1, 1),))
    assert held.release_ready([shown, arrive("b")]) == [arrive("b")]
    assert told == ["image: this engine reads text only"]


class Reader:
    """Adapters that are there when told so."""

    def __init__(self) -> None:
        self.there: set[str] = set()

    def is_ready(self, ref: AdapterRef, in_use: Callable[[], Set[str]]) -> bool:
        if ref.fingerprint == "never":
            raise AdapterRefused("gone")
        return ref.fingerprint in self.there

    def on_scheduled(self) -> None:
        return


def test_who_waits_for_an_adapter_waits_like_one_who_waits_for_a_grammar():
    told: list[tuple[str, str]] = []
    compiler, reader = Compiler(), Reader()
    held = ReadinessGate(
        ReadinessSources(compiler, adapters=reader), lambda event, reason: told.append((event.id, reason))
    )
    both = arrive("a", SLOW, adapter=AdapterRef(fingerprint="f", folder="/f"))
    assert held.release_ready([both, granted("a"), arrive("b")]) == [arrive("b")]
    reader.there.add("f")
    assert held.release_ready([]) == []
    compiler.done.add(SLOW)
    assert held.release_ready([]) == [both, granted("a")]
    assert held.release_ready([arrive("c", adapter=AdapterRef(fingerprint="never", folder="/n"))]) == []
    assert told == [("c", "adapter: gone")]
    without = ReadinessGate(ReadinessSources(), lambda event, reason: told.append((event.id, reason)))
    assert without.release_ready([arrive("d", adapter=AdapterRef(fingerprint="f", folder="/f"))]) == []
    assert told[1:] == [("d", "adapter: this engine has no adapters")]


class Counting(NoPrefetch):
    """Pages that come when they are told to; counts who asks for them."""

    def __init__(self) -> None:
        self.here = False
        self.asked = 0

    def is_ready(self, event: AddRequest) -> bool:
        self.asked += 1
        return self.here


def test_a_turn_looks_at_so_many_of_those_who_wait_however_many_there_are():
    pages = Counting()
    held = ReadinessGate(ReadinessSources(pages=pages), lambda event, reason: None)
    names = [f"r{number}" for number in range(3 * MAX_CHECKED_PER_TURN)]
    held.release_ready([arrive(name) for name in names])
    pages.asked = 0
    assert held.release_ready([]) == []
    assert pages.asked == MAX_CHECKED_PER_TURN
    pages.here = True
    passed = [event.id for _ in range(3) for event in held.release_ready([])]
    assert len(passed) == len(names)
    assert set(passed) == set(names), "every one has its turn"
    assert not held


def test_no_more_wait_here_than_there_is_room_for():
    told: list[tuple[str, str]] = []
    pages = Counting()
    held = ReadinessGate(
        ReadinessSources(pages=pages), lambda event, reason: told.append((event.id, reason)), lambda: 2
    )
    held.release_ready([arrive("a"), arrive("b"), granted("a"), arrive("c"), granted("c")])
    assert len(held) == 2
    assert told == [("c", "queue_full")]
    pages.here = True
    assert [event.id for event in held.release_ready([])] == ["a", "a", "b"]


def test_a_grammar_is_held_from_its_request_s_arrival_until_that_has_gone():
    compiler = Compiler()
    held = ReadinessGate(ReadinessSources(compiler), lambda event, reason: None)
    held.release_ready([arrive("a", SLOW)])
    compiler.done.add(SLOW)
    (passed,) = held.release_ready([])
    assert isinstance(passed, AddRequest)
    assert isinstance(passed.grammar, Compiling)
    assert passed.grammar.grammar is SLOW


def test_who_finds_no_room_for_a_grammar_is_told_so():
    told: list[str] = []
    compiler = Compiler()
    compiler.full = True
    held = ReadinessGate(ReadinessSources(compiler), lambda event, reason: told.append(reason))
    assert held.release_ready([arrive("a", SLOW), granted("a"), arrive("b")]) == [granted("a"), arrive("b")]
    assert told == ["queue_full"], "gateways try others, and then say 429"


def test_what_goes_wrong_with_one_request_is_its_own_affair():
    """A folder's name that no system takes, say: the worker must not end by it."""

    class Breaks(NoAdapters):
        def is_ready(self, ref, in_use):
            raise ValueError("embedded null byte")

    told = []
    held = ReadinessGate(
        ReadinessSources(Compiler(), adapters=Breaks()), lambda event, reason: told.append((event.id, reason))
    )
    adapted = replace(arrive("a"), adapter=AdapterRef(fingerprint="f", folder="\0"))
    assert held.release_ready([adapted, arrive("b")]) == [arrive("b")]
    assert told == [("a", "unfit: ValueError")]
    assert not held
