"""The family amx_bf16: it sums as Intel's manual says, the real build has the instructions, and nobody gets it unasked.

Where the processor has no AMX, only ``scripts/emulated-amx-tests`` runs what needs the family.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from kernel_cases import assert_same_bits, make, normal
from numpy.typing import NDArray

from penstock.errors import KernelError
from penstock.kernels import _native
from penstock.kernels.native.backend import families
from penstock.kernels.select import make_ops

FAMILY = "amx_bf16"
TILE_COLUMNS = 32  # of K
LEAST_NORMAL = Fraction(2) ** -126

needs_family = pytest.mark.skipif(FAMILY not in families(), reason="no AMX here; scripts/emulated-amx-tests has it")


def rounded(exact: Fraction) -> Fraction:
    """To 24 bits, ties to even; then zero for what would be denormal."""
    if exact == 0:
        return exact
    exponent = abs(exact.numerator).bit_length() - exact.denominator.bit_length()
    if Fraction(2) ** exponent > abs(exact):
        exponent -= 1
    unit = Fraction(2) ** (exponent - 23)
    value = round(exact / unit) * unit
    return value if abs(value) >= LEAST_NORMAL else Fraction(0)


def operand(value: float) -> Fraction:
    """Denormal operands count as zero."""
    exact = Fraction(value)
    return exact if abs(exact) >= LEAST_NORMAL else Fraction(0)


def sum_of_tiles(x: Sequence[Fraction], w: Sequence[Fraction]) -> Fraction:
    """TDPBF16PS for one output, tile after tile: pairs in two chains, their sum, then its sum with the tiles before."""
    total = Fraction(0)
    for start in range(0, len(x), TILE_COLUMNS):
        chains = [Fraction(0), Fraction(0)]
        for k in range(start, min(start + TILE_COLUMNS, len(x))):
            chains[k % 2] = rounded(chains[k % 2] + x[k] * w[k])
        total = rounded(total + rounded(chains[0] + chains[1]))
    return total


def product(x_TK: NDArray[np.float32], w_NK: NDArray[np.float32], ends: Sequence[int]) -> NDArray[np.float32]:
    """[T, N] from exact fractions, in the order that the manual and the segments' tree prescribe."""
    out = np.empty((len(x_TK), len(w_NK)), np.float32)
    rows = [[operand(float(value)) for value in row] for row in x_TK]
    weights = [[operand(float(value)) for value in row] for row in w_NK]
    for t, x in enumerate(rows):
        for n, w in enumerate(weights):
            starts = [0, *ends[:-1]]
            sums = [np.float32(float(sum_of_tiles(x[a:b], w[a:b]))) for a, b in zip(starts, ends, strict=True)]
            while len(sums) > 1:
                sums = [sums[i] + sums[i + 1] for i in range(0, len(sums), 2)]
            out[t, n] = sums[0]
    return out


def spread(seed: int, *shape: int, bits: int = 6) -> NDArray[np.float32]:
    """Values of very unlike sizes, so that the order of a sum shows."""
    return normal(seed, *shape) * np.exp2(np.random.default_rng(seed).integers(-bits, bits, shape)).astype(np.float32)


def given(ops: Any, values: NDArray[np.float32]) -> NDArray[np.float32]:
    return ops.to_numpy(ops.compute(values))


@needs_family
@pytest.mark.parametrize(
    ("rows", "n", "k", "ends"),
    [
        (2, 18, 96, (96,)),  # whole tiles
        (18, 3, 70, (70,)),  # two tiles of rows, the end of K
        (35, 2, 33, (33,)),  # two pairs of them, an odd end
        (2, 33, 134, (7, 39, 39, 134)),  # unlike segments, an empty one
    ],
)
def test_sums_are_those_of_the_manual(rows: int, n: int, k: int, ends: tuple[int, ...]) -> None:
    ops = make(FAMILY, "bf16")
    x, weight = spread(1, rows, k), spread(2, n, k)
    got = ops.to_numpy(ops.linear(ops.compute(x), ops.pack_linear(weight, segments=ends)))
    wanted = product(given(ops, x), given(ops, weight), ends)
    assert_same_bits(got, wanted)
    other = make("avx512_bf16", "bf16")
    assert (other.to_numpy(other.linear(other.compute(x), other.pack_linear(weight, segments=ends))) != wanted).any()


