"""From logits to tokens as Triton kernels: noise, the best token, which tokens may be drawn, and how likely they are.

Every token of a row has a *place*, one number that orders logits first and then lower ids: no two are equal, so whoever
compares them, in any order, finds the same.

::

    bits 0 ... ID_BITS - 1      the largest id minus this token's
    32 bits above               the logit's own bits, turned so that they order as the logit does; -0 counts as 0

The best token is the largest place.  Top-k, top-p and min-p each leave the tokens from some place on: the *floor* of a
row is the highest of the three, found digit by digit.  What is summed on the way are counts, and weights as whole
numbers of 2^-40, so no order matters there either.

Random numbers are those of ``kernels.philox``, to the bit.  The noise is computed by the operations of the C++ kernels
(sampling/gumbel_noise.hpp, families/math.hpp) one by one, in fp32 that rounds as IEEE 754 says and fuses where they
fuse, so it has their bits too: from equal logits the same token is sampled on a CPU and on a GPU.

This module imports triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

GREEDY = tl.constexpr(1e-5)
"""Below this temperature the most likely token is taken."""

NOWHERE = tl.constexpr(-1)
"""Below every place."""

_BEYOND = tl.constexpr(1 << 62)
_ONE = tl.constexpr(1 << 40)
_UNIT = tl.constexpr(2.0**-25)


@triton.jit
def place_of(x, ids, ID_BITS: tl.constexpr):
    """Larger for larger logits, and for the lower of two ids of one logit.  Not for NaN."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648
    return (order << ID_BITS) | ((1 << ID_BITS) - 1 - ids).to(tl.int64)


@triton.jit
def _log_near_one(x, e):
    """log(1 + x) for x from sqrt(1/2) - 1 to sqrt(2) - 1, plus e log 2."""
    z = x * x
    p = tl.fma(x, 7.0376836292e-2, -1.1514610310e-1)
    p = tl.fma(p, x, 1.1676998740e-1)
    p = tl.fma(p, x, -1.2420140846e-1)
    p = tl.fma(p, x, 1.4249322787e-1)
    p = tl.fma(p, x, -1.6668057665e-1)
    p = tl.fma(p, x, 2.0000714765e-1)
    p = tl.fma(p, x, -2.4999993993e-1)
    p = tl.fma(p, x, 3.3333331174e-1)
    y = (p * x) * z
    y = tl.fma(e, -2.12194440e-4, y)
    y = tl.fma(z, -0.5, y)
    return tl.fma(e, 0.693359375, x + y)


@triton.jit
def _log(x):
    """Of a normal number above 0."""
    bits = x.to(tl.int32, bitcast=True)
    e = (bits >> 23) - 126
    m = ((bits & 0x007FFFFF) | 0x3F000000).to(tl.float32, bitcast=True)
    small = m < 0.70710678
    e = tl.where(small, e - 1, e)
    m = tl.where(small, m + m, m) - 1.0
    return _log_near_one(m, e.to(tl.float32))


@triton.jit
def gumbel(seed, position, choice, ids):
    """Noise of each token id: -log(-log u), u = (upper 24 bits of the first word + 1/2) 2^-24, which is never rounded:
    near 1 its distance from 1 is used."""
    word, _, _, _ = tl.philox(seed, position, choice, ids, ids * 0)
    odd = ((word >> 8) * 2 + 1).to(tl.int32)  # u is so many 2^-25
    u = odd.to(tl.float32) * _UNIT
    rest = (33554432 - odd).to(tl.float32) * _UNIT
    near = _log_near_one(0.0 - rest, tl.zeros_like(rest))
    return 0.0 - _log(0.0 - tl.where(u < 0.70710678, _log(u), near))


@triton.jit
def noise(seeds, position, choice, ids_N, out_N, count, BLOCK: tl.constexpr):
    """Of given ids (tests and tools)."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_N + at, mask=at < count, other=0)
    drawn = gumbel(tl.load(seeds), tl.load(position), tl.load(choice), ids)
    tl.store(out_N + at, drawn, mask=at < count)


@triton.jit
def _read(logits_V, begin, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    """Logits and ids of a block; minus infinity for what is no number and behind the end."""
    ids = begin + tl.arange(0, BLOCK)
    x = tl.load(logits_V + ids, mask=ids < VOCABULARY, other=float("-inf"))
    return tl.where(x == x, x, float("-inf")), ids  # noqa: PLR0124  (not for NaN)


@triton.jit
def offers(
    logits_RV, seeds_R, positions_R, choices_R, temperatures_R, floors_R, best_RB,
    VOCABULARY: tl.constexpr, ID_BITS: tl.constexpr, FLOORED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The best place of each block of a row: that of its logits, or of logit / temperature + noise."""
    row, block = tl.program_id(0), tl.program_id(1)
    x, ids = _read(logits_RV + row.to(tl.int64) * VOCABULARY, block * BLOCK, VOCABULARY, BLOCK)
    temperature = tl.load(temperatures_R + row)
    drawn = x
    if temperature >= GREEDY:
        own = gumbel(tl.load(seeds_R + row), tl.load(positions_R + row), tl.load(choices_R + row), ids)
        drawn = tl.math.div_rn(x, temperature) + own
    places = tl.where(ids < VOCABULARY, place_of(drawn, ids, ID_BITS), NOWHERE)
    if FLOORED:
        places = tl.where(place_of(x, ids, ID_BITS) >= tl.load(floors_R + row), places, NOWHERE)
    tl.store(best_RB + row * tl.num_programs(1) + block, tl.max(places, axis=0))


