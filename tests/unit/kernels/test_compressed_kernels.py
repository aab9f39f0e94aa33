"""Compressed weights give the bits of plain ones: any family, number of rows, segments and threads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from kernel_cases import assert_same_bits, make, normal
from numpy.typing import NDArray

from penstock.errors import KernelError
from penstock.kernels import _native
from penstock.kernels.compressed import CompressedMatrix
from penstock.kernels.native import compression
from penstock.kernels.native.backend import families
from penstock.kernels.operands import segment_ends

ROWS = (*range(1, 20), 24, 25, 32, 33, 64, 191, 192, 193, 300)


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"], autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    _native.set_threads(request.param)
    yield
    _native.set_threads(1)


def weight_of(n: int, k: int, seed: int = 1, sigma: float = 0.02) -> NDArray[Any]:
    return (normal(seed, n, k) * sigma).astype(ml_dtypes.bfloat16)


def compressed(*weights: NDArray[Any]) -> list[CompressedMatrix]:
    found = [compression.compress(weight.view(np.uint16)) for weight in weights]
    return [matrix for matrix in found if matrix is not None]


def native(parts: list[CompressedMatrix], ends: tuple[int, ...]) -> Any:
    blocks = np.concatenate([part.blocks for part in parts])
    padding = np.full(compression.ESCAPE_PADDING, 0xFF, np.uint8)
    escapes = np.concatenate([*(part.escapes for part in parts), padding])
    return compression.native_weights(parts, ends, blocks, escapes)


@pytest.mark.parametrize("family", families())
@pytest.mark.parametrize(
    ("n", "k", "ends"),
    [
        (80, 320, (320,)),
        (50, 320, segment_ends(320, 64)),
        (300, 896, segment_ends(896, 32)),
        (45, 100, (36, 60, 60, 100)),  # segments inside chunks, and an empty one
        (130, 1172, (1172,)),  # slabs that are full, and a short last one
        (66, 1160, (0, 292, 1156, 1160)),  # an empty segment first; segments of two slabs, four and a single block
    ],
)
def test_linear(family: str, n: int, k: int, ends: tuple[int, ...]) -> None:
    ops, kernels = make(family, "bf16"), _native.CompressedKernels(family)
    weight = weight_of(n, k)
    plain, small = ops.pack_linear(weight, segments=ends), native(compressed(weight), ends)
    x = ops.compute(normal(2, max(ROWS), k))
    for rows in ROWS:
        wanted = ops.to_numpy(ops.linear(x[-rows:], plain)).copy()
        out = np.full((rows, n), np.nan, np.float32)
        kernels.linear(x[-rows:], small, out, False)
        assert_same_bits(out, wanted, f"{rows} rows")
        onto, also = normal(3, rows, n), normal(3, rows, n)
        ops.linear_add(x[-rows:], plain, onto)
        kernels.linear(x[-rows:], small, also, True)
        assert_same_bits(also, onto, f"{rows} rows, added")


@pytest.mark.parametrize("family", families())
def test_parts_with_other_codes_share_a_matrix(family: str) -> None:
    ops, kernels = make(family, "bf16"), _native.CompressedKernels(family)
    parts = [weight_of(64, 128, 1), weight_of(16, 128, 2, 3.0), weight_of(37, 128, 3, 1e-6)]
    small = native(compressed(*parts), (128,))
    plain = ops.pack_linear(np.concatenate(parts))
    x = ops.compute(normal(4, 20, 128))
    for rows in (1, 3, 7, 12, 20):
        out = np.empty((rows, 117), np.float32)
        kernels.linear(x[:rows], small, out, False)
        assert_same_bits(out, ops.to_numpy(ops.linear(x[:rows], plain)), f"{rows} rows")


@pytest.mark.parametrize("family", families())
@pytest.mark.parametrize("share", [0.0, 0.1, 0.3])
def test_many_escapes(family: str, share: float) -> None:
    """``share`` of the blocks are nothing but escapes, the others have none."""
    ops, kernels = make(family, "bf16"), _native.CompressedKernels(family)
    weight = normal(1, 112, 640) * 0.02
    weight = np.sign(weight) * np.clip(np.abs(weight), 0.001, None)
    blocks = np.random.default_rng(5).random((7, 160)) < share
    weight *= np.where(blocks.repeat(16, 0).repeat(4, 1), np.float32(1e20), np.float32(1))
    plain = weight.astype(ml_dtypes.bfloat16)
    small, packed = native(compressed(plain), (320, 640)), ops.pack_linear(plain, segments=(320, 640))
    x = ops.compute(normal(4, 70, 640))
    for rows in (1, 4, 8, 13, 16, 17, 30, 70):
        out = np.empty((rows, 112), np.float32)
        kernels.linear(x[:rows], small, out, False)
        assert_same_bits(out, ops.to_numpy(ops.linear(x[:rows], packed)), f"{rows} rows")


@pytest.mark.parametrize("family", families())
def test_embed(family: str) -> None:
    ops, kernels = make(family, "bf16"), _native.CompressedKernels(family)
    table = weight_of(101, 96)
    table[7] = 0  # nothing but escapes
    tokens = np.arange(101, dtype=np.int32)[::-1].copy()
    out = np.empty((101, 96), np.float32)
    kernels.embed(native(compressed(table), (96,)), tokens, out)
    assert_same_bits(out, ops.to_numpy(ops.embed(ops.pack_linear(table), tokens)))


@pytest.mark.parametrize("family", families())
def test_large_enough_for_threads(family: str) -> None:
    ops, kernels = make(family, "bf16"), _native.CompressedKernels(family)
    weight, ends = weight_of(700, 1024), segment_ends(1024, 32)
    plain, small = ops.pack_linear(weight, segments=ends), native(compressed(weight), ends)
    x = ops.compute(normal(2, 200, 1024))
    for rows in (1, 8, 16, 200):
        out = np.empty((rows, 700), np.float32)
        kernels.linear(x[:rows], small, out, False)
        assert_same_bits(out, ops.to_numpy(ops.linear(x[:rows], plain)), f"{rows} rows")


def test_ops_keep_compressed_what_they_decode_in_registers() -> None:
    for family in families():
        ops = make(family, "bf16")
        weight = weight_of(64, 128)
        packed = ops.pack_compressed(compressed(weight))
        assert (packed is not None) == _native.CompressedKernels(family).in_registers()
        if packed is None:
            continue
        plain = ops.pack_linear(weight)
        assert packed.nbytes < 0.75 * plain.nbytes
        x, tokens = ops.compute(normal(2, 3, 128)), np.array([5, 63, 0], np.int32)
        assert_same_bits(ops.to_numpy(ops.linear(x, packed)), ops.to_numpy(ops.linear(x, plain)))
        assert_same_bits(ops.to_numpy(ops.embed(packed, tokens)), ops.to_numpy(ops.embed(plain, tokens)))


def test_shapes_that_blocks_do_not_fit_are_left_to_plain_weights() -> None:
    ops = make(families()[0], "bf16")
    assert ops.pack_compressed(compressed(weight_of(64, 126))) is None
    assert ops.pack_compressed(compressed(weight_of(64, 128)), segments=(66, 128)) is None
    assert ops.pack_compressed(compressed(weight_of(40, 128), weight_of(40, 128))) is None
    assert make(families()[0], "fp32").pack_compressed(compressed(weight_of(64, 128))) is None


def test_wrong_arrays_are_refused() -> None:
    parts = compressed(weight_of(32, 64))
    blocks, escapes = parts[0].blocks, np.concatenate([parts[0].escapes, np.zeros(64, np.uint8)])
    with pytest.raises(KernelError, match="other escapes"):
        compression.native_weights(parts, (64,), blocks, escapes[:-1])
    with pytest.raises(KernelError, match="blocks do not fit"):
        compression.native_weights(parts, (64,), blocks[:-88], escapes)
    kernels, small = _native.CompressedKernels(families()[0]), native(parts, (64,))
    out = np.empty((1, 32), np.float32)
    with pytest.raises(ValueError, match=r"x must be"):
        kernels.linear(np.zeros((1, 63), np.uint16), small, out, False)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        kernels.embed(small, np.array([32], np.int32), np.empty((1, 64), np.float32))
    with pytest.raises(ValueError, match="whole panels"):
        kernels.decode(small, 0, np.empty((8, 64), np.uint16))
