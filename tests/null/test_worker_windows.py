"""Workers of a model whose layers read differently far back: what travels, what is found again, what is given back."""

from __future__ import annotations

import pytest

from penstock.kv_spec import TransferOrder
from penstock.types import Role
from penstock.wire.gateway_messages import Cancel

from .worker_stage import WINDOW, WINDOWED, Stage, expected, merged, split


@pytest.mark.parametrize("length", [1, 17, 40, 55, 64, 200])
@pytest.mark.parametrize("chunk", [1, 24, 2048])
def test_split_and_whole_give_one_answer_and_only_what_is_read_travels(length: int, chunk: int):
    stage, prefill, decode = split(WINDOWED, max_chunk_tokens=chunk)
    whole = Stage(layout=WINDOWED)
    both = whole.worker("w", Role.BOTH, max_chunk_tokens=chunk)
    prompt = [i % 50 for i in range(length)]
    stage.ask_split(prompt, prefill, decode, max_tokens=40)
    whole.ask(prompt, to=both, max_tokens=40)
    stage.run()
    whole.run()
    assert stage.answer() == whole.answer() == expected(length, tokens=40)
    blocks = -(-length // 16)
    windowed = blocks - max(0, length - WINDOW + 1) // 16
    assert decode.receiver.counters.pages == blocks + windowed
    stage.assert_idle()
    whole.assert_idle()


def test_a_prefix_is_found_where_the_window_before_it_is_still_there():
    stage, prefill, decode = split(WINDOWED)
    prompt = list(range(160))
    stage.ask_split(prompt, prefill, decode, request="a", max_tokens=60)
    stage.run()
    before = decode.receiver.counters.pages
    assert before == 10 + 3
    stage.ask_split([*prompt, 7, 8], prefill, decode, request="b")
    stage.run()
    assert decode.receiver.counters.pages == before + 2  # the beginning of an eleventh block, in both groups
    cached = {item.cached_tokens for _, item in stage.tokens if item.request == "b" and item.index == 0}
    assert cached == {160}
    assert stage.answer("b") == expected(162)
    stage.assert_idle()


def test_a_long_answer_takes_constant_memory_for_its_windows():
    stage = Stage(layout=WINDOWED)
    worker = stage.worker("w", Role.BOTH, max_model_len=500, max_chunk_tokens=16)
    stage.ask([1] * 20, to=worker, max_tokens=400)
    held: list[int] = []
    while stage.turn() or len(held) < 50:
        request = worker.scheduler.get_request("r")
        if request is not None and request.page_tables:
            held.append(len(request.page_tables[1].pages) - request.page_tables[1].first)
    assert max(held) <= (WINDOW - 1) // 16 + 2
    assert stage.answer() == expected(20, tokens=400)
    stage.assert_idle()


def test_room_for_more_answers_than_without_windows():
    """Three answers of 240 tokens and more: 48 pages a layer would be needed, and there are 64 for two layers."""
    stage = Stage(layout=WINDOWED)
    worker = stage.worker("w", Role.BOTH, pages=64, max_model_len=256, max_chunk_tokens=16)
    for name in ("a", "b", "c"):
        stage.ask([ord(name)] * 230, to=worker, request=name, max_tokens=20)
    stage.run()
    assert worker.scheduler.preemptions == 0
    assert worker.mailbox.reporter.report(asked=0, settled=True, dropped_frames=0).counters["batch_rows_max"] == 3
    for name in ("a", "b", "c"):
        assert stage.answer(name) == expected(230, tokens=20)
    stage.assert_idle()


def test_preempted_in_mid_answer_it_goes_on_with_the_same_tokens():
    stage, prefill, decode = split(WINDOWED, pages=26, max_model_len=160, max_chunk_tokens=32)
    for name in ("a", "b"):
        stage.ask_split([ord(name)] * 100, prefill, decode, request=name, max_tokens=55)
    stage.run()
    again = {returned.request for _, returned in stage.returned}
    assert again, "the room was not tight"
    for name in again:
        stage.ask_split(
            [ord(name)] * 100, prefill, decode, request=name, max_tokens=55, epoch=2, emitted=tuple(merged(stage, name))
        )
    stage.run()
    for name in ("a", "b"):
        assert merged(stage, name) == expected(100, tokens=55)
    stage.assert_idle()


@pytest.mark.parametrize("after", range(0, 14, 3))
def test_cancel_at_any_turn_frees_both_legs(after: int):
    stage, prefill, decode = split(WINDOWED, max_chunk_tokens=16)
    stage.ask_split(list(range(100)), prefill, decode, max_tokens=30)
    for _ in range(after):
        stage.turn()
    for worker in (prefill, decode):
        worker.link.send(Cancel(request="r", epoch=1))
    stage.run()
    stage.assert_idle()


@pytest.mark.parametrize("tokens", [0, 1, 39, 40, 57, 64, 161])
def test_pieces_are_numbered_in_the_order_in_which_pages_become_final(tokens: int):
    pieces = WINDOWED.transfer_order(tokens)
    order = list(pieces)
    assert order == sorted(order)
    assert len(order) == pieces.total
    assert [pieces.page_at(number) for number in range(pieces.total)] == order
    for block in range(pieces.blocks + 1):
        assert pieces.pages_before(block) == sum(own < block for own, _ in order)
    for number in range(pieces.total + 1):
        complete = pieces.blocks if number == pieces.total else order[number][0]
        assert pieces.tokens_in(number) == complete * 16
    with pytest.raises(IndexError, match=f"piece {pieces.total} of"):
        pieces.page_at(pieces.total)
    assert list(TransferOrder(WINDOWED.shape.reaches, tokens, 16)) == order
