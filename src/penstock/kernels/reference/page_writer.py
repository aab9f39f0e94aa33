"""Pages out of torch's memory, on a GPU or the CPU, into a processor's: gathered, permuted, copied.  No arithmetic.

On a GPU all of it runs on its own stream, after what was computed so far and during the next step; the bus is what
limits it.  The host's memory is registered with the driver if that lets us, so that copies need no thread of ours.

This module imports torch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.errors import KernelError
from penstock.kernels.page_export import CELLS, ROWS, PageWriter, PendingExport
from penstock.kernels.reference.attention import ReferenceKv
from penstock.types import PAGE_TOKENS

log = logging.getLogger(__name__)

_CUDA: Any = torch.cuda  # untyped

STAGED_BYTES = 64 << 20
"""Pages that are permuted at a time, on the device."""


class TorchPageWriter(PageWriter):
    """Exports pages through a staging buffer on the device."""

    def __init__(self, kv: ReferenceKv, memory: memoryview, layout: str) -> None:
        """``memory`` stays mapped and in place for as long as this is used."""
        if layout not in (ROWS, CELLS):
            raise KernelError(f"pages cannot be written in the layout {layout!r}; {ROWS} and {CELLS} are known")
        if kv.shape.states is not None:
            raise KernelError("pages with states of recurrent layers cannot be written in another layout")
        if kv.key_exponents is not None:
            raise KernelError("pages of codes cannot be written in another layout: keep keys and values as they are")
        self._kv = kv
        device, dtype = kv.keys.device, kv.keys.dtype
        self._per_cell = max(1, 4 // dtype.itemsize) if layout == CELLS else 0
        pages, numbers = len(kv.keys), kv.shape.numbers * PAGE_TOKENS
        if memory.nbytes < pages * numbers * dtype.itemsize:
            raise KernelError(f"twins of {pages} pages do not fit into {memory.nbytes} bytes of host memory")
        self._twins_PN = torch.frombuffer(memory, dtype=dtype, count=pages * numbers).view(pages, numbers)
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = _CUDA.Stream(device)
            _register(self._twins_PN)
        most = max(1, min(pages, STAGED_BYTES // (numbers * dtype.itemsize)))
        self._staged_MN = torch.empty((most, numbers), dtype=dtype, device=device)

    def begin_export(self, pages: Sequence[int]) -> PendingExport:
        if self._stream is None:
            self._write(pages)
            return FinishedExport()
        self._stream.wait_stream(torch.cuda.current_stream(self._kv.keys.device))
        with torch.cuda.stream(self._stream):
            self._write(pages)
            event = _CUDA.Event()
            event.record(self._stream)
        return EventExport(event)

    def _write(self, pages: Sequence[int]) -> None:
        for begin in range(0, len(pages), len(self._staged_MN)):
            some = pages[begin : begin + len(self._staged_MN)]
            copy_permuted(self._kv, some, self._staged_MN[: len(some)], self._per_cell)
            for place, page in enumerate(some):
                self._twins_PN[page].copy_(self._staged_MN[place], non_blocking=self._stream is not None)


def copy_permuted(kv: ReferenceKv, pages: Sequence[int], into_MN: Tensor, per_cell: int) -> None:
    """Whole pages, all layers of each, as cells of ``per_cell`` numbers; 0: as rows, which they are."""
    shape = kv.shape
    index = _on_device(pages, kv.keys.device)
    layers = (len(pages), shape.page_layers)
    into_MLN = into_MN.view(*layers, -1)
    of_keys = shape.kv_heads * PAGE_TOKENS * shape.key_dim
    keys, n = kv.keys.index_select(0, index), per_cell or shape.key_dim
    # [.., tokens, cells, n] to [.., cells, tokens, n]; with a cell as wide as a row there is one, and nothing moves
    cells = (*layers, shape.kv_heads, shape.key_dim // n, PAGE_TOKENS, n)
    of_rows = keys.reshape(*layers, shape.kv_heads, PAGE_TOKENS, shape.key_dim // n, n)
    into_MLN[..., :of_keys].view(cells).copy_(of_rows.transpose(3, 4))
    if shape.shared:
        return  # values are columns of keys
    values, n = kv.values.index_select(0, index), per_cell or 1
    cells = (*layers, shape.kv_heads, PAGE_TOKENS // n, shape.value_dim, n)
    of_rows = values.reshape(*layers, shape.kv_heads, PAGE_TOKENS // n, n, shape.value_dim)
    into_MLN[..., of_keys:].view(cells).copy_(of_rows.transpose(4, 5))


def _on_device(pages: Sequence[int], device: torch.device) -> Tensor:
    """Without waiting: a copy out of pageable memory is one that the host waits for, behind all that its stream does
    already, here the copies of pages.  Torch reuses pinned memory only after the copy out of it has ended."""
    on_gpu = device.type == "cuda"
    return torch.tensor(pages, dtype=torch.int64, pin_memory=on_gpu).to(device, non_blocking=on_gpu)


class FinishedExport(PendingExport):
    """An export that ended at once."""

    is_complete = True


class EventExport(PendingExport):
    """An export that ends with a CUDA event."""

    def __init__(self, event: Any) -> None:
        self._event = event

    @property
    def is_complete(self) -> bool:
        return bool(self._event.query())


def _register(twins: Tensor) -> None:
    """Have the driver copy there by itself; without, its own buffers stand in between, and the host waits."""
    begun = time.monotonic()
    code = _CUDA.cudart().cudaHostRegister(twins.data_ptr(), twins.nbytes, 0)
    if int(code) == 0:
        log.info("host memory of %.1f GiB registered in %.2f s", twins.nbytes / 2**30, time.monotonic() - begun)
    else:
        log.warning("host memory for pages cannot be registered (error %d): they are copied more slowly", int(code))
