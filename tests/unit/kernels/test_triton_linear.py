"""The GPU's products: values, law 1 over few and many rows, and the bits of plain weights out of compressed ones.

Interpreted where there is no GPU, so shapes are small; ``test_kernels_*`` face the same backend at length (--long).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from kernel_cases import INTERPRETED, TRITONS, assert_close, assert_same_bits, make, normal
from numpy.typing import NDArray
from quant_cases import FORMATS, matrix_of

from penstock.errors import KernelError
from penstock.kernels.compressed import GpuCompressedMatrix, compress_for_gpu
from penstock.kernels.native import compression
from penstock.kernels.operands import PackedLinear, segment_ends
from penstock.kernels.quantization import E2M1, QuantFormat, ScaleType

SHARED_BYTES = 227 << 10
"""Of one program on an H200."""

FUSED = ("gated_product_kernel", "written_product_kernel")
COMPILED = frozenset(
    f"{name}_kernel"
    for name in ("product", "join", "join_ranks", "decode", "survey", "route", "grouped", "down", "up", "slots")
)  # fmt: skip

COMPANY = (1, 2, 17, 64, 200)
FEWER = (1, 66)
LONG = [pytest.mark.long] if INTERPRETED else []
E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
FLOATS = {
    "fp8 by blocks": QuantFormat(8, tuple(map(float, E4M3)), 128, ScaleType.F32),
    "fp8 by rows": QuantFormat(8, tuple(map(float, E4M3)), 1 << 20, ScaleType.BF16),
    "mxfp4": QuantFormat(4, E2M1, 32, ScaleType.E8M0),
}


@pytest.fixture(params=[pytest.param(name, marks=LONG) for name in TRITONS], ids="-".join)
def ops(request: pytest.FixtureRequest) -> Any:
    return make(*request.param)


@pytest.fixture
def bf16() -> Any:
    return make(*TRITONS[0])


def exact(ops: Any, x: Any, weight_NK: NDArray[Any]) -> NDArray[np.float64]:
    return ops.to_numpy(x).astype(np.float64) @ weight_NK.astype(np.float64).T


def assert_rows_alone(ops: Any, packed: PackedLinear, k: int, company: tuple[int, ...] = COMPANY) -> None:
    """The last rows of a large batch, in smaller ones and added to something; the first of them alone."""
    x = ops.compute(normal(2, max(company), k))
    whole = ops.to_numpy(ops.linear(x, packed))
    for rows in company:
        assert_same_bits(ops.to_numpy(ops.linear(x[-rows:], packed)), whole[-rows:], f"{rows} rows")
        onto = ops.hidden(normal(3, rows, packed.n))
        ops.linear_add(x[-rows:], packed, onto)
        assert_same_bits(ops.to_numpy(onto), normal(3, rows, packed.n) + whole[-rows:], f"{rows} rows, added")


@pytest.mark.parametrize(
    ("n", "k", "ends"),
    [(130, 200, (200,)), (150, 320, segment_ends(320, 32)), (33, 105, segment_ends(105, 15)), (16, 96, (32, 96))],
)
def test_a_row_has_its_bits_in_any_company(ops: Any, n: int, k: int, ends: tuple[int, ...]) -> None:
    weight = normal(1, n, k) / k**0.5
    packed = ops.pack_linear(weight, segments=ends)
    x = ops.compute(normal(2, 5, k))
    assert_close(ops.to_numpy(ops.linear(x, packed)), exact(ops, x, ops.to_numpy(ops.compute(weight))), 5e-6)
    assert_rows_alone(ops, packed, k)


def test_few_rows_and_many_have_the_same_bits(bf16: Any) -> None:
    weight = normal(1, 70, 160) / 13
    packed = bf16.pack_linear(weight, segments=(60, 160))
    x = bf16.compute(normal(2, 5, 160))
    assert_close(bf16.to_numpy(bf16.linear(x, packed)), exact(bf16, x, bf16.to_numpy(bf16.compute(weight))), 5e-6)
    assert_rows_alone(bf16, packed, 160, FEWER)


def test_no_rows_and_wrong_calls(bf16: Any) -> None:
    packed = bf16.pack_linear(normal(1, 8, 8))
    assert bf16.to_numpy(bf16.linear(bf16.compute(normal(1, 0, 8)), packed)).shape == (0, 8)
    with pytest.raises(ValueError, match=r"\[2, 9\] does not fit a weight of 8 columns"):
        bf16.linear(bf16.compute(normal(1, 2, 9)), packed)
    with pytest.raises(ValueError, match="segments"):
        bf16.pack_linear(normal(1, 8, 8), segments=(4, 2, 8, 8))
    with pytest.raises(KernelError, match="not bfloat16"):
        bf16.pack_linear(np.zeros((2, 2)))


def test_heads_have_their_own_weights(ops: Any) -> None:
    packed, x = ops.pack_linear(normal(1, 4 * 20, 24)), ops.compute(normal(2, 70, 4 * 24).reshape(70, 4, 24))
    got = ops.to_numpy(ops.heads_linear(x, packed, heads=4))
    one = ops.to_numpy(ops.heads_linear(x[5:6], packed, heads=4))
    assert_same_bits(one[0], got[5])
    weight, wide = ops.to_numpy(ops.compute(normal(1, 80, 24))).reshape(4, 20, 24), ops.to_numpy(x)
    wanted = np.einsum("thk,hnk->thn", wide.astype(np.float64), weight.astype(np.float64)).reshape(70, 80)
    assert_close(got, wanted, 8e-3 if ops.compute_dtype == "bf16" else 5e-6)


# --- compressed -------------------------------------------------------------------------------------------------------


def rough(n: int, k: int, seed: int = 1) -> NDArray[Any]:
    """Weights with zeros, tiny and large ones: escapes of every kind that a product can bear."""
    weight = (normal(seed, n, k) * 0.02).astype(ml_dtypes.bfloat16)
    weight[::7, 3::29] = 0
    weight[5::11, 1::31] *= ml_dtypes.bfloat16(1e-9)
    weight[2::13, 7::37] = ml_dtypes.bfloat16(40.0)
    weight[-1] = 0
    return weight


def gpu(weight: NDArray[Any]) -> GpuCompressedMatrix:
    matrix = compress_for_gpu(weight.view(np.uint16))
    assert matrix is not None
    assert len(matrix.values)
    return matrix


@pytest.mark.parametrize(
    ("n", "k", "ends"),
    [
        (80, 128, (128,)),
        pytest.param(150, 320, segment_ends(320, 32), marks=LONG),
        pytest.param(45, 1160, (8, 136, 136, 1160), marks=LONG),
    ],
)
def test_compressed_weights_give_the_bits_of_plain_ones(bf16: Any, n: int, k: int, ends: tuple[int, ...]) -> None:
    weight = rough(n, k)
    plain, small = bf16.pack_linear(weight, segments=ends), bf16.pack_compressed([gpu(weight)], segments=ends)
    x = bf16.compute(normal(2, 260, k))
    for rows in (1, 17, 64, 65, 200, 260) if k > 128 else (3, 260):  # in registers up to 256, then in slabs
        wanted, got = (bf16.to_numpy(bf16.linear(x[-rows:], own)) for own in (plain, small))
        assert_same_bits(got, wanted, f"{rows} rows")
    ids = np.array([0, n - 1, 5, 5, 17], np.int32)
    assert_same_bits(bf16.to_numpy(bf16.embed(small, ids)), bf16.to_numpy(bf16.embed(plain, ids)))


@pytest.mark.long
def test_slabs_cut_a_matrix_anywhere(bf16: Any) -> None:
    weight = rough(300, 64)
    plain, small = bf16.pack_linear(weight), bf16.pack_compressed([gpu(weight)])
    narrow = replace(small, data=replace(small.data, workspace=small.data.workspace[: 128 * 64]))
    x = bf16.compute(normal(2, 257, 64))
    onto, also = bf16.hidden(normal(3, 257, 300)), bf16.hidden(normal(3, 257, 300))
    bf16.linear_add(x, plain, onto)
    bf16.linear_add(x, narrow, also)
    assert_same_bits(bf16.to_numpy(also), bf16.to_numpy(onto))


@pytest.mark.long
def test_parts_of_either_layout_share_a_matrix(bf16: Any) -> None:
    """Codes differ from part to part, and what is in the CPU's layout is converted."""
    parts = [rough(48, 128, 1), (normal(2, 64, 128) * 3).astype(ml_dtypes.bfloat16), rough(29, 128, 3)]
    cpu = compression.compress(parts[1].view(np.uint16))
    assert cpu is not None
    small = bf16.pack_compressed([gpu(parts[0]), cpu, gpu(parts[2])])
    plain = bf16.pack_linear(np.concatenate(parts))
    for rows in (1, 70):
        x = bf16.compute(normal(4, rows, 128))
        assert_same_bits(bf16.to_numpy(bf16.linear(x, small)), bf16.to_numpy(bf16.linear(x, plain)))


