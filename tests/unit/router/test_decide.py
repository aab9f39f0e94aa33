"""Decisions as tables: a fleet in words, who is picked, and why."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import pytest
from decision_words import NOW, PROMPT, check, fleet_in_words, picked
from router_words import IDENTITY, OTHER, fleet_of, hashes_of, request

from penstock.router.decide import (
    PlacementRequest,
    PlacementRules,
    choose_workers,
    decision_json,
    decision_line,
    has_ready_workers,
)
from penstock.router.fleet import Fleet
from penstock.router.prefix_index import PrefixIndex
from penstock.router.worker_load import ExpectedWork
from penstock.types import RequestId, WorkerId


@pytest.mark.parametrize(
    ("words", "picks"),
    [
        ("prefill-0; decode-0", "decode=decode-0 prefill=prefill-0"),
        ("both-0", "whole=both-0"),
        ("both-0; prefill-0; decode-0", "whole=both-0"),
        ("both-0 queued=1; prefill-0; decode-0", "decode=decode-0 prefill=prefill-0"),
        ("both-0; prefill-0", "whole=both-0"),
        ("prefill-0; decode-0 draining", ""),
        ("prefill-0; decode-0 starting", ""),
        ("prefill-0; prefill-1", ""),
        ("prefill-0 wedged; decode-0; both-0", "whole=both-0"),
    ],
)
def test_the_request_is_split_where_both_roles_stand_ready(words, picks):
    check(words, picks=picks)


def test_the_least_busy_is_picked_for_each_leg():
    check(
        "prefill-0 queued=500; prefill-1 queued=400; decode-0 answers=1; decode-1 answers=8",
        picks="decode=decode-0 prefill=prefill-1",
        because="prefill-0: cost 6.28e+05 ms, wait 5e+05 ms, read 1.28e+05 ms, compute 128; decode-1: cost",
    )


def test_the_prefix_decides_among_equals():
    check("prefill-0; prefill-1 cached=96; decode-0", picks="decode=decode-0 prefill=prefill-1", because="cached 96")
    check("prefill-0 cached=96; prefill-1; decode-0", picks="decode=decode-0 prefill=prefill-0")


def test_a_cached_prefix_is_worth_the_time_it_saves_and_no_more():
    check("prefill-0 cached=96 queued=90; prefill-1; decode-0", picks="decode=decode-0 prefill=prefill-0")
    check("prefill-0 cached=96 queued=100; prefill-1; decode-0", picks="decode=decode-0 prefill=prefill-1")
    slow = "prefill-0 cached=96 queued=90 token_us=100; prefill-1 token_us=50; decode-0 token_us=50"
    check(slow, picks="decode=decode-0 prefill=prefill-1")


def test_a_prompt_cached_in_full_still_computes_a_token():
    check("prefill-0 cached=128; decode-0", picks="decode=decode-0 prefill=prefill-0", because="compute 1, cached 127")


def test_a_worker_without_experience_is_taken_for_a_typical_one():
    words = "prefill-0 token_us=100 queued=10; prefill-1; decode-0 token_us=100"
    check(words, picks="decode=decode-0 prefill=prefill-1", because="prefill-1: cost 12.9 ms")
    check(words.replace("prefill-1;", "prefill-1 queued=20;"), picks="decode=decode-0 prefill=prefill-0")


FLEET = "prefill-0 token_us=50 step_ms=2; decode-0 token_us=50 step_ms=2"


def test_a_short_prompt_stays_with_a_decode_worker_when_the_split_would_lose():
    short = PlacementRequest(request=request(prompt=PROMPT[:30]))
    decision = check(FLEET, picks="whole=decode-0", ask=short)
    assert decision.explanation.startswith("whole 20.")
    check(FLEET, picks="decode=decode-0 prefill=prefill-0", ask=short, how=PlacementRules(always_split=True))
    check(FLEET.replace("token_us=50 ", ""), picks="decode=decode-0 prefill=prefill-0", ask=short)  # nothing measured
    check(FLEET, picks="decode=decode-0 prefill=prefill-0")  # would hold its answers up for longer than a step
    check(FLEET + " cached=112", picks="whole=decode-0")
    check(FLEET + " cached=112 queued=50", picks="decode=decode-0 prefill=prefill-0")


@pytest.mark.parametrize(
    ("words", "picks"),
    [
        ("prefill-0 cores=a; decode-0 cores=a", "decode=decode-0 prefill=prefill-0"),
        ("prefill-0 cores=a; decode-0 cores=a local=1", "whole=decode-0"),
        ("prefill-0 cores=a; decode-0 cores=a local=1 queued=999 answers=9", "whole=decode-0"),
        ("prefill-0 cores=a; decode-0 cores=a local=1 queued=9; decode-1 cores=a local=1", "whole=decode-1"),
        (
            "prefill-0 cores=a; prefill-1 cores=b; decode-0 cores=a local=1 answers=9",
            "decode=decode-0 prefill=prefill-1",
        ),
        ("prefill-0 cores=a; prefill-1; decode-0 cores=a local=1 answers=9", "decode=decode-0 prefill=prefill-1"),
        ("prefill-0; decode-0 local=1 answers=9", "decode=decode-0 prefill=prefill-0"),
    ],
)
def test_workers_that_share_cores_prefill_where_the_decode_worker_wants_it(words, picks):
    check("; ".join(f"{worker} token_us=100" for worker in words.split("; ")), picks=picks)


def test_shared_cores_do_not_matter_where_everything_is_to_be_split():
    words = "prefill-0 token_us=100 cores=a; decode-0 token_us=100 cores=a local=1"
    check(words, picks="decode=decode-0 prefill=prefill-0", how=PlacementRules(always_split=True))


def test_answers_count_for_more_the_longer_the_new_one_will_be():
    words = "both-0 token_us=10 cached=128 answers=4; both-1 token_us=10"
    check(words, picks="whole=both-0", ask=PlacementRequest(request=request(prompt=PROMPT, max_tokens=2)))
    check(words, picks="whole=both-1", ask=PlacementRequest(request=request(prompt=PROMPT, max_tokens=50)))
    fleet, prefixes = fleet_in_words(words)
    long = PlacementRequest(request=request(prompt=PROMPT, max_tokens=50))
    assert picked(choose_workers(long, fleet, prefixes, NOW, write=2.4)) == "whole=both-0"


def test_a_hot_prefix_is_copied_when_others_wait_for_it_too():
    fleet, prefixes = fleet_in_words("prefill-0 cached=96 queued=50; prefill-1; decode-0")
    ask = PlacementRequest(request=request("one", prompt=PROMPT))
    assert picked(choose_workers(ask, fleet, prefixes, NOW)) == "decode=decode-0 prefill=prefill-0"
    for name in ("two", "three"):
        prefixes.add_pending(RequestId(name), hashes_of(PROMPT), [0])
    assert picked(choose_workers(ask, fleet, prefixes, NOW)) == "decode=decode-0 prefill=prefill-1"


def test_a_session_has_a_home_that_load_and_caches_overrule():
    idle = ";".join(f"both-{i}" for i in range(8))
    homes = {}
    for name in "abcdefgh":
        asks = [
            PlacementRequest(request=msgspec.structs.replace(request(f"r{i}", prompt=(i,) * 40), session=name))
            for i in range(5)
        ]
        (homes[name],) = {picked(choose_workers(ask, *fleet_in_words(idle), NOW)) for ask in asks}
    assert len(set(homes.values())) > 2
    home = homes["a"].removeprefix("whole=")
    ask = PlacementRequest(request=msgspec.structs.replace(request(prompt=PROMPT), session="a"))
    check(idle.replace(home, f"{home} queued=100"), picks=f"whole={home}", ask=ask)
    fleet, prefixes = fleet_in_words(idle.replace(home, f"{home} queued=200"))
    assert picked(choose_workers(ask, fleet, prefixes, NOW)) != f"whole={home}"
    other = next(f"both-{i}" for i in range(8) if f"both-{i}" != home)
    check(idle.replace(other, f"{other} cached=96"), picks=f"whole={other}", ask=ask)


def test_room_goes_before_load():
    check(
        "prefill-0; decode-0 free=3; decode-1 answers=90",
        picks="decode=decode-1 prefill=prefill-0",
        because="short 5",
    )


def test_a_full_fleet_is_still_used():
    check("prefill-0 free=0; decode-0 free=0", picks="decode=decode-0 prefill=prefill-0")


def test_the_last_token_needs_no_hand_over():
    ask = PlacementRequest(request=request(prompt=PROMPT, max_tokens=5), emitted=4)
    check("prefill-0; decode-0", picks="whole=prefill-0", ask=ask)
    check("prefill-0; decode-0", picks="whole=prefill-0", ask=PlacementRequest(request=request(max_tokens=1)))
    check("both-0", picks="whole=both-0", ask=ask)
    check("decode-0", picks="", ask=ask)


def test_whoever_gave_it_back_is_not_asked_again():
    ask = PlacementRequest(request=request(prompt=PROMPT), avoid=frozenset({(WorkerId("decode-0"), 1)}))
    words = "prefill-0; decode-0; decode-1 queued=999 answers=99"
    check(words, picks="decode=decode-1 prefill=prefill-0", because="decode-0: gave this request back", ask=ask)
    other_fork = PlacementRequest(request=request(prompt=PROMPT), avoid=frozenset({(WorkerId("decode-0"), 0)}))
    check(words, picks="decode=decode-0 prefill=prefill-0", ask=other_fork)


def test_the_doubtful_are_the_last_resort():
    ask = PlacementRequest(request=request(prompt=PROMPT), distrusted=frozenset({(WorkerId("prefill-0"), 1)}))
    words = "prefill-0 cached=96; prefill-1 queued=999 answers=99; decode-0"
    check(words, picks="decode=decode-0 prefill=prefill-1", because="failed this request before", ask=ask)
    check("prefill-0; decode-0", picks="decode=decode-0 prefill=prefill-0", ask=ask)
    others = "prefill-1 queued=999 answers=99; decode-0"
    check(f"prefill-0 silent=0.8 answers=1; {others}", picks="decode=decode-0 prefill=prefill-1")
    check(f"prefill-0 silent=1.1; {others}", picks="decode=decode-0 prefill=prefill-1")
    check(f"prefill-0 silent=0.8; {others}", picks="decode=decode-0 prefill=prefill-0")  # it has nothing to tell
    check("prefill-0 silent=1.1; decode-0 silent=9", picks="decode=decode-0 prefill=prefill-0")


def test_all_workers_of_an_answer_compute_alike():
    words = "prefill-0 identity=other; prefill-1 queued=999 answers=99; decode-0"
    check(words, picks="decode=decode-0 prefill=prefill-1", because="prefill-0: another model or numerics class")
    check(words, picks="", ask=PlacementRequest(request=request(), identity=OTHER))
    check(
        "both-0; both-1 identity=other", picks="whole=both-1", ask=PlacementRequest(request=request(), identity=OTHER)
    )
    check("prefill-0 identity=other; decode-0", picks="")
    check("prefill-0; decode-0 identity=other; both-0 identity=other", picks="whole=both-0")


@pytest.mark.parametrize(
    ("words", "strict", "mixed"),
    [
        ("both-0 identity=class", "", "whole=both-0"),
        ("both-0 identity=class; both-1 queued=999 answers=99", "whole=both-1", "whole=both-1"),
        ("prefill-0 identity=class; decode-0", "", ""),
        ("prefill-0; decode-0 identity=class; both-0 identity=class", "", "whole=both-0"),
        ("both-0 identity=other", "", ""),
    ],
)
def test_another_numerics_class_of_the_model_only_where_it_is_allowed_and_its_own_has_nobody(words, strict, mixed):
    fleet, prefixes = fleet_in_words(words)
    ask = PlacementRequest(request=request(), emitted=3, identity=IDENTITY)
    assert picked(choose_workers(ask, fleet, prefixes, NOW)) == strict
    assert picked(choose_workers(ask, fleet, prefixes, NOW, PlacementRules(mixed_numerics=True))) == mixed


def test_nobody_is_picked_from_nobody_and_everybody_has_a_reason():
    assert choose_workers(PlacementRequest(request=request()), Fleet(), PrefixIndex(), 0.0).stages == ()
    check(
        "prefill-0 starting; decode-0",
        picks="",
        because="prefill-0: starting; decode-0: not needed, or completes no set of legs",
    )


def test_a_decision_tells_its_numbers_as_they_were():
    fleet, prefixes = fleet_in_words("both-0 queued=5")
    decision = choose_workers(PlacementRequest(request=request()), fleet, prefixes, 3.0)
    fleet.add_work(WorkerId("both-0"), 1, RequestId("later"), 1000, due=ExpectedWork(tokens=1000))
    (reason,) = decision.reasons()
    assert (reason.numbers["wait_s"], reason.numbers["compute"], reason.chosen) == (5.0, 40.0, True)
    assert decision.at == 3.0
    assert decision.prefill == decision.decode == decision.stages[0]
    assert decision.stages[0].tokens == 48
    assert decision.stages[0].work == ExpectedWork(tokens=40, pairs=820, rows=1, context=40, pages=3)
    assert "whole=both-0 cost_s=" in decision_line(decision)
    told = decision_json(decision, 1.0)
    assert (told["at_s"], told["legs"][0]["worker"], told["candidates"][0]["wait_s"]) == (2.0, "both-0", 5.0)
    assert msgspec.json.decode(msgspec.json.encode(told)) == told


def test_only_the_best_of_many_candidates_are_told():
    decision = check(";".join(f"both-{i} queued={9 * i}" for i in range(40)), picks="whole=both-0")
    reasons = decision.reasons()
    assert [reason.worker for reason in reasons[:16]] == [f"both-{i}" for i in range(16)]
    assert {reason.explanation for reason in reasons[16:]} == {"dearer than those, or not looked at"}


def test_equals_meet_by_their_first_block_and_spread_otherwise():
    fleet = fleet_of("both-0", "both-1", "both-2", "both-3")
    homes = set()
    for start in range(64):
        common = tuple(range(start, start + 16))
        answers = {
            choose_workers(PlacementRequest(request=request(prompt=(*common, tail))), fleet, PrefixIndex(), 0.0)
            .stages[0]
            .worker
            for tail in range(4)
        }
        assert len(answers) == 1
        homes |= answers
    assert len(homes) == 4
    short = {
        choose_workers(PlacementRequest(request=request(f"r{i}", prompt=(1, 2))), fleet, PrefixIndex(), 0.0)
        .stages[0]
        .worker
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
    assert has_ready_workers(fleet_in_words(words)[0]) is serves


def test_the_core_of_the_router_is_pure():
    code = (
        "import sys; import penstock.router.decide, penstock.router.request, penstock.router.policy.baselines;"
        "print(sorted({'torch', 'asyncio', 'zmq'} & set(sys.modules)))"
    )
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60, env=environ
    )
    assert told.stdout.strip() == "[]"


def test_workers_that_differ_by_noise_alone_are_equally_fast():
    words = "both-0 cached=64 token_us=MS step_ms=1; both-1 token_us=100 step_ms=1; both-2 token_us=100 step_ms=1"
    noisy = check(words.replace("MS", "115"), picks="whole=both-0")
    told = {reason.worker: reason.numbers for reason in noisy.reasons()}
    assert told["both-0"]["write_s"] == told["both-1"]["write_s"]
    slow = choose_workers(
        PlacementRequest(request=request(prompt=PROMPT)), *fleet_in_words(words.replace("MS", "400")), NOW
    )
    assert picked(slow) != "whole=both-0"
