"""Operations on logits as Triton kernels: Gumbel noise, sampling, top-k, top-p, min-p, log-probabilities.

Every token of a row has a *place*, one number that orders logits first and then lower ids.  No two are equal, so every
order of comparison finds the same token.

::

    bits 0 ... ID_BITS - 1      the largest id minus this token's
    32 bits above               the logit's bits, mapped so that they order as the logit does; -0 counts as 0

The sampled token is the largest place.  Top-k, top-p and min-p each keep the tokens from some place on: the *floor* of
a row is the highest of the three, found digit by digit.  The sums on the way are counts, and weights as whole numbers
of 2^-40, so their order does not matter.

Random numbers have the bits of ``kernels.sampling.gumbel``'s counters.  The noise is computed by the operations of the
C++ kernels (sampling/gumbel_noise.hpp, families/math.hpp) one by one, in IEEE 754 fp32 that fuses where they fuse, so
it has their bits too: from equal logits the same token is sampled on a CPU and on a GPU.

``TritonSampler.pick`` samples rows that have only a temperature, from arrays on the device to tokens on the device: it
can be captured.  ``TritonSampler.bring`` copies them to the host while the device goes on.  ``sample`` takes any rows;
their lists of ids (biases, penalties, bans) are scattered by torch, each id once, so there is no order to their sums.

This module imports torch and triton.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.reference.sampling import GREEDY_BELOW
from penstock.kernels.sampling import Sampled, SampleRow
from penstock.kernels.triton.numerics import UNFUSED, TritonContext

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
    """Natural logarithm of a normal number above 0."""
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
    odd = ((word >> 8) * 2 + 1).to(tl.int32)  # u in units of 2^-25
    u = odd.to(tl.float32) * _UNIT
    rest = (33554432 - odd).to(tl.float32) * _UNIT
    near = _log_near_one(0.0 - rest, tl.zeros_like(rest))
    return 0.0 - _log(0.0 - tl.where(u < 0.70710678, _log(u), near))


@triton.jit
def noise(seeds, position, choice, ids_N, out_N, count, BLOCK: tl.constexpr):
    """Noise of given ids, for tests and tools."""
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
def normalizers(logits_RV, rows_L, tops_L, logs_L, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
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


BLOCK: Final = 4096
"""Tokens that a program looks at at once."""

_LOW31: Final = 0x7FFFFFFF


@dataclass(frozen=True, slots=True)
class PendingTokens:
    """Tokens on their way to the host."""

    tokens: Tensor
    arrived: Any  # CUDA event, or None where they are there

    def wait(self) -> NDArray[np.int32]:
        """The tokens, once they have arrived."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return np.asarray(self.tokens.numpy(), np.int32)


@dataclass(frozen=True, slots=True)
class LogitEntries:
    """Some numbers of some rows: indices of row and column, each pair once, and what goes with each."""

    rows_E: Tensor
    ids_E: Tensor
    values_E: Tensor


