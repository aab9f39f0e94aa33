"""The rules of a flight, one by one.  Every case of interleaving is in ``test_router_failover_any_order``."""

from __future__ import annotations

import math
from itertools import pairwise, permutations

import msgspec
import pytest
from flight_words import B0, D0, D1, NOBODY, P0, P1, PATIENCE, WHOLE, flying, item, said, split, started, waiting
from router_words import IDENTITY, OTHER, ROOT, request

from penstock.errors import NoWorkers, QueueFull, RequestError, StalledRequest, WorkerLost
from penstock.hashing import chain_root
from penstock.router.decide import Decision
from penstock.router.effects import CancelStage, DeliverTokens, FailRequest, SubmitStage, WaitForWorker
from penstock.router.request import (
    AVOID_S,
    BACKOFF_MAX_S,
    CHECK_INTERVAL_S,
    DEADLINE_MARGIN_S,
    DISTRUST_S,
    MAX_CHECK_INTERVAL_S,
    PREFILL_TOKEN_WAIT_S,
    FailoverLimits,
    RequestPhase,
    RoutedRequest,
)
from penstock.types import FinishReason, Qos, ServiceClass, TokenBatch, TokenLogprob
from penstock.wire.gateway_messages import PageSource, TokenItem

# --- submitting ---------------------------------------------------------------------------------------------------


def test_a_split_request_names_its_pages_source():
    flight = waiting()
    sends = flight.on_placed(split(), ROOT, 0.0)
    assert said(sends) == ["send decode-0 decode e1", "send prefill-0 prefill e1"]
    decode, prefill = (effect.submit for effect in sends if isinstance(effect, SubmitStage))
    assert decode.pages_from == PageSource(worker=P0, incarnation=1, endpoint="memory://prefill-0")
    assert prefill.pages_from is None
    assert decode.prompt == prefill.prompt == bytes(request().prompt)
    assert decode.block_hashes == request().block_hashes
    assert (decode.root, decode.emitted) == (ROOT, ())
    assert flight.identity == IDENTITY


def test_hashes_made_for_another_model_are_not_sent():
    flight = waiting()
    (send,) = flight.on_placed(served_by(WHOLE, OTHER), chain_root(OTHER), 0.0)
    assert isinstance(send, SubmitStage)
    assert send.submit.block_hashes == ()
    assert send.submit.root == chain_root(OTHER)


def served_by(decision: Decision, identity) -> Decision:
    return Decision(at=decision.at, policy="none", identity=identity, stages=decision.stages)


def test_without_a_worker_it_waits_for_the_next():
    flight = waiting()
    assert said(flight.on_placed(NOBODY, ROOT, 0.0)) == ["wait inf"]
    assert said(flight.on_placed(WHOLE, ROOT, 5.0)) == ["send both-0 whole e1"]
    assert flight.on_placed(WHOLE, ROOT, 5.0) == ()


# --- tokens -------------------------------------------------------------------------------------------------------


def test_the_first_token_counts_once():
    flight = started(flying())
    assert said(flight.on_tokens(item(0, 1), D0, 1, 1.0)) == []
    assert said(flight.on_tokens(item(1, 2, 3), D0, 1, 1.0)) == ["deliver 2 3", "cancel prefill-0 e1"]
    assert list(flight.emitted) == [1, 2, 3]
    assert flight.emitted.itemsize == 4  # bytes a token, for as long as the stream is open


def test_an_item_that_overlaps_is_trimmed_with_its_logprobs():
    flight = started(flying())
    logprobs = tuple(TokenLogprob(t, -float(t)) for t in (1, 2))
    deliver, _ = flight.on_tokens(item(0, 1, 2, logprobs=logprobs), D0, 1, 1.0)
    assert deliver == DeliverTokens(TokenBatch(tokens=(2,), logprobs=(TokenLogprob(2, -2.0),)))


def test_an_early_item_waits_for_the_gap_to_fill():
    flight = started(flying())
    assert said(flight.on_tokens(item(3, 4), D0, 1, 1.0)) == []
    assert said(flight.on_tokens(item(2, 3), D0, 1, 1.0)) == []
    assert said(flight.on_tokens(item(1, 2), D0, 1, 1.0)) == [
        "deliver 2",
        "cancel prefill-0 e1",
        "deliver 3",
        "deliver 4",
    ]


