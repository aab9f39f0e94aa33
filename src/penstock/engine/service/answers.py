"""From the scheduler's progress to what gateways are sent: one item a request, one batch a gateway.

Sends nothing, and knows no time but what it is told.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from penstock.engine.core.plan import Progress
from penstock.engine.service.asks import Ask, Gateway
from penstock.wire.messages import TokenItem

LOGPROBS_AT_ONCE = 8192
"""Log-probabilities of prompt tokens and their alternatives in one message: some 120 KiB, decoded within 4 ms."""


class Batches:
    """The items of one step, by the gateway that waits for them."""

    def __init__(self) -> None:
        self._batches: dict[int, tuple[Gateway, list[TokenItem]]] = {}

    def add(self, gateway: Gateway, item: TokenItem) -> None:
        """One more item for this gateway."""
        self._batches.setdefault(id(gateway), (gateway, []))[1].append(item)

    def all(self) -> list[tuple[Gateway, tuple[TokenItem, ...]]]:
        """Every gateway with its items, in order."""
        return [(gateway, tuple(items)) for gateway, items in self._batches.values()]


def item_of(progress: Progress, ask: Ask, now: float) -> TokenItem:
    """What one request's progress is for its gateway.  A token that the prefill worker drew keeps its facts.

    Phases of a leg that is traced are told once.
    """
    request = progress.request
    if ask.first is not None and ask.first.index == progress.index:
        return ask.first
    is_first = progress.index == request.emitted
    if is_first and ask.phases is not None and ask.started is not None:
        computed = len(request.prompt) + request.emitted - request.cached_tokens
        ask.ended("prefill", ask.started, now, tokens=computed, cached_tokens=request.cached_tokens)
    return TokenItem(
        request=request.id,
        epoch=request.epoch,
        index=progress.index,
        tokens=progress.tokens,
        logprobs=progress.logprobs if request.sampling.logprobs is not None else None,
        prompt_logprobs=progress.prompt_logprobs or None,
        finish=progress.finish,
        cached_tokens=request.cached_tokens if is_first else 0,
        pooled=progress.pooled,
        queued_s=(ask.started if ask.started is not None else now) - ask.arrived if is_first else 0.0,
        phases=ask.take_phases(),
    )


def parts_of(item: TokenItem) -> Iterator[TokenItem]:
    """The item, with what comes before it of the prompt's log-probabilities where they are many.  The last has the
    tokens."""
    told = item.prompt_logprobs or ()
    at_once = max(1, LOGPROBS_AT_ONCE // (1 + max((len(one.top) for one in told), default=0)))
    start = 0
    while len(told) - start > at_once:
        yield TokenItem(
            request=item.request,
            epoch=item.epoch,
            index=item.index,
            tokens=(),
            prompt_logprobs=told[start : start + at_once],
            prompt_start=start,
            prompt_more=True,
        )
        start += at_once
    yield item if not start else msgspec.structs.replace(item, prompt_logprobs=told[start:], prompt_start=start)
