"""What stands in for the extension where it is not built gives what the extension gives."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels import _native, host_ops_fallback
from penstock.types import BlockHash

ROOT = BlockHash(bytes(range(32)))


def chain(blocks: int, seed: int) -> list[bytes]:
    return [blake3(f"{seed} {index}".encode()).digest() for index in range(blocks)]


def keys(blocks: list[bytes]) -> bytes:
    return b"".join(block[:8] for block in blocks)


OPS = st.lists(
    st.tuples(st.sampled_from(["add", "remove", "close"]), st.integers(0, 2), st.integers(0, 1), st.integers(0, 30)),
    max_size=25,
)


@settings(max_examples=40)
@given(OPS, st.integers(0, 1))
def test_the_index_is_the_same(ops: list[tuple[str, int, int, int]], asked: int) -> None:
    both = [_native.BlockIndex(40, 5), host_ops_fallback.BlockIndex(40, 5)]
    owners = [[index.open() for _ in range(3)] for index in both]
    for verb, who, seed, length in ops:
        blocks = chain(30, seed)
        told = []
        for index, own in zip(both, owners, strict=True):
            if verb == "add":
                told.append(index.add(own[who], keys(blocks[:length])))
            elif verb == "remove":
                index.remove(own[who], keys(blocks[length:]))
            else:
                index.close(own[who])
                index.sweep(1 << 20)
                own[who] = index.open()
        assert len(set(told)) < 2
    found = []
    for index, own in zip(both, owners, strict=True):
        depths = np.empty(5, np.int32)
        index.match(chain(30, asked), depths)
        has = [index.has(owner, block) for owner in own for block in chain(30, asked)]
        found.append((depths[own].tolist(), has, index.blocks()))
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", [_native.BlockIndex, host_ops_fallback.BlockIndex])
def test_limits_are_the_same(kind: Any) -> None:
    index = kind(1, 1)
    assert (index.open(), index.open()) == (0, None)
    for wrong in (lambda: kind(0, 1), lambda: kind(1, 0), lambda: index.add(1, b""), lambda: index.add(0, b"x")):
        with pytest.raises(ValueError):  # noqa: PT011 - the words are for nobody but us
            wrong()


def test_hashes_and_seals_are_the_same() -> None:
    tokens = tuple(range(70, 130))
    for first, last in ((0, 60), (16, 48), (3, 18)):
        expected = _native.hash_blocks(ROOT, tokens, first, last)
        assert host_ops_fallback.hash_blocks(ROOT, tokens, first, last) == expected
    for parent, given_tokens, last in ((b"short", tokens, 16), (ROOT, tokens, 61), (ROOT, (1,) * 15 + (2**32,), 16)):
        with pytest.raises(ValueError):  # noqa: PT011
            host_ops_fallback.hash_blocks(BlockHash(parent), given_tokens, 0, last)
    rows = np.empty((2, 2, 32), np.uint8)
    ids = np.arange(32, dtype=np.uint32)
    _native.hash_chain(ROOT, ids, rows[0])
    host_ops_fallback.hash_chain(ROOT, ids, rows[1])
    assert rows[0].tobytes() == rows[1].tobytes()
    page, into = os.urandom(300), bytearray(300)
    assert host_ops_fallback.xxh3_128(memoryview(page)) == _native.xxh3_128(memoryview(page))
    assert host_ops_fallback.xxh3_64(memoryview(page)[:120], 7) == _native.xxh3_64(memoryview(page)[:120], 7)
    with pytest.raises(ValueError, match="97 to 128"):
        host_ops_fallback.xxh3_64(memoryview(page), 7)
    expected = _native.seal_page(memoryview(page), b"own")
    assert host_ops_fallback.seal_page(memoryview(page), b"own") == expected
    assert host_ops_fallback.copy_page(memoryview(page), memoryview(into), b"own") == expected
    assert into == page
    for wrong in (b"", bytes(1025)):
        with pytest.raises(ValueError, match="1 to 1024"):
            host_ops_fallback.seal_page(memoryview(page), wrong)
    with pytest.raises(ValueError, match="other sizes"):
        host_ops_fallback.copy_page(memoryview(page), memoryview(bytearray(9)), b"own")


def test_without_the_extension_sums_name_what_they_need() -> None:
    """And the doctor can still say so."""
    code = """
import sys
sys.modules["penstock.kernels._native"] = sys.modules["xxhash"] = None
import penstock.cli.doctor
try:
    import penstock.kernels.host_ops
except ImportError as error:
    print(error)
"""
    done = _run(code)
    assert "pip install 'penstock[gpu]'" in done.stdout


def test_a_service_can_be_put_together_without_the_extension() -> None:
    """Whatever a GPU's worker and gateway import, they find."""
    code = """
import sys
sys.modules["penstock.kernels._native"] = None
import penstock.launch.compose, penstock.launch.worker_process, penstock.launch.gateway_process
from penstock.kernels.host_ops import BlockIndex
assert BlockIndex.__module__ == "penstock.kernels.host_ops_fallback"
"""
    _run(code)


def _run(code: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run([sys.executable, "-c", code], check=True, env=env, stdout=subprocess.PIPE, text=True)
