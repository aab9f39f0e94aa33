"""What a worker is sent when a leg of a request is placed with it.  Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.hashing import block_hash, image_marks
from penstock.router.decide import Chosen, Decision
from penstock.types import PAGE_TOKENS, BlockHash, Leg, ValidRequest
from penstock.wire.messages import PageSource, Submit


def submissions(
    request: ValidRequest, epoch: int, emitted: Sequence[int], decision: Decision, root: BlockHash
) -> list[Submit]:
    """One ``Submit`` a leg of the decision, in order.  ``emitted``: what the client has already of the answer.

    ``root`` is the hash chain's root for the workers' identity.
    """
    sampling, legs = request.sampling, decision.legs
    if emitted and sampling.prompt_logprobs is not None:
        sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)  # the client has them
    source = next((chosen for chosen in legs if chosen.leg is Leg.PREFILL), None)
    hashes = request.block_hashes if _hashed_for(request, root) else ()
    return [
        Submit(
            request=request.id,
            epoch=epoch,
            leg=chosen.leg,
            prompt=request.prompt,
            sampling=sampling,
            arrival=request.arrival,
            emitted=tuple(emitted),
            root=root,
            block_hashes=hashes,
            priority=request.priority,
            images=request.images,
            pictures=() if chosen.leg is Leg.DECODE else request.pictures,
            encoders=() if chosen.leg is Leg.DECODE else decision.encoders,
            pooling=request.pooling,
            adapter=request.adapter,
            pages_from=_source(source) if chosen.leg is Leg.DECODE and source is not None else None,
        )
        for chosen in legs
    ]


def _source(chosen: Chosen) -> PageSource:
    return PageSource(worker=chosen.worker, incarnation=chosen.incarnation, endpoint=chosen.endpoint)


def _hashed_for(request: ValidRequest, root: BlockHash) -> bool:
    """Were the request's hashes made for what the chosen workers serve?  Others would name wrong pages."""
    hashes = request.block_hashes
    marks = image_marks(request.images, 0, PAGE_TOKENS)
    return bool(hashes) and hashes[0] == block_hash(root, request.prompt[:PAGE_TOKENS], marks)
