"""Stored responses: the tokens of finished answers, by everything that their bits depend on, within so many bytes.

A response is found by a hash over the tokenised request (all of it that tokens follow from, the length apart), the
model's identity and the tenant.  By law 1 what is found is what would have been computed.

::

    tenant -> digest -> packed response      the one used longest ago of whoever has most makes room

Knows nothing about HTTP, text or workers.  Not for several threads.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
from blake3 import blake3

from penstock.types import GREEDY, FinishReason, ModelIdentity, TokenLogprob, ValidRequest

LARGEST_SHARE = 8
"""A response may take so large a part of the memory: one in so many."""

MOST_BYTES = 1 << 20
"""And at most so much, packed: one is unpacked within a turn of the loop, which takes some 10 ms for so many bytes."""

ENTRY_BYTES = 320
"""What an entry takes beside its packed response: objects, places in two tables."""

NO_PART = frozenset({"id", "arrival", "block_hashes", "session", "pictures", "claim", "begun", "open_ended", "trace"})
"""Fields of a request that its tokens do not follow from.  Pictures are told by their hashes, in ``images``."""

_KEYED = tuple(name for name in ValidRequest.__struct_fields__ if name not in NO_PART)
_pack = msgspec.msgpack.Encoder(order="deterministic").encode


class ResponseKey(NamedTuple):
    """What a response is found by."""

    tenant: str
    digest: bytes


class Response(msgspec.Struct, frozen=True, array_like=True):
    """The tokens of an answer from its first on.  ``finish`` is None where they are not all: the answer goes on."""

    tokens: tuple[int, ...]
    finish: FinishReason | None
    logprobs: tuple[TokenLogprob, ...] | None = None  # one a token
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None

    def cut(self, max_tokens: int) -> Response:
        """What such a request gets of it."""
        if len(self.tokens) <= max_tokens and (self.finish is FinishReason.STOP or len(self.tokens) < max_tokens):
            return self
        logprobs = None if self.logprobs is None else self.logprobs[:max_tokens]
        return Response(self.tokens[:max_tokens], FinishReason.LENGTH, logprobs, self.prompt_logprobs)


class Kept(NamedTuple):
    """What is kept of an answer, and what can be said of it without unpacking it."""

    packed: bytes
    tokens: int
    finish: FinishReason | None

    @classmethod
    def of(cls, response: Response) -> Kept:
        """Packed."""
        return cls(_pack(response), len(response.tokens), response.finish)

    @property
    def size(self) -> int:
        """Bytes that it takes."""
        return len(self.packed) + ENTRY_BYTES

    def serves(self, max_tokens: int) -> bool:
        """Is it the whole answer to a request for so many tokens?"""
        return self.finish is FinishReason.STOP or self.tokens >= max_tokens

    def response(self) -> Response:
        """Unpacked: not to be asked for many in one turn."""
        return _unpack(self.packed)


_unpack = msgspec.msgpack.Decoder(Response).decode


def key_of(request: ValidRequest, identity: ModelIdentity) -> ResponseKey:
    """By everything that its tokens follow from but their number.  The likeliest token needs no seed."""
    changes: dict[str, int] = {"max_tokens": 1}
    if request.sampling.temperature == GREEDY:
        changes |= {"seed": 0, "choice": 0}
    parts = {name: getattr(request, name) for name in _KEYED}
    sampling = msgspec.structs.replace(request.sampling, **changes)
    parts["sampling"] = msgspec.to_builtins(sampling, str_keys=True)  # in its own order: keys of biases are sorted
    return ResponseKey(request.claim.tenant, blake3(_pack((identity, parts))).digest())


@dataclass(slots=True)
class _Shelf:
    """What is kept of one tenant; those used last are at the end."""

    kept: OrderedDict[bytes, Kept] = field(default_factory=OrderedDict[bytes, Kept])
    nbytes: int = 0


class Responses:
    """Of one gateway, ``max_bytes`` at most."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.largest = min(max_bytes // LARGEST_SHARE, MOST_BYTES)  # bytes that one response may take
        self._shelves: dict[str, _Shelf] = {}
        self.nbytes = 0
        self.evicted = 0  # since the start

    def __len__(self) -> int:
        return sum(len(shelf.kept) for shelf in self._shelves.values())

    def find(self, key: ResponseKey) -> Kept | None:
        """What is kept; it counts as used now."""
        shelf = self._shelves.get(key.tenant)
        kept = shelf.kept.get(key.digest) if shelf is not None else None
        if shelf is None or kept is None:
            return None
        shelf.kept.move_to_end(key.digest)
        return kept

    def keep(self, key: ResponseKey, response: Response) -> None:
        """Keep it, unless what is kept says more already, or it is too large.  Others may have to make room."""
        present = self.find(key)
        if present is not None and not _says_more(response, present):
            return
        new = Kept.of(response)
        size = new.size
        if size > self.largest:
            return
        self._drop(key)
        shelf = self._shelves.setdefault(key.tenant, _Shelf())
        shelf.kept[key.digest] = new
        shelf.nbytes += size
        self.nbytes += size
        while self.nbytes > self._max_bytes:
            tenant, largest = max(self._shelves.items(), key=lambda item: item[1].nbytes)
            self._drop(ResponseKey(tenant, next(iter(largest.kept))))
            self.evicted += 1

    def _drop(self, key: ResponseKey) -> None:
        shelf = self._shelves.get(key.tenant)
        kept = shelf.kept.pop(key.digest, None) if shelf is not None else None
        if shelf is None or kept is None:
            return
        shelf.nbytes -= kept.size
        self.nbytes -= kept.size
        if not shelf.kept:
            del self._shelves[key.tenant]


def _says_more(new: Response, old: Kept) -> bool:
    """Of one answer: more tokens, or that it ends."""
    if old.finish is FinishReason.STOP:
        return False
    return len(new.tokens) > old.tokens or new.finish is FinishReason.STOP
