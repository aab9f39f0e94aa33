"""Stored responses: what they are found by, what of them is told, and how much memory they take."""

from __future__ import annotations

import msgspec
import pytest

from penstock.api.response_cache import (
    ENTRY_BYTES,
    MAX_RESPONSE_BYTES,
    MAX_RESPONSE_SHARE,
    UNKEYED_FIELDS,
    PackedResponse,
    ResponseKey,
    ResponseLru,
    StoredResponse,
    response_key,
)
from penstock.types import (
    AdapterRef,
    BlockHash,
    FinishReason,
    Grammar,
    GrammarKind,
    ModelIdentity,
    PlacedImage,
    PoolingParams,
    Qos,
    RequestId,
    ResumeFrom,
    ResumeKey,
    SamplingParams,
    ServiceClass,
    ValidRequest,
    pack_token_ids,
)

IDENTITY = ModelIdentity(fingerprint="ab" * 32, numerics="cpp-avx2-1-fp32")
REQUEST = ValidRequest(
    id=RequestId("r/0"),
    prompt=pack_token_ids((1, 2, 3)),
    block_hashes=(),
    sampling=SamplingParams(seed=7, max_tokens=9, logit_bias={5: 1.0, 3: 2.0}),
    arrival=1.0,
)

OTHER_BITS = {
    "prompt": pack_token_ids((1, 2, 4)),
    "sampling": SamplingParams(seed=8, max_tokens=9),
    "pooling": PoolingParams(),
    "images": (PlacedImage(b"x" * 32, 0, 1, 1),),
    "adapter": AdapterRef(fingerprint="cd", folder="/a"),
    "cache_salt": "salt",
}
SAME_BITS = {
    "id": RequestId("r/1"),
    "block_hashes": (BlockHash(b"h" * 32),),
    "open_ended": True,
    "arrival": 2.0,
    "session": "s",
    "pictures": (),
    "qos": Qos(service=ServiceClass.BATCH, weight=3.0),
    "begun": ResumeFrom((1,), IDENTITY),
    "usage_deferred": True,
    "resume": ResumeKey(b"k", b"n", IDENTITY),
    "trace": "00-" + "1" * 32 + "-" + "2" * 16 + "-01",
}


def key(request: ValidRequest = REQUEST, identity: ModelIdentity = IDENTITY, **changes: object) -> ResponseKey:
    return response_key(msgspec.structs.replace(request, **changes), identity)


def sampled(**changes: object) -> ResponseKey:
    return key(sampling=msgspec.structs.replace(REQUEST.sampling, **changes))


def test_of_every_field_of_a_request_it_is_said_whether_tokens_follow_from_it():
    assert set(ValidRequest.__struct_fields__) == set(OTHER_BITS) | set(SAME_BITS)
    assert set(SAME_BITS) == UNKEYED_FIELDS
    assert all(key(**{name: value}) == key() for name, value in SAME_BITS.items())
    assert all(key(**{name: value}) != key() for name, value in OTHER_BITS.items())


def test_every_field_of_sampling_counts_but_the_length():
    others: dict[str, object] = {
        "seed": 8,
        "choice": 1,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.5,
        "min_p": 0.1,
        "presence_penalty": 1.0,
        "frequency_penalty": 1.0,
        "repetition_penalty": 1.5,
        "logit_bias": {5: 1.0},
        "min_tokens": 1,
        "stop_token_ids": (4,),
        "logprobs": 2,
        "prompt_logprobs": 2,
        "grammar": Grammar(kind=GrammarKind.REGEX, text="a"),
        "banned": (1,),
        "banned_first": (1,),
    }
    assert set(SamplingParams.__struct_fields__) == {*others, "max_tokens"}
    assert len({sampled(**{name: value}).digest for name, value in others.items()} | {key().digest}) == len(others) + 1
    assert sampled(max_tokens=100) == key()
    assert sampled(logit_bias={3: 2.0, 5: 1.0}) == key()