@pytest.mark.parametrize(
    ("epoch", "worker", "incarnation"), [(2, P0, 1), (0, P0, 1), (1, P1, 1), (1, P0, 2), (1, P0, 0)]
)
def test_tokens_of_another_epoch_worker_or_incarnation_are_ignored(epoch, worker, incarnation):
    flight = flying()
    assert flight.on_tokens(item(0, 1, epoch=epoch), worker, incarnation, 1.0) == ()
    assert not flight.emitted


def test_tokens_of_a_given_up_epoch_are_ignored_even_from_the_same_worker():
    flight = started(flying())
    flight.on_worker_lost(P0, 1, "killed", 2.0)
    flight.on_placed(split(D0, P1), ROOT, 2.0)
    assert flight.on_tokens(item(1, 2, 3), D0, 1, 2.0) == ()
    assert said(flight.on_tokens(item(1, 2, epoch=2), P1, 1, 2.0)) == ["deliver 2"]
    assert said(flight.on_worker_lost(P1, 1, "killed", 2.0))[0] == "cancel decode-0 e2"


def test_early_tokens_of_a_given_up_epoch_are_asked_for_anew():
    flight = started(flying())
    assert said(flight.on_tokens(item(2, 3), D0, 1, 1.0)) == []
    flight.on_worker_lost(D0, 1, "killed", 2.0)
    flight.on_placed(WHOLE, ROOT, 2.0)
    assert said(flight.on_tokens(item(1, 2, epoch=2), B0, 1, 2.0)) == ["deliver 2"]
    assert said(flight.on_tokens(item(2, 3, epoch=2), B0, 1, 2.0)) == ["deliver 3"]


def test_the_first_batch_tells_what_was_cached_and_the_prompts_logprobs_once():
    asked = request(prompt_logprobs=0)
    flight = flying(asked=asked)
    facts = {"cached_tokens": 32, "prompt_logprobs": (TokenLogprob(1, -1.0),)}
    assert flight.on_tokens(item(0, 1, **facts), P0, 1, 1.0)[0] == DeliverTokens(TokenBatch(tokens=(1,), **facts))
    assert flight.on_tokens(item(1, 2, **facts), D0, 1, 1.0)[0] == DeliverTokens(TokenBatch(tokens=(2,)))
    flight.on_worker_lost(D0, 1, "killed", 2.0)
    sends = flight.on_placed(split(D1, P0), ROOT, 2.0)
    assert {send.submit.sampling.prompt_logprobs for send in sends if isinstance(send, SubmitStage)} == {None}
    assert flight.on_tokens(item(2, 3, epoch=2, **facts), P0, 1, 2.0)[0] == DeliverTokens(TokenBatch(tokens=(3,)))


def test_the_decode_leg_waits_for_the_word_of_the_prefill_leg():
    flight = flying()
    assert said(flight.on_tokens(item(0, 1, 2), D0, 1, 1.0)) == []
    assert said(flight.on_tokens(item(2, 3), D0, 1, 1.0)) == []
    effects = flight.on_tokens(item(0, 1, cached_tokens=16), P0, 1, 1.0)
    assert said(effects) == ["deliver 1", "deliver 2", "cancel prefill-0 e1", "deliver 3"]
    assert effects[0] == DeliverTokens(TokenBatch(tokens=(1,), cached_tokens=16))


def test_but_not_for_long_and_not_for_the_dead():
    flight = flying()
    flight.on_tokens(item(0, 1, 2), D0, 1, 1.0)
    assert said(flight.on_tick(1.0 + PREFILL_TOKEN_WAIT_S / 2)) == []
    assert said(flight.on_tick(1.0 + PREFILL_TOKEN_WAIT_S)) == ["deliver 1 2", "cancel prefill-0 e1"]

    flight = flying()
    flight.on_tokens(item(0, 1, 2), D0, 1, 1.0)
    assert said(flight.on_worker_lost(P0, 1, "killed", 1.0)) == ["end prefill-0 e1", "deliver 1 2"]


