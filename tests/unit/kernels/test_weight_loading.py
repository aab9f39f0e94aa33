"""Weights read by the loader are bit for bit those that one array after another would give, whatever the threads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from penstock.kernels import _native, host_ops
from penstock.kernels.native import compression
from penstock.kernels.native.backend import NativeOps, families
from penstock.kernels.operands import PackedLinear
from penstock.kernels.weight_source import LoadFailed, StoredTensor
from penstock.weights.compression_format import PIECE_BYTES, OriginalTensor, checksum, checksum_text

DTYPES = {"bf16": np.dtype(ml_dtypes.bfloat16), "fp16": np.dtype(np.float16), "fp32": np.dtype(np.float32)}
UPPER = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    file = os.open(tmp_path / "tensors", os.O_RDWR | os.O_CREAT)
    yield file
    os.close(file)


def nothing(done: int, total: int) -> None:
    assert 0 <= done <= total


def original(shape: tuple[int, ...], dtype: str, code: tuple[int, int] | None = None) -> OriginalTensor:
    return OriginalTensor(dtype=UPPER[dtype], shape=shape, blake3="0" * 64, code=code)


def rows_of(ops: NativeOps, weight: PackedLinear) -> NDArray[np.float32]:
    """What the weight holds, row by row."""
    return np.asarray(ops.embed(weight, np.arange(weight.n, dtype=np.int32)))


@settings(max_examples=200)
@given(data=st.binary(max_size=3000))
def test_xxh3_is_the_one_of_the_library(data: bytes) -> None:
    assert host_ops.xxh3_128(data) == xxhash.xxh3_128_digest(data)


def test_xxh3_at_every_length_that_takes_another_path() -> None:
    raw = np.random.default_rng(1).integers(0, 256, 1 << 18, np.uint8).tobytes()
    for size in [*range(300), 1023, 1024, 1025, 1088, 1089, 2048, 4095, 65536, len(raw)]:
        assert host_ops.xxh3_128(raw[:size]) == xxhash.xxh3_128_digest(raw[:size]), size


def test_small_records_are_summed_with_their_seed() -> None:
    raw = np.random.default_rng(2).integers(0, 256, 128, np.uint8).tobytes()
    for size in range(97, 129):
        for seed in (0, 1, size << 20, (1 << 64) - 1):
            assert host_ops.xxh3_64(raw[:size], seed) == xxhash.xxh3_64_intdigest(raw[:size], seed), (size, seed)
    for size in (0, 96, 129):
        with pytest.raises(ValueError, match="97 to 128"):
            host_ops.xxh3_64(bytes(size), 0)


@pytest.mark.parametrize("compute", ["bf16", "fp32"])
@pytest.mark.parametrize("source", ["bf16", "fp16", "fp32"])
def test_plain_weights_of_any_shape(descriptor: int, compute: str, source: str) -> None:
    rng = np.random.default_rng(4)
    for shapes in ([(1, 2)], [(16, 64)], [(5, 7), (3, 7)], [(33, 48), (16, 48), (7, 48)], [(40, 260)], [(700, 514)]):
        k = shapes[0][1]
        ends = (k // 4 // 2 * 2, k) if k > 8 else None
        parts = [rng.standard_normal(shape).astype(DTYPES[source]) for shape in shapes]
        raw = b"xyz" + b"".join(part.tobytes() for part in parts)
        os.pwrite(descriptor, raw, 0)
        ops = NativeOps(families()[0], compute)
        expected = ops.pack_linear(np.concatenate(parts), segments=ends)
        loading = ops.loading(1 << 16)
        offset, stored = 3, []
        for index, part in enumerate(parts):
            stored.append(StoredTensor(f"t{index}", descriptor, offset, *part.shape, source))
            offset += part.nbytes
        loading.add_matrix("w", stored, ends)
        weight = loading.run(2, nothing)["w"]
        np.testing.assert_array_equal(rows_of(ops, weight), rows_of(ops, expected))
        x = ops.compute(rng.standard_normal((3, k)))
        np.testing.assert_array_equal(ops.linear(x, weight), ops.linear(x, expected))
        for index, part in enumerate(parts):
            entry = original(part.shape, source)
            text = checksum_text(f"t{index}", entry)
            assert loading.checksum(f"t{index}", text) == checksum(f"t{index}", entry, [memoryview(part.tobytes())])


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("family", families())
def test_compressed_weights(descriptor: int, family: str, threads: int) -> None:
    """Kept as they are where the family decodes in registers, else decoded into plain ones."""
    ops = NativeOps(family, "bf16")
    rng = np.random.default_rng(5)
    plain = [(rng.standard_normal(s) * 0.02).astype(ml_dtypes.bfloat16) for s in ((320, 1024), (64, 1024), (26, 1024))]
    matrices = [m for part in plain if (m := compression.compress(part.view(np.uint16))) is not None]
    assert len(matrices) == len(plain)
    expected = ops.pack_linear(np.concatenate(plain), segments=(512, 1024))
    loading, offset, parts = ops.loading(1 << 20), 1, []
    stored: dict[str, bytes] = {}
    for index, matrix in enumerate(matrices):
        raw = b"".join(section.tobytes() for section in (matrix.counts, matrix.blocks, matrix.escapes))
        os.pwrite(descriptor, raw, offset)
        parts.append((StoredTensor(f"t{index}", descriptor, offset, matrix.n, matrix.k, "bf16"), matrix))
        stored[f"t{index}"] = raw
        offset += len(raw)
    assert loading.add_compressed("w", parts, (512, 1024))
    weight = loading.run(threads, nothing)["w"]
    kept = _native.CompressedKernels(family).in_registers()
    assert isinstance(weight.data, _native.CompressedWeights if kept else _native.Weights)
    np.testing.assert_array_equal(rows_of(ops, weight), rows_of(ops, expected))
    x_TK = ops.compute(rng.standard_normal((3, 1024)))
    np.testing.assert_array_equal(ops.linear(x_TK, weight), ops.linear(x_TK, expected))
    for (name, raw), matrix in zip(stored.items(), matrices, strict=True):
        entry = original((matrix.n, matrix.k), "bf16", (matrix.base, matrix.step))
        assert loading.checksum(name, checksum_text(name, entry)) == checksum(name, entry, [memoryview(raw)])


@pytest.mark.parametrize("family", families())
@pytest.mark.parametrize("damaged", ["planes", "table"])
def test_planes_that_contradict_their_table_are_refused(descriptor: int, family: str, damaged: str) -> None:
    ops = NativeOps(family, "bf16")
    weight = (np.random.default_rng(6).standard_normal((64, 256)) * 0.02).astype(ml_dtypes.bfloat16)
    matrix = compression.compress(weight.view(np.uint16))
    assert matrix is not None
    raw = bytearray(b"".join(section.tobytes() for section in (matrix.counts, matrix.blocks, matrix.escapes)))
    if damaged == "planes":
        raw[matrix.counts.nbytes : matrix.counts.nbytes + 24] = bytes(24)
    else:
        raw[0:4] = (2**32 - 1).to_bytes(4, "little")
    os.pwrite(descriptor, raw, 0)
    loading = ops.loading(1 << 16)
    assert loading.add_compressed("w", [(StoredTensor("t", descriptor, 0, 64, 256, "bf16"), matrix)], None)
    with pytest.raises(LoadFailed, match="other escapes"):
        loading.run(2, nothing)


def test_a_file_that_ends_too_early_names_the_tensor(descriptor: int) -> None:
    os.pwrite(descriptor, bytes(1000), 0)
    ops = NativeOps(families()[0], "bf16")
    loading = ops.loading(1 << 16)
    loading.add_matrix("w", [StoredTensor("t", descriptor, 0, 32, 32, "bf16")], None)
    with pytest.raises(LoadFailed, match="'t': it ends before its time"):
        loading.run(2, nothing)


def test_what_watch_raises_ends_the_load_and_its_threads(descriptor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A watcher that is called at once: before the end, or with the end."""
    monkeypatch.setattr("penstock.kernels.native.weights.WATCH_EVERY_S", 0.0)
    raw = np.zeros(64 << 20, np.uint8)
    os.pwrite(descriptor, raw.data, 0)
    ops = NativeOps(families()[0], "bf16")
    before = len(os.listdir("/proc/self/task"))
    loading = ops.loading(raw.nbytes)
    loading.add_matrix("w", [StoredTensor("t", descriptor, 0, 1 << 14, 1 << 11, "bf16")], None)

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loading.run(4, stop)
    assert len(os.listdir("/proc/self/task")) == before


def test_no_thread_is_left_however_often_it_is_done(descriptor: int) -> None:
    """The kernel counts a thread for a moment after it was joined; whoever forks next must not see it."""
    os.pwrite(descriptor, bytes(8 << 20), 0)
    ops = NativeOps(families()[0], "bf16")
    before = len(os.listdir("/proc/self/task"))
    for _ in range(50):
        loading: Any = ops.loading(8 << 20)
        loading.add_matrix("w", [StoredTensor("t", descriptor, 0, 2048, 2048, "bf16")], None)
        loading.run(3, nothing)
        assert len(os.listdir("/proc/self/task")) == before


def test_both_sides_cut_alike() -> None:
    assert _native.PIECE_BYTES == PIECE_BYTES
