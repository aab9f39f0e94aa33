"""Which model a gateway serves: that of most workers when it began, and no other from then on.

Requests are tokenized for one model.  A worker of another one, joined by mistake or upgraded too soon, would read their
tokens as other words; so it is given nothing, also while all others are away.  Pure: time is handed in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from penstock.types import ModelIdentity


class PinnedModel:
    """Of one gateway.  Numerics classes of one model are no different models."""

    def __init__(self, pin_s: float, *, follows_upgrades: bool) -> None:
        """Decided ``pin_s`` after the first worker was ready; never, if it ``follows_upgrades``."""
        self._pin_s = pin_s
        self._follows = follows_upgrades
        self._since: float | None = None  # when a worker was ready first
        self.fingerprint: str | None = None  # of the model; None: not decided yet

    def look(self, present: Iterable[ModelIdentity], now: float, *, ready: bool) -> None:
        """Workers of these identities are there, whatever their state; ``ready``: one of them is."""
        if self._follows or self.fingerprint is not None or not (ready or self._since is not None):
            return
        if self._since is None:
            self._since = now
        if now - self._since < self._pin_s:
            return
        counts = Counter(identity.fingerprint for identity in present)
        if counts:
            self.fingerprint = counts.most_common(1)[0][0]

    def is_foreign(self, identity: ModelIdentity) -> bool:
        """Is this another model?"""
        return self.fingerprint is not None and identity.fingerprint != self.fingerprint
