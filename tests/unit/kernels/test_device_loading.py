"""Weights that go to a device from files: the same as of arrays, checked by the same sums, and damage is told."""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from penstock.kernels.operands import PackedLinear
from penstock.kernels.triton import weights
from penstock.kernels.triton.weights import DeviceWeightLoading
from penstock.kernels.weight_source import LoadFailed, StoredTensor
from penstock.weights.compression_format import OriginalTensor, checksum, checksum_text

DTYPES = {"bf16": np.dtype(ml_dtypes.bfloat16), "fp16": np.dtype(np.float16), "fp32": np.dtype(np.float32)}
UPPER = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
CPU = torch.device("cpu")


def kept(matrix_NK: torch.Tensor, segments: tuple[int, ...] | None) -> PackedLinear:
    n, k = matrix_NK.shape
    return PackedLinear(n, k, segments or (k,), matrix_NK, matrix_NK.nbytes)


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    file = os.open(tmp_path / "tensors", os.O_RDWR | os.O_CREAT)
    yield file
    os.close(file)


def nothing(done: int, total: int) -> None:
    assert 0 <= done <= total


def as_float(array: NDArray[Any]) -> NDArray[np.float32]:
    return array.astype(np.float32)


@pytest.mark.parametrize(("threads", "compute"), [(1, torch.bfloat16), (3, torch.bfloat16), (3, torch.float32)])
def test_weights_of_all_types_and_their_checksums(
    descriptor: int, threads: int, compute: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces and chunks are small here, so that tensors have many; one weight has parts of two types.  Each number is
    rounded once, to the compute type, as torch does it."""
    monkeypatch.setattr(weights, "CHUNK_BYTES", 1 << 19)
    rng = np.random.default_rng(0)
    stored: dict[str, tuple[NDArray[Any], StoredTensor]] = {}
    at = 3

    def put(name: str, dtype: str, *shape: int) -> StoredTensor:
        nonlocal at
        array = rng.standard_normal(shape).astype(DTYPES[dtype])
        os.pwrite(descriptor, array.tobytes(), at)
        rows, columns = shape if len(shape) == 2 else (1, shape[0])
        tensor = StoredTensor(name, descriptor, at, rows, columns, dtype)
        at += array.nbytes
        stored[name] = (array, tensor)
        return tensor

    loading = DeviceWeightLoading(CPU, compute, kept)
    loading.add_matrix("large", [put("a", "bf16", 900, 500), put("b", "bf16", 41, 500)], (250, 500))
    loading.add_matrix("mixed", [put("c", "fp32", 5, 7), put("d", "fp16", 3, 7)], None)
    loading.add_matrix("wide", [put("f", "fp32", 700, 300)], None)
    loading.add_vector("norm", put("e", "fp16", 300_000), DTYPES["fp16"])
    made = loading.run(threads, nothing)
    assert made["large"].segments == (250, 500)
    for name, parts in (("large", "ab"), ("mixed", "cd"), ("wide", "f")):
        wanted = np.concatenate([as_float(stored[part][0]) for part in parts])
        assert made[name].data.dtype == compute
        assert torch.equal(made[name].data, torch.from_numpy(wanted).to(compute))
    np.testing.assert_array_equal(made["norm"].numpy(), as_float(stored["e"][0]))
    for name, (array, tensor) in stored.items():
        entry = OriginalTensor(dtype=UPPER[tensor.dtype], shape=array.shape, blake3="0" * 64, code=None)
        wanted_sum = checksum(name, entry, [memoryview(array.tobytes())])
        assert loading.checksum(name, checksum_text(name, entry)) == wanted_sum


def test_what_was_read_goes_when_it_is_packed(descriptor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pack that copies lets go of the bytes: a checkpoint is not there twice while it is converted."""
    os.pwrite(descriptor, bytes(300), 0)
    memory: list[weakref.ref[NDArray[np.float32]]] = []
    alive: list[int] = []

    def take(count: int, dtype: torch.dtype) -> torch.Tensor:
        array = np.zeros(count, np.float32)
        memory.append(weakref.ref(array))
        return torch.from_numpy(array)

    def copied(matrix_NK: torch.Tensor, segments: tuple[int, ...] | None) -> PackedLinear:
        alive.append(sum(one() is not None for one in memory))
        return kept(matrix_NK.double(), segments)

    loading = DeviceWeightLoading(CPU, torch.float32, copied)
    monkeypatch.setattr(loading, "_empty", take)
    for index, name in enumerate("abc"):
        loading.add_matrix(name, [StoredTensor(name, descriptor, 100 * index, 5, 5, "fp32")], None)
    assert set(loading.run(1, nothing)) == set("abc")
    assert alive == [3, 2, 1]


def test_a_checkpoint_in_fp32_never_lies_there_whole(descriptor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of the device is the weights in the compute type, and a chunk for each thread that brings some."""
    monkeypatch.setattr(weights, "CHUNK_BYTES", 1 << 16)
    os.pwrite(descriptor, bytes(4 << 20), 0)
    asked: list[int] = []
    empty = torch.empty

    def counted(*shape: int, dtype: torch.dtype, **where: Any) -> torch.Tensor:
        made = empty(*shape, dtype=dtype, **where)
        if "device" in where:
            asked.append(made.nbytes)
        return made

    monkeypatch.setattr(torch, "empty", counted)
    loading = DeviceWeightLoading(CPU, torch.bfloat16, kept)
    for index in range(4):
        loading.add_matrix(str(index), [StoredTensor(str(index), descriptor, index << 20, 512, 512, "fp32")], None)
    assert sum(asked) == 4 * 512 * 512 * 2
    weighed = weights._Work(deque(chunk for source in loading._sources for chunk in source.chunks()))
    assert weighed.landing_bytes <= weights.PIECE_BYTES, "of each thread, beside them"
    assert sum(made.nbytes for made in loading.run(2, nothing).values()) == sum(asked)


@pytest.mark.cuda
def test_a_device_holds_no_more_than_the_compute_type(descriptor: int) -> None:
    """On a GPU: 256 MiB of fp32 take 128 and a landing place for each thread."""
    rows = np.random.default_rng(1).standard_normal((8, 4096, 2048), np.float32)
    os.pwrite(descriptor, rows.tobytes(), 0)
    cuda = torch.device("cuda")
    loading = DeviceWeightLoading(cuda, torch.bfloat16, kept)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for index in range(8):
        tensor = StoredTensor(str(index), descriptor, index * rows[0].nbytes, 4096, 2048, "fp32")
        loading.add_matrix(str(index), [tensor], None)
    made = loading.run(2, nothing)
    assert torch.cuda.max_memory_allocated() - before <= rows.nbytes // 2 + 2 * (weights.CHUNK_BYTES + (1 << 20))
    for index in range(8):
        assert torch.equal(made[str(index)].data.cpu(), torch.from_numpy(rows[index]).bfloat16())


def test_a_file_that_is_too_short_is_named(descriptor: int) -> None:
    os.pwrite(descriptor, bytes(100), 0)
    loading = DeviceWeightLoading(CPU, torch.bfloat16, kept)
    loading.add_matrix("w", [StoredTensor("t", descriptor, 0, 10, 10, "bf16")], None)
    with pytest.raises(LoadFailed, match="'t': the file is too short"):
        loading.run(2, nothing)


def test_who_watches_can_end_it(descriptor: int) -> None:
    os.pwrite(descriptor, bytes(400), 0)
    loading = DeviceWeightLoading(CPU, torch.bfloat16, kept)
    loading.add_matrix("w", [StoredTensor("t", descriptor, 0, 10, 10, "fp32")], None)

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loading.run(1, stop)


def test_compressed_weights_come_as_arrays() -> None:
    assert not DeviceWeightLoading(CPU, torch.bfloat16, kept).add_compressed("w", [], None)
