"""The oracle's attention: KV memory and its fp8 codes, rotary positions, sparse block selection, and one tile of 16
positions that attends to all its keys.

Knows nothing of batches: ``reference.backend`` calls it tile by tile.  ``UncachedAttention`` computes one sequence
after the other, so a sequence's result depends on its own shapes only.  This module imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.operands import (
    BLOCK_KEYS,
    LEAST_EXPONENT,
    MOST_EXPONENT,
    NO_NUMBER,
    AttentionSpec,
    KvShape,
    Sparse,
    StepBatch,
)
from penstock.kernels.sum_tree import KEY_CLASSES, join, partition_class
from penstock.types import PAGE_TOKENS

_LARGEST = 448.0 / 512
"""What of a number's significand, from 1/2 on, is the largest code's."""


def encoded(x_HC: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 codes [..., C] and exponents [...] of fp32 rows [..., C], to nearest even."""
    largest_H = x_HC.abs().amax(-1)
    significand_H, exponent_H = torch.frexp(largest_H)
    exponent_H = exponent_H + 126 + (significand_H > _LARGEST)
    exponent_H = torch.where(largest_H > 0, exponent_H, LEAST_EXPONENT).clamp(min=LEAST_EXPONENT)
    exponent_H = torch.where(largest_H.isfinite() & (exponent_H <= MOST_EXPONENT), exponent_H, NO_NUMBER).int()
    codes_HC = (x_HC * _power(262 - exponent_H)[..., None]).to(torch.float8_e4m3fn)
    return codes_HC.view(torch.uint8), exponent_H.to(torch.uint8)


def decoded(codes_HC: Tensor, exponents_H: Tensor) -> Tensor:
    """fp32 [..., C]; NaN where there is no number."""
    scale_H = torch.where(exponents_H == NO_NUMBER, torch.nan, _power(exponents_H.int()))
    return codes_HC.view(torch.float8_e4m3fn).float() * 2**-8 * scale_H[..., None]


def _power(biased: Tensor) -> Tensor:
    """2^(biased - 127), exactly; of 255, infinity."""
    return (biased << 23).view(torch.float32)


BLOCK_PAGES = BLOCK_KEYS // PAGE_TOKENS

PARTITION_KEYS = 512
"""Keys of one partition."""


