"""Memory nodes: the mask is right, and a machine that has one node goes on as before."""

from __future__ import annotations

import mmap

from penstock.launch.machine import interleave_memory, node_mask


def test_masks_are_words_of_bits() -> None:
    assert node_mask((0, 1)) == (0b11,)
    assert node_mask((1, 65)) == (0b10, 0b10)
    assert node_mask(()) == ()


def test_memory_can_be_had_within_and_after() -> None:
    for nodes in ((), (0,), (0, 63)):  # the last is refused where there is no such node
        with interleave_memory(nodes):
            assert bytes(mmap.mmap(-1, 4096)[:1]) == b"\0"
        assert bytes(mmap.mmap(-1, 4096)[:1]) == b"\0"