def test_prompt_logprobs_that_died_with_the_prefill_worker_are_computed_again():
    flight = flying(asked=request(prompt_logprobs=0))
    flight.on_tokens(item(0, 1, 2), D0, 1, 1.0)
    assert said(flight.on_tick(50.0)) == []
    assert said(flight.on_worker_lost(P0, 1, "killed", 1.0)) == ["cancel decode-0 e1", "cancel prefill-0 e1", "wait 1"]
    (send, _) = flight.on_placed(split(), ROOT, 1.0)
    assert isinstance(send, SubmitStage)
    assert (send.submit.emitted, send.submit.sampling.prompt_logprobs) == ((), 0)


# --- ends ---------------------------------------------------------------------------------------------------------


def test_the_last_token_ends_both_legs():
    flight = started(flying())
    flight.on_tokens(item(1, 2), D0, 1, 1.0)
    effects = flight.on_tokens(item(2, 3, finish=FinishReason.LENGTH), D0, 1, 1.0)
    assert said(effects) == ["deliver 3 length", "end decode-0 e1"]
    assert flight.phase is RequestPhase.DONE


def test_a_first_token_that_is_the_last_frees_both_legs():
    """The prefill worker holds the pages until told that they are not wanted; the decode worker may be dead."""
    flight = flying()
    effects = flight.on_tokens(item(0, 1, finish=FinishReason.STOP), P0, 1, 1.0)
    assert said(effects) == ["deliver 1 stop", "cancel decode-0 e1", "cancel prefill-0 e1"]


def test_the_end_may_come_on_a_token_that_is_known():
    flight = started(flying())
    effects = flight.on_tokens(item(0, 1, finish=FinishReason.STOP), D0, 1, 1.0)
    assert said(effects) == ["deliver stop", "end decode-0 e1", "cancel prefill-0 e1"]


@pytest.mark.parametrize("after_own_token", [False, True])
def test_a_client_that_leaves_frees_both_legs(after_own_token):
    flight = started(flying())
    if after_own_token:
        flight.on_tokens(item(1, 2), D0, 1, 1.0)
    assert said(flight.on_client_gone()) == ["cancel decode-0 e1"] + ["cancel prefill-0 e1"] * (not after_own_token)
    assert flight.on_client_gone() == ()
    assert (
        flight.on_tokens(item(2, 3), D0, 1, 1.0) == flight.on_worker_lost(D0, 1, "", 1.0) == flight.on_tick(1e9) == ()
    )


def test_a_client_that_leaves_while_it_waits_frees_nothing():
    assert waiting().on_client_gone() == ()


# --- losses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", [P0, D0])
def test_the_death_of_either_before_the_decode_workers_own_token_starts_anew(who):
    flight = started(flying())
    assert said(flight.on_worker_lost(who, 1, "killed", 2.0)) == ["cancel decode-0 e1", "cancel prefill-0 e1", "wait 2"]
    sends = flight.on_placed(split(), ROOT, 2.0)
    assert said(sends) == ["send decode-0 decode e2", "send prefill-0 prefill e2"]
    assert {send.submit.emitted for send in sends if isinstance(send, SubmitStage)} == {(1,)}


def test_the_death_of_the_prefill_worker_after_it_changes_nothing():
    flight = started(flying())
    flight.on_tokens(item(1, 2), D0, 1, 1.0)
    assert flight.on_worker_lost(P0, 1, "killed", 2.0) == ()
    assert flight.on_returned(1, "draining", P0, 1, 2.0) == ()
    assert said(flight.on_tokens(item(2, 3), D0, 1, 2.0)) == ["deliver 3"]


def test_the_death_of_the_decode_worker_at_any_time_starts_anew():
    flight = started(flying())
    flight.on_tokens(item(1, 2), D0, 1, 1.0)
    assert said(flight.on_worker_lost(D0, 1, "killed", 2.0)) == ["cancel decode-0 e1", "wait 2"]
    assert flight.placement_request(2.0).emitted == 2
    assert flight.placement_request(2.0).identity == IDENTITY


def test_the_death_of_a_stranger_or_of_an_earlier_incarnation_changes_nothing():
    flight = started(flying())
    assert flight.on_worker_lost(P1, 1, "killed", 2.0) == flight.on_worker_lost(P0, 0, "killed", 2.0) == ()


