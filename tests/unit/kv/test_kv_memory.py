"""Pages lie where they should, readers cannot write, and nothing is left behind."""

from __future__ import annotations

import ctypes
import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.errors import ConfigError
from penstock.kernels.operands import KvShape
from penstock.kv.page_memory import KvLayout, KvMemory, KvMemoryFile
from penstock.types import PageId

LAYOUT = KvLayout.for_shape(
    KvShape.plain(layers=1, kv_heads=1, head_dim=5), "fp32"
)  # 640 bytes: no multiple of a memory page


@contextmanager
def made(pages: int, *, shared: bool) -> Iterator[tuple[KvMemory, KvMemory]]:
    """An owner's memory and a reader's: two mappings of one file, or one private memory twice."""
    with ExitStack() as stack:
        if not shared:
            memory = stack.enter_context(closing(KvMemory.anonymous(LAYOUT, pages)))
            yield memory, memory
            return
        file = stack.enter_context(closing(KvMemoryFile.create(LAYOUT, pages)))
        own, reader = file.map_own(), file.map_readonly()
        stack.enter_context(closing(own))
        stack.enter_context(closing(reader))
        yield own, reader


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_sizes_and_names_of_layouts() -> None:
    assert LAYOUT.page_bytes == 2 * 16 * 5 * 4
    names = {
        KvLayout.for_shape(KvShape.plain(layers=a, kv_heads=b, head_dim=c), d).name
        for a in (1, 2)
        for b in (1, 2)
        for c in (8, 16)
        for d in ("bf16", "fp16", "fp32")
    }
    assert len(names) == 24


def test_a_latent_page_holds_its_values_once() -> None:
    latent = KvShape(layers=3, kv_heads=1, key_dim=576, value_dim=512, shared=True)
    assert KvLayout.for_shape(latent, "bf16").page_bytes == 3 * 16 * 576 * 2
    assert KvLayout.for_shape(replace(latent, shared=False), "bf16").page_bytes == 3 * 16 * (576 + 512) * 2
    assert KvLayout.for_shape(latent, "bf16").name == "latent-l3-h1-t16-k576-v512-bf16"


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("dtype", {"dtype": "int3"}),
        ("layers", {"layers": 0}),
        ("key_dim", {"head_dim": -1}),
        ("page_tokens", {"page_tokens": 0}),
    ],
)
def test_a_layout_that_cannot_be_is_refused(field: str, change: dict[str, Any]) -> None:
    asked = {"layers": 1, "kv_heads": 1, "head_dim": 8, "dtype": "bf16", "page_tokens": 16} | change
    shape = KvShape.plain(**{name: asked[name] for name in ("layers", "kv_heads", "head_dim")})
    with pytest.raises(ConfigError, match=field):
        KvLayout.for_shape(shape, asked["dtype"], page_tokens=asked["page_tokens"])


@pytest.mark.parametrize("shared", [True, False])
def test_pages_lie_one_after_another(shared: bool) -> None:
    with made(7, shared=shared) as (memory, _):
        assert memory.buffer.nbytes == 7 * LAYOUT.page_bytes
        assert bytes(memory.buffer) == bytes(memory.buffer.nbytes)
        for page in range(7):
            memory.view(PageId(page))[:] = bytes([page + 1]) * LAYOUT.page_bytes
        assert bytes(memory.buffer) == b"".join(bytes([page + 1]) * LAYOUT.page_bytes for page in range(7))
        for outside in (-1, 7, 1 << 70):
            with pytest.raises(IndexError):
                memory.view(PageId(outside))


@pytest.mark.parametrize("shared", [True, False])
def test_wiping_gives_zeros(shared: bool) -> None:
    with made(7, shared=shared) as (memory, reader):
        memory.buffer[:] = b"x" * memory.buffer.nbytes
        memory.wipe()
        assert bytes(memory.buffer) == bytes(memory.buffer.nbytes)
        assert bytes(reader.buffer) == bytes(reader.buffer.nbytes)
        memory.view(PageId(3))[:4] = b"page"
        assert bytes(memory.view(PageId(3))[:4]) == b"page"


