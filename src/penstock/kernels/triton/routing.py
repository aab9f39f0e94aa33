"""Choosing experts on the GPU: one program a token, so a token's choice and weights know nothing of the others.

This module imports torch and triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.operands import Routing, Score
from penstock.kernels.reference.experts import Chosen
from penstock.kernels.triton.arithmetic import UNFUSED
from penstock.kernels.triton.form import TritonForm

SOFTMAX = tl.constexpr(0)
SIGMOID = tl.constexpr(1)
SOFTMAX_CHOSEN = tl.constexpr(2)


@triton.jit
def first_best(values, ids, candidates):
    """The candidate with the largest value; of equal ones the lowest id.  All along the last axis."""
    best = tl.max(tl.where(candidates, values, float("-inf")))
    return tl.min(tl.where(candidates & (values == best), ids, 1 << 30))


@triton.jit
def kept_groups(choice_GE, live_GE, groups, GROUPS: tl.constexpr, KEPT: tl.constexpr, PAIRS: tl.constexpr):
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
    SCORE: tl.constexpr, NORMALISED: tl.constexpr, PAIRS: tl.constexpr, BIASED: tl.constexpr,
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
        candidates_GE = live_GE & kept_groups(choice_GE, live_GE, groups, GROUPS, KEPT, PAIRS)[:, None]
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
    elif NORMALISED:
        weights_K = weights_K / (tl.sum(weights_K, axis=0) + 1e-20)
    tl.store(weights + token * TOP + slots_K, weights_K * factor, mask=slots_K < TOP)


def chosen_experts(form: TritonForm, logits_TE: Tensor, how: Routing, bias_E: Tensor | None) -> Chosen:
    """See ``Ops.route``: ids [T, k] int32 and weights [T, k]."""
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
            NORMALISED=how.normalised, PAIRS=how.pairs, BIASED=bias_E is not None, **UNFUSED,
        )  # fmt: skip
    return Chosen(ids_TK, weights_TK)
