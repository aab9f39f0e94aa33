"""Routed experts: the choice of experts, rows grouped by expert on the device, one product for all experts of a layer.

::

    ids [T, k] --sort--> pairs of one expert side by side --tiles--> gate_up, down --> y [T k, D] --join--> hidden

The choice runs one program per token, so it does not depend on other tokens.  The experts of a layer are one tall
matrix, in which an expert is a band of outputs; where their weights have several forms, there is a matrix for each form
(``StackedOperand``), multiplied one after another.  The host does not learn which experts were chosen: the grid follows
from the most that T, k and the number of experts allow, its programs share the tiles that exist, and an expert without
tokens is not read.  A pair's product is a row of ``matmul``, with its tiles and its order; a token's experts are joined
by ascending id within their groups, groups by a tree.  So a row's bits do not depend on other tokens' experts.
Where ranks divide the experts of a layer, pairs of other ranks' experts are left out, and add zeros.

This module imports torch and triton.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.operands import PackedExperts, PackedLinear, Routing, Score
from penstock.kernels.reference.experts import ChosenExperts, ReferenceExperts
from penstock.kernels.sum_tree import EXPERT_GROUPS
from penstock.kernels.triton.matmul import FEW_ROWS, Operand, keeps_apart, multiprocessors, whole
from penstock.kernels.triton.numerics import UNFUSED, TritonContext

BESIDE = 2
"""Programs that one multiprocessor has room for."""

INDEX_BYTES = 16 << 20
"""Of the columns of pairs that are put into their experts' order at a time."""


@triton.jit
def group_of(tile, tile_ends, groups, GROUPS: tl.constexpr):
    """The group whose rows are in a tile; ``groups`` where there are none."""
    ids_G = tl.arange(0, GROUPS)
    before_G = (tl.load(tile_ends + ids_G, mask=ids_G < groups, other=2147483647) <= tile).to(tl.int32)
    return tl.sum(before_G, axis=0)


@triton.jit
def rows_of(tile, group, order, starts, tile_ends, ROWS: tl.constexpr):
    """The rows [ROWS] of a tile of a group, and which of them there are."""
    begin = tl.load(starts + group)
    end = tl.load(starts + group + 1)
    own_tile = tile - tl.load(tile_ends + group) + (end - begin + ROWS - 1) // ROWS
    places_T = begin + own_tile * ROWS + tl.arange(0, ROWS)
    return tl.load(order + places_T, mask=places_T < end, other=0), places_T < end