def test_what_cannot_stay_compressed_is_left_to_others(bf16: Any) -> None:
    weight = gpu(rough(32, 128))
    assert make(*TRITONS[1]).pack_compressed([weight]) is None  # fp32
    assert bf16.pack_compressed([weight], segments=(36, 128)) is None
    assert bf16.pack_compressed([gpu(rough(40, 128)), weight]) is None


def test_a_damaged_dictionary_is_refused(bf16: Any) -> None:
    weight = gpu(rough(32, 128))
    fewer = weight.counts_PS.copy()
    fewer[0, 0] -= 1
    with pytest.raises(KernelError, match="not those of the table"):
        bf16.pack_compressed([replace(weight, counts_PS=fewer)])
    with pytest.raises(KernelError, match="not in its dictionary"):
        bf16.pack_compressed([replace(weight, counts_PS=fewer, values=weight.values[:-1])])


# --- quantized --------------------------------------------------------------------------------------------------------

QUICK = ("8 bits, fp16", "4 bits, zero point", "5 bits of super-blocks", "6 bits of super-blocks")
ALL_FORMATS = {**FORMATS, **FLOATS}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name == QUICK[1] else LONG) for name in ALL_FORMATS])
def test_quantized_products_are_those_of_the_weights(bf16: Any, name: str) -> None:
    form = ALL_FORMATS[name]
    matrix, weight_NK = sound(form, 50, 512)
    packed = bf16.pack_quantized([matrix], segments=(224, 512))
    x = bf16.compute(normal(2, 6, 512))
    assert_close(bf16.to_numpy(bf16.linear(x, packed)), exact(bf16, x, weight_NK), 2e-5)
    assert_rows_alone(bf16, packed, 512, FEWER)
    ids = np.arange(50, dtype=np.int32)[::-1].copy()
    assert_same_bits(bf16.to_numpy(bf16.embed(packed, ids)), weight_NK[::-1].copy())
    assert packed.nbytes * 8 <= 50 * 512 * form.bits_a_weight() * 1.001 + 8 * 50 * 8