@triton.jit
def best(best_RB, tokens_R, blocks, ID_BITS: tl.constexpr, BLOCK: tl.constexpr):
    """The token of the best offer of each row."""
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    place = tl.max(tl.load(best_RB + row * blocks + at, mask=at < blocks, other=NOWHERE), axis=0)
    largest: tl.constexpr = (1 << ID_BITS) - 1
    tl.store(tokens_R + row, (largest - (place & largest)).to(tl.int32))


@triton.jit
def _weights(x, top, temperature):
    """exp((x - top) / temperature): 0 where x is minus infinity."""
    known = x > float("-inf")
    return tl.where(known, tl.exp(tl.where(known, x - top, 0.0) / temperature), 0.0)


@triton.jit
def _reached(
    logits_V, top, temperature, floor, limit,
    VOCABULARY: tl.constexpr, ID_BITS: tl.constexpr, COUNTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The highest place from which on there is as much as ``limit``: tokens, or weight, of those from ``floor`` on.

    Two binary digits a pass; 0 if there is not so much.
    """
    digits: tl.constexpr = (32 + ID_BITS + 1) // 2
    found = limit * 0
    one = limit * 0 + 1
    for digit in range(digits):
        unit = one << (2 * (digits - 1 - digit))
        sum1, sum2, sum3 = limit * 0, limit * 0, limit * 0
        for begin in range(0, VOCABULARY, BLOCK):
            x, ids = _read(logits_V, begin, VOCABULARY, BLOCK)
            places = tl.where(ids < VOCABULARY, place_of(x, ids, ID_BITS), NOWHERE)
            much = (places >= floor).to(tl.int64)
            if not COUNTED:
                much = much * (_weights(x, top, temperature) * _ONE).to(tl.int64)
            sum1 += tl.sum(tl.where(places >= found + unit, much, 0), axis=0)
            sum2 += tl.sum(tl.where(places >= found + 2 * unit, much, 0), axis=0)
            sum3 += tl.sum(tl.where(places >= found + 3 * unit, much, 0), axis=0)
        steps = (sum1 >= limit).to(tl.int64) + (sum2 >= limit).to(tl.int64) + (sum3 >= limit).to(tl.int64)
        found = found + steps * unit
    return found


@triton.jit
def floors(
    logits_RV, rows_F, temperatures_R, top_ks_F, top_ps_F, min_ps_F, floors_R,
    VOCABULARY: tl.constexpr, ID_BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The least place that top_k (0: all), top_p and min_p leave, of each of some rows."""
    own = tl.program_id(0)
    row = tl.load(rows_F + own)
    logits_V, temperature = logits_RV + row.to(tl.int64) * VOCABULARY, tl.load(temperatures_R + row)
    top = tl.full((), float("-inf"), tl.float32)
    for begin in range(0, VOCABULARY, BLOCK):
        x, _ = _read(logits_V, begin, VOCABULARY, BLOCK)
        top = tl.maximum(top, tl.max(x, axis=0))
    floor = tl.full((), 0, tl.int64)
    top_k, top_p, min_p = tl.load(top_ks_F + own), tl.load(top_ps_F + own), tl.load(min_ps_F + own)
    if top_k > 0:
        floor = _reached(logits_V, top, temperature, floor, top_k, VOCABULARY, ID_BITS, True, BLOCK)
    total = tl.full((), 0, tl.int64)
    least = tl.full((), _BEYOND, tl.int64)
    for begin in range(0, VOCABULARY, BLOCK):
        x, ids = _read(logits_V, begin, VOCABULARY, BLOCK)
        places = tl.where(ids < VOCABULARY, place_of(x, ids, ID_BITS), NOWHERE)
        weights = _weights(x, top, temperature)
        total += tl.sum(tl.where(places >= floor, (weights * _ONE).to(tl.int64), 0), axis=0)
        least = tl.minimum(least, tl.min(tl.where((weights >= min_p) & (weights > 0), places, _BEYOND), axis=0))
    if top_p < 1.0:
        limit = tl.maximum(tl.ceil(total.to(tl.float64) * top_p).to(tl.int64), 1)
        likely = _reached(logits_V, top, temperature, floor, limit, VOCABULARY, ID_BITS, False, BLOCK)
        floor = tl.maximum(floor, likely)
    tl.store(floors_R + row, tl.maximum(floor, least))


@triton.jit
def masked(logits_RV, rows_M, words_MW, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    """Minus infinity, in place, for what the bits of a row's mask do not allow."""
    own = tl.program_id(0)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    words: tl.constexpr = (VOCABULARY + 31) // 32
    word = tl.load(words_MW + own * words + ids // 32, mask=ids < VOCABULARY, other=-1)
    forbidden = ((word >> (ids % 32)) & 1) == 0
    at = logits_RV + tl.load(rows_M + own).to(tl.int64) * VOCABULARY + ids
    tl.store(at, tl.full((BLOCK,), float("-inf"), tl.float32), mask=forbidden & (ids < VOCABULARY))


@triton.jit
def normalisers(logits_RV, rows_L, tops_L, logs_L, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    """The largest logit of a row, and the logarithm of the sum of exp(logit - largest): lanes low to high, then the
    lanes of one tile."""
    own = tl.program_id(0)
    logits_V = logits_RV + tl.load(rows_L + own).to(tl.int64) * VOCABULARY
    top = tl.full((), float("-inf"), tl.float32)
    for begin in range(0, VOCABULARY, BLOCK):
        x, _ = _read(logits_V, begin, VOCABULARY, BLOCK)
        top = tl.maximum(top, tl.max(x, axis=0))
    sums = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, VOCABULARY, BLOCK):
        x, _ = _read(logits_V, begin, VOCABULARY, BLOCK)
        sums += _weights(x, top, 1.0)
    tl.store(tops_L + own, top)
    tl.store(logs_L + own, _log(tl.sum(sums, axis=0)))
