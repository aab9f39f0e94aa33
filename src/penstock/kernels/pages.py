"""KV pages as bytes, checked and copied, or taken from a socket, in one pass (C++: cpp/python/module_pages.cpp).

Knows nothing of who sends them, or why.
"""

from __future__ import annotations

try:
    from penstock.kernels._native import Arrivals, copy_page, seal_page  # noqa: F401
except ImportError:  # not built: enough for a GPU, whose pages stay where they are
    from penstock.kernels.without_native import Arrivals, copy_page, seal_page  # type: ignore[assignment]  # noqa: F401