def test_the_likeliest_token_needs_no_seed():
    greedy = sampled(temperature=0.0)
    assert sampled(temperature=0.0, seed=8, choice=3) == greedy
    assert greedy != key()


def test_models_numerics_and_tenants_are_apart():
    other = msgspec.structs.replace(IDENTITY, numerics="cpp-avx512-1-fp32")
    assert len({key(), key(identity=other), key(qos=Qos(tenant="t"))}) == 3


@pytest.mark.parametrize(
    ("finish", "asked", "tokens", "told"),
    [
        (FinishReason.STOP, 9, 4, FinishReason.STOP),
        (FinishReason.STOP, 4, 4, FinishReason.STOP),
        (FinishReason.STOP, 3, 3, FinishReason.LENGTH),
        (None, 3, 3, FinishReason.LENGTH),
        (None, 4, 4, FinishReason.LENGTH),
        (None, 9, 4, None),
    ],
)
def test_what_a_request_for_so_many_tokens_gets(
    finish: FinishReason | None, asked: int, tokens: int, told: FinishReason | None
):
    stored = StoredResponse((11, 12, 13, 14), finish)
    cut = stored.truncated(asked)
    assert (cut.tokens, cut.finish) == ((11, 12, 13, 14)[:tokens], told)
    assert PackedResponse.of(stored).covers(asked) is (told is not None)


def entry(tenant: str, number: int) -> ResponseKey:
    return ResponseKey(tenant, number.to_bytes(4, "big"))


def response_of(responses: ResponseLru, name: ResponseKey) -> StoredResponse | None:
    kept = responses.get(name)
    return None if kept is None else kept.unpack()


def test_memory_is_bounded_and_what_is_used_stays():
    responses = ResponseLru(MAX_RESPONSE_SHARE * 1000)
    for number in range(100):
        responses.put(entry("", number), StoredResponse(tuple(range(50)), FinishReason.STOP))
        assert responses.get(entry("", 0)) is not None
        assert responses.nbytes <= MAX_RESPONSE_SHARE * 1000
    assert 2 < len(responses) < 100
    assert len(responses) + responses.evicted == 100
    assert responses.nbytes >= len(responses) * ENTRY_BYTES


def test_whoever_has_most_makes_room():
    responses = ResponseLru(MAX_RESPONSE_SHARE * 1000)
    responses.put(entry("quiet", 1), StoredResponse((1, 2), FinishReason.STOP))
    for number in range(200):
        responses.put(entry("noisy", number), StoredResponse(tuple(range(50)), FinishReason.STOP))
    assert response_of(responses, entry("quiet", 1)) == StoredResponse((1, 2), FinishReason.STOP)


def test_nothing_is_kept_that_says_less_or_is_too_large():
    responses = ResponseLru(MAX_RESPONSE_SHARE * 600)
    name = entry("", 1)
    responses.put(name, StoredResponse((1, 2, 3), None))
    responses.put(name, StoredResponse((1, 2), None))
    assert response_of(responses, name) == StoredResponse((1, 2, 3), None)
    responses.put(name, StoredResponse((1, 2, 3, 4), FinishReason.STOP))
    responses.put(name, StoredResponse((1, 2, 3), None))
    assert response_of(responses, name) == StoredResponse((1, 2, 3, 4), FinishReason.STOP)
    responses.put(entry("", 2), StoredResponse(tuple(range(1000)), None))
    assert responses.get(entry("", 2)) is None
    assert len(responses) == 1


def test_no_response_is_larger_than_may_be_unpacked_at_once():
    responses = ResponseLru(MAX_RESPONSE_BYTES * MAX_RESPONSE_SHARE * 4)
    responses.put(entry("", 1), StoredResponse((1 << 40,) * (MAX_RESPONSE_BYTES // 9), None))
    responses.put(entry("", 2), StoredResponse((1 << 40,) * (MAX_RESPONSE_BYTES // 10), None))
    assert responses.get(entry("", 1)) is None
    assert responses.get(entry("", 2)) is not None
