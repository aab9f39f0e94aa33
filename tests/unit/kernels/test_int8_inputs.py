"""Inputs of 8 bits (``--activation-dtype int8``): integers are multiplied exactly, and law 1 holds as for floats."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from kernel_cases import COMPUTE, NATIVE, assert_close, assert_same_bits, normal
from numpy.typing import NDArray
from quant_cases import FORMATS, matrix_of

from penstock.errors import KernelError
from penstock.kernels import _native
from penstock.kernels.native.backend import NativeOps
from penstock.kernels.operands import INT8, SILU, Routing, segment_ends
from penstock.kernels.quantization import (
    E2M1,
    SUPER_COLUMNS,
    CodeType,
    QuantFormat,
    QuantizedMatrix,
    ScaleType,
    scales_and_minimums,
)
from penstock.kernels.reference.backend import ReferenceOps
from penstock.kernels.select import make_ops
from penstock.kernels.sum_tree import join

ROWS = (1, 2, 3, 4, 5, 8, 9, 17, 70, 200)
IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
ALL = {
    **FORMATS,
    "4 bits, floats of MXFP4": QuantFormat(4, E2M1, 32, ScaleType.E8M0),
    "4 bits, non-linear": QuantFormat(4, tuple(map(float, IQ4_NL)), 32, ScaleType.F16),
    "6 bits, groups of 64": QuantFormat(6, tuple(float(i - 32) for i in range(64)), 64, ScaleType.F16),
    "5 bits of super-blocks, groups of 64": QuantFormat(
        5, tuple(float(i - 16) for i in range(32)), 64, ScaleType.I8_OF_F16
    ),
}
SHAPES = ((80, 512, None), (50, 1024, segment_ends(1024, 32)), (33, 768, (0, 32, 416, 768)))


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    _native.set_threads(request.param)
    yield
    _native.set_threads(1)


def int8_ops(family: str, compute: str) -> NativeOps:
    return NativeOps(family, compute, activation_dtype=INT8)


@pytest.fixture(params=NATIVE, ids="-".join)
def ops(request: pytest.FixtureRequest) -> NativeOps:
    return int8_ops(*request.param)


def quantized(x_TK: NDArray[np.float32], begin: int, end: int, block: int) -> Iterator[tuple[int, Any, Any]]:
    """The blocks of some columns, each with its integers and scales [T]."""
    while begin < end:
        stop = min(end, (begin // block + 1) * block)
        own_TB = x_TK[:, begin:stop]
        largest_T = np.abs(own_TB).max(axis=1)
        usual_T = np.where(largest_T < 2.0**-100, np.float32(1), largest_T).astype(np.float32)
        integers_TB = np.rint(own_TB * (np.float32(127) / usual_T)[:, None]).astype(np.int64)
        scale_T = np.where(largest_T < 2.0**-100, np.float32(0), usual_T / np.float32(127)).astype(np.float32)
        yield begin, integers_TB, scale_T
        begin = stop


def expected(x_TK: NDArray[np.float32], matrix: QuantizedMatrix, ends: tuple[int, ...] | None) -> NDArray[np.float32]:
    """The product in the order of the kernels, each operation rounded by itself as ``portable`` does it."""
    form, rows = matrix.format, matrix.read_all()
    codes = form.integer_codes()
    assert codes is not None
    integers_NK = np.array(codes.integers, np.int64)[rows.codes_NK] - codes.offset
    scales_NG, minimums_NG = scales_and_minimums(rows, form)
    x_TK = x_TK if matrix.order is None else x_TK[:, matrix.order]
    sums, begin = [], 0
    for end in ends or (matrix.k,):
        acc_TN = np.zeros((len(x_TK), matrix.n), np.float32)
        for first, x_TB, scale_T in quantized(x_TK, begin, end, form.input_block):
            columns = slice(first, first + x_TB.shape[1])
            if form.input_block == SUPER_COLUMNS:
                add_super_block(acc_TN, x_TB, scale_T, integers_NK[:, columns], rows, form, first)
                continue
            size = min(form.group, 32)
            for c in range(0, x_TB.shape[1], size):
                own_TC, group = x_TB[:, c : c + size], (first + c) // min(form.group, matrix.k)
                dots_TN = (own_TC @ integers_NK[:, first + c : first + c + size].T).astype(np.float32)
                acc_TN += scales_NG[:, group] * (scale_T * np.float32(codes.unit))[:, None] * dots_TN
                if minimums_NG is not None:
                    acc_TN += minimums_NG[:, group] * (scale_T * own_TC.sum(axis=1).astype(np.float32))[:, None]
        sums.append(acc_TN)
        begin = end
    joined = join(sums, np.add)
    assert joined is not None
    return joined


def add_super_block(
    acc_TN: Any, x_TB: Any, scale_T: Any, integers_NB: Any, rows: Any, form: QuantFormat, first: int
) -> None:
    sum_TN, low_TN = np.zeros(acc_TN.shape, np.int64), np.zeros(acc_TN.shape, np.int64)
    for c in range(0, x_TB.shape[1], form.group):
        own, group = slice(c, c + form.group), (first + c) // form.group
        sum_TN += rows.scales_NG[:, group].astype(np.int64) * (x_TB[:, own] @ integers_NB[:, own].T)
        if rows.minimums_NG is not None:
            low_TN += rows.minimums_NG[:, group].astype(np.int64) * x_TB[:, own].sum(axis=1)[:, None]
    block = first // SUPER_COLUMNS
    codes = form.integer_codes()
    assert codes is not None
    scale_N = rows.super_scales_NB[:, block].astype(np.float32)
    acc_TN += scale_N * (scale_T * np.float32(codes.unit))[:, None] * sum_TN.astype(np.float32)
    if rows.super_minimums_NB is not None:
        acc_TN += -rows.super_minimums_NB[:, block].astype(np.float32) * scale_T[:, None] * low_TN.astype(np.float32)


@pytest.mark.parametrize("form", ALL.values(), ids=ALL)
def test_products_are_those_of_integers(ops: NativeOps, form: QuantFormat) -> None:
    for n, k, ends in SHAPES:
        matrix, _ = matrix_of(form, n, k)
        packed = ops.pack_quantized([matrix], segments=ends)
        assert packed is not None
        x = ops.compute(normal(2, 6, k))
        wanted = expected(ops.to_numpy(x), matrix, ends)
        found = ops.to_numpy(ops.linear(x, packed))
        if ops.family == "portable":
            assert_same_bits(found, wanted)
        assert_close(found, wanted, 2e-6)
        onto = ops.hidden(normal(3, 6, n))
        ops.linear_add(x, packed, onto)
        assert_same_bits(onto, normal(3, 6, n) + found)


@pytest.mark.parametrize("compute", COMPUTE)
@pytest.mark.parametrize("form", ALL.values(), ids=ALL)
def test_the_oracle_has_the_same_integers(compute: str, form: QuantFormat) -> None:
    ops = ReferenceOps(compute_dtype=compute, activation_dtype=INT8)
    for n, k, ends in SHAPES:
        matrix, weight_NK = matrix_of(form, n, k)
        x = ops.compute(normal(2, 6, k))
        found = ops.to_numpy(ops.linear(x, ops.pack_quantized([matrix], segments=ends)))
        assert_close(found, expected(ops.to_numpy(x), matrix, ends), 2e-5)
        assert_close(found, ops.to_numpy(x).astype(np.float64) @ weight_NK.T.astype(np.float64), 0.05)


@pytest.mark.parametrize("form", ALL.values(), ids=ALL)
def test_a_row_has_its_bits_in_any_company(ops: NativeOps, form: QuantFormat, threads: None) -> None:
    ends = segment_ends(1152, 96)
    packed = ops.pack_quantized([matrix_of(form, 200, 1152)[0]], segments=ends)
    assert packed is not None
    x = ops.compute(normal(2, max(ROWS), 1152))
    wanted = ops.to_numpy(ops.linear(x, packed)).copy()
    for rows in ROWS:
        assert_same_bits(ops.to_numpy(ops.linear(x[-rows:], packed)), wanted[-rows:], f"{rows} rows")


def test_parts_of_other_formats_share_a_matrix(ops: NativeOps) -> None:
    """Inputs are quantized in blocks of 32 columns for the ones, of 256 for the others."""
    made = [matrix_of(form, 48, 512, seed)[0] for seed, form in enumerate(ALL.values())]
    made.append(matrix_of(ALL["8 bits, fp16"], 37, 512, 99)[0])
    packed = ops.pack_quantized(made, threads=2)
    assert packed is not None
    for rows in (1, 3, 20):
        x = ops.compute(normal(4, rows, 512))
        whole, first = ops.to_numpy(ops.linear(x, packed)), 0
        for matrix in made:
            alone = ops.to_numpy(ops.linear(x, ops.pack_quantized([matrix])))
            assert_same_bits(whole[:, first : first + matrix.n].copy(), alone)
            first += matrix.n


@pytest.mark.parametrize("form", ALL.values(), ids=ALL)
def test_embed_gives_the_weights(ops: NativeOps, form: QuantFormat) -> None:
    matrix, weight_NK = matrix_of(form, 101, 256)
    tokens = np.arange(101, dtype=np.int32)[::-1].copy()
    packed = ops.pack_quantized([matrix])
    assert packed is not None
    np.testing.assert_array_equal(ops.to_numpy(ops.embed(packed, tokens)), weight_NK[::-1])


@pytest.mark.parametrize("name", ["8 bits, fp32", "4 bits, zero point"])
def test_columns_in_an_order_of_their_own(ops: NativeOps, name: str) -> None:
    order, ends = np.random.default_rng(5).permutation(320).astype(np.int32), segment_ends(320, 32)
    matrix, _ = matrix_of(ALL[name], 48, 320, order=order)
    packed = ops.pack_quantized([matrix], segments=ends)
    assert packed is not None
    x = ops.compute(normal(4, 40, 320))
    whole = np.array(ops.to_numpy(ops.linear(x, packed)))
    assert_close(whole, expected(ops.to_numpy(x), matrix, ends), 2e-6)
    for rows in (1, 5, 9):
        assert_same_bits(np.array(ops.to_numpy(ops.linear(x[:rows], packed))), whole[:rows], f"{rows} rows")


@pytest.mark.parametrize("backend", NATIVE, ids="-".join)
def test_experts_have_their_bits_in_any_company(backend: tuple[str, str], threads: None) -> None:
    ops, how = int8_ops(*backend), Routing(experts=6, top_k=2, normalised=True)
    forms = [ALL["4 bits of super-blocks"], ALL["6 bits of super-blocks"], ALL["8 bits, fp16"]]
    wide = [ops.pack_quantized([matrix_of(forms[e % 3], 512, 256, e)[0]]) for e in range(6)]
    narrow = [ops.pack_quantized([matrix_of(forms[e % 2], 48, 256, 50 + e)[0]]) for e in range(6)]
    experts = ops.pack_experts(wide, narrow)
    x = normal(4, 90, 256)

    def added(first: int, stop: int) -> NDArray[np.float32]:
        own, hidden = x[first:stop], ops.hidden(np.zeros((stop - first, 48), np.float32))
        ops.experts_add(ops.compute(own), ops.route(ops.hidden(own[:, :6]), how), experts, SILU, hidden)
        return np.array(ops.to_numpy(hidden))

    whole = added(0, 90)
    for first, stop in ((0, 1), (3, 5), (40, 57), (89, 90)):
        assert_same_bits(added(first, stop), whole[first:stop])


def test_the_largest_integers_fit(ops: NativeOps) -> None:
    """Inputs of 127 times the largest codes: no sum of 16 or 32 bits overflows."""
    for form in ALL.values():
        read = matrix_of(form, 32, 512)[0].read_all()
        for code in (0, (1 << form.bits) - 1):
            read.codes_NK[:] = code
            if form.has_super:
                read.scales_NG[:] = -128 if form.scale is ScaleType.I8_OF_F16 else 255
            own = QuantizedMatrix(32, 512, form, lambda a, b, read=read: read.map_arrays(lambda array: array[a:b]))
            packed = ops.pack_quantized([own])
            assert packed is not None
            for sign in (1, -1):
                x = ops.compute(np.full((5, 512), sign, np.float32))
                assert_close(ops.to_numpy(ops.linear(x, packed)), expected(ops.to_numpy(x), own, None), 2e-6)


@pytest.mark.parametrize("backend", [*NATIVE, ("reference", "fp32")], ids="-".join)
def test_a_block_without_numbers_is_none_and_one_of_nearly_zero_is_zero(backend: tuple[str, str]) -> None:
    ops = make_ops(family=backend[0], compute_dtype=backend[1], activation_dtype=INT8)
    packed = ops.pack_quantized([matrix_of(ALL["8 bits, fp16"], 32, 64)[0]])
    assert packed is not None
    x = np.zeros((4, 64), np.float32)
    x[0, 3], x[1, 40], x[2, 5], x[3, 7] = np.nan, np.inf, 1e-36, 1.0
    found = ops.to_numpy(ops.linear(ops.compute(x), packed))
    assert np.isnan(found[:2]).all()
    assert (found[2] == 0).all()
    assert (found[3] != 0).any()


@pytest.mark.parametrize("family", ["portable", "reference"])
def test_the_class_is_another_one(family: str) -> None:
    """Class and KV layout name an identity: a response never continues, and no page is read, in another class."""
    plain, own = (make_ops(family=family, activation_dtype=kind) for kind in (None, INT8))
    assert own.numerics == f"{plain.numerics}-act_int8"
    assert own.kv_layout == plain.kv_layout


def test_what_cannot_be_computed_is_refused() -> None:
    e4m3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    form = QuantFormat(8, tuple(map(float, np.nan_to_num(e4m3))), 32, ScaleType.F16)
    for ops in (int8_ops("portable", "bf16"), ReferenceOps(compute_dtype="bf16", activation_dtype=INT8)):
        with pytest.raises(KernelError, match="integer codes only"):
            ops.pack_quantized([matrix_of(form, 32, 64)[0]])
    with pytest.raises(KernelError, match="leave it out on a GPU"):
        make_ops(family="triton", device="cuda", activation_dtype=INT8)
    with pytest.raises(KernelError, match="there is int8"):
        make_ops(activation_dtype="int3")


@pytest.mark.parametrize("form", ALL.values(), ids=ALL)
def test_integers_are_the_values(form: QuantFormat) -> None:
    codes = form.integer_codes()
    assert codes is not None
    values = [codes.unit * (integer - codes.offset) for integer in codes.integers]
    assert values == list(form.values)
    assert codes.kind is not CodeType.BYTE or form.bits == 8
