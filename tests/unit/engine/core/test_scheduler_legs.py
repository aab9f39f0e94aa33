"""Legs: credit, pages handed over, first tokens, epochs and release, one rule a script."""

from __future__ import annotations

from engine_script import TOO_SMALL_FOR_TWO, check, shown_outcome, shown_plan

from penstock.engine.core.events import CancelRequest
from penstock.types import RequestId


def test_a_preempted_decode_leg_goes_back_to_the_gateway() -> None:
    check(
        """
        decode a prompt=6 max=12 family=0
        decode b prompt=6 max=12 family=1
        step -> reserved a@0, reserved b@0
        pages a 6
        first a
        pages b 6
        first b
        step -> a 6+1*, b 6+1*      | a token 0, b token 0, a token 1, b token 1
        steps 5 -> a 11+1*, b 11+1*
        step -> a 12+1*, returned b preempted, preempted 1
        load running=1 queued=0 awaiting=0
        """,
        **TOO_SMALL_FOR_TWO,
    )


def test_a_prefill_leg_waits_for_credit_announces_and_holds_until_released() -> None:
    check(
        """
        prefill a prompt=10 family=0 at=0
        whole b prompt=3 family=1 max=1 at=1       # is not held up by it
        step -> b 0+3*
        grant a
        step -> a 0+4     | a page 0:4
        step -> a 4+4     | a page 1:4
        step -> a 8+2*    | a page 2:2, a token 0
        load running=0 handing_over=1 pages_used=3 tokens_in_flight=1
        step ->           |
        release a
        load handing_over=0 pages_used=0
        prefill c prompt=10 family=0
        grant c
        step -> c 8+2*    | c page 0:4, c page 1:4, c page 2:2, c token 0
        """,
        max_chunk_tokens=4,
    )


def test_a_cancel_of_a_later_epoch_ends_the_leg_of_the_earlier_one() -> None:
    """The submission of that epoch and its cancel may have been lost or passed each other."""
    world = check("prefill a prompt=8 epoch=1\n grant a\n step -> a 0+8*", to_the_end=False)
    world.scheduler.apply(CancelRequest(id=RequestId("a"), epoch=0), 0.0)
    assert world.find("a") is not None
    world.scheduler.apply(CancelRequest(id=RequestId("a"), epoch=2), 0.0)
    assert world.find("a") is None
    assert world.scheduler.memory.pool.leased == 0


def test_a_prefill_leg_may_end_with_its_first_token() -> None:
    check(
        """
        prefill a prompt=8 max=1
        grant a
        step -> a 0+8*   | a page 0:4, a page 1:4, a token 0 length
        load handing_over=1 pages_used=2
        release a
        load pages_used=0
        """
    )


def test_hand_overs_are_never_preempted() -> None:
    check(
        """
        whole a prompt=2 max=18 family=0
        step -> a 0+2*
        prefill b prompt=12 family=1
        grant b
        step -> a 2+1*, b 0+12*
        step -> a 3+1*
        steps 4 -> a 7+1*
        step ->                     # no page to be had, and nobody but itself to take one from
        release b
        step -> a 8+1*
        """,
        pages=5,
        max_model_len=20,
    )


def test_prefill_legs_are_not_preempted_while_they_compute() -> None:
    check(
        """
        whole a prompt=1 max=18 family=0
        step -> a 0+1*
        prefill b prompt=12 family=1
        grant b
        steps 7 -> a 7+1*, b 6+1
        steps 2 -> b 8+1            # no page for a, which takes none from who may be being copied
        steps 3 -> b 11+1*
        """,
        pages=5,
        max_model_len=20,
        max_chunk_tokens=1,
        to_the_end=False,
    )


def test_a_decode_leg_starts_with_all_pages_and_the_first_token() -> None:
    check(
        """
        decode a prompt=9 max=4
        step -> reserved a@0
        pages a 8                   # one is missing: it could compute that, but it is not asked to
        step ->
        pages a 9
        step ->
        first a
        first a
        step -> a 9+1*              | a token 0, a token 1
        decode b prompt=9 family=1 max=4
        step -> a 10+1*, reserved b@0
        first b
        first b
        step -> a 11+1*             | b token 0, a token 3 length
        pages b 9
        step -> b 9+1*              | b token 1
        """
    )


def test_a_decode_leg_takes_what_is_cached_and_pulls_the_rest() -> None:
    check(
        """
        whole a prompt=8 max=1
        step -> a 0+8*
        decode b prompt=11 max=4
        step -> reserved b@8
        load awaiting=1 running=0
        step ->
        first b
        step ->            | b token 0
        pages b 11
        step -> b 11+1*    | b token 1
        """
    )


def test_a_decode_leg_whose_pages_are_too_slow_computes_what_has_not_come() -> None:
    check(
        """
        decode a prompt=9 max=4
        step -> reserved a@0
        pages a 5
        here a
        load awaiting=0 running=0 queued=1
        step -> a 4+6*     | a token 0, a token 1
        first a                     # too late to be heard
        step -> a 10+1*    | a token 2
        step -> a 11+1*    | a token 3 length
        """
    )


def test_arrived_pages_are_cached_like_computed_ones() -> None:
    check(
        """
        decode a prompt=9 max=2
        step -> reserved a@0
        pages a 9
        cancel a
        whole b prompt=9 max=1
        step -> b 8+1*
        """
    )


def test_pages_that_did_not_arrive_are_not_cached() -> None:
    check(
        """
        decode a prompt=9 max=2
        step -> reserved a@0
        pages a 5
        cancel a
        whole b prompt=9 max=1
        step -> b 4+5*
        """
    )


def test_a_first_token_that_is_the_last_ends_in_silence() -> None:
    check(
        """
        decode a prompt=9 max=1
        step -> reserved a@0
        first a
        load awaiting=0 pages_used=0
        step ->  |
        """
    )


def test_a_later_epoch_replaces_and_an_earlier_one_is_ignored() -> None:
    check(
        """
        whole a prompt=9 max=4 epoch=1
        step -> a 0+9*
        whole a prompt=9 max=4 epoch=1
        whole a prompt=9 max=4 epoch=0
        step -> a 9+1*
        whole a prompt=9 max=4 epoch=2 emitted=2
        load running=0 queued=1 pages_used=0
        step -> a 8+3*   | a token 2
        """
    )


def test_cached_pages_of_one_who_goes_during_its_first_step_are_not_announced() -> None:
    world = check(
        """
        whole a prompt=9 max=1
        step -> a 0+9*
        prefill b prompt=9
        grant b
        """,
        to_the_end=False,
    )
    world.step(cancel_in_flight="b")
    assert shown_plan(world) == "b 8+1*"
    assert shown_outcome(world) == ""
