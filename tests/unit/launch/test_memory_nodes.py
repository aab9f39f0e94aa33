"""Memory nodes: the mask is right, and a machine that has one node goes on as before."""

from __future__ import annotations

import mmap

from penstock.launch.machine import mask_of, spread_over


def test_masks_are_words_of_bits() -> None:
    assert mask_of((0, 1)) == (0b11,)
    assert mask_of((1, 65)) == (0b10, 0b10)
    assert mask_of(()) == ()


def test_memory_can_be_had_within_and_after() -> None:
    for nodes in ((), (0,), (0, 63)):  # the last is refused where there is no such node
        with spread_over(nodes):
            assert bytes(mmap.mmap(-1, 4096)[:1]) == b"\0"
        assert bytes(mmap.mmap(-1, 4096)[:1]) == b"\0"
