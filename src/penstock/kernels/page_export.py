"""Pages of a device exported to host memory, in the layout of the worker that fetches them.

An exported page has the number that it has on the device.  Numbers are permuted and not changed, so a page is exact in
either layout.

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
"""The layout of the torch and Triton backends."""

CELLS = "cells16-1"
"""The layout of the C++ backend."""


class PendingExport(Protocol):
    """Pages that are being written."""

    @property
    def is_complete(self) -> bool:
        """Whether these pages, and all exports begun before, are written."""
        ...


class PageWriter(Protocol):
    """Writes pages to host memory; called by one thread, between two steps."""

    def begin_export(self, pages: Sequence[int]) -> PendingExport:
        """Begin writing these pages as they are now; returns at once where the device copies asynchronously."""
        ...


@runtime_checkable
class ExportsPages(Protocol):
    """A backend that can export pages from its device."""

    def page_writer(self, kv: Array, memory: memoryview, layout: str) -> PageWriter:
        """A writer from this KV memory to ``memory``, page after page, in ``layout``: ROWS or CELLS.

        Raises KernelError for memory that is too small, another layout, or pages that hold states.
        """
        ...


def export_layout(numerics: str) -> str:
    """The layout of pages in a numerics class."""
    return CELLS if numerics.startswith("cpp-") else ROWS
