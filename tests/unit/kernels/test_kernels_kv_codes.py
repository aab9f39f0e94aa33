"""Keys and values as codes of 8 bits: the codes themselves, attention over them, law 1, and how far they are from what
they stand for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from kernel_cases import (
    CODED,
    PLAIN,
    SLOW_PAIRS,
    TOLERANCE,
    TRITONS,
    Heads,
    Story,
    Way,
    assert_close,
    assert_same_bits,
    kept,
    make,
    normal,
    short,
)
from kernel_ways import assert_any_cut_is_the_same
from numpy.typing import NDArray
from test_kernels_attention import WAYS, plain_attention
from test_kernels_latent import SHAPES, Latent, LatentStory
from test_triton_attention import assert_the_same_however_read

from penstock.errors import KernelError
from penstock.kernels.native.backend import families
from penstock.kernels.operands import KV_TYPES, LEAST_EXPONENT, MOST_EXPONENT, NO_NUMBER, KvShape, StateShape
from penstock.kernels.reference.attention import decoded, encoded
from penstock.kernels.select import REFERENCE, make_ops
from penstock.kv.page_memory import KvLayout
from penstock.types import FP8_E4M3

BOTH = [(REFERENCE, "bf16", FP8_E4M3), (*TRITONS[0], FP8_E4M3)]
"""One of each: what the default suite runs; interpreted, it must be small."""

ROWS = np.array(
    [
        [448.0, 447.0, 3.0, -0.01, 2.0**-6, -(2.0**-9), 2.0**-10, 1.5 * 2.0**-9],  # largest code, subnormal ones, ties
        [449.0, 1.0, 0.0, -0.0, 17.0, -19.0, 1e-3, 1e-9],  # above it: the next power of two
        [1.75, -1.75, 1.6875, 1.5625, 1.0625, 1.1875, 0.4, -0.3],  # halfway between codes: to even
        [1e30, -3e29, 1e24, 5e25, -1e27, 7.0, 0.0, 2e28],
        [1e-30, 2e-31, -3e-33, 1e-37, 1e-38, 0.0, 0.0, 0.0],
        [0.0] * 8,
    ],
    np.float32,
)


@pytest.fixture(params=CODED, ids="-".join)
def ops(request: pytest.FixtureRequest) -> Any:
    return make(*request.param)


def written(ops: Any, rows: NDArray[np.float32]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Codes and exponents that pages have of these keys, and of the same values."""
    heads = Heads(1, 1, rows.shape[1])
    story = Story(ops, heads, [len(rows)], Way(rotated=0), poison=True)
    story.qkv = [np.concatenate([rows] * 3, axis=1)]
    batch = story.batch([(0, 0, len(rows))])
    ops.rope_and_write(ops.hidden(story.qkv[0]), None, story.kv, 1, batch, heads=1, kv_heads=1)
    kv, page = story.kv, int(story.table[0, 0])
    codes = [own[page, 1, 0, : len(rows)].cpu().numpy() for own in (kv.keys, kv.values)]
    exponents = [own[page, 1, 0, : len(rows)].cpu().numpy() for own in (kv.key_exponents, kv.value_exponents)]
    np.testing.assert_array_equal(codes[0], codes[1])
    np.testing.assert_array_equal(exponents[0], exponents[1])
    return codes[0], exponents[0]


@pytest.mark.parametrize("way", BOTH, ids="-".join)
def test_codes_are_those_of_the_standard(way: tuple[str, str, str]) -> None:
    """By ml_dtypes' E4M3, which is neither the oracle's nor the kernels'."""
    wild = normal(3, 9, 8) * np.float32(10.0) ** np.arange(-4, 5, dtype=np.float32)[:, None]
    rows = np.concatenate([ROWS, wild, np.exp(4 * normal(4, 1, 8))])
    codes, exponents = written(make(*way), rows)
    scale = 2.0 ** (exponents.astype(np.float64) - 135)
    wanted = (rows / scale[:, None]).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(codes, wanted.view(np.uint8))
    largest = np.abs(wanted.astype(np.float64)).max(1)
    proper = exponents > LEAST_EXPONENT
    assert proper.tolist() == [True] * 4 + [True, False] + [True] * 10
    assert (largest[proper] > 208).all(), "no power of two less would do"
    assert (largest <= 448).all()


@pytest.mark.parametrize("way", BOTH, ids="-".join)
def test_rows_with_what_is_no_number_say_so(way: tuple[str, str, str]) -> None:
    rows = np.ones((3, 8), np.float32)
    rows[0, 3], rows[1, 5] = np.nan, -np.inf
    assert written(make(*way), rows)[1].tolist() == [NO_NUMBER, NO_NUMBER, 127]