def test_another_model_may_take_it_as_long_as_nothing_was_delivered():
    flight = flying()
    flight.on_worker_lost(D0, 1, "killed", 2.0)
    assert flight.placement_request(2.0).identity is None


@pytest.mark.parametrize(
    ("sampling", "tokens", "finish"),
    [
        ({"max_tokens": 2}, (1, 2), "length"),
        ({"stop_token_ids": (2,)}, (1, 2), "stop"),
        ({"stop_token_ids": (2,), "min_tokens": 2}, (1, 2), "stop"),
        ({"stop_token_ids": (2,), "min_tokens": 3}, (1, 2), "stop"),  # drawn where a grammar leaves nothing else
    ],
)
def test_an_answer_that_is_complete_is_never_submitted_again(sampling, tokens, finish):
    flight = flying(WHOLE, request(**sampling))
    flight.on_tokens(item(0, *tokens), B0, 1, 1.0)  # and the word of the end is lost
    assert said(flight.on_worker_lost(B0, 1, "killed", 2.0)) == ["cancel both-0 e1", f"deliver {finish}"]


def test_attempts_without_a_new_token_are_limited_and_slow_down():
    flight = flying(WHOLE)
    waits = []
    for _ in range(2):
        *_, wait = flight.on_worker_lost(B0, 1, "killed", 2.0)
        assert isinstance(wait, WaitForWorker)
        waits.append(wait.not_before - 2.0)
        flight.on_placed(WHOLE, ROOT, 2.0)
    assert waits == pytest.approx([0.0, 0.05])
    assert said(flight.on_worker_lost(B0, 1, "killed", 2.0)) == ["cancel both-0 e3", "fail WorkerLost"]


def test_a_new_token_gives_new_attempts():
    flight = flying(WHOLE)
    for epoch in range(1, 8):
        assert flight.on_tokens(item(epoch - 1, 7, epoch=epoch), B0, 1, 2.0)
        assert said(flight.on_worker_lost(B0, 1, "killed", 2.0))[-1] == "wait 2"
        flight.on_placed(WHOLE, ROOT, 2.0)


def test_the_slowest_retry_is_bounded():
    flight = RoutedRequest(request(), FailoverLimits(max_attempts=100, first_byte_s=1e9, stall_s=1e9), 0.0)
    flight.begin(0.0)
    for _ in range(50):
        flight.on_placed(WHOLE, ROOT, 0.0)
        *_, wait = flight.on_worker_lost(B0, 1, "killed", 0.0)
    assert wait == WaitForWorker(BACKOFF_MAX_S)


# --- checks -------------------------------------------------------------------------------------------------------


def checks_until_the_end(flight: RoutedRequest) -> list[float]:
    times = [0.0]
    while not flight.on_tick(times[-1]):
        times.append(flight.next_check(times[-1]))
    return times


def test_a_request_that_merely_waits_for_its_worker_is_checked_less_and_less_often_and_at_its_deadline():
    times = checks_until_the_end(flying(WHOLE))
    gaps = [after - before for before, after in pairwise(times[:-1])]
    assert gaps == pytest.approx(sorted(gaps)), "they grow"
    assert (gaps[0], gaps[-1]) == pytest.approx((CHECK_INTERVAL_S, MAX_CHECK_INTERVAL_S))
    assert times[-1] == PATIENCE.first_byte_s + DEADLINE_MARGIN_S


@pytest.mark.parametrize("flight", [waiting(), flying(), flying(WHOLE, request(prompt_logprobs=1))])
def test_one_of_which_something_may_be_held_back_is_checked_as_often_as_before(flight):
    times = checks_until_the_end(flight)
    assert all(after - before <= CHECK_INTERVAL_S for before, after in pairwise(times))
    assert times[-1] <= PATIENCE.first_byte_s + CHECK_INTERVAL_S


# --- returns ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", ["preempted", "pages_lost", "draining", "something new"])
@pytest.mark.parametrize("who", [P0, D0])
def test_a_returned_leg_takes_the_other_with_it(who, reason):
    flight = started(flying())
    other = D0 if who == P0 else P0
    assert said(flight.on_returned(1, reason, who, 1, 2.0)) == [f"end {who} e1", f"cancel {other} e1", "wait 2"]
    avoided = {(who, 1)} if reason == "draining" else set()
    assert flight.placement_request(2.0).avoid == avoided
    assert flight.placement_request(2.0 + AVOID_S).avoid == set()