def block_scores(q_GMC: Tensor, k_GNC: Tensor, dtype: torch.dtype) -> Tensor:
    """Each position's score of each whole block before the tile's end, [G, 16, blocks]; mean keys are rounded
    to ``dtype`` as keys are.  A group's rows are its heads, one after another."""
    groups, keys, dims = k_GNC.shape
    pages = keys // BLOCK_KEYS * BLOCK_PAGES
    means_GPC = k_GNC[:, : pages * PAGE_TOKENS].view(groups, pages, PAGE_TOKENS, dims).mean(2).to(dtype).float()
    products_GMP = q_GMC.contiguous() @ means_GPC.transpose(1, 2)
    by_head = products_GMP.view(groups, -1, PAGE_TOKENS, pages // BLOCK_PAGES, BLOCK_PAGES)
    return by_head.amax(dim=(1, 4))


def chosen_blocks(liked_GB: Tensor, position: int, sparse: Sparse) -> Tensor:
    """bool [G, blocks up to the position's own]: what it reads, by its likings of whole blocks."""
    own = position // BLOCK_KEYS
    if not sparse.thins(position):
        return torch.ones((len(liked_GB), own + 1), dtype=torch.bool, device=liked_GB.device)
    read_GB = torch.zeros((len(liked_GB), own + 1), dtype=torch.bool, device=liked_GB.device)
    read_GB[:, : sparse.sinks] = True
    read_GB[:, own - sparse.window + 1 :] = True
    candidates = sparse.candidates(position)
    order_GB = torch.sort(liked_GB[:, candidates.start : candidates.stop], dim=-1, descending=True, stable=True).indices
    read_GB.scatter_(1, order_GB[:, : sparse.chosen] + candidates.start, True)
    return read_GB


def read_keys(q_GMC: Tensor, k_GNC: Tensor, first: int, sparse: Sparse, dtype: torch.dtype) -> Tensor:
    """bool [G, M, N]: which keys the rows of the tile that begins at position ``first`` read."""
    groups, keys = k_GNC.shape[:2]
    read_GSN = torch.ones((groups, PAGE_TOKENS, keys), dtype=torch.bool, device=k_GNC.device)
    if sparse.thins(first + PAGE_TOKENS - 1):
        liked_GSB = block_scores(q_GMC, k_GNC, dtype)
        for own in range(PAGE_TOKENS):
            read_GB = chosen_blocks(liked_GSB[:, own], first + own, sparse)
            read_GSN[:, own] = read_GB.repeat_interleave(BLOCK_KEYS, dim=1)[:, :keys]
    return read_GSN.repeat(1, q_GMC.shape[1] // PAGE_TOKENS, 1)


_Numbers = tuple[Tensor, Tensor | None]
"""Keys or values, and the exponents of codes."""


@dataclass(frozen=True, slots=True)
class ReferenceKv:
    """A page holds of each of its layers keys, then values, a head's tokens one after another; all are views of it.

    Of codes (``operands.KvType``), the exponents of keys, then of values, stand behind them.
    """

    shape: KvShape
    keys: Tensor  # [P, L, G, 16, C], L layers a page; codes are uint8
    values: Tensor  # [P, L, G, 16, value_dim]
    states: Tensor  # [P, rows, value_dim of states], fp32; empty where none are kept
    heads: Tensor  # [1, heads]: the place of each head of this model among those of a page, G
    key_exponents: Tensor | None = None  # uint8 [P, L, G, 16], of codes
    value_exponents: Tensor | None = None

    def table(self, layer: int, batch: StepBatch) -> tuple[int, NDArray[np.int32]]:
        """The place of a layer in its pages, and the table of these pages [S, P]."""
        group, place = self.shape.places[layer]
        return place, batch.table_of(group, self.shape.layer_groups)

    def put_keys(self, place: int, tokens: tuple[Tensor, Tensor], k_TGC: Tensor) -> None:
        """Write fp32 keys of tokens, given page and slot of each, as the memory keeps them."""
        self._put((self.keys, self.key_exponents), place, tokens, k_TGC)

    def put_values(self, place: int, tokens: tuple[Tensor, Tensor], v_TGC: Tensor) -> None:
        """The same for values."""
        self._put((self.values, self.value_exponents), place, tokens, v_TGC)

    def gathered(self, place: int, pages: Tensor, seen: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Keys and values [G, N, C] of whole pages in fp32; zero outside of ``seen``, where there may be anything."""
        keys = self._gathered((self.keys, self.key_exponents), place, pages, seen)
        return keys, self._gathered((self.values, self.value_exponents), place, pages, seen)

    def _put(self, memory: _Numbers, place: int, tokens: tuple[Tensor, Tensor], x_TGC: Tensor) -> None:
        (numbers, exponents), (pages_T, slots_T) = memory, tokens
        at = pages_T[:, None], place, self.heads, slots_T[:, None]
        if exponents is None:
            numbers[at] = x_TGC.to(numbers.dtype)
        else:
            numbers[at], exponents[at] = encoded(x_TGC)

    def _gathered(self, memory: _Numbers, place: int, pages: Tensor, seen: tuple[int, int]) -> Tensor:
        numbers, exponents = memory
        at = (pages, place) if self.shape.share is None else (pages[:, None], place, self.heads)
        wide_PGSC = numbers[at].float() if exponents is None else decoded(numbers[at], exponents[at])
        gathered_GNC = wide_PGSC.transpose(0, 1).flatten(1, 2).contiguous()
        gathered_GNC[:, : seen[0]] = 0
        gathered_GNC[:, seen[1] :] = 0
        return gathered_GNC


@dataclass(frozen=True, slots=True)
class ReferenceRope:
    """cos and sin by absolute position."""

    table: Tensor  # [position, cos or sin, pairs of columns]
    interleaved: bool
    axes: Tensor | None = None  # [pairs of columns]: which of a token's turns each follows

    def angles(self, positions_T: Tensor, turns_T3: Tensor | None) -> tuple[Tensor, Tensor]:
        """cos and sin of every token, [T, 1, pairs]."""
        if self.axes is None or turns_T3 is None:
            rows_T2C = self.table[positions_T]
        else:
            pairs = torch.arange(len(self.axes), device=self.axes.device)
            rows_T2C = self.table[turns_T3[:, self.axes], :, pairs].transpose(1, 2)
        return rows_T2C[:, :1], rows_T2C[:, 1:]


def kv_over(numbers: Tensor, shape: KvShape) -> ReferenceKv:
    """KV memory over these numbers; over bytes, it holds codes."""
    coded = numbers.dtype == torch.uint8
    key_dim, value_dim = shape.key_dim, 0 if shape.shared else shape.value_dim
    widths = [key_dim, value_dim, int(coded), int(coded and not shape.shared)]
    heads = shape.of_pages.kv_heads
    tokens = heads * PAGE_TOKENS
    layers = numbers.view(-1, shape.page_layers, tokens * sum(widths))
    places = (*layers.shape[:2], heads, PAGE_TOKENS)
    parts = layers.split_with_sizes([tokens * width for width in widths], dim=-1)
    keys, values, of_keys, of_values = (part.view(*places, width) for part, width in zip(parts, widths, strict=True))
    if shape.shared:
        values, of_values = keys[..., : shape.value_dim], of_keys
    own = range(heads) if shape.share is None else shape.share.heads
    at = torch.tensor(own, device=numbers.device)[None]
    states = _states(layers.flatten(1), shape)
    if not coded:
        return ReferenceKv(shape, keys, values, states, at)
    return ReferenceKv(shape, keys, values, states, at, of_keys[..., 0], of_values[..., 0])


def _states(pages: Tensor, shape: KvShape) -> Tensor:
    """The same memory as rows of states."""
    if shape.states is None:
        return torch.empty((len(pages), 0, 0), device=pages.device)
    rows, width = shape.state_rows_a_page, shape.states.value_dim
    return pages.view(torch.float32)[:, : rows * width].view(len(pages), rows, width)


def rotated(x_THC: Tensor, rope: ReferenceRope | None, positions_T: Tensor, turns_T3: Tensor | None = None) -> Tensor:
    """Every head turned by its token's position: its first columns, as many as the table has."""
    if rope is None:
        return x_THC
    cos_T1C, sin_T1C = rope.angles(positions_T, turns_T3)
    columns = 2 * cos_T1C.shape[-1]
    turned, rest = x_THC[..., :columns], x_THC[..., columns:]
    if rope.interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned.chunk(2, dim=-1)
    a, b = first * cos_T1C - second * sin_T1C, second * cos_T1C + first * sin_T1C
    pairs = torch.stack([a, b], dim=-1).flatten(-2) if rope.interleaved else torch.cat([a, b], dim=-1)
    return torch.cat([pairs, rest], dim=-1)


@dataclass(frozen=True, slots=True)
class KeyPart:
    """Attention of rows to some of their keys."""

    logsums: Tensor  # [G, M, 1]: log of the sum of exponentials of scores; -infinity: the row sees none of these keys
    out: Tensor  # [G, M, C]: weighted means of values, or zero

    def joined(self, other: KeyPart) -> KeyPart:
        """Attention to the keys of both."""
        logsums_GM1 = torch.logaddexp(self.logsums, other.logsums)
        first, second = (part.out * torch.exp(part.logsums - logsums_GM1) for part in (self, other))
        out_GMC = first + second
        for one, alone in ((other, self), (self, other)):
            missing_GM1 = one.logsums == -torch.inf
            logsums_GM1 = torch.where(missing_GM1, alone.logsums, logsums_GM1)
            out_GMC = torch.where(missing_GM1, alone.out, out_GMC)
        return KeyPart(logsums_GM1, out_GMC)


def attend_partition(
    q_GMC: Tensor, k_GNC: Tensor, v_GNC: Tensor, hidden_GMN: Tensor, spec: AttentionSpec
) -> KeyPart | None:
    """Attention to keys that are not hidden, None where all are; a group's rows are its heads, one after another."""
    if hidden_GMN.all():
        return None
    scores_GMN = q_GMC @ k_GNC.transpose(1, 2) * spec.scale
    if spec.softcap is not None:
        scores_GMN = torch.tanh(scores_GMN / spec.softcap) * spec.softcap
    scores_GMN = scores_GMN.masked_fill(hidden_GMN, -torch.inf)
    weights_GMN = torch.softmax(scores_GMN, dim=-1).masked_fill(hidden_GMN.all(dim=-1, keepdim=True), 0.0)
    return KeyPart(torch.logsumexp(scores_GMN, dim=-1, keepdim=True), weights_GMN @ v_GNC)


def attend_keys(q_GMC: Tensor, k_GNC: Tensor, v_GNC: Tensor, hidden_GMN: Tensor, spec: AttentionSpec) -> Tensor:
    """Attention to all keys: partitions of a class from low to high, classes by the tree, the sinks last."""
    classes: list[KeyPart | None] = [None] * KEY_CLASSES
    for begin in range(0, k_GNC.shape[1], PARTITION_KEYS):
        keys = slice(begin, begin + PARTITION_KEYS)
        own = attend_partition(q_GMC, k_GNC[:, keys], v_GNC[:, keys], hidden_GMN[..., keys], spec)
        place = partition_class(begin // PARTITION_KEYS)
        before = classes[place]
        classes[place] = before.joined(own) if before is not None and own is not None else own or before
    whole = join(classes, KeyPart.joined)
    assert whole is not None, "a row sees its own key at least"
    if spec.sinks_H is None:
        return whole.out
    groups, rows = q_GMC.shape[:2]
    sinks_GM1 = spec.sinks_H.view(groups, -1).repeat_interleave(PAGE_TOKENS, dim=1).view(groups, rows, 1)
    logsums_GM1 = torch.logaddexp(whole.logsums, sinks_GM1)
    return whole.out * torch.exp(whole.logsums - logsums_GM1)


def attend_tile(q_THC: Tensor, k_GNC: Tensor, v_GNC: Tensor, position: int, spec: AttentionSpec) -> Tensor:
    """Rows of one aligned tile of 16 positions, each in its own place; keys up to the tile's end, or to ``until``."""
    count, heads, head_dim = q_THC.shape
    groups, keys = k_GNC.shape[:2]
    slot = position % PAGE_TOKENS
    tile = torch.zeros((PAGE_TOKENS, heads, head_dim), device=q_THC.device)
    tile[slot : slot + count] = q_THC.float()
    q_GMC = tile.view(PAGE_TOKENS, groups, heads // groups, head_dim).permute(1, 2, 0, 3).flatten(1, 2)
    first = keys - PAGE_TOKENS
    seen_SN = torch.zeros((PAGE_TOKENS, keys), dtype=torch.bool, device=q_THC.device)
    for own in range(PAGE_TOKENS):
        begin, end = spec.keys_of(first + own)
        seen_SN[own, begin:end] = True
    hidden_GMN = ~seen_SN.repeat(heads // groups, 1).expand(groups, -1, -1)
    if spec.sparse is not None:
        hidden_GMN = hidden_GMN | ~read_keys(q_GMC, k_GNC, first, spec.sparse, q_THC.dtype)
    out_GMC = attend_keys(q_GMC.contiguous(), k_GNC, v_GNC, hidden_GMN, spec)
    out_THC = out_GMC.view(groups, heads // groups, PAGE_TOKENS, -1).permute(2, 0, 1, 3).flatten(1, 2)
    return out_THC[slot : slot + count]


@dataclass(frozen=True, slots=True)
class UncachedAttention:
    """``Ops.attention``, one sequence after the other."""

    heads: int
    kv_heads: int
    spec: AttentionSpec
    causal: bool
    bias: Tensor | None  # [H, 2 R + 1]

    def attend(
        self,
        qkv_TN: Tensor,
        starts_S1: NDArray[np.int32],
        rope: ReferenceRope | None,
        rows_T: NDArray[np.int32] | None,
        dtype: torch.dtype,
    ) -> Tensor:
        """[T, H C]; queries, keys and values are rounded to ``dtype`` before they meet."""
        heads, kv_heads = self.heads, self.kv_heads
        if rows_T is None:  # each token's place in its sequence
            rows_T = np.arange(len(qkv_TN), dtype=np.int32) - np.repeat(starts_S1[:-1], np.diff(starts_S1))
        places_T = torch.from_numpy(rows_T.astype(np.int64)).to(qkv_TN.device)
        qkv_THC = qkv_TN.view(len(qkv_TN), heads + 2 * kv_heads, -1)
        q_THC, k_TGC, v_TGC = qkv_THC.split_with_sizes([heads, kv_heads, kv_heads], dim=1)
        q_THC, k_TGC = rotated(q_THC, rope, places_T), rotated(k_TGC, rope, places_T)
        out_THC = qkv_TN.new_empty(q_THC.shape, dtype=dtype)
        for begin, end in pairwise(starts_S1.tolist()):
            if begin < end:
                own = (x_THC[begin:end].to(dtype).float().transpose(0, 1) for x_THC in (q_THC, k_TGC, v_TGC))
                out_THC[begin:end] = self._sequence(*(x_HTC.contiguous() for x_HTC in own)).transpose(0, 1).to(dtype)
        return out_THC.flatten(1)

    def _sequence(self, q_HTC: Tensor, k_GTC: Tensor, v_GTC: Tensor) -> Tensor:
        repeat = self.heads // self.kv_heads
        k_HTC, v_HTC = (x_GTC.repeat_interleave(repeat, dim=0) for x_GTC in (k_GTC, v_GTC))
        scores_HTT = (q_HTC @ k_HTC.transpose(1, 2)) * self.spec.scale
        if self.spec.softcap is not None:
            scores_HTT = torch.tanh(scores_HTT / self.spec.softcap) * self.spec.softcap
        places_T = torch.arange(scores_HTT.shape[-1], device=scores_HTT.device)
        apart_TT = places_T[None] - places_T[:, None]  # key - position
        if self.bias is not None:
            reach = self.bias.shape[1] // 2
            scores_HTT = scores_HTT + self.bias[:, apart_TT.clamp(-reach, reach) + reach]
        hidden_TT = apart_TT > 0 if self.causal else torch.zeros_like(apart_TT, dtype=torch.bool)
        if self.spec.window is not None:
            hidden_TT = hidden_TT | (apart_TT.abs() >= self.spec.window)
        weights_HTT = torch.softmax(scores_HTT.masked_fill(hidden_TT, -torch.inf), dim=-1)
        return weights_HTT @ v_HTC
