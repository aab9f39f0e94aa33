"""Quantized weights: every backend computes what the codes say, and law 1 holds for them as for plain ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from kernel_cases import EVERY, NATIVE, ON_GPU, assert_close, assert_same_bits, make, normal
from quant_cases import FLOATS, FORMATS, matrix_of

from penstock.kernels import _native
from penstock.kernels.operands import segment_ends
from penstock.kernels.quantization import QuantFormat, QuantizedMatrix, ScaleType

ALL = {**FORMATS, **FLOATS}
ROWS = (1, 2, 3, 4, 5, 8, 9, 17, 70, 200)
TOLERANCE = {"bf16": 2e-3, "fp32": 2e-5}
"""Inputs are rounded before the product, weights never are: what is left is the order of sums in fp32."""


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    _native.set_threads(request.param)
    yield
    _native.set_threads(1)


@pytest.fixture(params=[*EVERY, *ON_GPU], ids="-".join)
def ops(request: pytest.FixtureRequest) -> Any:
    return make(*request.param)


@pytest.mark.parametrize("form", ALL.values(), ids=ALL)
def test_products_are_those_of_the_weights(ops: Any, form: QuantFormat) -> None:
    for n, k, ends in ((80, 512, None), (50, 1024, segment_ends(1024, 32)), (33, 256, (0, 32, 32, 256))):
        matrix, weight_NK = matrix_of(form, n, k)
        packed = ops.pack_quantized([matrix], segments=ends)
        assert packed is not None
        x = ops.compute(normal(2, 6, k))
        wanted = ops.to_numpy(x).astype(np.float64) @ weight_NK.astype(np.float64).T
        assert_close(ops.to_numpy(ops.linear(x, packed)), wanted, TOLERANCE[ops.compute_dtype])
        onto = ops.hidden(normal(3, 6, n))
        ops.linear_add(x, packed, onto)
        assert_close(ops.to_numpy(onto), wanted + normal(3, 6, n), TOLERANCE[ops.compute_dtype])


@pytest.mark.parametrize(("family", "compute"), NATIVE)
@pytest.mark.parametrize("form", ALL.values(), ids=ALL)
def test_a_row_has_its_bits_in_any_company(family: str, compute: str, form: QuantFormat, threads: None) -> None:
    ops = make(family, compute)
    ends = segment_ends(1152, 96)
    packed = ops.pack_quantized([matrix_of(form, 200, 1152)[0]], segments=ends)
    x = ops.compute(normal(2, max(ROWS), 1152))
    wanted = ops.to_numpy(ops.linear(x, packed)).copy()
    for rows in ROWS:
        assert_same_bits(ops.to_numpy(ops.linear(x[-rows:], packed)), wanted[-rows:], f"{rows} rows")


@pytest.mark.parametrize(("family", "compute"), NATIVE)
@pytest.mark.parametrize("form", ALL.values(), ids=ALL)
def test_every_code_is_decoded_to_its_value(family: str, compute: str, form: QuantFormat) -> None:
    """An input that is 1 in one column gives that column of weights: decoded for many rows, and for a single one."""
    ops = make(family, compute)
    matrix, weight_NK = matrix_of(form, 80, 256)
    packed, columns = ops.pack_quantized([matrix]), np.eye(256, dtype=np.float32)
    assert np.array_equal(ops.to_numpy(ops.linear(ops.compute(columns), packed)), weight_NK.T)
    for column in range(256):
        alone = ops.to_numpy(ops.linear(ops.compute(columns[column : column + 1]), packed))
        assert np.array_equal(alone[0], weight_NK[:, column]), f"column {column}"


@pytest.mark.parametrize("form", ALL.values(), ids=ALL)
def test_embed_gives_the_weights(ops: Any, form: QuantFormat) -> None:
    matrix, weight_NK = matrix_of(form, 101, 256)
    tokens = np.arange(101, dtype=np.int32)[::-1].copy()
    packed = ops.pack_quantized([matrix])
    assert_same_bits(ops.to_numpy(ops.embed(packed, tokens)), weight_NK[::-1].copy())


def test_parts_of_other_formats_share_a_matrix(ops: Any) -> None:
    made = [matrix_of(form, 48, 256, seed) for seed, form in enumerate(ALL.values())]
    made.append(matrix_of(FORMATS["8 bits, fp16"], 37, 256, 99))
    packed = ops.pack_quantized([matrix for matrix, _ in made], threads=2)
    weight_NK = np.concatenate([weight for _, weight in made])
    for rows in (1, 3, 20):
        x = ops.compute(normal(4, rows, 256))
        wanted = ops.to_numpy(x).astype(np.float64) @ weight_NK.astype(np.float64).T
        assert_close(ops.to_numpy(ops.linear(x, packed)), wanted, TOLERANCE[ops.compute_dtype])
    tokens = np.arange(len(weight_NK), dtype=np.int32)
    assert_same_bits(ops.to_numpy(ops.embed(packed, tokens)), weight_NK)


@pytest.mark.parametrize("rows", [1, 3, 20])
def test_integers_of_eight_bits_are_the_same_with_and_without_the_one_that_has_no_negative(ops: Any, rows: int) -> None:
    """-128 is looked up in another way than the others."""
    matrix, _ = matrix_of(FORMATS["8 bits, fp16"], 32, 128)
    x, told = ops.compute(normal(4, rows, 128)), []
    for least in (0, 1):
        read = matrix.read_all()
        read.codes_NK[:16] = np.maximum(read.codes_NK[:16], 1)
        read.codes_NK[16:] = np.maximum(read.codes_NK[16:], least)
        assert (read.codes_NK == 0).any() == (least == 0)
        own = QuantizedMatrix(32, 128, matrix.format, lambda a, b, read=read: read.map_arrays(lambda array: array[a:b]))
        told.append(np.array(ops.to_numpy(ops.linear(x, ops.pack_quantized([own])))))
    assert_same_bits(told[0][:, :16].copy(), told[1][:, :16].copy())


def test_the_memory_is_that_of_the_codes() -> None:
    for name, bits in {"8 bits, fp16": 8.5, "4 bits of super-blocks": 4.625, "6 bits of super-blocks": 6.5625}.items():
        form = FORMATS[name]
        packed = make(*NATIVE[0]).pack_quantized([matrix_of(form, 64, 512)[0]])
        assert packed.nbytes * 8 == 64 * 512 * bits == 64 * 512 * form.bits_a_weight()


@pytest.mark.parametrize("name", ["8 bits, fp32", "4 bits, zero point"])
def test_columns_in_an_order_of_their_own(ops: Any, name: str) -> None:
    """Groups of columns that lie anywhere; the last group is not full."""
    order = np.random.default_rng(5).permutation(320).astype(np.int32)
    made = [matrix_of(FORMATS[name], 48, 320, seed, order=order) for seed in (0, 1)]
    packed = ops.pack_quantized([matrix for matrix, _ in made], segments=segment_ends(320, 32))
    weight_NK = np.concatenate([weight for _, weight in made])
    x = ops.compute(normal(4, 40, 320))
    whole = np.array(ops.to_numpy(ops.linear(x, packed)))
    wanted = ops.to_numpy(x).astype(np.float64) @ weight_NK.astype(np.float64).T
    assert_close(whole, wanted, TOLERANCE[ops.compute_dtype])
    for rows in (1, 5, 9):
        assert_same_bits(np.array(ops.to_numpy(ops.linear(x[:rows], packed))), whole[:rows], f"{rows} rows")
    tokens = np.arange(96, dtype=np.int32)
    assert_same_bits(ops.to_numpy(ops.embed(packed, tokens)), weight_NK)


def test_shapes_that_units_do_not_fit_are_left_to_others() -> None:
    ops, form = make(*NATIVE[0]), FORMATS["8 bits, fp16"]
    assert ops.pack_quantized([matrix_of(form, 32, 64)[0]], segments=(40, 64)) is None
    assert ops.pack_quantized([matrix_of(form, 40, 64)[0], matrix_of(form, 16, 64)[0]]) is None
    orders = [np.random.default_rng(seed).permutation(64).astype(np.int32) for seed in (0, 1)]
    assert ops.pack_quantized([matrix_of(form, 16, 64, order=order)[0] for order in orders]) is None
    assert ops.pack_quantized([matrix_of(form, 16, 64, order=order)[0] for order in (orders[0], None)]) is None
    odd = QuantFormat(8, form.values, 24, ScaleType.F16)
    assert ops.pack_quantized([matrix_of(odd, 16, 96)[0]]) is None


def test_wrong_arrays_are_refused() -> None:
    weights = _native.QuantWeights(32, 64, [64])
    codes, table = np.zeros(2 * 2 * 512, np.uint8), np.zeros(256, np.uint16)
    with pytest.raises(ValueError, match="scales do not fit"):
        weights.add_part(codes, np.zeros(3, np.uint8), table, 32, 8, (0, 0, 32))
    with pytest.raises(ValueError, match="codes do not fit"):
        weights.add_part(codes[1:], np.zeros(128, np.uint8), table, 32, 8, (0, 0, 32))
    with pytest.raises(ValueError, match="a value for every code"):
        weights.add_part(codes, np.zeros(128, np.uint8), table[1:], 32, 8, (0, 0, 32))
    with pytest.raises(ValueError, match="every column once"):
        weights.set_order(np.zeros(64, np.int32))
    kernels, x, out = _native.QuantKernels(NATIVE[0][0], "bf16"), np.zeros((1, 64), np.uint16), np.zeros((1, 32))
    with pytest.raises(ValueError, match="the parts must have all rows"):
        kernels.linear(x, weights, out.astype(np.float32), False)
    with pytest.raises(ValueError, match="values that bf16 holds"):
        QuantFormat(4, tuple(float(i) + 0.001 for i in range(16)), 32, ScaleType.F16).table()