@pytest.mark.parametrize("who", [P0, D0])
def test_a_hand_over_that_failed_casts_doubt_on_its_other_end(who):
    flight = flying()
    flight.on_returned(1, "pages_lost: silent", who, 1, 2.0)
    assert flight.placement_request(2.0).distrusted == {(D0 if who == P0 else P0, 1)}
    assert flight.placement_request(2.0 + DISTRUST_S).distrusted == flight.placement_request(2.0).avoid == frozenset()


def test_returns_are_bounded_too():
    flight = flying(WHOLE)
    for epoch in (1, 2):
        flight.on_returned(epoch, "preempted", B0, 1, 2.0)
        flight.on_placed(WHOLE, ROOT, 2.0)
    effects = flight.on_returned(3, "preempted", B0, 1, 2.0)
    assert said(effects) == ["end both-0 e3", "fail WorkerLost"]
    assert isinstance(effects[-1], FailRequest)
    assert "both-0 gave it back: preempted" in str(effects[-1].error)


@pytest.mark.parametrize(("epoch", "worker", "incarnation"), [(2, B0, 1), (1, P0, 1), (1, B0, 2)])
def test_a_return_of_another_epoch_worker_or_incarnation_is_ignored(epoch, worker, incarnation):
    assert flying(WHOLE).on_returned(epoch, "preempted", worker, incarnation, 2.0) == ()


def test_a_full_queue_is_another_workers_chance_and_else_the_clients_to_retry():
    flight = flying(WHOLE)
    assert said(flight.on_returned(1, "queue_full", B0, 1, 2.0)) == ["end both-0 e1", "wait 2"]
    assert flight.placement_request(2.0).avoid == {(B0, 1)}
    assert flight.placement_request(2.0 + AVOID_S).avoid == frozenset()
    (fail,) = flight.on_placed(NOBODY, ROOT, 2.0)
    assert isinstance(fail, FailRequest)
    assert isinstance(fail.error, QueueFull)


def test_an_answer_that_has_begun_waits_for_a_full_queue():
    flight = started(flying())
    flight.on_returned(1, "queue_full", D0, 1, 2.0)
    assert said(flight.on_placed(NOBODY, ROOT, 2.0)) == [f"wait {2.0 + AVOID_S:g}"]


@pytest.mark.parametrize(("begun", "error"), [(False, RequestError), (True, WorkerLost)])
def test_what_no_worker_can_hold_is_said(begun, error):
    flight = flying(WHOLE)
    if begun:
        flight.on_tokens(item(0, 1), B0, 1, 1.0)
    flight.on_returned(1, "too_long", B0, 1, 2.0)
    assert flight.placement_request(math.inf).avoid == frozenset()
    assert flight.placement_request(1e9).avoid == {(B0, 1)}
    (fail,) = flight.on_placed(NOBODY, ROOT, 2.0)
    assert isinstance(fail, FailRequest)
    assert isinstance(fail.error, error)
    assert "40 tokens of prompt and 8 of answer" in str(fail.error)


# --- time ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flight", "at", "error"),
    [
        (waiting, 100.0, NoWorkers),
        (flying, 100.0, StalledRequest),
        (lambda: started(flying()), 11.0, StalledRequest),
    ],
)
def test_patience_ends(flight, at, error):
    flight = flight()
    assert flight.on_tick(at) == ()
    *cancels, fail = flight.on_tick(at + 0.1)
    assert isinstance(fail, FailRequest)
    assert isinstance(fail.error, error)
    assert all(isinstance(cancel, CancelStage) for cancel in cancels)
    assert len(cancels) == (0 if error is NoWorkers else 2)
    assert flight.phase is RequestPhase.DONE


def test_every_token_renews_patience():
    flight = flying(WHOLE)
    for index in range(5):
        assert flight.on_tick(index * 9.0) == ()
        flight.on_tokens(item(index, 1), B0, 1, index * 9.0)


# --- deadlines and classes ------------------------------------------------------------------------------------------


def in_time(seconds: float | None):
    return msgspec.structs.replace(request(), qos=Qos(max_wait_s=seconds, service=ServiceClass.BATCH))


