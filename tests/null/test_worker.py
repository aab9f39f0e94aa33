"""Workers as their gateways see them: legs, hand-over, cancels, silence, preemption, corruption, resubmission."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kv.connectors.shm import InMemoryConnector
from penstock.types import FinishReason, ModelIdentity, RequestStage, Role, WorkerId
from penstock.wire.gateway_messages import Cancel, Hello, Recipient, ReturnReason, Tokens

from .worker_stage import IDENTITY, Stage, expected, merged, split


@pytest.mark.parametrize("length", [1, 3, 15, 16, 17, 64, 100, 240])
@pytest.mark.parametrize("chunk", [1, 16, 64, 2048])
def test_split_and_whole_give_one_answer(length: int, chunk: int):
    stage, prefill, decode = split(max_chunk_tokens=chunk)
    whole = Stage()
    both = whole.worker("w", Role.BOTH, max_chunk_tokens=chunk)
    prompt = [i % 50 for i in range(length)]
    stage.ask_split(prompt, prefill, decode)
    whole.ask(prompt, to=both)
    stage.run()
    whole.run()
    assert stage.answer() == whole.answer() == expected(length)
    assert {name for name, item in stage.tokens if item.index == 0} == {"p", "d"}  # the first token comes from both
    assert {name for name, item in stage.tokens if item.index > 0} == {"d"}
    assert stage.tokens[-1][1].finish is FinishReason.LENGTH
    stage.assert_idle()
    whole.assert_idle()


def test_tokens_of_one_step_go_in_one_message():
    stage = Stage()
    worker = stage.worker("w", Role.BOTH)
    for name in ("a", "b", "c"):
        stage.ask([1, 2, 3], to=worker, request=name)
    sizes: list[int] = []
    for _ in range(12):
        worker.loop.step()
        told = [received.message for received in iter(worker.link.recv, None)]
        tokens = [message for message in told if isinstance(message, Tokens)]
        assert len(tokens) <= 1
        sizes += [len(message.items) for message in tokens]
    assert sizes == [3] * 8


@pytest.mark.parametrize(
    "other",
    [
        {"incarnation": 2},
        {"worker": WorkerId("both-1")},
        {"identity": ModelIdentity(fingerprint="another", numerics=IDENTITY.numerics)},
    ],
)
def test_what_is_meant_for_another_process_at_its_address_is_given_back(other: dict[str, object]):
    stage = Stage()
    worker = stage.worker("both-0", Role.BOTH)
    stage.turn()
    own = Recipient(worker=worker.name, incarnation=1, identity=IDENTITY)
    stage.ask([1, 2, 3], to=worker, recipient=msgspec.structs.replace(own, **other))
    stage.run()
    assert [returned.reason for _, returned in stage.returned] == [ReturnReason.OTHER_PROCESS]
    assert stage.tokens == []
    stage.assert_idle()


def test_pages_travel_once_and_later_come_from_the_cache():
    stage, prefill, decode = split()
    prompt = list(range(70))
    stage.ask_split(prompt, prefill, decode, request="a")
    stage.run()
    assert decode.receiver.counters.pages == 5  # four full pages and the beginning of a fifth
    stage.ask_split(prompt, prefill, decode, request="b")
    stage.run()
    assert decode.receiver.counters.pages == 6  # only the last, partial one again
    assert stage.answer("a") == stage.answer("b")
    cached = [item.cached_tokens for name, item in stage.tokens if item.request == "b" and item.index == 0]
    assert cached == [64, 64]  # as the prefill worker says, whoever says it
    stage.assert_idle()


def test_the_prompt_is_not_read_before_the_decode_worker_has_room():
    stage, prefill, decode = split(pages=16)
    stage.ask([1] * 200, to=decode, request="big", max_tokens=50)  # 13 of 16 pages
    stage.turn()
    stage.ask_split([2] * 100, prefill, decode, request="later")
    for _ in range(20):
        stage.turn()
    assert prefill.mailbox.reporter.steps == 0
    stage.run()
    assert stage.answer("later") == expected(100)
    assert stage.answer("big") == expected(200, tokens=50)
    stage.assert_idle()


@pytest.mark.parametrize("after", range(14))
def test_cancel_at_any_turn_frees_both_legs(after: int):
    stage, prefill, decode = split(max_chunk_tokens=16)
    stage.ask_split(list(range(100)), prefill, decode, max_tokens=30)
    for _ in range(after):
        stage.turn()
    for worker in (prefill, decode):
        worker.link.send(Cancel(request="r", epoch=1))
    stage.run()
    stage.assert_idle()


def test_a_gateway_that_comes_back_as_another_leaves_nothing_behind():
    stage, prefill, decode = split()
    stage.ask_split(list(range(100)), prefill, decode, max_tokens=100)
    for _ in range(6):
        stage.turn()
    for worker in (prefill, decode):
        worker.link.send(Hello(gateway="g", incarnation=2))
    stage.turn()
    stage.turn()
    for worker in (prefill, decode):
        assert worker.scheduler.load().pages_used == 0
    stage.reports.clear()


def test_a_silent_gateway_loses_its_requests():
    stage, prefill, decode = split()
    stage.ask_split(list(range(100)), prefill, decode, max_tokens=150)
    for _ in range(6):
        stage.turn()
    assert decode.scheduler.load().pages_used > 0
    stage.clock.advance(11.0)
    stage.turn()
    stage.turn()
    for worker in (prefill, decode):
        assert worker.scheduler.load().pages_used == 0
        assert len(worker.mailbox._requests) == 0


def test_a_prefill_worker_that_stops_is_given_up_and_the_request_returned():
    stage, prefill, decode = split(max_chunk_tokens=16)
    stage.ask_split(list(range(100)), prefill, decode)
    for _ in range(4):
        stage.turn()
    prefill.stopped = True
    stage.wait(2.0)
    assert [(name, r.reason) for name, r in stage.returned] == [("d", "pages_lost: silent")]
    stage.assert_idle()


def test_a_decode_worker_that_stops_costs_the_prefill_worker_nothing_for_long():
    stage, prefill, decode = split(max_chunk_tokens=16)
    stage.ask_split(list(range(100)), prefill, decode)
    for _ in range(4):
        stage.turn()
    decode.stopped = True
    stage.wait(2.0)
    assert prefill.scheduler.load().pages_used == 0
    stage.assert_idle()


def test_a_stopped_prefill_worker_that_wakes_changes_nothing():
    stage, prefill, decode = split(max_chunk_tokens=16)
    stage.ask_split(list(range(100)), prefill, decode)
    for _ in range(4):
        stage.turn()
    prefill.stopped = True
    stage.wait(2.0)
    prefill.stopped = False
    stage.tokens.clear()
    stage.ask(list(range(100)), to=decode, epoch=2)
    stage.run()
    assert stage.answer(epoch=2) == expected(100)
    stage.assert_idle()


def test_a_flipped_bit_is_found_and_the_request_returned():
    stage, prefill, decode = split(max_chunk_tokens=16)
    stage.ask_split(list(range(100)), prefill, decode)
    stage.turn()
    decode.stopped = True  # what is announced now is copied later
    while not prefill.sender.open_transfers or not prefill.scheduler.get_request("r").announced_pieces:
        stage.turn()
    prefill.memory.view(prefill.scheduler.get_request("r").page_tables[0].pages[0])[12] ^= 1
    decode.stopped = False
    stage.run()
    assert [(name, r.reason) for name, r in stage.returned][:1] == [("d", "pages_lost: corrupt")]
    assert decode.receiver.counters.corrupt >= 1
    stage.assert_idle()


def test_preempted_answers_are_returned_and_resubmitted_to_the_same_tokens():
    stage, prefill, decode = split(pages=18, max_model_len=160)
    prompts = {f"r{i}": [i] * 60 for i in range(4)}
    for name, prompt in prompts.items():
        stage.ask_split(prompt, prefill, decode, request=name, max_tokens=60)
    seen = 0
    epochs = dict.fromkeys(prompts, 1)
    for _ in range(60):
        stage.run()
        fresh, seen = stage.returned[seen:], len(stage.returned)
        if not fresh:
            break
        for _, returned in fresh:
            name = returned.request
            assert returned.reason == "preempted"
            epochs[name] += 1
            emitted = merged(stage, name)
            stage.ask_split(
                prompts[name], prefill, decode, request=name, max_tokens=60, epoch=epochs[name], emitted=tuple(emitted)
            )
    assert seen > 0, "nothing was preempted: the test shows nothing"
    for name, prompt in prompts.items():
        assert merged(stage, name) == expected(len(prompt), tokens=60)
    stage.assert_idle()


def test_a_stop_at_the_first_token_ends_both_legs():
    stage, prefill, decode = split()
    (first, *_) = expected(40)
    stage.ask_split(list(range(40)), prefill, decode, stop_token_ids=(first,))
    stage.run()
    assert stage.answer() == [first]
    assert all(item.finish is FinishReason.STOP for _, item in stage.tokens)
    stage.assert_idle()


def test_prompt_logprobs_come_with_the_first_token_of_the_leg_that_read_the_prompt():
    stage, prefill, decode = split(max_chunk_tokens=16)
    stage.ask_split(list(range(40)), prefill, decode, prompt_logprobs=1, logprobs=2)
    stage.run()
    firsts = [item for _, item in stage.tokens if item.index == 0]
    assert len(firsts) == 2
    assert [len(item.prompt_logprobs or ()) for item in firsts] == [39, 0]
    assert all(item.logprobs for _, item in stage.tokens)
    stage.assert_idle()


def test_a_decode_leg_without_a_source_is_returned():
    stage, _, decode = split()
    stage.ask([1, 2, 3], to=decode, leg=RequestStage.DECODE)
    stage.run()
    assert [r.reason for _, r in stage.returned] == ["no source of pages was named"]
    stage.assert_idle()


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 120), st.integers(1, 30), st.integers(0, 6)), min_size=1, max_size=8),
    st.sampled_from([16, 48, 2048]),
    st.integers(16, 40),
)
def test_any_mix_of_requests_is_answered_or_cancelled_and_nothing_stays(
    requests: list[tuple[int, int, int]], chunk: int, pages: int
):
    """Requests arrive a few turns apart, every third is cancelled in between; preempted ones are asked for again."""
    stage, prefill, decode = split(pages=pages, max_chunk_tokens=chunk, max_model_len=160)
    wanted: dict[str, tuple[list[int], int]] = {}
    for number, (length, tokens, turns) in enumerate(requests):
        name = f"r{number}"
        prompt = [number % 3] * length
        stage.ask_split(prompt, prefill, decode, request=name, max_tokens=tokens)
        for _ in range(turns):
            stage.turn()
        if number % 3 == 2:
            for worker in (prefill, decode):
                worker.link.send(Cancel(request=name, epoch=1))
        else:
            wanted[name] = (prompt, tokens)
    epochs = dict.fromkeys(wanted, 1)
    seen = 0
    for _ in range(100):
        stage.run()
        fresh, seen = stage.returned[seen:], len(stage.returned)
        if not fresh:
            break
        for _, returned in fresh:
            name = returned.request
            if name in wanted and returned.epoch == epochs[name]:
                epochs[name] += 1
                prompt, tokens = wanted[name]
                emitted = tuple(merged(stage, name))
                stage.ask_split(
                    prompt, prefill, decode, request=name, epoch=epochs[name], emitted=emitted, max_tokens=tokens
                )
    for name, (prompt, tokens) in wanted.items():
        assert merged(stage, name) == expected(len(prompt), tokens=tokens)
    stage.assert_idle()


def test_connections_for_pages_that_are_turned_away_are_reported() -> None:
    class Besieged(InMemoryConnector):
        rejected_connections = 3  # type: ignore[assignment]

    stage = Stage(carrier=Besieged)
    worker = stage.worker("w", Role.BOTH)
    stage.ask(range(20), to=worker)
    stage.run()
    stage.wait(0.5)
    assert stage.reports[worker.name].counters["page_connections_refused"] == 3