def test_a_wiped_file_holds_no_memory() -> None:
    with closing(KvMemoryFile.create(LAYOUT, 1000)) as file, closing(file.map_own()) as memory:
        assert os.fstat(file.descriptor).st_blocks == 0
        memory.buffer[:] = b"x" * memory.buffer.nbytes
        assert os.fstat(file.descriptor).st_blocks > 0
        memory.wipe()
        assert os.fstat(file.descriptor).st_blocks == 0


def test_readers_see_what_the_owner_writes_and_cannot_write() -> None:
    with made(3, shared=True) as (own, reader):
        own.view(PageId(2))[:5] = b"hello"
        assert bytes(reader.view(PageId(2))[:5]) == b"hello"
        assert reader.readonly
        assert not own.readonly
        with pytest.raises(TypeError):
            reader.view(PageId(2))[:5] = b"other"


def test_a_reader_cannot_make_its_mapping_writable() -> None:
    with closing(KvMemoryFile.create(LAYOUT, 3)) as file, closing(file.map_own()) as own:
        own.view(PageId(0))[:5] = b"hello"
        libc = ctypes.CDLL(None, use_errno=True)
        for memory, allowed in ((own, 0), (file.map_readonly(), -1)):
            address = np.frombuffer(memory.buffer, np.uint8).ctypes.data
            assert libc.mprotect(ctypes.c_void_p(address), 4096, 1 | 2) == allowed
            memory.close()


def test_the_file_cannot_change_its_size_and_is_not_inherited_by_programs() -> None:
    with closing(KvMemoryFile.create(LAYOUT, 3)) as file:
        size = os.fstat(file.descriptor).st_size
        for other in (0, size * 2):
            with pytest.raises(PermissionError):
                os.ftruncate(file.descriptor, other)
        assert fcntl.fcntl(file.descriptor, fcntl.F_GETFD) & fcntl.FD_CLOEXEC


def test_nothing_is_left_after_closing() -> None:
    before = (descriptors(), sorted(os.listdir("/dev/shm")))
    file = KvMemoryFile.create(LAYOUT, 3, label="left-behind")
    own, reader = file.map_own(), file.map_readonly()
    for _ in range(2):
        file.close()
    for memory in (own, reader):
        memory.close()
    assert (descriptors(), sorted(os.listdir("/dev/shm"))) == before
    assert "left-behind" not in Path("/proc/self/maps").read_text()


def test_views_in_use_keep_the_memory() -> None:
    memory = KvMemory.anonymous(LAYOUT, 3)
    array = np.frombuffer(memory.view(PageId(1)), np.uint8)
    memory.close()
    assert array.sum() == 0


@pytest.mark.parametrize("pages", [0, -1])
def test_memory_without_pages_is_refused(pages: int) -> None:
    with pytest.raises(ConfigError, match="at least 1 page"):
        KvMemoryFile.create(LAYOUT, pages)
    with pytest.raises(ConfigError, match="at least 1 page"):
        KvMemory.anonymous(LAYOUT, pages)


def test_memory_that_the_system_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="bytes of"):
        KvMemory.anonymous(LAYOUT, 1 << 50)


def test_memory_that_cannot_be_had_is_refused_with_what_helps() -> None:
    help_ = "use --kv-memory with less"
    with pytest.raises(ConfigError, match=rf"cannot make \d+ bytes of KV memory: .*; {help_}"):
        KvMemory.anonymous(LAYOUT, 1 << 50)
    with (
        closing(KvMemoryFile.create(LAYOUT, 1 << 45)) as file,
        pytest.raises(ConfigError, match=rf"cannot map \d+ bytes of KV memory: .*; {help_}"),
    ):
        file.map_own()
