"""What a worker is sent for a stage of a request, and which of its messages belong to it.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from penstock.hashing import block_hash, image_block_marks
from penstock.router.decide import ChosenWorker, Decision
from penstock.types import (
    PAGE_TOKENS,
    BlockHash,
    ModelIdentity,
    Qos,
    RequestStage,
    TokenBatch,
    TokenLogprob,
    ValidRequest,
)
from penstock.wire.gateway_messages import MAX_AGE_S, PageSource, Recipient, Submit, TokenItem


def build_submits(
    request: ValidRequest,
    epoch: int,
    emitted: Sequence[int],
    decision: Decision,
    root: BlockHash,
    *,
    now: float,
    qos: Qos | None = None,
) -> list[Submit]:
    """One ``Submit`` a leg of the decision, in order.  ``emitted``: what the client has already of the answer.

    ``root`` is the hash chain's root for the workers' identity; ``qos`` the request's as it is by now, if not as it
    came.  Whenever it is submitted, its age counts from when it came: it keeps its place in line.
    """
    stages, identity = decision.stages, decision.identity
    if not stages or identity is None:
        return []
    source = next((chosen for chosen in stages if chosen.stage is RequestStage.PREFILL), None)
    to = recipient_of(stages[0], identity)
    of_all = _common_submit(request, epoch, emitted, root, qos or request.qos, to=to, now=now)
    apart = has_mixed_numerics(identity)
    of_readers = _reading_again(of_all) if apart and emitted else of_all
    return [
        msgspec.structs.replace(
            of_readers if chosen.stage is RequestStage.PREFILL else of_all,
            recipient=recipient_of(chosen, identity),
            stage=chosen.stage,
            mixed=apart,
            media=() if chosen.stage is RequestStage.DECODE else request.pictures,
            encoders=() if chosen.stage is RequestStage.DECODE else decision.encoders,
            pages_from=_source(source) if chosen.stage is RequestStage.DECODE and source is not None else None,
            expected_tokens=decision.expected_tokens,
        )
        for chosen in stages
    ]


def build_migration_submit(
    request: ValidRequest,
    epoch: int,
    emitted: Sequence[int],
    source: PageSource,
    root: BlockHash,
    *,
    to: Recipient,
    now: float,
    expected: int = 0,
) -> Submit:
    """For a worker that goes on with an answer which ``source``, of the same identity, is writing."""
    qos, apart = remaining_qos(request.qos, 0.0, started=True), has_mixed_numerics(to.identity)
    of_all = _common_submit(request, epoch, emitted, root, qos, to=to, now=now)
    return msgspec.structs.replace(
        of_all, stage=RequestStage.DECODE, pages_from=source, joins=True, mixed=apart, expected_tokens=expected
    )


def recipient_of(chosen: ChosenWorker, identity: ModelIdentity) -> Recipient:
    """The process that was chosen."""
    return Recipient(worker=chosen.worker, incarnation=chosen.incarnation, identity=identity)


def has_mixed_numerics(identity: ModelIdentity | None) -> bool:
    """Whether workers of this identity prefill in one numerics class and decode in another."""
    return identity is not None and identity.mixed


def _reading_again(of_all: Submit) -> Submit:
    """For the prefill stage of a request that has output already.

    It samples a first token again, which is dropped: the client has one.  If that was drawn in another class, this one
    may be another, and must not end the answer.
    """
    sampling = msgspec.structs.replace(
        of_all.sampling, max_tokens=max(2, of_all.sampling.max_tokens), min_tokens=0, stop_token_ids=(), grammar=None
    )
    return msgspec.structs.replace(of_all, emitted=(), sampling=sampling)


def _common_submit(
    request: ValidRequest,
    epoch: int,
    emitted: Sequence[int],
    root: BlockHash,
    qos: Qos,
    *,
    to: Recipient,
    now: float,
) -> Submit:
    """The part of a Submit that all stages have in common."""
    sampling = request.sampling
    if emitted and sampling.prompt_logprobs is not None:
        sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)  # the client has them
    return Submit(
        recipient=to,
        request=request.id,
        epoch=epoch,
        stage=RequestStage.WHOLE,
        prompt=bytes(request.prompt),
        sampling=sampling,
        age_s=min(max(0.0, now - request.arrival), MAX_AGE_S),
        emitted=tuple(emitted),
        root=root,
        block_hashes=request.block_hashes if _hashed_for(request, root) else (),
        qos=qos,
        open_ended=request.open_ended,
        images=request.images,
        pooling=request.pooling,
        adapter=request.adapter,
        traced=bool(request.trace),
    )


def new_tokens(item: TokenItem, skip: int, *, first: bool) -> TokenBatch:
    """What a client gets of ``item``, whose first ``skip`` tokens it has.  The prompt's facts come with the first."""
    logprobs = item.logprobs
    return TokenBatch(
        tokens=item.tokens[skip:] if skip else item.tokens,
        logprobs=logprobs[skip:] if skip and logprobs is not None else logprobs,
        prompt_logprobs=item.prompt_logprobs if first else None,
        finish=item.finish,
        pooled=item.pooled,
        cached_tokens=item.cached_tokens if first else 0,
    )


def _source(chosen: ChosenWorker) -> PageSource:
    return PageSource(worker=chosen.worker, incarnation=chosen.incarnation, endpoint=chosen.endpoint)


def _hashed_for(request: ValidRequest, root: BlockHash) -> bool:
    """Whether the request's hashes belong to the identity of the chosen workers."""
    hashes = request.block_hashes
    marks = image_block_marks(request.images, 0, PAGE_TOKENS)
    return bool(hashes) and hashes[0] == block_hash(root, request.prompt[:PAGE_TOKENS], marks)


def has_valid_tokens(item: TokenItem, vocabulary: int) -> bool:
    """Whether all tokens of the item and of its log-probabilities are below ``vocabulary``."""
    if max(item.tokens, default=0) >= vocabulary:
        return False
    if item.logprobs is not None and (len(item.logprobs) != len(item.tokens) or not _known(item.logprobs, vocabulary)):
        return False
    return item.prompt_logprobs is None or _known(item.prompt_logprobs, vocabulary)


def _known(logprobs: Iterable[TokenLogprob], vocabulary: int) -> bool:
    return all(one.token < vocabulary and all(token < vocabulary for token, _ in one.top) for one in logprobs)


def matches_request(item: TokenItem, request: ValidRequest) -> bool:
    """Whether the item can belong to this request."""
    most, prompt = request.sampling.max_tokens, len(request.prompt)
    if item.index + len(item.tokens) > most or item.cached_tokens > prompt + most:
        return False
    if request.sampling.logprobs is not None and item.tokens and item.logprobs is None and request.pooling is None:
        return False
    if request.pooling is None:
        return item.pooled is None
    return item.pooled is None or (len(item.pooled) > 0 and len(item.pooled) % 4 == 0)


def remaining_qos(qos: Qos, waited_s: float, *, started: bool) -> Qos:
    """The qos by now: some of its time is over, and who has a token waits for no first one."""
    if qos.max_wait_s is None:
        return qos
    left = None if started else max(0.0, qos.max_wait_s - waited_s)
    return msgspec.structs.replace(qos, max_wait_s=left)
