"""What a token of a prompt takes while its request is served.  Counted by the allocator, not estimated."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

import penstock
from penstock.config.limits import FailoverConfig, RequestLimits
from penstock.engine.core.request import Request
from penstock.engine.service.gateways import add_request_of
from penstock.hashing import chain_root
from penstock.interfaces import RequestContext
from penstock.processing.service import GenerationProcessor
from penstock.router.request import FailoverLimits, RoutedRequest
from penstock.types import (
    ModelIdentity,
    RequestId,
    RequestStage,
    SamplingParams,
    WorkerId,
    pack_token_ids,
    read_token_ids,
)
from penstock.wire.codec import decode_peer, encode_message
from penstock.wire.gateway_messages import Recipient, Submit

STORYTELLER = Path(penstock.__file__).parent / "bundled" / "storyteller"
IDENTITY = ModelIdentity(fingerprint="f" * 64, numerics="test-1-fp32")
MOST_BYTES = 5
HASH_BYTES = 5
"""A block's hash is an object of 65 bytes and a place in a tuple, for 16 tokens."""

TOKENS = 50_000


def kept_by(make: Callable[[], object]) -> float:
    """Bytes a token that what ``make`` returns keeps in memory."""
    make()  # whatever is made once
    gc.collect()
    tracemalloc.start()
    try:
        kept = make()
        gc.collect()
        assert kept is not None
        return tracemalloc.get_traced_memory()[0] / TOKENS
    finally:
        tracemalloc.stop()


def test_a_worker_keeps_a_prompt_in_few_bytes_a_token():
    submit = Submit(
        recipient=Recipient(worker=WorkerId("w"), incarnation=1, identity=IDENTITY),
        request=RequestId("r"),
        epoch=1,
        stage=RequestStage.WHOLE,
        prompt=bytes(pack_token_ids(range(TOKENS))),
        sampling=SamplingParams(seed=1, max_tokens=8),
        root=chain_root(IDENTITY),
    )
    frame = encode_message(submit)

    def arrive() -> Request:
        message = decode_peer(frame)
        assert isinstance(message, Submit)
        return Request(add_request_of(message, 0.0, ahead=0), serial=1, max_model_len=2 * TOKENS)

    assert kept_by(arrive) <= MOST_BYTES
    request = arrive()
    assert request.tokens(TOKENS - 2, TOKENS) == (TOKENS - 2, TOKENS - 1)


@pytest.mark.parametrize("n", [pytest.param(1, marks=pytest.mark.long), 4])
def test_a_gateway_keeps_a_prompt_once_and_in_few_bytes_a_token(n: int):
    intake = GenerationProcessor(STORYTELLER, name="m", max_model_len=2 * TOKENS, limits=RequestLimits(), created=7)
    envelope = RequestContext(id=RequestId("x"), arrival=0.0, identity=IDENTITY)
    ids = [7 + index % 3000 for index in range(TOKENS)]

    def prepared_and_flying() -> object:
        preparing = intake.completion({"model": "m", "prompt": ids, "n": n, "echo": True, "max_tokens": 4}, envelope)
        prepared = None
        while prepared is None:
            try:
                preparing.send(None)
            except StopIteration as done:
                prepared = done.value
        patience = FailoverLimits.from_config(FailoverConfig(), RequestLimits())
        return prepared, [RoutedRequest(request, patience, 0.0) for request in prepared.requests]

    echoed = sys.getsizeof(intake._tokenizer.decode(ids)) / TOKENS  # the client asked for the text
    assert kept_by(prepared_and_flying) <= MOST_BYTES + HASH_BYTES + echoed + 0.5


def test_ids_of_32_bits_are_kept_as_they_are_and_no_others_taken():
    ids = pack_token_ids([0, 7, (1 << 32) - 1])
    assert tuple(ids) == (0, 7, (1 << 32) - 1)
    assert ids.readonly
    assert read_token_ids(bytes(ids)) == ids
    for wrong in (-1, 1 << 32):
        with pytest.raises(OverflowError):
            pack_token_ids([wrong])
    with pytest.raises(ValueError, match="9 bytes"):
        read_token_ids(b"\0" * 9)
