"""Mooncake's store as a tier.

A value is ``| proof 40 | page |`` under a name that covers model, numerics class, layout and ``--kv-key``, as in Redis.
Mooncake evicts by its own policy and loses everything with its master: such pages are simply missing.  Nothing that
comes back is trusted: no more is read than a value can have, and every page is verified; one that fails is deleted.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.errors import ConfigError, PageCorrupt, TierError
from penstock.kv.store.envelope import PROOF_BYTES, AnyEnvelope, identity_digest, page_key_bytes
from penstock.kv.store.mooncake.client import (
    KEYS_PER_REQUEST,
    NO_ROOM,
    NOT_READY,
    NOT_THERE,
    TOO_LONG,
    GetRequest,
    HasRequest,
    MooncakeClient,
    MooncakeLane,
    MooncakeRequest,
    MooncakeResponse,
    MooncakeSetup,
    PutRequest,
    RemoveRequest,
)
from penstock.kv.store.tier import FinalPage, KvTier, PageKey

_MASTER = re.compile(r"(\[[0-9a-fA-F:]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
_TRIAL_S = 60.0
_READ, _WRITE = "read", "write"


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeConfig:
    """Where the store is, and how this worker takes part in it."""

    master: str  # HOST:PORT
    metadata: str = "P2PHANDSHAKE"
    protocol: str = "tcp"
    devices: str = ""
    segment_bytes: int = 0  # of memory that this worker gives to all


class MooncakeTier(KvTier):
    """Thread-safe."""

    name = "mooncake"
    stores_copies = True
    is_remote = True
    pages = 0

    def __init__(self, at: MooncakeConfig, seal: AnyEnvelope, *, timeout_s: float) -> None:
        """Starts its process at the first use.  Raises ConfigError for a bad address."""
        _check_address(at.master)
        self._value_bytes = PROOF_BYTES + seal.layout.page_bytes
        self._seal = seal
        self._names = f"penstock.kv.1.{identity_digest(seal.identity, seal.layout)[:16].hex()}.{seal.kind}."
        setup = MooncakeSetup(
            master=at.master,
            metadata=at.metadata,
            protocol=at.protocol,
            devices=at.devices,
            segment_bytes=at.segment_bytes,
            value_bytes=self._value_bytes,
            timeout_s=timeout_s,
            lanes=(),
        )
        self._keeper = MooncakeClient(setup, (_READ, _WRITE), timeout_s)

    @staticmethod
    def check(master: str) -> None:
        """Raises ConfigError for a bad address, or where the library does not load.  Takes as long as starting
        Python."""
        _check_address(master)
        trial = [sys.executable, "-c", "import mooncake.store"]
        try:
            done = subprocess.run(trial, capture_output=True, timeout=_TRIAL_S, check=False)
        except subprocess.TimeoutExpired:
            raise ConfigError("--kv-mooncake: the package mooncake does not load: it hangs") from None
        if done.returncode:
            last = (done.stderr.decode(errors="replace").strip().splitlines() or [f"exit status {done.returncode}"])[-1]
            raise ConfigError(
                f"--kv-mooncake needs a package that loads: pip install 'penstock[mooncake]' and, on Debian, "
                f"apt-get install libibverbs1 libnl-3-200 libnl-route-3-200 ({last:.200})"
            )

    @property
    def pid(self) -> int | None:
        """Process id of the running client."""
        return self._keeper.pid

    def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        """False for all keys behind the first missing one."""
        found: list[bool] = []
        with self._keeper.lane(_READ) as lane:
            for start in range(0, len(keys), KEYS_PER_REQUEST):
                part = [self._name(key) for key in keys[start : start + KEYS_PER_REQUEST]]
                found += _found(lane, part)
                if not all(found):
                    break
        return found + [False] * (len(keys) - len(found))

    def read_page(self, key: PageKey, into: memoryview) -> bool:
        name = self._name(key)
        with self._keeper.lane(_READ) as lane:
            code = _code(lane, GetRequest(name), {NOT_THERE, NOT_READY, TOO_LONG})
            if code in (NOT_THERE, NOT_READY):
                return False
            try:
                if code != self._value_bytes:
                    raise PageCorrupt(f"a value in Mooncake that has not {self._value_bytes} bytes")
                self._seal.unseal(key, lane.value[PROOF_BYTES:], bytes(lane.value[:PROOF_BYTES]), into)
            except PageCorrupt:
                lane.request(RemoveRequest(name))  # if it fails, the next reader tries again
                raise
        return True

    def write_page(self, final: FinalPage, content: memoryview) -> bool:
        """For a page that is stored already, renews its lease."""
        name = self._name(final.key)
        with self._keeper.lane(_WRITE) as lane:
            if _found(lane, [name]) == [True]:
                return True
            stored, proof = self._seal.seal(final.key, content)
            lane.value[:PROOF_BYTES] = proof
            lane.value[PROOF_BYTES:] = stored
            return _code(lane, PutRequest(name), {NO_ROOM}) != NO_ROOM

    def on_evicted(self, key: PageKey) -> None:
        """Nothing to do: the stored page is a copy."""

    def close(self) -> None:
        self._keeper.close()

    def _name(self, key: PageKey) -> str:
        return self._names + page_key_bytes(key).hex()


def _found(lane: MooncakeLane, names: list[str]) -> list[bool]:
    answer = lane.request(HasRequest(names))
    _told(answer, set())
    if len(answer.found) != len(names):
        raise TierError(f"mooncake: {len(answer.found)} answers to {len(names)} questions")
    return answer.found


def _code(lane: MooncakeLane, question: MooncakeRequest, known: set[int]) -> int:
    return _told(lane.request(question), known)


def _told(answer: MooncakeResponse, known: set[int]) -> int:
    if answer.code < 0 and answer.code not in known:
        raise TierError(f"mooncake: code {answer.code}")
    return answer.code


def _check_address(master: str) -> None:
    match = _MASTER.fullmatch(master)
    if match is None or not 0 < int(match[2]) < 1 << 16:
        raise ConfigError(f"--kv-mooncake {master}: where its master listens is wanted, as HOST:PORT (10.0.0.1:50051)")
