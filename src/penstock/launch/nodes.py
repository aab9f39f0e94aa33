"""Memory of several nodes: spreads what is touched first over all of them (set_mempolicy(2), without libnuma)."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_CALL = {"x86_64": 238, "aarch64": 237}  # number of set_mempolicy
_DEFAULT, _INTERLEAVE = 0, 3
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)

log = logging.getLogger(__name__)


@contextmanager
def spread_over(nodes: Sequence[int]) -> Iterator[None]:
    """Pages that this thread touches first come from these nodes in turn; none: wherever the thread runs.

    A system that refuses (a container may) only costs speed, so it is logged and nothing else.
    """
    if not nodes:
        yield
        return
    _set_policy(_INTERLEAVE, nodes)
    try:
        yield
    finally:
        _set_policy(_DEFAULT, ())


def mask_of(nodes: Sequence[int]) -> tuple[int, ...]:
    """The nodes as bits of words as long as the machine's."""
    words = [0] * (max(nodes, default=-1) // _WORD_BITS + 1)
    for node in nodes:
        words[node // _WORD_BITS] |= 1 << node % _WORD_BITS
    return tuple(words)


def _set_policy(mode: int, nodes: Sequence[int]) -> None:
    number = _CALL.get(platform.machine())
    if number is None:
        return
    words = mask_of(nodes)
    mask = (ctypes.c_ulong * max(1, len(words)))(*words)
    libc = ctypes.CDLL(None, use_errno=True)
    # The kernel reads one bit less than it is told.
    if libc.syscall(ctypes.c_long(number), mode, mask, ctypes.c_ulong(len(words) * _WORD_BITS + 1)) != 0:
        log.info("memory is not spread over nodes: set_mempolicy: %s", os.strerror(ctypes.get_errno()))