@triton.jit
def grouped_kernel(
    x, weight, ends, out, kept, order, starts, tile_ends, places, x_stride, out_stride, n, experts,
    SHARE: tl.constexpr, EXPERTS: tl.constexpr, STEP: tl.constexpr, SEGMENTS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, ALIGNED: tl.constexpr, EVEN: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """out [pairs, N]: each pair's row of x (``pair // SHARE``) times its expert's N outputs of the tall weight.

    ``order``: pairs, those of an expert side by side from ``starts[expert]`` on.  ``tile_ends[expert]``: tiles of it
    and of those before it.  ``places[expert]``: its place in the tall weight, below 0 if it is in another.  Grid:
    persistent programs; tiles of all experts with the same columns run side by side.
    """
    kept += tl.program_id(0).to(tl.int64) * (2 * ROWS * COLUMNS)
    tiles = tl.load(tile_ends + experts - 1)
    for index in range(tl.program_id(0), tiles * tl.cdiv(n, COLUMNS), tl.num_programs(0)):
        tile = index % tiles
        expert = group_of(tile, tile_ends, experts, EXPERTS)
        place = tl.load(places + expert)
        if place >= 0:
            pairs_T, live_T = rows_of(tile, expert, order, starts, tile_ends, ROWS)
            columns_N = index // tiles * COLUMNS + tl.arange(0, COLUMNS)
            outputs_N = place * n + tl.minimum(columns_N, n - 1)
            x_T1, live_T1 = x + (pairs_T // SHARE).to(tl.int64)[:, None] * x_stride, live_T[:, None]
            sums_TN = whole(
                x_T1, live_T1, weight, outputs_N, ends, kept, SEGMENTS, KEPT, STEP, ROWS, COLUMNS, DEPTH, ALIGNED, EVEN
            )
            at_TN = out + pairs_T.to(tl.int64)[:, None] * out_stride + columns_N[None, :]
            tl.store(at_TN, sums_TN, mask=live_T1 & (columns_N < n)[None, :])


@triton.jit
def raised(sums_D, left_LD, group, following, levels_L1, LEVELS: tl.constexpr):
    """The sum of a group goes up the tree until it has to wait for the group that follows: what begins that group's
    sum, or the whole; and what waits at each level, zero where nothing does."""
    for level in range(LEVELS):
        node, parent = group >> level, group >> (level + 1)
        if node != following >> level:  # all groups of the node are there
            if node % 2 == 1:
                sums_D += tl.sum(tl.where(levels_L1 == level, left_LD, 0.0), axis=0)
                left_LD = tl.where(levels_L1 == level, 0.0, left_LD)
            elif parent == following >> (level + 1):
                left_LD = tl.where(levels_L1 == level, sums_D[None, :], left_LD)
                sums_D = tl.zeros_like(sums_D)
    return sums_D, left_LD


@triton.jit
def mix_kernel(
    y, experts_TK, slots_TK, weights, hidden, stride, n, experts, TOP: tl.constexpr, WEIGHS: tl.constexpr,
    BLOCK: tl.constexpr, GROUPS: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """hidden [T, D] += sum over a token's slots of y [T, TOP, D], times weights if WEIGHS.

    ``experts_TK``: a token's experts, ascending, ``slots_TK``: where they are in y and weights.  Those of a group are
    summed in this order, groups by the tree (``kernels.sum_tree``), in which zeros stand for what is not there: at the
    end no zero has a sign, so that it makes no difference.  Grid: columns, tokens.
    """
    token = tl.program_id(1).to(tl.int64)
    columns_D = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live_D = columns_D < n
    levels_L1 = tl.arange(0, 8)[:, None]
    left_LD = tl.zeros((8, BLOCK), tl.float32)
    sums_D = tl.zeros((BLOCK,), tl.float32)
    for place in range(TOP):
        slot = tl.load(slots_TK + token * TOP + place)
        y_D = tl.load(y + (token * TOP + slot) * n + columns_D, mask=live_D, other=0.0)
        if WEIGHS:
            y_D = y_D * tl.load(weights + token * TOP + slot)
        sums_D += y_D
        group = ((tl.load(experts_TK + token * TOP + place) + 1) * GROUPS - 1) // experts
        more = tl.load(experts_TK + token * TOP + place + 1, mask=place + 1 < TOP, other=0)
        following = tl.where(place + 1 < TOP, ((more + 1) * GROUPS - 1) // experts, 2 * GROUPS)
        if following != group:
            sums_D, left_LD = raised(sums_D, left_LD, group, following, levels_L1, LEVELS)
    at_D = hidden + token * stride + columns_D
    tl.store(at_D, tl.load(at_D, mask=live_D, other=0.0) + (sums_D + 0.0), mask=live_D)


class Stackable(Protocol):
    """A form of weights of which several may become one tall matrix."""

    @property
    def operands(self) -> tuple[Operand, ...]: ...

    @property
    def order_K(self) -> Tensor | None:  # noqa: N802  (names carry shapes)
        """Column i of the weights is column order[i] of what is multiplied; None: as it is."""
        ...

    @classmethod
    def stacked(cls, forms: Sequence[Self]) -> Operand | None:
        """All outputs, one below the other, with the tile of one; the memory of each becomes part of the whole.

        None, and nothing is done, if they cannot be one matrix.
        """
        ...


@dataclass(frozen=True, slots=True)
class StackedOperand:
    """Outputs of some experts, one expert below the other."""

    operand: Operand
    places_E: Tensor  # int32: which of them an expert is, below 0: it is in another stack
    n: int  # outputs of one
    first: int  # column of the first
    orders_EK: Tensor | None = None  # of the columns of what is multiplied, for every expert


@dataclass(frozen=True, slots=True)
class TritonExperts:
    """``PackedExperts.data``."""

    own: ReferenceExperts
    gate_up: tuple[StackedOperand, ...]
    down: tuple[StackedOperand, ...]
    here_E: Tensor | None  # int32: 1 for experts that are here; None: all are


def stacked_experts(own: ReferenceExperts) -> TritonExperts:
    """The experts as few tall matrices: one for each form that their weights have, where the form allows it."""
    gate_up, down = _stacks(own.gate_up), _stacks(own.down)
    here = [int(weight is not None) for weight in own.gate_up]
    device = gate_up[0].places_E.device
    here_E = None if all(here) else torch.tensor(here, dtype=torch.int32, device=device)
    return TritonExperts(own, gate_up, down, here_E)


def _stacks(weights: Sequence[PackedLinear | None]) -> tuple[StackedOperand, ...]:
    kinds: dict[tuple[object, ...], list[int]] = {}
    known = {expert: weight for expert, weight in enumerate(weights) if weight is not None}
    for expert, weight in known.items():
        form: Stackable = weight.data
        kinds.setdefault((type(form), weight.segments, len(form.operands), form.order_K is None), []).append(expert)
    return tuple(stack for own in kinds.values() for stack in _stacks_of(known, own, len(weights)))


def _stacks_of(weights: Mapping[int, PackedLinear], own: list[int], count: int) -> list[StackedOperand]:
    """Stacks of experts whose weights have one form: one, or, where that cannot be, one for each expert."""
    forms: list[Stackable] = [weights[expert].data for expert in own]
    tall = type(forms[0]).stacked(forms) if len(forms[0].operands) == 1 else None
    if tall is not None:
        return [StackedOperand(tall, _places(tall, own, count), tall.n // len(own), 0, _orders(forms, own, count))]
    return [
        StackedOperand(
            operand, _places(operand, [expert], count), operand.n, operand.first, _orders([form], [expert], count)
        )
        for expert, form in zip(own, forms, strict=True)
        for operand in form.operands
    ]


def _places(operand: Operand, own: list[int], count: int) -> Tensor:
    found = [-1] * count
    for place, expert in enumerate(own):
        found[expert] = place
    return torch.tensor(found, dtype=torch.int32, device=operand.ends.device)


def _orders(forms: list[Stackable], own: list[int], count: int) -> Tensor | None:
    known = {expert: form.order_K for expert, form in zip(own, forms, strict=True)}
    some = forms[0].order_K
    return None if some is None else torch.stack([known.get(expert, some) for expert in range(count)])  # type: ignore[misc]


class GroupedExperts:
    """Experts of one backend.  ``gated``: its operation."""

    def __init__(self, form: TritonContext, *, gated: Callable[[Tensor], Tensor]) -> None:
        self._form = form
        self._gated = gated

    def add(self, x_TK: Tensor, chosen: ChosenExperts, experts: PackedExperts, hidden_TD: Tensor) -> None:
        data: TritonExperts = experts.data
        rows, top = chosen.ids.shape
        if rows == 0:
            return
        own = data.own
        pairs_P = chosen.ids.reshape(-1)
        groups = ExpertGroups.of(_pairs_here(pairs_P, data.here_E), experts.count, leaves_out=experts.partial)
        share = top
        if own.weighs_input:
            x_TK = (x_TK.float()[:, None] * chosen.weights[:, :, None]).to(x_TK.dtype).flatten(0, 1)
            share = 1
        wide_PN = self._product(x_TK, data.gate_up, groups, share)
        if own.gate_up_bias is not None:
            wide_PN = wide_PN + own.gate_up_bias[pairs_P.long()]
        y_PD = self._product(self._gated(wide_PN), data.down, groups, 1)
        if own.down_bias is not None:
            y_PD = y_PD + own.down_bias[pairs_P.long()]
        by_id = chosen.ids.sort(dim=1)
        mix_kernel[(triton.cdiv(experts.n, 512), rows)](
            y_PD, by_id.values, by_id.indices.to(torch.int32), chosen.weights, hidden_TD, hidden_TD.stride(0),
            experts.n, experts.count, TOP=top, WEIGHS=not own.weighs_input, BLOCK=512, GROUPS=EXPERT_GROUPS,
            LEVELS=EXPERT_GROUPS.bit_length() - 1, **UNFUSED,
        )  # fmt: skip

    def _product(self, x: Tensor, stacks: tuple[StackedOperand, ...], groups: ExpertGroups, share: int) -> Tensor:
        """The product of each pair with its expert; x has a row for every ``share`` pairs.  Zeros for experts of other
        ranks: their biases are zeros here, too, so that they add nothing."""
        width = max(stack.first + stack.n for stack in stacks)
        out_PN = self._form.empty((len(groups.order), width))
        if groups.leaves_out:
            out_PN.zero_()
        x = x if x.stride(1) == 1 else x.contiguous()
        for stack in stacks:
            own, each = x, share
            if stack.orders_EK is not None:
                own, each = ordered(x, stack.orders_EK, groups, share), 1
            self._multiply(own, stack, groups, each, out_PN)
        return out_PN

    def _multiply(self, x: Tensor, stack: StackedOperand, groups: ExpertGroups, share: int, out_PN: Tensor) -> None:
        weight, tile = stack.operand, stack.operand.tile
        tiles = triton.cdiv(stack.n, tile.columns) * groups.bound
        programs = min(tiles, BESIDE * multiprocessors(self._form.device))
        keeps = keeps_apart(weight, tile)
        kept = self._form.empty((programs if keeps else 0, 2, groups.rows, tile.columns))
        grouped_kernel[(programs,)](
            x, weight.arguments, weight.ends, out_PN[:, stack.first :], kept, groups.order, groups.starts,
            groups.tile_ends, stack.places_E, x.stride(0), out_PN.stride(0), stack.n, groups.experts,
            SHARE=share, EXPERTS=triton.next_power_of_2(groups.experts), STEP=weight.step, SEGMENTS=weight.segments,
            ROWS=groups.rows, COLUMNS=tile.columns, DEPTH=tile.depth, ALIGNED=tile.aligned, EVEN=tile.even, KEPT=keeps,
            num_warps=groups.rows // 16, num_stages=4, **UNFUSED,
        )  # fmt: skip


def _pairs_here(pairs_P: Tensor, here_E: Tensor | None) -> Tensor:
    """Each pair's expert; one that no expert has, for those of other ranks."""
    if here_E is None:
        return pairs_P
    return torch.where(here_E[pairs_P.long()] != 0, pairs_P, len(here_E))


def ordered(x: Tensor, orders_EK: Tensor, groups: ExpertGroups, share: int) -> Tensor:
    """A row for each pair, with the columns of its expert; x has a row for every ``share`` pairs.

    In slices: an index of 8 bytes for each number would be the largest array of a step.
    """
    pairs, columns = len(groups.experts_P), x.shape[1]
    out_PK = x.new_empty((pairs, columns))
    rows = max(1, INDEX_BYTES // (8 * columns * share))
    for first in range(0, len(x), rows):
        rows_PK = x[first : first + rows].repeat_interleave(share, dim=0)
        own = slice(first * share, first * share + len(rows_PK))
        experts_P = groups.experts_P[own].long().clamp(max=groups.experts - 1)  # of what is left out: any
        torch.gather(rows_PK, 1, orders_EK[experts_P], out=out_PK[own])
    return out_PK


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """Pairs (token, slot) by expert; whose expert is not below ``experts`` is left out.  All arrays on the device; the
    numbers follow from shapes alone."""

    experts_P: Tensor
    order: Tensor  # [pairs], those of an expert side by side, in their own order
    starts: Tensor  # [E + 1]
    tile_ends: Tensor  # [E]
    experts: int
    rows: int  # of a tile
    bound: int  # tiles that could be needed
    leaves_out: bool  # whether some pairs may be in no group

    @classmethod
    def of(cls, experts_P: Tensor, experts: int, rows: int | None = None, *, leaves_out: bool = False) -> ExpertGroups:
        """Group pairs by their expert.  ``rows`` of a tile: by default more where most experts have many."""
        pairs = len(experts_P)
        if rows is None:
            rows = 2 * FEW_ROWS if pairs > FEW_ROWS * experts else FEW_ROWS
        by_expert = experts_P.sort(stable=True)
        edges = torch.arange(experts + 1, dtype=by_expert.values.dtype, device=experts_P.device)
        starts = torch.searchsorted(by_expert.values, edges).to(torch.int32)
        tiles = (starts.diff() + (rows - 1)) // rows
        bound = min(pairs, experts + pairs // rows)
        order, tile_ends = by_expert.indices.to(torch.int32), tiles.cumsum(0).to(torch.int32)
        return cls(experts_P, order, starts, tile_ends, experts, rows, bound, leaves_out)


SOFTMAX = tl.constexpr(0)
SIGMOID = tl.constexpr(1)
SOFTMAX_CHOSEN = tl.constexpr(2)


@triton.jit
def first_best(values, ids, candidates):
    """The candidate with the largest value; of equal ones the lowest id.  All along the last axis."""
    best = tl.max(tl.where(candidates, values, float("-inf")))
    return tl.min(tl.where(candidates & (values == best), ids, 1 << 30))


@triton.jit
def selected_groups(choice_GE, live_GE, groups, GROUPS: tl.constexpr, KEPT: tl.constexpr, PAIRS: tl.constexpr):
    """bool [GROUPS]: the best groups, each as good as its best expert or its best two together."""
    lowest = float("-inf")
    masked_GE = tl.where(live_GE, choice_GE, lowest)
    worth_G = tl.max(masked_GE, axis=1)
    if PAIRS:
        places_GE = tl.broadcast_to(tl.arange(0, masked_GE.shape[1])[None, :], masked_GE.shape)
        first_G = tl.min(tl.where(masked_GE == worth_G[:, None], places_GE, 1 << 30), axis=1)
        worth_G += tl.max(tl.where(places_GE == first_G[:, None], lowest, masked_GE), axis=1)
    ids_G = tl.arange(0, GROUPS)
    kept_G = ids_G < 0
    for _ in range(KEPT):
        best = first_best(worth_G, ids_G, (ids_G < groups) & (kept_G == 0))
        kept_G = kept_G | (ids_G == best)
    return kept_G


@triton.jit
def route_kernel(
    logits, bias, ids, weights, stride, experts, groups, size, factor,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, KEPT: tl.constexpr, TOP: tl.constexpr, WIDTH: tl.constexpr,
    SCORE: tl.constexpr, NORMALIZED: tl.constexpr, PAIRS: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """ids and weights [T, TOP] of logits [T, E]; experts lie as [GROUPS, SIZE], both padded.  Grid: tokens."""
    token = tl.program_id(0)
    groups_G1 = tl.arange(0, GROUPS)[:, None]
    places_1E = tl.arange(0, SIZE)[None, :]
    ids_GE = groups_G1 * size + places_1E
    live_GE = (groups_G1 < groups) & (places_1E < size)
    logits_GE = tl.load(logits + token * stride + ids_GE, mask=live_GE, other=float("-inf"))
    if SCORE == SIGMOID:
        scores_GE = 1 / (1 + tl.exp(-logits_GE))
    else:
        powers_GE = tl.where(live_GE, tl.exp(logits_GE - tl.max(logits_GE)), 0.0)
        scores_GE = powers_GE / tl.sum(tl.sum(powers_GE, axis=1), axis=0)
    choice_GE = logits_GE
    if BIASED or PAIRS:
        choice_GE = scores_GE
    if BIASED:
        choice_GE += tl.load(bias + ids_GE, mask=live_GE, other=0.0)
    candidates_GE = live_GE
    if GROUPS > 1:
        candidates_GE = live_GE & selected_groups(choice_GE, live_GE, groups, GROUPS, KEPT, PAIRS)[:, None]
    slots_K = tl.arange(0, WIDTH)
    weights_K = tl.zeros((WIDTH,), tl.float32)
    if SCORE == SOFTMAX_CHOSEN:
        weights_K += float("-inf")
    for slot in range(TOP):
        best = tl.minimum(first_best(choice_GE, ids_GE, candidates_GE), experts - 1)
        own_GE = ids_GE == best
        candidates_GE = candidates_GE & (own_GE == 0)
        if SCORE == SOFTMAX_CHOSEN:
            weight = tl.max(tl.where(own_GE & live_GE, logits_GE, float("-inf")))
        else:
            weight = tl.max(tl.where(own_GE & live_GE, scores_GE, 0.0))
        weights_K = tl.where(slots_K == slot, weight, weights_K)
        tl.store(ids + token * TOP + slot, best)
    if SCORE == SOFTMAX_CHOSEN:
        powers_K = tl.exp(weights_K - tl.max(weights_K, axis=0))
        weights_K = powers_K / tl.sum(powers_K, axis=0)
    elif NORMALIZED:
        weights_K = weights_K / (tl.sum(weights_K, axis=0) + 1e-20)
    tl.store(weights + token * TOP + slots_K, weights_K * factor, mask=slots_K < TOP)


def chosen_experts(form: TritonContext, logits_TE: Tensor, how: Routing, bias_E: Tensor | None) -> ChosenExperts:
    """Ids [T, k] int32 and weights [T, k]."""
    rows = len(logits_TE)
    ids_TK, weights_TK = form.empty((rows, how.top_k), torch.int32), form.empty((rows, how.top_k))
    if rows:
        logits_TE = logits_TE if logits_TE.stride(1) == 1 else logits_TE.contiguous()
        scores = {Score.SOFTMAX: SOFTMAX, Score.SIGMOID: SIGMOID, Score.SOFTMAX_CHOSEN: SOFTMAX_CHOSEN}
        route_kernel[(rows,)](
            logits_TE, logits_TE if bias_E is None else bias_E, ids_TK, weights_TK, logits_TE.stride(0),
            how.experts, how.groups, how.group_size, how.factor,
            GROUPS=triton.next_power_of_2(how.groups), SIZE=triton.next_power_of_2(how.group_size),
            KEPT=how.groups_kept, TOP=how.top_k, WIDTH=triton.next_power_of_2(how.top_k), SCORE=scores[how.score],
            NORMALIZED=how.normalised, PAIRS=how.pairs, BIASED=bias_E is not None, **UNFUSED,
        )  # fmt: skip
    return ChosenExperts(ids_TK, weights_TK)
