"""Hashed blocks in C++ against their definitions: the chain against BLAKE3, the index against sets."""

from __future__ import annotations

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.hashing import block_hash, block_hashes
from penstock.kernels.host_ops import BlockIndex, hash_blocks, hash_chain, keys_of
from penstock.types import BlockHash

ROOT = BlockHash(bytes(range(32)))


@given(st.lists(st.integers(0, 2**32 - 1), max_size=70), st.binary(min_size=32, max_size=32))
def test_a_chain_is_keyed_blake3(tokens: list[int], root: bytes):
    expected = list(block_hashes(BlockHash(root), tokens))
    assert hash_blocks(BlockHash(root), tuple(tokens), 0, len(tokens)) == expected
    assert hash_blocks(BlockHash(root), tokens, 0, len(tokens)) == expected
    if expected:
        raw = b"".join(token.to_bytes(4, "little") for token in tokens[:16])
        assert expected[0] == blake3(raw, key=root).digest() == block_hash(BlockHash(root), tokens[:16])


def test_a_chain_goes_on_from_any_block():
    tokens = tuple(range(160))
    whole = hash_blocks(ROOT, tokens, 0, 160)
    assert hash_blocks(whole[3], tokens, 64, 160) == whole[4:]
    out = np.empty((10, 32), np.uint8)
    hash_chain(ROOT, np.arange(160, dtype=np.uint32), out)
    assert [row.tobytes() for row in out] == whole


@pytest.mark.parametrize(
    ("root", "tokens", "first", "last", "error"),
    [
        (b"short", (1,) * 16, 0, 16, ValueError),
        (ROOT, (1,) * 16, 0, 17, ValueError),
        (ROOT, (1,) * 16, -1, 16, ValueError),
        (ROOT, (1,) * 15 + (2**32,), 0, 16, ValueError),
        (ROOT, (1,) * 15 + (-1,), 0, 16, OverflowError),
        (ROOT, (1,) * 15 + ("1",), 0, 16, TypeError),
        (ROOT, "1" * 16, 0, 16, ValueError),
    ],
)
def test_what_are_no_tokens_is_refused(root, tokens, first, last, error):
    with pytest.raises(error):
        hash_blocks(root, tokens, first, last)


def chain(blocks: int, seed: int = 0) -> list[BlockHash]:
    """Names of blocks; chains of other seeds have none in common."""
    return [BlockHash(blake3(f"{seed} {i}".encode()).digest()) for i in range(blocks)]


def depths(index: BlockIndex, hashes: list[BlockHash], owners: int) -> list[int]:
    found = np.empty(owners, np.int32)
    index.match(hashes, found)
    return found.tolist()


OPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "remove", "close"]), st.integers(0, 3), st.integers(0, 2), st.integers(0, 40)
    ),
    max_size=40,
)


@settings(deadline=None)
@given(OPS, st.integers(0, 2), st.integers(1, 1024))
def test_the_index_knows_what_sets_know(ops, asked: int, swept: int):
    """Owners gain chains from their beginning and lose them from their end, as caches do."""
    index = BlockIndex(10_000, 70)
    owners = [index.open() for _ in range(4)]
    held: list[set[BlockHash]] = [set() for _ in owners]
    for verb, who, seed, length in ops:
        blocks = chain(40, seed)
        if verb == "add":
            assert index.add(owners[who], keys_of(blocks[:length])) == 0
            held[who].update(blocks[:length])
        elif verb == "remove":
            index.remove(owners[who], keys_of(blocks[length:]))
            held[who].difference_update(blocks[length:])
        else:
            index.close(owners[who])
            held[who] = set()
            owners[who] = index.open()
            index.sweep(swept)
    prompt = chain(40, asked)
    found = depths(index, prompt, 70)
    for who, owner in enumerate(owners):
        assert found[owner] == next((i for i, block in enumerate(prompt) if block not in held[who]), 40)
        assert all(index.has(owner, block) == (block in held[who]) for block in prompt)
    index.sweep(1 << 20)
    assert index.blocks() == len(set().union(*held))


def test_many_owners_share_one_block_for_the_same_memory():
    index = BlockIndex(1_000_000, 256)
    blocks = keys_of(chain(20_000))
    owners = [index.open() for _ in range(256)]
    index.add(owners[0], blocks)
    alone = index.memory_bytes()
    for owner in owners[1:]:
        index.add(owner, blocks)
    assert index.blocks() == 20_000
    assert index.memory_bytes() < 1.5 * alone
    assert index.open() is None
    index.close(owners[7])
    assert index.open() == owners[7]
    assert depths(index, chain(20_000), 256)[owners[7]] == 0


def test_limits_hold():
    index = BlockIndex(10, 2)
    owner = index.open()
    assert index.add(owner, keys_of(chain(12))) == 2
    assert index.add(owner, keys_of(chain(12))) == 2
    assert index.blocks() == 10
    index.remove(owner, keys_of(chain(5)))
    assert index.add(owner, keys_of(chain(3, seed=1))) == 0
    for wrong in (
        lambda: BlockIndex(0, 1),
        lambda: BlockIndex(1, 0),
        lambda: index.add(2, b""),
        lambda: index.add(0, b"x"),
    ):
        with pytest.raises(ValueError):  # noqa: PT011 - the words are for nobody but us
            wrong()
