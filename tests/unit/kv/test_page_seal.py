"""A page's checksum covers its bytes and everything they depend on."""

from __future__ import annotations

import os

import pytest

from penstock.errors import PageCorrupt
from penstock.kernels.operands import KvShape
from penstock.kv.layout import KvLayout
from penstock.kv.transfer import port
from penstock.kv.transfer.port import PageSeal
from penstock.types import ModelIdentity, PageId, RequestId
from penstock.wire.messages import PageReady

LAYOUT = KvLayout.of(KvShape.plain(layers=1, kv_heads=1, head_dim=2), "bf16")  # 128 bytes
IDENTITY = ModelIdentity(fingerprint="ab", numerics="c")
SEAL = PageSeal(IDENTITY, LAYOUT)


def frame(checksum: bytes, generation: int = 3) -> PageReady:
    return PageReady(
        request=RequestId("r"),
        epoch=1,
        block=0,
        tokens=16,
        page=PageId(0),
        generation=generation,
        checksum=checksum,
    )


def test_a_copy_is_the_same_and_passes() -> None:
    page, into = bytearray(os.urandom(LAYOUT.page_bytes)), bytearray(LAYOUT.page_bytes)
    SEAL.copy(frame(SEAL.checksum(memoryview(page), 3)), memoryview(page), memoryview(into))
    assert into == page


def test_every_single_bit_counts() -> None:
    page = bytearray(os.urandom(LAYOUT.page_bytes))
    announced = frame(SEAL.checksum(memoryview(page), 3))
    for bit in range(8 * len(page)):
        page[bit // 8] ^= 1 << bit % 8
        with pytest.raises(PageCorrupt):
            SEAL.copy(announced, memoryview(page), memoryview(bytearray(len(page))))
        page[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize("extra", [-1, 0, 1, 7])
def test_pages_longer_than_a_chunk(monkeypatch: pytest.MonkeyPatch, extra: int) -> None:
    monkeypatch.setattr(port, "COPY_CHUNK_BYTES", 40)
    size = 3 * 40 + extra
    page, into = bytearray(os.urandom(size)), bytearray(size)
    announced = frame(SEAL.checksum(memoryview(page), 3))
    SEAL.copy(announced, memoryview(page), memoryview(into))
    assert into == page
    page[-1] ^= 1
    with pytest.raises(PageCorrupt):
        SEAL.copy(announced, memoryview(page), memoryview(into))


def test_the_checksum_depends_on_all_that_the_bits_depend_on() -> None:
    page = memoryview(bytes(LAYOUT.page_bytes))
    seals = [
        SEAL,
        PageSeal(ModelIdentity(fingerprint="a", numerics="bc"), LAYOUT),
        PageSeal(ModelIdentity(fingerprint="abc", numerics=""), LAYOUT),
        PageSeal(IDENTITY, KvLayout.of(KvShape.plain(layers=1, kv_heads=2, head_dim=1), "bf16")),
    ]
    assert len({seal.checksum(page, generation) for seal in seals for generation in (0, 1, 1 << 40)}) == 12


@pytest.mark.parametrize("generation", [-1, 1 << 64])
def test_a_generation_that_cannot_be_is_corrupt_not_a_crash(generation: int) -> None:
    page = memoryview(bytes(LAYOUT.page_bytes))
    with pytest.raises(PageCorrupt):
        SEAL.copy(frame(bytes(16), generation), page, memoryview(bytearray(LAYOUT.page_bytes)))


@pytest.mark.parametrize("size", [0, LAYOUT.page_bytes - 1, LAYOUT.page_bytes + 1])
def test_a_wrong_size_is_corrupt(size: int) -> None:
    with pytest.raises(PageCorrupt):
        SEAL.copy(frame(bytes(16)), memoryview(bytes(size)), memoryview(bytearray(LAYOUT.page_bytes)))
