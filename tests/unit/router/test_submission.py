"""What a leg is sent: everybody learns where images stand, and who reads the prompt gets their pixels too."""

from __future__ import annotations

import msgspec
import pytest

from penstock.hashing import block_hashes, chain_root
from penstock.router.decide import ChosenWorker, Decision
from penstock.router.submission import build_submits
from penstock.types import (
    Grammar,
    GrammarKind,
    ImageInput,
    ModelIdentity,
    PlacedImage,
    RequestId,
    RequestStage,
    SamplingParams,
    ValidRequest,
    WorkerId,
    pack_token_ids,
)
from penstock.wire.gateway_messages import MAX_AGE_S, PageSource

ROOT = chain_root(ModelIdentity(fingerprint="f", numerics="n"))
IMAGE = PlacedImage(bytes(32), 3, 4, 5)
PICTURE = ImageInput(4, 5, b"xyz", 1.0, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


def request() -> ValidRequest:
    prompt = (7,) * 40
    return ValidRequest(
        id=RequestId("r/0"),
        prompt=pack_token_ids(prompt),
        block_hashes=tuple(block_hashes(ROOT, prompt, images=(IMAGE,))),
        sampling=SamplingParams(seed=1, max_tokens=4),
        arrival=0.0,
        images=(IMAGE,),
        pictures=(PICTURE,),
    )


PLAIN, MIXED = ModelIdentity(fingerprint="f", numerics="n"), ModelIdentity(fingerprint="f", numerics="reads>writes")
ENCODER = PageSource(worker=WorkerId("encode-0"), incarnation=2, endpoint="ipc://@e")


def chosen(leg: RequestStage) -> Decision:
    one = ChosenWorker(stage=leg, worker=WorkerId(leg.value), incarnation=1, endpoint="ipc://@x", slot=0, tokens=0)
    return Decision(at=0.0, policy="none", identity=PLAIN, stages=(one,), encoders=(ENCODER,))


@pytest.mark.parametrize(
    ("leg", "reads"), [(RequestStage.WHOLE, True), (RequestStage.PREFILL, True), (RequestStage.DECODE, False)]
)
def test_pixels_go_where_the_prompt_is_read(leg: RequestStage, reads: bool):
    (sent,) = build_submits(request(), 1, (), chosen(leg), ROOT, now=0.0)
    assert sent.images == (IMAGE,)
    assert sent.media == ((PICTURE,) if reads else ())
    assert sent.encoders == ((ENCODER,) if reads else ())
    assert sent.block_hashes == request().block_hashes  # the first block begins with the image


def both(identity: ModelIdentity) -> Decision:
    legs = [one for leg in (RequestStage.PREFILL, RequestStage.DECODE) for one in chosen(leg).stages]
    return Decision(at=0.0, policy="none", identity=identity, stages=tuple(legs))


def test_who_reads_the_prompt_of_an_answer_again_cannot_end_it():
    """Its first token may be another than the client's, which another class has drawn."""
    sampling = SamplingParams(
        seed=1, max_tokens=4, stop_token_ids=(2, 5), min_tokens=1, grammar=Grammar(kind=GrammarKind.REGEX, text="a|b")
    )
    asked = msgspec.structs.replace(request(), sampling=sampling)
    reads, writes = build_submits(asked, 2, (9,), both(MIXED), ROOT, now=0.0)
    assert (reads.emitted, writes.emitted) == ((), (9,))
    assert (reads.sampling.stop_token_ids, reads.sampling.grammar) == ((), None)
    assert reads.sampling.max_tokens >= 2
    assert writes.sampling == sampling
    for emitted, identity in (((), MIXED), ((9,), ModelIdentity(fingerprint="f", numerics="n"))):
        sent = build_submits(asked, 2, emitted, both(identity), ROOT, now=0.0)
        assert all((leg.sampling, leg.emitted) == (sampling, emitted) for leg in sent)


def test_hashes_of_another_identity_stay_away():
    other = chain_root(ModelIdentity(fingerprint="other", numerics="n"))
    (sent,) = build_submits(request(), 1, (), chosen(RequestStage.WHOLE), other, now=0.0)
    assert sent.block_hashes == ()


@pytest.mark.parametrize(("now", "age_s"), [(0.0, 0.0), (7.5, 7.5), (-1.0, 0.0), (1e9, MAX_AGE_S)])
def test_whenever_it_is_submitted_its_age_counts_from_when_it_came(now: float, age_s: float):
    (sent,) = build_submits(request(), 3, (9,), chosen(RequestStage.WHOLE), ROOT, now=now)
    assert sent.age_s == age_s
