"""What every tier of the KV store does: the same suite for memory, disk, other workers' caches, Redis and Mooncake."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.store_rig import IDENTITY, LAYOUT, TIERS, Pair, final_of, key_of, page_of, pair, redis_server

from penstock.errors import PageCorrupt, TierError
from penstock.kv.page_memory import KvLayout
from penstock.kv.store.envelope import EncryptedEnvelope, PageEnvelope
from penstock.kv.store.redis_tier import RedisTier
from penstock.types import ModelIdentity


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], str]]:
    """Started when it is first needed; a test without Redis does not."""
    running: list[str] = []
    contexts = []

    def url() -> str:
        if not running:
            context = redis_server(tmp_path_factory.mktemp("redis"))
            running.append(context.__enter__())
            contexts.append(context)
        return running[0]

    yield url
    for context in contexts:
        context.__exit__(None, None, None)


MOONCAKE = [pytest.param(kind, marks=pytest.mark.long) for kind in ("mooncake", "mooncake, encrypted")]


@pytest.fixture(params=[*TIERS, *MOONCAKE])
def tier(request: pytest.FixtureRequest, tmp_path: Path, redis_url: Callable[[], str]) -> Iterator[Pair]:
    if request.param.startswith("redis"):
        pytest.importorskip("redis", reason="the extra with redis is not installed")
        import redis

        redis.Redis.from_url(redis_url()).flushall()
    with pair(request.param, tmp_path, redis_url) as made:
        yield made


def test_what_one_keeps_another_finds(tier: Pair):
    assert tier.other.contains([key_of(1), key_of(2)]) == [False, False]
    assert tier.put(1)
    assert tier.put(2)
    assert tier.other.contains([key_of(2), key_of(1), key_of(3)]) == [True, True, False]
    assert tier.get(1) == page_of(1)
    assert tier.get(2) == page_of(2)


def test_what_nobody_has_is_not_found(tier: Pair):
    tier.put(1)
    assert tier.get(9) is None
    into = bytearray(LAYOUT.page_bytes)
    assert not tier.other.read_page(key_of(1, group=1), memoryview(into)), "a page of another group"
    assert into == bytes(LAYOUT.page_bytes), "nothing was written"


def test_a_page_kept_twice_is_one_page(tier: Pair):
    assert tier.put(1)
    assert tier.put(1)
    assert tier.get(1) == page_of(1)
    assert tier.writer.contains([key_of(1)]) == [tier.memory is None], "of other workers, not of one's own"


@pytest.mark.parametrize("tier", ["redis", "redis, encrypted"], indirect=True)
def test_pages_in_redis_expire_and_one_that_is_written_again_lives_longer(
    tier: Pair, redis_url: Callable[[], str]
) -> None:
    import redis

    client = redis.Redis.from_url(redis_url())
    assert tier.put(1)
    (name,) = client.keys()
    assert 0 < client.pttl(name) <= 60_000
    client.pexpire(name, 1_000)
    assert tier.put(1)
    assert 1_000 < client.pttl(name) <= 60_000


def test_many_pages_come_back_as_they_went(tier: Pair):
    numbers = range(30)
    assert all(tier.put(number) for number in numbers)
    assert tier.other.contains([key_of(number) for number in numbers]) == [True] * 30
    for number in numbers:
        assert tier.get(number) == page_of(number)


def test_pages_of_another_layout_are_not_offered(tmp_path: Path, redis_url: Callable[[], str]):
    pytest.importorskip("redis", reason="the extra with redis is not installed")
    other = ModelIdentity(fingerprint="b" * 64, numerics=IDENTITY.numerics)
    ours, theirs = (
        RedisTier(redis_url(), PageEnvelope(identity, LAYOUT), timeout_s=5.0, expire_s=60)
        for identity in (IDENTITY, other)
    )
    ours.write_page(final_of(77), memoryview(page_of(77)))
    assert ours.contains([key_of(77)]) == [True]
    assert theirs.contains([key_of(77)]) == [False]


def test_pages_of_another_key_are_left_alone(redis_url: Callable[[], str]):
    pytest.importorskip("redis", reason="the extra with redis is not installed")
    pytest.importorskip("cryptography", reason="the extra with cryptography is not installed")
    one, other = (
        RedisTier(redis_url(), EncryptedEnvelope(IDENTITY, LAYOUT, bytes([byte]) * 32), timeout_s=5.0, expire_s=60)
        for byte in (1, 2)
    )
    assert one.write_page(final_of(78), memoryview(page_of(78)))
    assert other.contains([key_of(78)]) == [False]
    assert other.write_page(final_of(78), memoryview(page_of(78)))
    for tier in (one, other):
        into = bytearray(LAYOUT.page_bytes)
        assert tier.read_page(key_of(78), memoryview(into))
        assert into == page_of(78)


def test_redis_is_not_believed(redis_url: Callable[[], str]):
    redis = pytest.importorskip("redis", reason="the extra with redis is not installed")
    tier = RedisTier(redis_url(), PageEnvelope(IDENTITY, LAYOUT), timeout_s=5.0, expire_s=60)
    client = redis.Redis.from_url(redis_url())
    client.flushall()
    tier.write_page(final_of(5), memoryview(page_of(5)))
    (name,) = client.scan_iter()
    good = client.get(name)
    into = memoryview(bytearray(LAYOUT.page_bytes))
    for bad in (good[:-1], good + b"x", good[:40], b"x", good[:50] + bytes([good[50] ^ 1]) + good[51:], good * 1000):
        client.set(name, bad)
        with pytest.raises(PageCorrupt):
            tier.read_page(key_of(5), into)
        assert tier.contains([key_of(5)]) == [False], "it is not offered again"
    client.lpush(name, "a list")
    with pytest.raises(TierError):
        tier.read_page(key_of(5), into)


def test_a_redis_that_is_not_there_fails_and_says_so(tmp_path: Path):
    pytest.importorskip("redis", reason="the extra with redis is not installed")
    tier = RedisTier(f"unix://{tmp_path}/nobody", PageEnvelope(IDENTITY, LAYOUT), timeout_s=0.2, expire_s=60)
    with pytest.raises(TierError, match="redis"):
        tier.contains([key_of(1)])
    with pytest.raises(TierError, match="redis"):
        tier.write_page(final_of(1), memoryview(page_of(1)))


def test_the_layout_is_part_of_the_proof():
    wide = KvLayout.for_shape(LAYOUT.shape, "fp32")
    _, proof = PageEnvelope(IDENTITY, LAYOUT).seal(key_of(1), memoryview(page_of(1)))
    with pytest.raises(PageCorrupt):
        PageEnvelope(IDENTITY, wide).unseal(
            key_of(1), memoryview(page_of(1)), proof, memoryview(bytearray(LAYOUT.page_bytes))
        )