def sound(form: QuantFormat, n: int, k: int) -> Any:
    """Without NaN, which an fp8 code can be."""
    if not np.isnan(form.values).any():
        return matrix_of(form, n, k)
    tame = replace(form, values=tuple(0.0 if np.isnan(value) else value for value in form.values))
    matrix, weight_NK = matrix_of(tame, n, k)
    rows = matrix.read_all()
    rows.codes_NK[(rows.codes_NK & 0x7F) == 0x7F] = 0
    codes = rows.codes_NK
    scales = np.repeat(rows.scales_NG.astype(np.float32), min(form.group, k), axis=1)[:, :k]
    weight_NK = np.array(tame.values, np.float32)[codes] * scales
    return replace(matrix, format=form), weight_NK


@pytest.mark.long
def test_parts_and_orders(bf16: Any) -> None:
    order = np.random.default_rng(5).permutation(320).astype(np.int32)
    made = [matrix_of(FORMATS[name], 48, 320, seed, order=order) for seed, name in enumerate(QUICK[:2])]
    packed = bf16.pack_quantized([matrix for matrix, _ in made], segments=segment_ends(320, 32))
    weight_NK = np.concatenate([weight for _, weight in made])
    x = bf16.compute(normal(4, 9, 320))
    assert_close(bf16.to_numpy(bf16.linear(x, packed)), exact(bf16, x, weight_NK), 2e-5)
    ids = np.arange(96, dtype=np.int32)
    assert_same_bits(bf16.to_numpy(bf16.embed(packed, ids)), weight_NK)
    assert bf16.pack_quantized([made[0][0]], segments=(40, 320)) is None


@pytest.mark.cuda
@pytest.mark.parametrize(("n", "k", "unit"), [(6144, 4096, None), (4096, 14336, 32), (28672, 4096, None)])
def test_shapes_of_a_model_on_a_gpu(bf16: Any, n: int, k: int, unit: int | None) -> None:
    """Law 1 and compressed against plain at the size where tiles, warps and stages are what they are."""
    ends = (k,) if unit is None else segment_ends(k, unit)
    weight = (normal(1, n, k) * 0.02).astype(ml_dtypes.bfloat16)
    plain, small = bf16.pack_linear(weight, segments=ends), bf16.pack_compressed([gpu(weight)], segments=ends)
    x = bf16.compute(normal(2, 1100, k))
    whole = bf16.to_numpy(bf16.linear(x, plain))
    assert_close(whole[:4], exact(bf16, x[:4], weight), 1e-4)
    for rows in (1, 2, 17, 64, 65, 128, 129, 256, 257, 1100):
        for own in (plain, small):
            assert_same_bits(bf16.to_numpy(bf16.linear(x[-rows:], own)), whole[-rows:], f"{rows} rows")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_kernels_compile_for_a_gpu_that_is_not_there() -> None:
    """On the matrix units of warp groups, with copies running ahead, and within shared memory."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    canary = Path(__file__).with_name("triton_canary.py")
    done = subprocess.run([sys.executable, str(canary)], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert COMPILED | set(FUSED) <= {kernel["name"] for kernel in kernels}
    grouped = [kernel["about"] for kernel in kernels if kernel["name"] == "grouped_kernel"]
    assert any("8 segments" in about for about in grouped)
    units = {kernel["about"]: kernel["units"] for kernel in kernels if kernel["name"] == "product_kernel"}
    for kernel in kernels:
        if kernel["name"] in FUSED:  # sums of the same bits are made by the same instruction
            assert kernel["units"] == units[kernel["about"].replace("compressed,", "compressed plain,")], kernel
    assert all(kernel["shared"] <= SHARED_BYTES for kernel in kernels), kernels
    for kernel in kernels:
        if kernel["name"] == "product_kernel" and kernel["about"].startswith("bf16"):
            assert kernel["units"][-1] in ("m64n128k16", "m64n16k16"), kernel
            assert kernel["copies_ahead"], kernel
            assert kernel["spilled"] < 256 or "5 bits" in kernel["about"] or "6 bits" in kernel["about"], kernel