def test_a_worker_is_told_what_is_left_of_the_wait():
    flight = waiting(in_time(9.0))
    (send,) = flight.on_placed(WHOLE, ROOT, 2.5)
    assert isinstance(send, SubmitStage)
    assert send.submit.qos == Qos(max_wait_s=6.5, service=ServiceClass.BATCH)
    flight.on_tokens(item(0, 1), B0, 1, 3.0)
    flight.on_worker_lost(B0, 1, "died", 4.0)
    (again,) = flight.on_placed(WHOLE, ROOT, 5.0)
    assert isinstance(again, SubmitStage)
    assert again.submit.qos.max_wait_s is None, "who has a token waits for no first one"


def test_who_waits_for_as_long_as_it_may_is_told():
    flight = flying(asked=in_time(9.0))
    assert flight.on_tick(9.0) == ()
    assert said(flight.on_tick(9.1)) == ["cancel decode-0 e1", "cancel prefill-0 e1", "fail DeadlineMissed"]


def test_a_worker_may_say_it_first():
    flight = flying(WHOLE, in_time(9.0))
    assert said(flight.on_returned(1, "deadline", B0, 1, 9.0)) == ["end both-0 e1", "fail DeadlineMissed"]


def test_yielding_is_no_failure():
    flight = flying(WHOLE, in_time(None))
    for epoch in range(1, 3 * PATIENCE.max_attempts):
        again = said(flight.on_returned(epoch, "yielded", B0, 1, 1.0))
        assert again == [f"end both-0 e{epoch}", "wait 1"], "at once, and as often as it takes"
        assert said(flight.on_placed(WHOLE, ROOT, 1.0)) == [f"send both-0 whole e{epoch + 1}"]


# --- log-probabilities of a prompt that come in parts -----------------------------------------------------------------


def parts(epoch: int = 1) -> list[TokenItem]:
    """Of a prompt of 5 tokens, in three messages; the last has the first token."""
    told = [TokenLogprob(token, -1.0) for token in range(1, 5)]
    return [
        item(0, epoch=epoch, prompt_logprobs=(told[0],), prompt_more=True),
        item(0, epoch=epoch, prompt_logprobs=(told[1], told[2]), prompt_start=1, prompt_more=True),
        item(0, 9, epoch=epoch, prompt_logprobs=(told[3],), prompt_start=3),
    ]


def test_parts_are_put_together_in_whatever_order_and_however_often_they_come():
    for order in permutations([*parts(), parts()[1]]):
        flight = flying(WHOLE, request(prompt=tuple(range(5)), prompt_logprobs=0))
        effects = [effect for part in order for effect in flight.on_tokens(part, B0, 1, 1.0)]
        delivered = [effect.batch for effect in effects if isinstance(effect, DeliverTokens)]
        assert [batch.tokens for batch in delivered] == [(9,)]
        assert [one.token for one in delivered[0].prompt_logprobs or ()] == [1, 2, 3, 4]


def test_parts_that_were_lost_are_computed_again():
    flight = flying(WHOLE, request(prompt=tuple(range(5)), prompt_logprobs=0))
    first, _, last = parts()
    assert said(flight.on_tokens(first, B0, 1, 1.0)) == said(flight.on_tokens(last, B0, 1, 1.0)) == []
    assert said(flight.on_tick(1.5)) == []
    assert said(flight.on_tick(2.5)) == ["cancel both-0 e1", "wait 2.5"]
    flight.on_placed(WHOLE, ROOT, 2.5)
    effects = [effect for part in parts(epoch=2) for effect in flight.on_tokens(part, B0, 1, 3.0)]
    assert said(tuple(effects)) == ["deliver 9"]


def test_parts_that_nobody_asked_for_are_not_kept():
    flight = flying(WHOLE, request(prompt=tuple(range(5)), prompt_logprobs=0))
    many = tuple(TokenLogprob(1, -1.0) for _ in range(10))
    for start in range(100):
        flight.on_tokens(
            item(0, prompt_logprobs=many[: 1 + start % 4], prompt_start=start, prompt_more=True), B0, 1, 1.0
        )
    assert flight._prompt_logprobs._kept <= 4