@needs_family
def test_denormal_numbers_are_zero() -> None:
    """Given or found: operands, products, sums."""
    ops = make(FAMILY, "bf16")
    x, weight = spread(3, 4, 64) * np.float32(2**-63), spread(4, 17, 64) * np.float32(2**-63)
    x[1] *= np.float32(2**-64)
    x[2] *= np.float32(2**63)
    weight[5] *= np.float32(2**-66)
    assert (np.abs(given(ops, weight)[5]) < 2**-126).any()
    got = ops.to_numpy(ops.linear(ops.compute(x), ops.pack_linear(weight)))
    wanted = product(given(ops, x), given(ops, weight), (64,))
    np.testing.assert_array_equal(got, wanted)  # a zero's sign is nobody's business
    exact = given(ops, x).astype(np.float64) @ given(ops, weight).astype(np.float64).T
    assert (got[exact != 0] == 0).any()
    assert (got != 0).any()


@needs_family
def test_fp32_is_that_of_avx512_bf16() -> None:
    x, weight = normal(5, 9, 77), normal(6, 20, 77)
    results = []
    for family in (FAMILY, "avx512_bf16"):
        ops = make(family, "fp32")
        results.append(ops.to_numpy(ops.linear(ops.compute(x), ops.pack_linear(weight))))
    assert_same_bits(*results)


@needs_family
@pytest.mark.parametrize("k", [40, 33])
def test_what_lies_behind_the_end_of_k_is_not_read(k: int) -> None:
    """Neither the next row of x nor the next panel of the weight reaches a sum, were they infinite."""
    ops = make(FAMILY, "bf16")
    x, weight = normal(7, 3, k), normal(8, 20, k)
    plain = ops.to_numpy(ops.linear(ops.compute(x), ops.pack_linear(weight[:16])))
    x[1], weight[16:] = np.inf, np.inf
    got = ops.to_numpy(ops.linear(ops.compute(x), ops.pack_linear(weight)))
    assert_same_bits(got[::2, :16].copy(), plain[::2].copy())
    assert not np.isfinite(got[1]).any()
    assert not np.isfinite(got[:, 16:]).any()


def test_nobody_gets_it_unasked() -> None:
    assert families()[0] != FAMILY
    assert FAMILY not in make_ops(compute_dtype="bf16").numerics
    if FAMILY not in families():
        with pytest.raises(KernelError, match="'amx_bf16' cannot run"):
            make_ops(family=FAMILY, compute_dtype="bf16")
        with pytest.raises(ValueError, match="cannot run here"):
            _native.CompressedKernels(FAMILY)
    else:
        assert make_ops(family=FAMILY, compute_dtype="bf16").numerics == f"cpp-{FAMILY}-{_native.VERSION}-bf16"


@pytest.mark.long
@pytest.mark.skipif(platform.machine() != "x86_64" or shutil.which("objdump") is None, reason="nothing to look into")
def test_the_build_has_the_instructions() -> None:
    """Sums in tiles 0 to 3, rows of x in 4 and 5, panels in 6 and 7; an emulation has none of them."""
    words = ["objdump", "-d", "--no-show-raw-insn", "-M", "intel", _native.__file__]
    code = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    products = set(re.findall(r"\btdpbf16ps (\S+)", code))
    others = set(re.findall(r"\b(ldtilecfg|tileloadd|tilestored|tilezero|tilerelease)\b", code))
    if _native.EMULATES_AMX:
        assert not products | others
        assert FAMILY in families()
        return
    assert products == {"tmm0,tmm4,tmm6", "tmm1,tmm4,tmm7", "tmm2,tmm5,tmm6", "tmm3,tmm5,tmm7"}
    assert others == {"ldtilecfg", "tileloadd", "tilestored", "tilezero", "tilerelease"}
