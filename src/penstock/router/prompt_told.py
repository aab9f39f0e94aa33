"""Log-probabilities of a long prompt's tokens, which come in several messages: put together again.  Pure.

Messages may be lost, doubled or overtaken: a part is known by its place.  No more is kept than the prompt has tokens.
"""

from __future__ import annotations

import msgspec

from penstock.types import TokenLogprob, ValidRequest
from penstock.wire.messages import TokenItem

LOST_S = 1.0
"""After the last part the others are waited for so long."""


class PromptTold:
    """What one epoch of a request has brought so far."""

    __slots__ = ("_kept", "_last", "_most", "_parts", "_since")

    def __init__(self, request: ValidRequest) -> None:
        self._most = 0 if request.sampling.prompt_logprobs is None else max(0, len(request.prompt) - 1)
        self._parts: dict[int, tuple[TokenLogprob, ...]] = {}
        self._kept = 0  # of those
        self._last: TokenItem | None = None
        self._since = 0.0  # when the last part came

    def whole(self, item: TokenItem, now: float) -> TokenItem | None:
        """The item to go on with: as it came, or with all that other parts have brought; None while some miss."""
        last = self._last
        if not item.prompt_more and not item.prompt_start:
            return item
        told = item.prompt_logprobs or ()
        if item.prompt_start not in self._parts and self._kept + len(told) <= self._most:
            self._parts[item.prompt_start] = told
            self._kept += len(told)
        if last is None and not item.prompt_more:
            last, self._last, self._since = item, item, now
        if last is None:
            return None
        whole: list[TokenLogprob] = []
        while len(whole) < self._most and (part := self._parts.get(len(whole))):
            whole += part
        if len(whole) < last.prompt_start + len(last.prompt_logprobs or ()):
            return None
        self._last = None
        return msgspec.structs.replace(last, prompt_logprobs=tuple(whole), prompt_start=0)

    def lost(self, now: float) -> bool:
        """Has the last part come, and others not for so long that they will not?"""
        return self._last is not None and now - self._since >= LOST_S
