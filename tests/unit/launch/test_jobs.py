"""What a run's incarnations are counted from, and when a worker that loads for itself says that it is alive."""

from __future__ import annotations

from penstock.launch.board import Board
from penstock.launch.jobs import GettingOn, incarnations_before
from penstock.types import BlockHash, Leg, RequestId, SamplingParams, WorkerId
from penstock.wire.codec import decode_peer, encode
from penstock.wire.messages import PageSource, Submit

START_NS = 1_795_320_303_449_000_000


def test_a_run_a_millisecond_later_is_later_than_every_restart_of_the_one_before() -> None:
    assert incarnations_before(START_NS + 1_000_000) > incarnations_before(START_NS) + 65_535


def test_what_comes_of_it_travels_for_centuries() -> None:
    source = PageSource(worker=WorkerId("p"), incarnation=incarnations_before(START_NS * 4), endpoint="tcp://a:1")
    submit = Submit(
        request=RequestId("r"),
        epoch=1,
        leg=Leg.DECODE,
        prompt=(1,),
        sampling=SamplingParams(seed=1, max_tokens=1),
        arrival=0.0,
        root=BlockHash(b""),
        pages_from=source,
    )
    assert decode_peer(encode(submit)) == submit


def test_a_worker_that_loads_beats_while_it_gets_on() -> None:
    (slot,) = Board(1).slots
    slot.reset(1, now_ns=1)
    watch = GettingOn(slot)
    watch(0, 0)
    assert slot.read().beat_s == 1e-9
    watch(5, 10)
    first = slot.read()
    assert first.beat_s > 1e-9
    assert first.predicted_end_s == first.beat_s
    watch(5, 10)
    assert slot.read() == first, "what stands still may hang"
    watch(6, 10)
    assert slot.read().beat_s > first.beat_s