@pytest.mark.parametrize("way", BOTH, ids="-".join)
def test_the_largest_number_that_codes_stand_for(way: tuple[str, str, str]) -> None:
    """Behind it a row is no number: it does not become a small one of another sign."""
    edge = 1.75 * 2.0**126
    rows = np.ones((5, 8), np.float32)
    rows[:, 3] = [edge, -edge, (1.75 + 2.0**-7) * 2.0**126, -(2.0**127), ml_dtypes.finfo(ml_dtypes.bfloat16).max]
    codes, exponents = written(make(*way), rows)
    assert exponents.tolist() == [MOST_EXPONENT] * 2 + [NO_NUMBER] * 3
    assert codes[:2, 3].tolist() == [0x7E, 0xFE]


@pytest.mark.parametrize("way", BOTH, ids="-".join)
@pytest.mark.parametrize("part", ["key", "value"])
def test_attention_tells_of_what_is_no_number(way: tuple[str, str, str], part: str) -> None:
    """Whatever its sign: a score of minus infinity would leave the key out, and nobody would know."""
    ops, heads = make(*way), Heads(1, 1, 8)
    for wrong in (np.nan, 2.0**127):
        for query in (1.0, -1.0):
            story = Story(ops, heads, [4], Way(rotated=0), poison=True)
            story.qkv[0][:, :8] = query
            story.qkv[0][1, 8 if part == "key" else 16] = wrong
            story.chunked(1)
            out = story.out[0]
            assert np.isfinite(out[0]).all()
            assert np.isnan(out[1:]).all()


def test_every_code_is_read_back() -> None:
    """By the oracle, exactly, also in bf16, at both ends of the exponents."""
    codes = torch.arange(256, dtype=torch.uint8)[None].repeat(3, 1)
    exponents = torch.tensor([LEAST_EXPONENT, 127, 253], dtype=torch.uint8)
    numbers = decoded(codes, exponents)
    assert torch.equal(numbers.bfloat16().float().nan_to_num(7.0), numbers.nan_to_num(7.0))
    again, same = encoded(numbers[:, :0x7F].contiguous())
    assert torch.equal(again, codes[:, :0x7F])
    assert torch.equal(same, exponents)


@pytest.mark.parametrize("heads", [Heads(5, 1, 64), Heads(6, 2, 24), Heads(8, 2, 80), Heads(2, 2, 6)], ids=str)
def test_attention(ops: Any, heads: Heads) -> None:
    story = Story(ops, heads, short(ops, [1, 17, 150], [1, 70]), poison=True)
    for got, qkv in zip(story.whole(), story.qkv, strict=True):
        assert_close(got, plain_attention(ops, heads, PLAIN, qkv), 2 * TOLERANCE[ops.compute_dtype])


@pytest.mark.parametrize("name", ["interleaved", "other values", "window", "chunks", "everything"])
def test_attention_in_other_ways(ops: Any, name: str) -> None:
    heads, way = WAYS[name]
    story = Story(ops, heads, short(ops, [1, 150], [1, 79]), way, poison=True)
    for got, qkv in zip(story.whole(), story.qkv, strict=True):
        assert_close(got, plain_attention(ops, heads, way, qkv), 2 * TOLERANCE[ops.compute_dtype])


@pytest.mark.parametrize("heads", SHAPES, ids=str)
def test_latent_attention(ops: Any, heads: Latent) -> None:
    story = LatentStory(ops, heads, short(ops, [1, 90], [1, 33]), PLAIN, poison=True)  # type: ignore[arg-type]
    for got, qkv in zip(story.whole(), story.qkv, strict=True):
        assert_close(got, story.plain_attention(qkv), 2 * TOLERANCE[ops.compute_dtype])


@pytest.mark.parametrize("name", ["half", "window", "everything"])
@pytest.mark.parametrize("compute", ["bf16", "fp32"])
def test_any_cut_in_any_company(compute: str, name: str) -> None:
    ops, (heads, way) = make(REFERENCE, compute, FP8_E4M3), WAYS[name]
    assert_any_cut_is_the_same(lambda own: Story(ops, heads, own, way, poison=True), [30, 120], last=100)


def test_the_kernels_cut_as_they_like() -> None:
    """Law 1 of the GPU's kernels: in pieces, alone, one by one; and close to float64."""
    ops, heads = make(*BOTH[1]), Heads(3, 1, 24, values=20)
    way = Way(rotated=8, sinks=True, masks=(("window", 9), ("softcap", 20.0)))
    together, apart = (Story(ops, heads, [1, 18], way, poison=True) for _ in range(2))
    for got, qkv in zip(together.whole(), together.qkv, strict=True):
        assert_close(got, plain_attention(ops, heads, way, qkv), 2 * TOLERANCE["bf16"])
    for parts in ([(1, 0, 15), (0, 0, 1)], [(1, 15, 17)], [(1, 17, 18)]):
        apart.step(parts)
    for got, wanted in zip(apart.out, together.out, strict=True):
        assert_same_bits(got, wanted)
    assert apart.written() == together.written()


@pytest.mark.cuda
@pytest.mark.parametrize("heads", [Heads(32, 8, 128), Heads(10, 2, 80)], ids=str)
def test_a_token_has_the_same_bits_however_it_is_read(heads: Heads) -> None:
    """Law 1 on the device, over several partitions."""
    assert_the_same_however_read(make(*BOTH[1]), heads)