class TritonSampler:
    """Samples and scores rows of logits on the device."""

    def __init__(self, form: TritonContext) -> None:
        self._form = form

    def pick(
        self,
        logits_RV: Tensor,
        seeds_R: Tensor,
        positions_R: Tensor,
        choices_R: Tensor,
        temperatures_R: Tensor,
        floors_R: Tensor | None = None,
    ) -> Tensor:
        """int32 [R]: the token of each row, by the bits of ``GumbelRows``: int64, int32, int32, fp32.

        ``floors_R``: int64, the least place that may be sampled.
        """
        rows, vocabulary = logits_RV.shape
        block = _block(vocabulary)
        blocks, bits = triton.cdiv(vocabulary, block), _id_bits(vocabulary)
        best_RB, tokens_R = self._form.empty((rows, blocks), torch.int64), self._form.empty((rows,), torch.int32)
        if rows:
            offers[(rows, blocks)](
                logits_RV.contiguous(), seeds_R, positions_R, choices_R, temperatures_R, floors_R, best_RB,
                VOCABULARY=vocabulary, ID_BITS=bits, FLOORED=floors_R is not None, BLOCK=block, num_warps=8,
                **UNFUSED,
            )  # fmt: skip
            best[(rows,)](best_RB, tokens_R, blocks, ID_BITS=bits, BLOCK=triton.next_power_of_2(blocks), **UNFUSED)
        return tokens_R

    def bring(self, tokens_R: Tensor) -> PendingTokens:
        """Send tokens to the host without waiting for them."""
        on_gpu = tokens_R.is_cuda
        host_R = torch.empty(tokens_R.shape, dtype=tokens_R.dtype, pin_memory=on_gpu)
        host_R.copy_(tokens_R, non_blocking=on_gpu)
        arrived = torch.cuda.Event() if on_gpu else None
        if arrived is not None:
            arrived.record(torch.cuda.current_stream())
        return PendingTokens(host_R, arrived)

    def sample(self, logits_RV: Tensor, rows: list[SampleRow]) -> list[Sampled]:
        """ValueError for ids outside the vocabulary, or a mask of another."""
        if not rows:
            return []
        logits_RV = logits_RV.contiguous()
        for row in rows:
            _check(row, logits_RV.shape[1])
        wanted_RV = self._masked(self._adjusted(logits_RV, rows), rows)
        temperatures_R = self._column(rows, lambda row: row.temperature, np.float32)
        tokens_R = self.pick(
            wanted_RV,
            self._form.tensor(np.array([row.seed for row in rows], np.uint64).view(np.int64)),
            self._form.tensor(np.array([row.position for row in rows], np.uint32).view(np.int32)),
            self._form.tensor(np.array([row.choice for row in rows], np.uint32).view(np.int32)),
            temperatures_R,
            self._floors(wanted_RV, rows, temperatures_R),
        )
        with_logprobs = [index for index, row in enumerate(rows) if row.logprobs is not None]
        sampled = [Sampled(token) for token in self.bring(tokens_R).wait().tolist()]
        if with_logprobs:
            tops = [rows[i].logprobs or 0 for i in with_logprobs]
            scored = self._scored(logits_RV, np.array(with_logprobs, np.int32), tokens_R, tops)
            for index, one in zip(with_logprobs, scored, strict=True):
                sampled[index] = one
        return sampled

    def token_logprobs(self, logits_RV: Tensor, tokens_R: NDArray[np.int32], top: int) -> list[Sampled]:
        rows = len(logits_RV)
        every = np.arange(rows, dtype=np.int32)
        return self._scored(logits_RV.contiguous(), every, self._form.integers(tokens_R), [top] * rows)

    def gumbel(self, seed: int, position: int, choice: int, ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """The noise that ``sample`` adds for each of these token ids (tests and tools)."""
        seeds, out_N = self._form.tensor(np.array([seed], np.uint64).view(np.int64)), self._form.empty((ids.size,))
        counters = [self._form.tensor(np.array([word], np.uint32).view(np.int32)) for word in (position, choice)]
        grid = (triton.cdiv(ids.size, BLOCK),)
        noise[grid](seeds, *counters, self._form.integers(ids), out_N, ids.size, BLOCK=BLOCK, **UNFUSED)
        return np.asarray(out_N.cpu().numpy(), np.float32).reshape(ids.shape)

    def _adjusted(self, logits_RV: Tensor, rows: list[SampleRow]) -> Tensor:
        """Logits after bias, penalties and bans: a copy where there are any."""
        biases = self._entries(rows, _biases)
        prompts = self._entries(rows, _prompt_penalties)
        outputs = self._entries(rows, _output_penalties)
        bans = self._entries(rows, lambda row: (row.banned_ids, np.zeros((len(row.banned_ids), 1))))
        if not any((biases, prompts, outputs, bans)):
            return logits_RV
        x_RV = logits_RV.clone()
        if biases is not None:
            x_RV[biases.rows_E, biases.ids_E] += biases.values_E[:, 0]
        # Tokens of both prompt and output are penalized once, from their original logits.
        penalised = [(own, x_RV[own.rows_E, own.ids_E]) for own in (prompts, outputs) if own is not None]
        for own, before_E in penalised:
            by_E, less_E = own.values_E.unbind(1)
            x_RV[own.rows_E, own.ids_E] = torch.where(before_E > 0, before_E / by_E, before_E * by_E) - less_E
        if bans is not None:
            x_RV[bans.rows_E, bans.ids_E] = -torch.inf
        return x_RV

    def _masked(self, x_RV: Tensor, rows: list[SampleRow]) -> Tensor:
        """Minus infinity for what the rows' masks do not allow: a copy where there are any."""
        masks = {index: row.allowed for index, row in enumerate(rows) if row.allowed is not None}
        if not masks:
            return x_RV
        words_MW = self._form.tensor(np.stack(list(masks.values())).view(np.int32))
        rows_M, x_RV = self._form.integers(np.array(list(masks), np.int32)), x_RV.clone()
        block = _block(x_RV.shape[1])
        masked[(len(masks), triton.cdiv(x_RV.shape[1], block))](
            x_RV, rows_M, words_MW, VOCABULARY=x_RV.shape[1], BLOCK=block, **UNFUSED
        )
        return x_RV

    def _floors(self, x_RV: Tensor, rows: list[SampleRow], temperatures_R: Tensor) -> Tensor | None:
        """int64 [R]: the least place that each row may sample; None where all rows sample from all tokens."""
        some = [index for index, row in enumerate(rows) if _is_filtered(row, x_RV.shape[1])]
        if not some:
            return None
        filtered = [rows[index] for index in some]
        floors_R = torch.zeros((len(rows),), dtype=torch.int64, device=x_RV.device)
        vocabulary = x_RV.shape[1]
        floors[(len(some),)](
            x_RV, self._form.integers(np.array(some, np.int32)), temperatures_R,
            self._column(filtered, lambda row: row.top_k if row.top_k and row.top_k < vocabulary else 0, np.int64),
            self._column(filtered, lambda row: row.top_p, np.float64),
            self._column(filtered, lambda row: row.min_p, np.float32), floors_R, VOCABULARY=vocabulary,
            ID_BITS=_id_bits(vocabulary), BLOCK=_block(vocabulary), num_warps=16, **UNFUSED,
        )  # fmt: skip
        return floors_R

    def _scored(self, logits_RV: Tensor, rows_L: NDArray[np.int32], tokens_R: Tensor, tops: list[int]) -> list[Sampled]:
        """Log-probabilities of tokens under some rows, with as many of the likeliest as each wants."""
        vocabulary, count, most = logits_RV.shape[1], len(rows_L), min(max(tops), logits_RV.shape[1])
        own, (top_L, log_L) = self._form.integers(rows_L), (self._form.empty((count,)) for _ in range(2))
        normalizers[(count,)](
            logits_RV, own, top_L, log_L, VOCABULARY=vocabulary, BLOCK=_block(vocabulary), num_warps=16, **UNFUSED
        )
        x_LV, tokens_L = logits_RV.index_select(0, own), tokens_R.index_select(0, own)
        ids_LK = torch.cat([tokens_L[:, None].long(), _likeliest(x_LV, most)], dim=1)
        logprobs_LK = (x_LV.gather(1, ids_LK) - top_L[:, None]) - log_L[:, None]
        scored = zip(ids_LK.tolist(), logprobs_LK.tolist(), tops, strict=True)
        return [
            Sampled(ids[0], logprobs[0], tuple(zip(ids[1 : top + 1], logprobs[1 : top + 1], strict=True)))
            for ids, logprobs, top in scored
        ]

    def _column(self, rows: list[SampleRow], of: Callable[[SampleRow], float], dtype: type[np.generic]) -> Tensor:
        return self._form.tensor(np.array([of(row) for row in rows], dtype))

    def _entries(
        self, rows: list[SampleRow], of: Callable[[SampleRow], tuple[NDArray[Any], NDArray[Any]]]
    ) -> LogitEntries | None:
        """What ``of`` says of each row: ids, each once, and numbers [ids, ...] that go with them."""
        found = [of(row) for row in rows]
        counts = [len(ids) for ids, _ in found]
        if not sum(counts):
            return None
        owners = np.repeat(np.arange(len(rows)), counts)
        width = max(values.shape[1] for _, values in found)
        values = np.concatenate([values for ids, values in found if len(ids)]).reshape(-1, width)
        ids = np.concatenate([ids for ids, _ in found]).astype(np.int64)
        return LogitEntries(
            self._form.tensor(owners.astype(np.int64)),
            self._form.tensor(ids),
            self._form.tensor(values.astype(np.float32)),
        )


def _biases(row: SampleRow) -> tuple[NDArray[Any], NDArray[Any]]:
    """Biases of one id count together."""
    ids, places = np.unique(row.bias_ids, return_inverse=True)
    return ids, np.bincount(places, row.bias_values.astype(np.float64), minlength=len(ids))[:, None]


def _prompt_penalties(row: SampleRow) -> tuple[NDArray[Any], NDArray[Any]]:
    """What ids of the prompt are divided by, or multiplied by below 0, and what is subtracted then."""
    if row.repetition_penalty == 1.0:
        return np.empty(0, np.int32), np.empty((0, 2))
    return row.prompt_ids, np.tile([row.repetition_penalty, 0.0], (len(row.prompt_ids), 1))


def _output_penalties(row: SampleRow) -> tuple[NDArray[Any], NDArray[Any]]:
    """The same for output ids."""
    if row.repetition_penalty == 1.0 and row.frequency_penalty == 0.0 and row.presence_penalty == 0.0:
        return np.empty(0, np.int32), np.empty((0, 2))
    less = row.frequency_penalty * row.output_counts + row.presence_penalty * (row.output_counts > 0)
    return row.output_ids, np.stack([np.full(len(less), row.repetition_penalty), less], axis=1)


def _is_filtered(row: SampleRow, vocabulary: int) -> bool:
    fewer = row.top_k is not None and 0 < row.top_k < vocabulary
    return row.temperature >= GREEDY_BELOW and (fewer or row.top_p < 1.0 or row.min_p > 0.0)


def _check(row: SampleRow, vocabulary: int) -> None:
    """Raises ValueError for ids or a mask that do not fit."""
    for ids in (row.output_ids, row.prompt_ids, row.bias_ids, row.banned_ids):
        if len(ids) and not 0 <= ids.min() <= ids.max() < vocabulary:
            raise ValueError(f"ids from {ids.min()} to {ids.max()} are outside the vocabulary of {vocabulary} tokens")
    if row.allowed is not None and len(row.allowed) != triton.cdiv(vocabulary, 32):
        raise ValueError(f"a mask of {vocabulary} tokens has a bit for every token, 32 a word; got {len(row.allowed)}")


def _likeliest(x_LV: Tensor, count: int) -> Tensor:
    """Ids of the largest logits, ties to the lower id."""
    bits_LV = (x_LV + 0.0).view(torch.int32)
    order_LV = (bits_LV ^ ((bits_LV >> 31) & _LOW31)).long() << 31
    ids_V = torch.arange(x_LV.shape[1], device=x_LV.device)
    return _LOW31 - (torch.topk(order_LV | (_LOW31 - ids_V), count, dim=1).values & _LOW31)


def _block(vocabulary: int) -> int:
    return min(BLOCK, int(triton.next_power_of_2(vocabulary)))


def _id_bits(vocabulary: int) -> int:
    return max(1, (vocabulary - 1).bit_length())
