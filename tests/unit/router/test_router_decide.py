"""Decisions as tables: a fleet in words, who is picked, and why."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
from router_words import IDENTITY, OTHER, OTHER_CLASS, fleet_of, hashes_of, report, request, up

from penstock.router.decide import Ask, Decision, can_serve, decide
from penstock.router.fleet import Fleet
from penstock.router.prefix_index import PrefixIndex
from penstock.types import RequestId, WorkerId, WorkerState

PROMPT = tuple(range(128))
NOW = 100.0


def fleet_in_words(words: str) -> tuple[Fleet, PrefixIndex]:
    """``prefill-0 cached=96 tokens=50; decode-0 free=3; both-0 starting``: one worker a clause, ready and idle."""
    fleet, prefixes = Fleet(), PrefixIndex()
    for slot, clause in enumerate(words.split(";")):
        name, *facts = clause.split()
        up(fleet, name)
        told = dict(fact.split("=") for fact in facts if "=" in fact)
        state = next((WorkerState(fact) for fact in facts if "=" not in fact), WorkerState.READY)
        identity = {"other": OTHER, "class": OTHER_CLASS}.get(told.get("identity", ""), IDENTITY)
        if state is not WorkerState.STARTING:
            free = int(told.get("free", 100))
            heard = NOW - float(told.get("silent", 0))
            assert fleet.report(report(name, state=state, identity=identity, kv_pages_free=free), heard)
        fleet.charge(WorkerId(name), 1, RequestId("before"), int(told.get("tokens", 0)))
        prefixes.record(hashes_of(PROMPT[: int(told.get("cached", 0))]), slot, 1)
    return fleet, prefixes


def picked(decision: Decision) -> str:
    return " ".join(f"{chosen.leg.value}={chosen.worker}" for chosen in decision.legs)


def check(words: str, *, picks: str, because: str = "", ask: Ask | None = None) -> None:
    fleet, prefixes = fleet_in_words(words)
    decision = decide(ask or Ask(request=request(prompt=PROMPT)), fleet, prefixes, NOW)
    assert picked(decision) == picks
    reasons = "; ".join(f"{reason.worker}: {reason.because}" for reason in decision.reasons())
    for clause in filter(None, because.split("; ")):
        assert clause in reasons


@pytest.mark.parametrize(
    ("words", "picks"),
    [
        ("prefill-0; decode-0", "decode=decode-0 prefill=prefill-0"),
        ("both-0", "whole=both-0"),
        ("both-0; prefill-0; decode-0", "decode=decode-0 prefill=prefill-0"),
        ("both-0; prefill-0", "whole=both-0"),
        ("prefill-0; decode-0 draining", ""),
        ("prefill-0; decode-0 starting", ""),
        ("prefill-0; prefill-1", ""),
        ("prefill-0 wedged; decode-0; both-0", "whole=both-0"),
    ],
)
def test_the_request_is_split_where_both_roles_stand_ready(words, picks):
    check(words, picks=picks)


def test_the_least_loaded_is_picked_for_each_leg():
    check(
        "prefill-0 tokens=500; prefill-1 tokens=400; decode-0 tokens=9; decode-1 tokens=80",
        picks="decode=decode-0 prefill=prefill-1",
        because="prefill-0: 500 tokens in flight, 128 to compute, 0 cached; decode-1: 80 tokens in flight",
    )


def test_the_prefix_decides_among_equals():
    check("prefill-0; prefill-1 cached=96; decode-0", picks="decode=decode-0 prefill=prefill-1", because="96 cached")
    check("prefill-0 cached=96; prefill-1; decode-0", picks="decode=decode-0 prefill=prefill-0")


def test_a_cached_prefix_is_worth_the_tokens_it_saves_and_no_more():
    check("prefill-0 cached=96 tokens=90; prefill-1; decode-0", picks="decode=decode-0 prefill=prefill-0")
    check("prefill-0 cached=96 tokens=100; prefill-1; decode-0", picks="decode=decode-0 prefill=prefill-1")


def test_a_prompt_cached_in_full_still_computes_a_token():
    check("prefill-0 cached=128; decode-0", picks="decode=decode-0 prefill=prefill-0", because="1 to compute")


def test_room_goes_before_load():
    check(
        "prefill-0; decode-0 free=3; decode-1 tokens=1000",
        picks="decode=decode-1 prefill=prefill-0",
        because="decode-0: 0 tokens in flight, 8 to compute, 0 cached, lacks 5 pages",
    )


def test_a_full_fleet_is_still_used():
    check("prefill-0 free=0; decode-0 free=0", picks="decode=decode-0 prefill=prefill-0")


def test_the_last_token_needs_no_hand_over():
    ask = Ask(request=request(prompt=PROMPT, max_tokens=5), emitted=4)
    check("prefill-0; decode-0", picks="whole=prefill-0", ask=ask)
    check("prefill-0; decode-0", picks="whole=prefill-0", ask=Ask(request=request(max_tokens=1)))
    check("both-0", picks="whole=both-0", ask=ask)
    check("decode-0", picks="", ask=ask)


def test_whoever_gave_it_back_is_not_asked_again():
    ask = Ask(request=request(prompt=PROMPT), avoid=frozenset({(WorkerId("decode-0"), 1)}))
    words = "prefill-0; decode-0; decode-1 tokens=999"
    check(words, picks="decode=decode-1 prefill=prefill-0", because="decode-0: gave this request back", ask=ask)
    other_fork = Ask(request=request(prompt=PROMPT), avoid=frozenset({(WorkerId("decode-0"), 0)}))
    check(words, picks="decode=decode-0 prefill=prefill-0", ask=other_fork)


def test_the_doubtful_are_the_last_resort():
    ask = Ask(request=request(prompt=PROMPT), doubt=frozenset({(WorkerId("prefill-0"), 1)}))
    words = "prefill-0 cached=96; prefill-1 tokens=999; decode-0"
    check(words, picks="decode=decode-0 prefill=prefill-1", because="failed this request before", ask=ask)
    check("prefill-0; decode-0", picks="decode=decode-0 prefill=prefill-0", ask=ask)
    check("prefill-0 silent=0.8; prefill-1 tokens=999; decode-0", picks="decode=decode-0 prefill=prefill-1")
    check("prefill-0 silent=0.8; decode-0 silent=9", picks="decode=decode-0 prefill=prefill-0")


def test_all_workers_of_an_answer_compute_alike():
    words = "prefill-0 identity=other; prefill-1 tokens=999; decode-0"
    check(words, picks="decode=decode-0 prefill=prefill-1", because="prefill-0: another model or numerics class")
    check(words, picks="", ask=Ask(request=request(), identity=OTHER))
    check("both-0; both-1 identity=other", picks="whole=both-1", ask=Ask(request=request(), identity=OTHER))
    check("prefill-0 identity=other; decode-0", picks="")
    check("prefill-0; decode-0 identity=other; both-0 identity=other", picks="whole=both-0")


@pytest.mark.parametrize(
    ("words", "strict", "mixed"),
    [
        ("both-0 identity=class", "", "whole=both-0"),
        ("both-0 identity=class; both-1 tokens=999", "whole=both-1", "whole=both-1"),
        ("prefill-0 identity=class; decode-0", "", ""),
        ("prefill-0; decode-0 identity=class; both-0 identity=class", "", "whole=both-0"),
        ("both-0 identity=other", "", ""),
    ],
)
def test_another_numerics_class_of_the_model_only_where_it_is_allowed_and_its_own_has_nobody(words, strict, mixed):
    fleet, prefixes = fleet_in_words(words)
    ask = Ask(request=request(), emitted=3, identity=IDENTITY)
    assert picked(decide(ask, fleet, prefixes, NOW)) == strict
    assert picked(decide(ask, fleet, prefixes, NOW, mixed_numerics=True)) == mixed


def test_nobody_is_picked_from_nobody_and_everybody_has_a_reason():
    assert decide(Ask(request=request()), Fleet(), PrefixIndex(), 0.0).legs == ()
    check("prefill-0 starting; decode-0", picks="", because="prefill-0: starting; decode-0: completes no set of legs")


def test_a_decision_tells_its_numbers_as_they_were():
    fleet, prefixes = fleet_in_words("both-0 tokens=5")
    decision = decide(Ask(request=request()), fleet, prefixes, 3.0)
    fleet.charge(WorkerId("both-0"), 1, RequestId("later"), 1000)
    assert [reason.because for reason in decision.reasons()] == ["5 tokens in flight, 48 to compute, 0 cached"]
    assert decision.at == 3.0
    assert decision.prefill == decision.decode == decision.legs[0]
    assert decision.legs[0].tokens == 48


def test_equals_meet_by_their_first_block_and_spread_otherwise():
    fleet = fleet_of("both-0", "both-1", "both-2", "both-3")
    homes = set()
    for start in range(64):
        common = tuple(range(start, start + 16))
        answers = {
            decide(Ask(request=request(prompt=(*common, tail))), fleet, PrefixIndex(), 0.0).legs[0].worker
            for tail in range(4)
        }
        assert len(answers) == 1
        homes |= answers
    assert len(homes) == 4
    short = {
        decide(Ask(request=request(f"r{i}", prompt=(1, 2))), fleet, PrefixIndex(), 0.0).legs[0].worker
        for i in range(64)
    }
    assert len(short) == 4


@pytest.mark.parametrize(
    ("words", "serves"),
    [
        ("prefill-0; decode-0", True),
        ("both-0", True),
        ("prefill-0", False),
        ("prefill-0; decode-0 identity=other", False),
        ("both-0 draining", False),
    ],
)
def test_ready_means_a_worker_for_each_leg(words, serves):
    assert can_serve(fleet_in_words(words)[0]) is serves


def test_deciding_takes_microseconds():
    fleet = fleet_of(*(f"prefill-{i}" for i in range(4)), *(f"decode-{i}" for i in range(4)))
    ask, prefixes = Ask(request=request(prompt=PROMPT)), PrefixIndex()
    best = min(_timed(lambda: decide(ask, fleet, prefixes, 0.0)) for _ in range(200))
    assert best < 500e-6


def _timed(call) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def test_the_core_of_the_router_is_pure():
    code = (
        "import sys; import penstock.router.decide, penstock.router.failover, penstock.router.prefix_index;"
        "print(sorted({'torch', 'asyncio', 'socket', 'zmq', 'numpy'} & set(sys.modules)))"
    )
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60, env=environ
    )
    assert told.stdout.strip() == "[]"
