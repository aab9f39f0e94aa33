"""A tier and its threads: what is evicted while it is written, and how long the end may take."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.store_rig import HandNow, final_of, key_of, page_of, pair

from penstock.config.schema import KvStoreConfig
from penstock.kv.store.peer_tier import PeerTier
from penstock.kv.store.store import PageStore


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("where", ["before it is sealed", "before it is said", "after it is said", "never"])
def test_a_page_that_is_evicted_while_it_is_written_is_not_offered(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pair("peers", tmp_path, str) as tiers:
        assert isinstance(tiers.writer, PeerTier)
        assert tiers.memory is not None
        generations = [1]
        store = PageStore(
            [tiers.writer], tiers.memory, generations.__getitem__, Clock(), KvStoreConfig(), job_runner=HandNow
        )
        tiers.memory.view(final_of(1).page)[:] = page_of(1)

        def evicting(plain: Callable[..., Any], *, first: bool) -> Callable[..., Any]:
            def call(*words: Any) -> Any:
                found = None if first else plain(*words)
                generations[0] += 1
                store.on_evicted(key_of(1))
                return plain(*words) if first else found

            return call

        seal, directory = tiers.writer._seal, tiers.writer._directory
        if where == "before it is sealed":
            monkeypatch.setattr(seal, "seal", evicting(seal.seal, first=True))
        elif where != "never":
            put = evicting(directory.write_entry, first=where == "before it is said")
            monkeypatch.setattr(directory, "write_entry", put)
        store.save_page(final_of(1))
        assert tiers.other.contains([key_of(1)]) == [where == "never"]


class Slow(HandNow):
    """Ends when it is told to, but for the first, which never does."""

    made: list[Slow]
    clock: Clock
    ended = False

    def finish(self) -> None:
        self.ended = True

    def join(self, patience_s: float) -> bool:
        assert all(hand.ended for hand in self.made), "all are told before one is waited for"
        if self is not self.made[0]:
            return True
        self.clock.now += patience_s
        return False


class Closed:
    name = "disk"
    closed = False

    def close(self) -> None:
        self.closed = True


def test_a_hand_that_hangs_costs_the_limit_once(tmp_path: Path) -> None:
    clock = Clock()
    made: list[Slow] = []

    def hand(name: str, now: Callable[[], float], pause_s: float) -> Slow:
        one = Slow(name, now, pause_s)
        one.made, one.clock = made, clock
        made.append(one)
        return one

    tiers: list[Any] = [Closed(), Closed()]
    with pair("peers", tmp_path, str) as rig:
        assert rig.memory is not None
        config = KvStoreConfig(close_s=2.0)
        store = PageStore(tiers, rig.memory, lambda page: 1, clock, config, job_runner=hand)
    store.close()
    assert clock.now == 2.0
    assert [tier.closed for tier in tiers] == [False, True]
