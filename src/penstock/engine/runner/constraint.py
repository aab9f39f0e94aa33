"""What the grammar of one answer allows for its next tokens, as bit masks for the sampler.

The state follows from the request's output alone: a preempted answer, or one that another worker began, is read again
from its first token.  A mask is worked out on another thread while the step that it is for is computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock.grammar.matcher import Matcher, mask_words

if TYPE_CHECKING:
    from penstock.engine.core.request import Request


class Constraint:
    """One request's grammar, and how far its answer has come in it."""

    def __init__(self, request: Request, begin: Callable[[], Matcher]) -> None:
        """``begin``: the grammar's matcher at the beginning of an answer."""
        self._request = request
        self._begin = begin
        self._matcher = begin()
        self._taken = 0  # tokens of the answer that the matcher knows
        self._masks: list[NDArray[np.uint32]] = []
        self.cut_at: int | None = None  # tokens of the draft after which there is no going on: the answer ends there

    def mask(self, ahead: int = 0) -> NDArray[np.uint32]:
        """[ceil(V / 32)] words for the token after the first ``ahead`` of a draft; written by ``look_ahead``."""
        while len(self._masks) <= ahead:
            self._masks.append(np.zeros(mask_words(self._matcher.vocabulary), np.uint32))
        return self._masks[ahead]

    def look_ahead(self, drawn: Sequence[int], draft: Sequence[int] = ()) -> None:
        """Write the masks of the next token and of those after each token of ``draft``.

        ``drawn``: tokens since the request's own output.  After a draft token that the grammar forbids comes nothing
        that could stand, so nothing is worked out any more and all tokens are allowed.
        """
        count = len(self._request.output) + len(drawn)
        known = 0
        goes_on = self._catch_up(drawn) and self._write(0, count)
        while goes_on and known < len(draft) and self._allows(known, draft[known]):
            goes_on = self._matcher.take(draft[known : known + 1]) and self._write(known + 1, count + known + 1)
            known += 1
        for ahead in range(known + 1, len(draft) + 1):
            self.mask(ahead).fill(0xFFFFFFFF)
        self.cut_at = None if goes_on else known
        if not goes_on:
            self._allow_end_only(self.mask(known))
            self._matcher, self._taken = self._begin(), 0  # one that has failed cannot go back
        elif known:
            self._matcher.give_back(known)

    def _catch_up(self, drawn: Sequence[int]) -> bool:
        output = self._request.output
        new = (*output[self._taken :], *drawn[max(0, self._taken - len(output)) :])
        self._taken = len(output) + len(drawn)
        return not new or self._matcher.take(new)

    def _write(self, ahead: int, count: int) -> bool:
        """The mask after ``count`` tokens of the answer.  False when there is no going on."""
        mask = self.mask(ahead)
        if not self._matcher.write_mask(mask):
            return False
        if count < self._request.sampling.min_tokens:
            self._without_stops(mask)
        return True

    def _allow_end_only(self, mask: NDArray[np.uint32]) -> None:
        mask.fill(0)
        for token in self._matcher.end_tokens:
            mask[token // 32] |= np.uint32(1 << token % 32)

    def _without_stops(self, mask: NDArray[np.uint32]) -> None:
        """``min_tokens``: stop tokens are not drawn yet, unless the grammar leaves nothing else."""
        before = mask.copy()
        for token in self._request.sampling.stop_token_ids:
            mask[token // 32] &= ~np.uint32(1 << token % 32)
        if not mask.any():
            mask[:] = before

    def _allows(self, ahead: int, token: int) -> bool:
        return bool(self.mask(ahead)[token // 32] >> np.uint32(token % 32) & np.uint32(1))


Work = tuple[Constraint, Sequence[int], Sequence[int]]
"""Whose masks to write, after which tokens and for which draft."""


class Lookahead:
    """The masks of one step: begun on a thread beside the one that computes it, finished by whoever comes first.

    A machine whose cores are all busy may not let that thread run in time.
    """

    def __init__(self, beside: Executor, work: Sequence[Work]) -> None:
        self._work = deque(work)
        self._begun = beside.submit(self._drain)

    def finish(self) -> None:
        """Returns when all masks are written.  Raises what went wrong."""
        self._drain()
        if not self._begun.cancel():
            self._begun.result()

    def _drain(self) -> None:
        while self._work:
            try:
                constraint, drawn, draft = self._work.popleft()
            except IndexError:  # the other thread has taken the last
                return
            constraint.look_ahead(drawn, draft)
