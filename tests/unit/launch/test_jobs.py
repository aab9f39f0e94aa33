"""What a run's incarnations are counted from."""

from __future__ import annotations

from penstock.launch.jobs import incarnations_before
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
