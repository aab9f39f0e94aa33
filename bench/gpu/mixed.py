"""Mixed fleets' part of a GPU: how fast the pages of a chunk get into host memory, alone and beside the next chunk."""

from __future__ import annotations

import mmap
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from bench.gpu.driving import Driver
from bench.gpu.figures import Check
from bench.gpu.place import Place

from penstock.kernels.ops import Ops
from penstock.kernels.page_export import CELLS, ExportsPages, PageWriter
from penstock.kernels.reference.attention import ReferenceKv, kv_over
from penstock.kernels.reference.page_writer import copy_permuted
from penstock.types import PAGE_TOKENS

REPEATS = 10


def measured(driver: Driver, ops: Ops, place: Place, chunk: int) -> tuple[dict[str, Any], Check]:
    """Seconds of a chunk's pages out, of reading a chunk, of both at once; and whether they arrived as they were."""
    assert isinstance(ops, ExportsPages)
    shape = driver.made.spec.kv
    pages = max(1, chunk // PAGE_TOKENS)
    kv: ReferenceKv = ops.new_kv(shape, pages=2 * pages)
    _fill(kv)
    nbytes = ops.page_bytes(shape)
    twins = memoryview(mmap.mmap(-1, 2 * pages * nbytes))
    writer = ops.page_writer(kv, twins, CELLS)
    scattered = torch.randperm(2 * pages, generator=torch.Generator().manual_seed(3)).tolist()[:pages]
    text_N = driver.texts(1, chunk)[0]

    def read() -> None:
        driver.read(text_N, 0, chunk)

    def both() -> None:
        writing = writer.begin_export(scattered)
        read()
        _wait(writing)

    out_s = _seconds(lambda: _wait(writer.begin_export(scattered)), place)
    read_s, both_s = _seconds(read, place), _seconds(both, place)
    line = {
        "pages": pages,
        "MB": pages * nbytes / 1e6,
        "out_ms": out_s * 1e3,
        "GB_per_s": pages * nbytes / out_s / 1e9,
        "out_us_a_token": out_s / chunk * 1e6,
        "read_us_a_token": read_s / chunk * 1e6,
        "beside": both_s / read_s,
    }
    return line, _arrived(writer, kv, twins, scattered)


def _arrived(writer: PageWriter, kv: ReferenceKv, twins: memoryview, pages: list[int]) -> Check:
    """Against the same permutation of a copy on the host."""
    twins[:] = bytes(len(twins))
    _wait(writer.begin_export(pages))
    whole = kv.keys.untyped_storage().cpu()
    numbers = torch.empty(0, dtype=kv.keys.dtype).set_(whole)
    host = kv_over(numbers, kv.shape)
    dtype = kv.keys.dtype
    written_PN = torch.frombuffer(twins, dtype=dtype).view(len(host.keys), -1)
    wanted_MN = torch.empty((len(pages), written_PN.shape[1]), dtype=dtype)
    copy_permuted(host, pages, wanted_MN, max(1, 4 // dtype.itemsize))
    same = torch.equal(written_PN[pages].view(torch.uint8), wanted_MN.view(torch.uint8))
    return Check("pages out of the device, turned", passed=same, found=f"{len(pages)} pages, byte for byte")


def _fill(kv: ReferenceKv) -> None:
    for numbers in (kv.keys, kv.values):
        numbers.copy_(torch.randn(numbers.shape, dtype=torch.float32, device=numbers.device))


def _wait(writing: Any) -> None:
    while not writing.is_complete:
        time.sleep(0)


def _seconds(work: Callable[[], None], place: Place) -> float:
    """The median by the host's clock: two streams have no common one."""
    took = []
    for _ in range(1 if place.dry else REPEATS):
        place.wait()
        begun = time.perf_counter()
        work()
        place.wait()
        took.append(time.perf_counter() - begun)
    return statistics.median(took)
