"""Pages of torch's memory, written for the C++ kernels: the very bytes that those would have written themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from kernel_cases import COMPUTE, TRITONS, families, make, normal, on_gpu

from penstock.errors import KernelError
from penstock.kernels.operands import KvShape, StateShape, StepBatch
from penstock.kernels.page_export import CELLS, ROWS, ExportsPages, export_layout
from penstock.kernels.select import REFERENCE
from penstock.kv_spec import FULL_ATTENTION, KvSpec
from penstock.types import PAGE_TOKENS

PAGES = 5
SHAPES = {
    "heads": KvShape.plain(layers=3, kv_heads=2, head_dim=12),
    "wide keys": KvShape(layers=2, kv_heads=3, key_dim=24, value_dim=16),
    "latent": KvShape(layers=2, kv_heads=1, key_dim=20, value_dim=16, shared=True),
    "groups": KvShape.plain(layers=4, kv_heads=2, head_dim=8).grouped(
        [FULL_ATTENTION, KvSpec(window=32), FULL_ATTENTION, FULL_ATTENTION]
    ),
}


def filled(ops: Any, shape: KvShape) -> Any:
    """KV memory with other numbers everywhere, none of them rounded."""
    kv = ops.new_kv(shape, pages=PAGES)
    kv.keys[:] = torch.from_numpy(normal(1, *kv.keys.shape)).to(kv.keys.dtype)
    if not shape.shared:
        kv.values[:] = torch.from_numpy(normal(2, *kv.values.shape)).to(kv.values.dtype)
    return kv


def by_the_book(kv: Any, shape: KvShape, page: int, per_cell: int) -> np.ndarray:
    """A page as cpp/attention/attention_args.hpp and rope.hpp have it, number by number."""
    out = []
    for layer in range(shape.page_layers):
        keys = kv.keys[page, layer].float().cpu().numpy()  # [head, token, column]
        for head in keys:
            for first in range(0, shape.key_dim, per_cell):
                out += [head[token, column] for token in range(16) for column in range(first, first + per_cell)]
        if shape.shared:
            continue
        for head in kv.values[page, layer].float().cpu().numpy():
            for first in range(0, PAGE_TOKENS, per_cell):
                out += [head[t, c] for c in range(shape.value_dim) for t in range(first, first + per_cell)]
    return np.array(out, np.float32)


def numbers(ops: Any, memory: bytearray, page: int) -> np.ndarray:
    dtype = torch.bfloat16 if ops.compute_dtype == "bf16" else torch.float32
    whole = torch.frombuffer(memory, dtype=dtype).view(PAGES, -1)
    return whole[page].float().numpy()


@pytest.mark.parametrize("compute", COMPUTE)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_number_stands_where_the_kernels_look_for_it(shape: KvShape, compute: str):
    ops = make(REFERENCE, compute)
    kv, memory = filled(ops, shape), bytearray(PAGES * ops.page_bytes(shape))
    writer = ops.page_writer(kv, memoryview(memory), CELLS)
    assert writer.begin_export([3, 0]).is_complete
    for page in (3, 0):
        wanted = by_the_book(kv, shape, page, 2 if compute == "bf16" else 1)
        np.testing.assert_array_equal(numbers(ops, memory, page), wanted)
    for page in (1, 2, 4):
        assert not numbers(ops, memory, page).any(), "a page that nobody asked for was written"


@pytest.mark.parametrize("compute", COMPUTE)
@pytest.mark.parametrize("count", [16, 21])
def test_a_prompts_pages_are_byte_for_byte_those_of_the_kernels(compute: str, count: int):
    """Values that need no rounding, unturned: what both kinds of kernels write is then the same by definition."""
    shape, heads = SHAPES["heads"], 4
    width = (heads + shape.kv_heads) * shape.key_dim + shape.kv_heads * shape.value_dim
    qkv = np.round(normal(3, count, width) * 16) / 16
    memory = {}
    for family in (families()[-1], REFERENCE):
        ops = make(family, compute)
        memory[family] = bytearray(PAGES * ops.page_bytes(shape))
        apart = family == REFERENCE
        kv = ops.new_kv(shape, pages=PAGES, memory=None if apart else memoryview(memory[family]))
        table = np.array([[4, 1]], np.int32)
        batch = StepBatch(
            np.zeros(count, np.int32), np.arange(count, dtype=np.int32), np.array([0, count], np.int32), table,
            np.zeros(0, np.int32),
        )  # fmt: skip
        for layer in range(shape.layers):
            ops.rope_and_write(ops.hidden(qkv + layer), None, kv, layer, batch, heads=heads, kv_heads=shape.kv_heads)
        if apart:
            ops.page_writer(kv, memoryview(memory[family]), CELLS).begin_export([4, 1])
    assert memory[families()[-1]] == memory[REFERENCE]


def test_rows_stay_rows():
    ops, shape = make(REFERENCE, "bf16"), SHAPES["wide keys"]
    size = PAGES * ops.page_bytes(shape)
    straight, memory = bytearray(size), bytearray(size)
    ops.new_kv(shape, pages=PAGES, memory=memoryview(straight))
    straight[:] = np.random.default_rng(0).integers(0, 256, size, np.uint8).tobytes()
    kv = ops.new_kv(shape, pages=PAGES, memory=memoryview(straight))
    ops.page_writer(kv, memoryview(memory), ROWS).begin_export(range(PAGES))
    assert memory == straight


@pytest.mark.parametrize("pair", TRITONS)
def test_the_gpus_backend_writes_them_too(pair: tuple[str, str]):
    """On a GPU: beside what is computed, and done when it says so."""
    ops, shape = make(*pair), SHAPES["heads"]
    assert isinstance(ops, ExportsPages)
    kv, memory = filled(ops, shape), bytearray(PAGES * ops.page_bytes(shape))
    writing = ops.page_writer(kv, memoryview(memory), CELLS).begin_export([2])
    if on_gpu(ops):
        torch.cuda.synchronize()
    assert writing.is_complete
    np.testing.assert_array_equal(numbers(ops, memory, 2), by_the_book(kv, shape, 2, 2 if pair[1] == "bf16" else 1))


def test_what_cannot_be_written_is_refused():
    ops, shape = make(REFERENCE, "bf16"), SHAPES["heads"]
    kv = ops.new_kv(shape, pages=PAGES)
    with pytest.raises(KernelError, match="layout 'cells8-1'; plain-1 and cells16-1 are known"):
        ops.page_writer(kv, memoryview(bytearray(PAGES * ops.page_bytes(shape))), "cells8-1")
    with pytest.raises(KernelError, match="twins of 5 pages do not fit into 100 bytes"):
        ops.page_writer(kv, memoryview(bytearray(100)), CELLS)
    states = StateShape(layers=1, key_heads=1, heads=1, key_dim=16, value_dim=16, taps=2)
    stateful = KvShape(layers=3, kv_heads=2, key_dim=64, value_dim=64, states=states)
    with pytest.raises(KernelError, match="states of recurrent layers"):
        ops.page_writer(ops.new_kv(stateful, pages=2), memoryview(bytearray(1 << 20)), CELLS)


def test_a_class_tells_its_layout():
    for family in families():
        assert export_layout(make(family, "bf16").numerics) == CELLS == make(family, "bf16").kv_layout[: len(CELLS)]
    assert export_layout(make(REFERENCE, "bf16").numerics) == ROWS == make(REFERENCE, "bf16").kv_layout[: len(ROWS)]
    assert export_layout("triton-1-sm90-3.6.0-torch2.11.0-bf16") == ROWS
