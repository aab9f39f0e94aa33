"""A page's checksum covers its bytes and everything they depend on."""

from __future__ import annotations

import os
import socket
import threading

import pytest
import xxhash

from penstock.errors import PageCorrupt
from penstock.kernels import host_ops_fallback
from penstock.kernels.host_ops import Arrivals, copy_page, seal_page
from penstock.kernels.operands import KvShape
from penstock.kv.checksum import PageChecksum
from penstock.kv.page_memory import KvLayout
from penstock.types import ModelIdentity, PageId, RequestId
from penstock.wire.transfer_messages import PageReady

LAYOUT = KvLayout.for_shape(KvShape.plain(layers=1, kv_heads=1, head_dim=2), "bf16")  # 128 bytes
IDENTITY = ModelIdentity(fingerprint="ab", numerics="c")
SEAL = PageChecksum(IDENTITY, LAYOUT)


def frame(checksum: bytes, generation: int = 3) -> PageReady:
    return PageReady(
        request=RequestId("r"),
        epoch=1,
        index=0,
        tokens=16,
        page=PageId(0),
        generation=generation,
        checksum=checksum,
    )


def test_a_copy_is_the_same_and_passes() -> None:
    page, into = bytearray(os.urandom(LAYOUT.page_bytes)), bytearray(LAYOUT.page_bytes)
    SEAL.copy_checked(frame(SEAL.checksum(memoryview(page), 3)), memoryview(page), memoryview(into))
    assert into == page


def test_every_single_bit_counts() -> None:
    page = bytearray(os.urandom(LAYOUT.page_bytes))
    announced = frame(SEAL.checksum(memoryview(page), 3))
    for bit in range(8 * len(page)):
        page[bit // 8] ^= 1 << bit % 8
        with pytest.raises(PageCorrupt):
            SEAL.copy_checked(announced, memoryview(page), memoryview(bytearray(len(page))))
        page[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize("size", [64, 255, 256, 257, 1023, 1024, 1025, 4096, 65536 + 40])
def test_pages_of_every_length(size: int) -> None:
    page, into = bytearray(os.urandom(size)), bytearray(size)
    announced = frame(SEAL.checksum(memoryview(page), 3))
    SEAL.copy_checked(announced, memoryview(page), memoryview(into))
    assert into == page
    page[-1] ^= 1
    with pytest.raises(PageCorrupt):
        SEAL.copy_checked(announced, memoryview(page), memoryview(into))


@pytest.mark.parametrize("size", [0, 1, 64, 255, 256, 257, 1000, 1024, 1088, 65536, 65599])
@pytest.mark.parametrize("more", [1, 31, 64, 65, 200, 1024])
def test_a_seal_is_xxh3_of_the_page_and_what_stands_behind_it(size: int, more: int) -> None:
    page, suffix, into = os.urandom(size), os.urandom(more), bytearray(size)
    expected = xxhash.xxh3_128_digest(page + suffix)
    assert seal_page(memoryview(page), suffix) == expected
    assert copy_page(memoryview(page), memoryview(into), suffix) == expected
    assert into == page


@pytest.mark.parametrize("suffix", [b"", bytes(1025)])
def test_what_stands_behind_a_page_has_its_limits(suffix: bytes) -> None:
    with pytest.raises(ValueError, match="1 to 1024"):
        seal_page(memoryview(bytes(64)), suffix)


def test_a_page_is_not_copied_into_one_of_another_size() -> None:
    into = bytearray(63)
    with pytest.raises(ValueError, match="other sizes"):
        copy_page(memoryview(bytes(64)), memoryview(into), b"x")


def test_the_checksum_depends_on_all_that_the_bits_depend_on() -> None:
    page = memoryview(bytes(LAYOUT.page_bytes))
    seals = [
        SEAL,
        PageChecksum(ModelIdentity(fingerprint="a", numerics="bc"), LAYOUT),
        PageChecksum(ModelIdentity(fingerprint="abc", numerics=""), LAYOUT),
        PageChecksum(IDENTITY, KvLayout.for_shape(KvShape.plain(layers=1, kv_heads=2, head_dim=1), "bf16")),
    ]
    assert len({seal.checksum(page, generation) for seal in seals for generation in (0, 1, 1 << 40)}) == 12


@pytest.mark.parametrize("generation", [-1, 1 << 64])
def test_a_generation_that_cannot_be_is_corrupt_not_a_crash(generation: int) -> None:
    page = memoryview(bytes(LAYOUT.page_bytes))
    with pytest.raises(PageCorrupt):
        SEAL.copy_checked(frame(bytes(16), generation), page, memoryview(bytearray(LAYOUT.page_bytes)))


@pytest.mark.parametrize("size", [0, LAYOUT.page_bytes - 1, LAYOUT.page_bytes + 1])
def test_a_wrong_size_is_corrupt(size: int) -> None:
    with pytest.raises(PageCorrupt):
        SEAL.copy_checked(frame(bytes(16)), memoryview(bytes(size)), memoryview(bytearray(LAYOUT.page_bytes)))


@pytest.mark.parametrize("kind", [Arrivals, host_ops_fallback.Arrivals], ids=["native", "without"])
@pytest.mark.parametrize("size", [64, 255, 256, 257, 1023, 65536 + 40, 300_000])
def test_pages_that_come_over_a_socket_are_hashed_on_the_way(size: int, kind: type[Arrivals]) -> None:
    sent, into = [os.urandom(size) for _ in range(3)], [bytearray(size) for _ in range(3)]
    one, other = socket.socketpair()
    with one, other:
        one.setblocking(False)
        other.setblocking(False)
        arrivals = kind([memoryview(page) for page in into])
        assert (arrivals.receive(other.fileno(), 0.0), arrivals.done, arrivals.left) == (0, 0, 3 * size)
        left = memoryview(b"".join(sent))
        while left:
            left = left[one.send(left[: size // 3 + 1]) :]
            while arrivals.receive(other.fileno(), 0.0) > 0:
                pass
            with pytest.raises(ValueError, match="not there"):
                arrivals.checksum(arrivals.done, b"x")
        assert (arrivals.done, arrivals.left) == (3, 0)
        assert [bytes(page) for page in into] == sent
        assert [arrivals.checksum(i, SEAL.suffix(3)) for i in range(3)] == [
            SEAL.checksum(memoryview(page), 3) for page in sent
        ]
        one.close()
        gone = kind([memoryview(bytearray(8))])
        assert gone.receive(other.fileno(), 1.0) == -1
        with pytest.raises(OSError, match="Bad file descriptor"):
            gone.receive(-1, 1.0)


@pytest.mark.parametrize("kind", [Arrivals, host_ops_fallback.Arrivals], ids=["native", "without"])
def test_nothing_is_written_once_arrivals_are_stopped(kind: type[Arrivals]) -> None:
    into = bytearray(100)
    one, other = socket.socketpair()
    with one, other:
        arrivals = kind([memoryview(into)])
        one.sendall(b"a" * 40)
        assert arrivals.receive(other.fileno(), 0.0) == 40
        waiting = threading.Thread(target=arrivals.receive, args=(other.fileno(), 60.0))
        waiting.start()
        arrivals.stop()
        one.sendall(b"b" * 60)  # it wakes, and finds that it is not to write
        waiting.join(30)
        assert not waiting.is_alive()
        assert arrivals.receive(other.fileno(), 60.0) == 0
        assert into == b"a" * 40 + bytes(60)
        assert other.recv(60) == b"b" * 60
