"""Requests with an idempotency key: what makes a repeat the same request, wherever it is sent.

Id, seed and marks follow from tenant, key, body and model, and from a secret of the service: any gateway comes to the
same, and none has to remember anything.  Knows nothing about tokens or workers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b

import msgspec

from penstock.config.limits import Limits
from penstock.edge.event_ids import MARK_BYTES, After, EventMarks
from penstock.edge.exchange import Exchange
from penstock.errors import RequestError
from penstock.types import ModelIdentity
from penstock.wire.ports import Envelope, JsonObject

IDEMPOTENCY_KEY = b"idempotency-key"
LAST_EVENT_ID = b"last-event-id"

SEED_BITS = 53
"""A derived seed survives clients that keep JSON numbers as doubles, as a drawn one does."""

_NAME_BYTES = 12
_KEY_BYTES = 16

_encode = msgspec.json.Encoder(order="deterministic").encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Keyed:
    """A request that its client may send again."""

    key: bytes  # of tenant and key; what it is kept by
    name: str  # of the answer and of its charge: the same for every repeat
    seed: int  # instead of a drawn one
    mark: str  # of body and model: another one is another request
    marks: EventMarks  # of its events
    after: After = field(default_factory=After)
    resumed: bool = False  # the client has some of it already

    def body(self, body: JsonObject) -> JsonObject:
        """With a seed in any case, so that a repeat draws the same tokens."""
        return body if body.get("seed") is not None else {**body, "seed": self.seed}


def keyed_of(
    exchange: Exchange, body: JsonObject, envelope: Envelope, limits: Limits, event_key: bytes
) -> Keyed | None:
    """What the request's headers ask for; None without a key.  Raises RequestError, KeyReused."""
    given, last = exchange.header(IDEMPOTENCY_KEY), exchange.header(LAST_EVENT_ID)
    if given is None:
        if last is not None:
            raise RequestError(
                "Last-Event-ID needs the Idempotency-Key that the stream was begun with.",
                code="missing_idempotency_key",
            )
        return None
    _check(given, limits.max_idempotency_key_chars)
    if last is not None and body.get("stream") is not True:
        raise RequestError("Last-Event-ID is for streams: send it with 'stream': true.", code="invalid_last_event_id")
    wide = _wide(envelope.caller.tenant, given)
    marks = event_marks(event_key, envelope.caller.tenant, given, body, envelope.identity)
    return Keyed(
        key=wide[:_KEY_BYTES],
        name=wide[_KEY_BYTES : _KEY_BYTES + _NAME_BYTES].hex(),
        seed=int.from_bytes(wide[-8:], "little") >> (64 - SEED_BITS),
        mark=_body_mark(body, envelope.identity),
        marks=marks,
        after=After() if last is None else After.parse(last, marks),
        resumed=last is not None,
    )


def event_marks(event_key: bytes, tenant: str, key: bytes, body: JsonObject, identity: ModelIdentity) -> EventMarks:
    """The marks of one request's events."""
    return EventMarks(event_key, _wide(tenant, key) + _body_mark(body, identity).encode())


def _wide(tenant: str, key: bytes) -> bytes:
    own = blake2b(tenant.encode(), digest_size=_KEY_BYTES).digest()
    return blake2b(own + key, digest_size=64, person=b"penstock idem").digest()


def _body_mark(body: JsonObject, identity: ModelIdentity) -> str:
    asked = blake2b(_encode(body), digest_size=MARK_BYTES, person=b"penstock body")
    asked.update(identity.system_fingerprint.encode())
    return asked.hexdigest()


def _check(key: bytes, most: int) -> None:
    plain = all(33 <= char < 127 for char in key)
    if not plain or not 0 < len(key) <= most:
        raise RequestError(
            f"The header Idempotency-Key must have 1 to {most} visible ASCII characters (a UUID, for example).",
            code="invalid_idempotency_key",
        )
