"""On a build with sanitizers, every weight lies in memory of its own: the arena's neighbours would hide an overrun."""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.kernels.native.memory import ALIGNMENT, WeightArena

SANITIZED = "PENSTOCK_SANITIZED" in os.environ


def exact_cells(_: WeightArena, count: int) -> NDArray[np.uint32]:
    """``count`` zeroed cells, aligned as the arena's, with nothing readable around them."""
    libc, address = ctypes.CDLL(None), ctypes.c_void_p()
    assert libc.posix_memalign(ctypes.byref(address), ctypes.c_size_t(ALIGNMENT), ctypes.c_size_t(count * 4)) == 0
    memory: Any = (ctypes.c_uint32 * count).from_address(address.value)
    weakref.finalize(memory, libc.free, address)
    cells = np.frombuffer(memory, np.uint32)
    cells[:] = 0
    return cells


@pytest.fixture(autouse=True, scope="session")
def _weights_apart() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        if SANITIZED:
            patch.setattr(WeightArena, "cells", exact_cells)
        yield
