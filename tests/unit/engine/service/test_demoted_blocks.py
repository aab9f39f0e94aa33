"""Blocks that a cache gave up: in which tier they are, whether they come back, and who is forgotten."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from penstock.config.schema import SchedulerConfig, WorkerConfig
from penstock.engine.core.page_pool import PagePool
from penstock.engine.core.prefix_cache import PrefixCache
from penstock.engine.service import kv_events as service_bulletins
from penstock.engine.service.gateways import ConnectedGateway
from penstock.engine.service.kv_events import LOOKED_AT, DemotedBlocks, KvEventPublisher, LowerTiers
from penstock.kernels.host_ops import keys_of
from penstock.router.prefix_index import PrefixIndex
from penstock.types import BlockHash, ModelIdentity, Role, WorkerId, WorkerState
from penstock.wire.gateway_messages import KV_KEY_BYTES, Hello, KvEvents, WorkerReport
from penstock.wire.in_memory import InMemoryHub

BLOCKS = [BlockHash(bytes([n]) * 32) for n in range(3 * LOOKED_AT)]


class Below:
    """Tiers as a test says."""

    def __init__(self) -> None:
        self.tiers: dict[BlockHash, int] = {}
        self.asked = 0

    def nearest(self, blocks: Sequence[BlockHash]) -> list[int]:
        self.asked += 1
        return [self.tiers.get(block, 0) for block in blocks]


def set_of(keys: bytes) -> set[bytes]:
    return {keys[start : start + KV_KEY_BYTES] for start in range(0, len(keys), KV_KEY_BYTES)}


def test_what_leaves_the_cache_is_where_the_tiers_say() -> None:
    below = Below()
    known = DemotedBlocks(below.nearest)
    below.tiers[BLOCKS[0]] = 2
    assert list(known.on_evicted(BLOCKS[:2])) == [(BLOCKS[0], 2), (BLOCKS[1], 0)]
    assert list(known.on_evicted([])) == []
    assert list(known.tiers().items()) == [(BLOCKS[0], 2)]
    known.remove(BLOCKS[0])
    assert list(known.tiers().items()) == []


def test_what_a_tier_drops_is_found_out_in_time() -> None:
    below = Below()
    known = DemotedBlocks(below.nearest)
    below.tiers = dict.fromkeys(BLOCKS, 1)
    assert list(known.on_evicted(BLOCKS)) == [(block, 1) for block in BLOCKS]
    assert list(known.recheck()) == []
    below.tiers = dict.fromkeys(BLOCKS[1:], 2)
    changes = [change for _ in range(3) for change in known.recheck()]
    assert sorted(changes) == sorted([(BLOCKS[0], 0), *((block, 2) for block in BLOCKS[1:])])
    assert BLOCKS[0] not in known.tiers()


def test_no_more_is_remembered_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_bulletins, "MAX_DEMOTED", 2)
    below = Below()
    below.tiers = dict.fromkeys(BLOCKS, 1)
    known = DemotedBlocks(below.nearest)
    told = list(known.on_evicted(BLOCKS[:3]))
    assert told == [(BLOCKS[0], 1), (BLOCKS[1], 1), (BLOCKS[0], 0), (BLOCKS[2], 1)]


def report_of(config: WorkerConfig) -> WorkerReport:
    return WorkerReport(
        worker=config.worker,
        incarnation=config.incarnation,
        role=config.role,
        state=WorkerState.READY,
        pid=1,
        identity=ModelIdentity(fingerprint="f", numerics="n"),
        max_model_len=64,
    )


def test_tiers_are_asked_once_for_all_that_has_left_when_it_is_told() -> None:
    hub, below, prefix = InMemoryHub(), Below(), PrefixCache(PagePool(len(BLOCKS)))
    config = WorkerConfig(
        worker=WorkerId("w"),
        incarnation=1,
        role=Role.BOTH,
        endpoint="memory://w",
        connector="memory",
        scheduler=SchedulerConfig(pages=len(BLOCKS)),
    )
    link = hub.connect(config.endpoint)
    listener = hub.listen(config.endpoint)
    bulletins = KvEventPublisher(
        config, prefix, listener, lambda: report_of(config), lower=LowerTiers(below.nearest, 2)
    )
    hello = Hello(gateway="g", incarnation=1, kv_snapshot=True)
    assert link.send(hello)
    heard = listener.recv()
    assert heard is not None
    gateway = ConnectedGateway("g", 1, heard.peer, 0.0)
    bulletins.on_hello(gateway, hello)
    bulletins.send_due([gateway], 0.0, waiting=False)
    assert link.recv() is not None  # the report
    assert link.recv() is not None  # the snapshot, of nothing
    for block in BLOCKS[:6]:
        prefix.on_change(block, True)
    below.tiers = dict.fromkeys(BLOCKS[:2], 1) | {BLOCKS[2]: 2}
    for block in BLOCKS[:5]:
        prefix.on_change(block, False)
    prefix.on_change(BLOCKS[0], True)  # back before anybody was told
    assert below.asked == 0, "asked in the middle of a plan"
    bulletins.report([gateway], 1.0)
    assert below.asked == 1
    received = link.recv()
    assert received is not None
    report = received.message
    assert isinstance(report, WorkerReport)
    (told,) = report.cached
    assert set_of(told.stored) == set_of(keys_of([BLOCKS[0], BLOCKS[5]]))
    assert [set_of(keys) for keys in told.sunk] == [set_of(keys_of(BLOCKS[1:2])), set_of(keys_of(BLOCKS[2:3]))]
    assert set_of(told.removed) == set_of(keys_of(BLOCKS[3:5]))


class Followers:
    """Gateways that speak to one worker, over a hub without processes."""

    def __init__(self, names: str) -> None:
        self.config = WorkerConfig(
            worker=WorkerId("w"),
            incarnation=1,
            role=Role.BOTH,
            endpoint="memory://w",
            connector="memory",
            scheduler=SchedulerConfig(pages=64),
        )
        hub = InMemoryHub()
        self.listener = hub.listen(self.config.endpoint)
        self.links = [hub.connect(self.config.endpoint) for _ in names]
        self.gateways: list[ConnectedGateway] = []
        for name, link in zip(names, self.links, strict=True):
            link.send(Hello(gateway=name, incarnation=1))
            heard = self.listener.recv()
            assert heard is not None
            self.gateways.append(ConnectedGateway(name, 1, heard.peer, 0.0))

    def heard(self) -> list[list[KvEvents]]:
        """What each was told since the last call."""
        told: list[list[KvEvents]] = []
        for link in self.links:
            told.append([])
            while (received := link.recv()) is not None:
                message = received.message
                assert isinstance(message, KvEvents | WorkerReport)
                told[-1] += [message] if isinstance(message, KvEvents) else message.cached
        return told


def test_all_that_is_cached_is_told_once_for_all_who_ask_and_one_message_a_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service_bulletins, "KV_EVENT_BLOCKS", 4)
    on = Followers("abc")
    prefix = PrefixCache(PagePool(64))
    bulletins = KvEventPublisher(on.config, prefix, on.listener, lambda: report_of(on.config))
    known = [BlockHash(bytes([n]) * 32) for n in range(10)]
    walks = 0

    def blocks() -> list[BlockHash]:
        nonlocal walks
        walks += 1
        return known

    monkeypatch.setattr(bulletins._log, "_known", blocks)
    for gateway in on.gateways[:2]:
        bulletins.on_hello(gateway, Hello(gateway=gateway.name, incarnation=1, kv_snapshot=True))
    index = [PrefixIndex(), PrefixIndex()]
    for one in index:
        one.add_worker(0, 1)
    turns = 0
    new = BlockHash(bytes([99]) * 32)
    while turns == 0 or bulletins.is_sending_snapshot:
        if turns == 1:  # in the middle: a change for all, and one gateway more that asks
            known.append(new)
            prefix.on_change(new, True)
            bulletins.on_hello(on.gateways[2], Hello(gateway="c", incarnation=1, kv_snapshot=True))
        bulletins.send_due(on.gateways, float(turns), waiting=False)
        turns += 1
        told = on.heard()
        assert all(sum(len(message.stored) for message in messages) <= 5 * KV_KEY_BYTES for messages in told)
        for one, messages in zip(index, told, strict=False):
            for message in messages:
                one.on_kv_events(0, message)
    assert (turns, walks) == (3, 1), "ten blocks by four, for two gateways at once"
    assert [one.gaps for one in index] == [0, 0]
    for one in index:
        assert all(one.stored_blocks([block], 1)[0] == 1 for block in [*known, new])
    bulletins.send_due(on.gateways, float(turns), waiting=False)
    while bulletins.is_sending_snapshot:
        turns += 1
        bulletins.send_due(on.gateways, float(turns), waiting=False)
    a, b, c = on.heard()
    assert (a, b) == ([], [])
    assert b"".join(message.stored for message in c) == keys_of(known)
    assert walks == 2


def test_who_asks_again_while_it_is_told_hears_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway asks once a second for as long as something is lacking, and a large cache takes longer to be told."""
    monkeypatch.setattr(service_bulletins, "KV_EVENT_BLOCKS", 1)
    on = Followers("a")
    prefix = PrefixCache(PagePool(64))
    bulletins = KvEventPublisher(on.config, prefix, on.listener, lambda: report_of(on.config))
    monkeypatch.setattr(bulletins._log, "_known", lambda: BLOCKS)
    turns, hello = 0, Hello(gateway="a", incarnation=1, kv_snapshot=True)
    while turns == 0 or bulletins.is_sending_snapshot:
        bulletins.on_hello(on.gateways[0], hello)
        bulletins.send_due(on.gateways, float(turns), waiting=False)
        turns += 1
    bulletins.send_due(on.gateways, float(turns), waiting=False)
    assert [message.part for message in on.heard()[0]] == list(range(len(BLOCKS)))
    bulletins.on_hello(on.gateways[0], hello)
    bulletins.send_due(on.gateways, float(turns), waiting=False)
    assert bulletins.is_sending_snapshot, "it has missed something since"
