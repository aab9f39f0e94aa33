"""Pages of a device that others are to read: written to host memory in the layout of whoever goes on with them.

A page there has the number that it has on the device: its twin.  Numbers change their places and nothing else, so what
was written is exact in either layout.

::

    rows      K [kv head][16 tokens][columns]              V [kv head][16 tokens][columns]
    cells16   K [kv head][columns / n][16 tokens][n]       V [kv head][16 tokens / n][columns][n]     n numbers a cell

Knows neither requests nor whether a page is final.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from penstock.kernels.operands import Array

ROWS = "plain-1"
"""Of ``reference`` and the kernels of a GPU."""

CELLS = "cells16-1"
"""Of the C++ kernels: ``native``."""


class PendingExport(Protocol):
    """Pages on their way."""

    @property
    def over(self) -> bool:
        """Are they there?  Those begun before are, then, too."""
        ...


class PageWriter(Protocol):
    """Called by one thread, between two steps."""

    def begin(self, pages: Sequence[int]) -> PendingExport:
        """Write these pages as they are now to their twins; does not wait where the device can do it by itself."""
        ...


@runtime_checkable
class ExportsPages(Protocol):
    """What a backend has besides, if its pages can leave its device."""

    def page_writer(self, kv: Array, memory: memoryview, layout: str) -> PageWriter:
        """From this KV memory to ``memory``, page after page, in ``layout``: ROWS or CELLS.  Raises KernelError for
        memory that is too small, another layout, or pages that hold states."""
        ...


def export_layout(numerics: str) -> str:
    """How pages lie in a numerics class: one layout for all kernels of a kind."""
    return CELLS if numerics.startswith("cpp-") else ROWS
