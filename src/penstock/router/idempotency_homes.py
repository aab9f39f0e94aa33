"""The homes of idempotency keys: gateways of all hosts ask one worker about a key (``router.home_calls``).

::

    gateway --ClaimIdempotencyKey: it computes this--------> home (engine.service.idempotency_claims)
    gateway <--IdempotencyKeyState: what is known of it---- home
    gateway --ClaimIdempotencyKey: the tokens it has sent--> home
    gateway <--IdempotencyKeyState: those counted before---- home

What was sent itself, for another gateway to resume from, is in ``router.saved_tokens``.  Keys, tenants and bodies leave
the gateway as digests only.  Without an answer requests go on as if the key were new.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import TypeAlias

from penstock.clock import Clock
from penstock.router.home_calls import HomeCalls, WorkerHomes
from penstock.router.saved_tokens import FoundHandler, SavedTokenHomes
from penstock.telemetry.registry import Metrics
from penstock.types import WorkerId
from penstock.wire.gateway_messages import KEY_DIGEST_BYTES, ClaimIdempotencyKey, IdempotencyKeyState

KeyStateHandler: TypeAlias = Callable[[IdempotencyKeyState | None], None]
"""Called once; None: there is no home, or it has not answered."""


class IdempotencyHomes:
    """``api.idempotency.KeyHomes`` of one gateway; from its event loop."""

    def __init__(
        self, homes: WorkerHomes, saved: SavedTokenHomes, metrics: Metrics, clock: Clock, secret: bytes
    ) -> None:
        """``secret``: of digests, the same at all gateways."""
        self._calls = HomeCalls[IdempotencyKeyState](homes, clock)
        self._saved = saved
        self._metrics = metrics
        self._secret = blake2b(secret, digest_size=32, person=b"penstock homes").digest()

    def digest(self, name: bytes) -> bytes:
        """What homes know instead of a key or a tenant."""
        return blake2b(name, digest_size=KEY_DIGEST_BYTES, key=self._secret).digest()

    def send(self, message: ClaimIdempotencyKey, on_state: KeyStateHandler | None = None) -> None:
        """Tells the home of the key; ``on_state`` is called with its answer, be it now."""
        if on_state is None:
            self._calls.notify(message.key, message)
        else:
            self._calls.call(message.key, message, on_state)

    def find_saved(self, key: bytes, names: Sequence[bytes], on_found: FoundHandler) -> None:
        """``SavedTokenHomes.find``."""
        self._saved.find(key, names, on_found)

    def on_state(self, worker: WorkerId, incarnation: int, message: IdempotencyKeyState) -> None:
        """The answer of a worker.  One that was not asked is ignored."""
        self._calls.on_answer(worker, incarnation, message)

    def tick(self, now: float) -> None:
        """``HomeCalls.tick``."""
        self._calls.tick(now)

    def close(self) -> None:
        """No more answers will come."""
        self._calls.close()

    def count_tokens(self, prompts: int, generated: int, replayed: int) -> None:
        """Counts tokens of a request with a deferred usage: those that no other gateway has counted, and others."""
        self._metrics.on_settled_usage(prompts, generated, replayed)

    def count_resumed(self, tokens: int) -> None:
        """Counts tokens that another gateway had saved, and that this one does not have computed."""
        self._metrics.on_resumed_tokens(tokens)
