"""What kernel tests share: which backends are of the default tier, and weights apart on a build with sanitizers."""

from __future__ import annotations

import ctypes
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.kernels.native.backend import families
from penstock.kernels.native.memory import ALIGNMENT, WeightArena
from penstock.kernels.select import REFERENCE

CPU_BACKENDS = {(family, compute) for family in (*families(), REFERENCE) for compute in ("bf16", "fp32")}
SANITIZED = "PENSTOCK_SANITIZED" in os.environ


DEFAULT = {(families()[0], "bf16"), (families()[0], "fp32"), (REFERENCE, "fp32")}
"""The best family of this processor, which serves, in both types, and the reference.  Others: ``--families``, which CI
takes when the kernels have changed."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Other families and types go through the same tests with ``--families`` or ``--long``."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and isinstance(item, pytest.Function):
            pair = backend_of(getattr(item, "callspec", None))
            if pair is not None and pair not in DEFAULT:
                item.add_marker(pytest.mark.family)
                item.add_marker(pytest.mark.long)


def backend_of(callspec: Any) -> tuple[str, str] | None:
    """The family and type of the CPU that a test faces, by its parameters; None for one that is not told them."""
    parameters = callspec.params if callspec is not None else {}
    pair = parameters.get("family"), parameters.get("compute")
    tuples = [value for value in parameters.values() if isinstance(value, tuple)]
    return next((each[:2] for each in (pair, *tuples) if each[:2] in CPU_BACKENDS), None)


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
