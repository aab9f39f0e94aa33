"""One test an operation: every family and both compute types against plain float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernel_cases import NATIVE, SLOW_TRITONS, TOLERANCE, Heads, Story, assert_close, make, normal
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from penstock.errors import KernelError
from penstock.kernels.operands import AttentionSpec, KvShape, StepBatch, segment_ends


@pytest.fixture(params=SLOW_TRITONS, ids="-".join)
def ops(request: pytest.FixtureRequest) -> Any:
    return make(*request.param)


def rounded(ops: Any, values: NDArray[Any]) -> NDArray[np.float64]:
    return ops.to_numpy(ops.compute(values)).astype(np.float64)


@pytest.mark.parametrize(
    ("n", "k", "segments"),
    [
        (64, 64, None),
        (1, 1, None),
        (50, 33, None),
        (130, 320, segment_ends(320, 64)),  # 5 heads in 8 segments: three are empty
        (100, 200, segment_ends(200, 20)),
        (48, 105, segment_ends(105, 15)),  # odd ends
        (96, 896, segment_ends(896, 32)),
        (33, 4100, None),  # more than one span of K
    ],
)
@pytest.mark.parametrize("rows", [1, 2, 5, 19])
def test_linear(ops: Any, n: int, k: int, segments: tuple[int, ...] | None, rows: int) -> None:
    weight, x = normal(1, n, k) / k**0.5, normal(2, rows, k)
    packed = ops.pack_linear(weight, segments=segments)
    wanted = rounded(ops, x) @ rounded(ops, weight).T
    assert_close(ops.to_numpy(ops.linear(ops.compute(x), packed)), wanted, 5e-6)

    before = normal(3, rows, n)
    hidden = ops.hidden(before)
    product = ops.to_numpy(ops.linear(ops.compute(x), packed))
    ops.linear_add(ops.compute(x), packed, hidden)
    np.testing.assert_array_equal(ops.to_numpy(hidden), before + product)  # finished before it is added


@pytest.mark.parametrize("source", [bfloat16, np.float16, np.float32])
def test_a_weight_may_lie_with_its_inputs_first(ops: Any, source: type) -> None:
    weight, tokens = normal(4, 301, 105).astype(source), np.arange(301, dtype=np.int32)
    x = ops.compute(normal(2, 3, 105))
    for segments in (None, segment_ends(105, 15)):  # odd ends
        one, other = (ops.pack_linear(own, segments=segments) for own in (weight, np.asfortranarray(weight)))
        np.testing.assert_array_equal(ops.to_numpy(ops.linear(x, other)), ops.to_numpy(ops.linear(x, one)))
        np.testing.assert_array_equal(ops.to_numpy(ops.embed(other, tokens)), ops.to_numpy(ops.embed(one, tokens)))


@pytest.mark.parametrize("source", [bfloat16, np.float16, np.float32])
def test_embed_returns_what_was_packed(ops: Any, source: type) -> None:
    weight = normal(4, 37, 45).astype(source)
    table = ops.pack_linear(weight)
    tokens = np.array([0, 36, 5, 5, 17], np.int32)
    np.testing.assert_array_equal(ops.to_numpy(ops.embed(table, tokens)), rounded(ops, weight)[tokens])


@pytest.mark.parametrize("width", [16, 20, 320, 2048])
def test_rms_norm(ops: Any, width: int) -> None:
    hidden, weight = normal(5, 7, width) * 3, normal(6, width)
    wide = hidden.astype(np.float64)
    wanted = wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-5) * weight
    got = ops.to_numpy(ops.rms_norm(ops.hidden(hidden), ops.vector(weight), 1e-5))
    assert_close(got, wanted, TOLERANCE[ops.compute_dtype])


def test_rows_and_rounding(ops: Any) -> None:
    values = normal(8, 6, 10)
    picked = ops.rows(ops.compute(values), np.array([5, 0, 5], np.int32))
    exact = values.astype(bfloat16).astype(np.float32) if ops.compute_dtype == "bf16" else values
    np.testing.assert_array_equal(ops.to_numpy(picked), exact[[5, 0, 5]])


def test_pages_are_zero_copy_over_given_memory(ops: Any) -> None:
    story = Story(ops, Heads(2, 1, 16), [20])
    assert not any(story.memory)
    story.whole()
    half = ops.page_bytes(KvShape.plain(layers=1, kv_heads=1, head_dim=16))
    for page in story.table[0, :2]:
        start = int(page) * 2 * half
        assert not any(story.memory[start : start + half])  # layer 0: not written
        assert any(story.memory[start + half : start + 2 * half])


@pytest.mark.parametrize(("family", "compute"), NATIVE)
def test_bad_calls_are_refused(family: str, compute: str) -> None:
    ops = make(family, compute)
    weight = ops.pack_linear(normal(1, 8, 8))
    with pytest.raises(ValueError, match="outside the vocabulary"):
        ops.embed(weight, np.array([8], np.int32))
    with pytest.raises(ValueError, match=r"x must be compute"):
        ops.linear(ops.compute(normal(1, 2, 9)), weight)
    with pytest.raises(ValueError, match="segment"):
        ops.pack_linear(normal(1, 8, 8), segments=(4, 2, 8, 8))
    with pytest.raises(KernelError, match="not bfloat16"):
        ops.pack_linear(np.zeros((2, 2)))
    with pytest.raises(KernelError, match="bytes of KV memory"):
        ops.new_kv(KvShape.plain(layers=1, kv_heads=1, head_dim=8), pages=2, memory=memoryview(bytearray(100)))

    story = Story(ops, Heads(2, 1, 16), [20])
    batch = StepBatch(
        np.zeros(1, np.int32), np.array([19], np.int32), np.array([0, 1], np.int32), np.array([[0, 99]], np.int32),
        np.zeros(1, np.int32),
    )  # fmt: skip
    with pytest.raises(ValueError, match="page outside the memory"):
        ops.paged_attention(ops.compute(normal(1, 1, 2, 16)), story.kv, 0, batch, AttentionSpec(1.0))