def test_latent_kernels_cut_as_they_like() -> None:
    ops, latent = make(*BOTH[1]), Latent(3, 30, 22, 6)
    story, apart = (LatentStory(ops, latent, [4], PLAIN, poison=True) for _ in range(2))  # type: ignore[arg-type]
    assert_close(story.whole()[0], story.plain_attention(story.qkv[0]), 2 * TOLERANCE["bf16"])
    assert_same_bits(apart.chunked(2)[0], story.out[0])


@pytest.mark.parametrize(("family", "compute"), SLOW_PAIRS)
def test_pages_have_the_bytes_of_their_layout(family: str, compute: str) -> None:
    """One arithmetic: of the shape, of a layout, of a backend's memory; codes take half, and a byte a row."""
    plain, shape = make(family, compute), KvShape(layers=3, kv_heads=2, key_dim=24, value_dim=20)
    for own in (shape, replace(shape, kv_heads=1, shared=True)):
        assert plain.page_bytes(own) == own.page_bytes(compute) == KvLayout.for_shape(own, compute).page_bytes
    if family in families():
        return
    ops = make(family, compute, FP8_E4M3)
    assert ops.page_bytes(shape) == 16 * 3 * 2 * (24 + 1 + 20 + 1) == KvLayout.for_shape(shape, FP8_E4M3).page_bytes
    assert ops.page_bytes(replace(shape, kv_heads=1, shared=True)) == 16 * 3 * (24 + 1)
    assert KvLayout.for_shape(shape, FP8_E4M3).name == "full-l3-h2-t16-k24-v20-fp8_e4m3"


def test_codes_are_a_class_of_their_own() -> None:
    plain, coded = make(REFERENCE, "bf16"), make(*BOTH[0])
    assert coded.numerics == f"{plain.numerics}-kv_fp8_e4m3"
    assert (plain.kv_dtype, coded.kv_dtype) == ("bf16", FP8_E4M3)
    assert plain.kv_layout != coded.kv_layout
    assert make(*BOTH[1]).numerics == f"{make(*TRITONS[0]).numerics}-kv_fp8_e4m3"
    assert KV_TYPES[FP8_E4M3].number_bytes == 1


def test_who_cannot_keep_codes_says_who_can() -> None:
    with pytest.raises(KernelError, match="keeps KV pages in the compute type; for fp8_e4m3 take 'triton' on a GPU"):
        make_ops(compute_dtype="bf16", kv_dtype=FP8_E4M3)
    with pytest.raises(KernelError, match="KV pages in 'int3'"):
        make_ops(family=REFERENCE, compute_dtype="bf16", kv_dtype="int3")
    states = StateShape(layers=1, key_heads=1, heads=1, key_dim=16, value_dim=16, taps=4)
    shape = replace(KvShape.plain(layers=1, kv_heads=1, head_dim=64), states=states)
    with pytest.raises(KernelError, match="states of recurrent layers are in fp32"):
        make(*BOTH[0]).new_kv(shape, pages=1)


def like_a_model(seed: int, *shape: int) -> NDArray[np.float32]:
    """Rows as layers make them: a few channels are ten times as large as others, and some tokens than others."""
    rng = np.random.default_rng(seed)
    channels = np.exp(0.5 * rng.standard_normal(shape[-1]))
    channels[rng.permutation(shape[-1])[:3]] *= 10
    tokens = np.exp(0.5 * rng.standard_normal((shape[0], *(1,) * (len(shape) - 1))))
    rows = rng.standard_normal(shape) * channels * tokens
    return (rows / np.sqrt(np.square(rows).mean())).astype(np.float32)


@pytest.mark.parametrize("compute", ["bf16", "fp32"])
def test_how_far_codes_are_from_numbers(compute: str) -> None:
    """A number is within a sixteenth of itself, or 2^-17 of its row's largest; what attention makes of 300 tokens is
    within 7 % of what it makes of numbers, by root mean square: 4 to 6 were found (docs/gpu.md)."""
    heads = Heads(4, 2, 64)
    keys = like_a_model(1, 500, 64)
    error = np.abs(kept(make(REFERENCE, compute, FP8_E4M3), keys) - keys)
    assert (error <= np.maximum(np.abs(keys) / 16, np.abs(keys).max(-1, keepdims=True) * 2.0**-17)).all()
    qkv = np.concatenate([normal(2, 300, 4 * 64), *(like_a_model(3 + i, 300, 64) for i in range(4))], axis=1)
    found = []
    for kv_dtype in (None, FP8_E4M3):
        story = Story(make(REFERENCE, compute, kv_dtype), heads, [300])
        story.qkv = [qkv]
        found.append(story.whole()[0].astype(np.float64))
    apart, size = np.square(found[1] - found[0]), np.square(found[0])
    assert np.sqrt(apart.mean() / size.mean()) < 0.07
