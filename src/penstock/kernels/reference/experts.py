"""The oracle's routed experts, in torch.  Rows and experts one after another; knows no layouts.

This module imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.operands import PackedExperts, PackedLinear, Routing, Score
from penstock.kernels.sum_tree import EXPERT_GROUPS, expert_group, join


@dataclass(frozen=True, slots=True)
class ReferenceExperts:
    """``PackedExperts.data``; biases [E, N].  None: another rank has this expert."""

    gate_up: list[PackedLinear | None]
    down: list[PackedLinear | None]
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    weighs_input: bool


@dataclass(frozen=True, slots=True)
class ChosenExperts:
    """``Routes.data``: ids [T, k], best first, and their weights."""

    ids: Tensor
    weights: Tensor


def stacked_biases(vectors: Sequence[Tensor | None] | None) -> Tensor | None:
    """[E, N], zeros for an expert of another rank; None where experts have no biases."""
    known = [vector for vector in vectors or () if vector is not None]
    if vectors is None or not known:
        return None
    return torch.stack([torch.zeros_like(known[0]) if vector is None else vector for vector in vectors])


def choose_experts(logits_TE: Tensor, how: Routing, bias_E: Tensor | None) -> ChosenExperts:
    """``Ops.route`` for rows of logits."""
    scores_TE = _scores(logits_TE, how)
    by_score = bias_E is not None or how.pairs
    choice_TE = (scores_TE if by_score else logits_TE).clone()
    if bias_E is not None:
        choice_TE += bias_E
    if how.groups > 1:
        choice_TE[_dropped(choice_TE, how)] = -torch.inf
    ids_TK = _best(choice_TE, how.top_k)
    weights_TK = scores_TE.gather(1, ids_TK)
    if how.score is Score.SOFTMAX_CHOSEN:
        weights_TK = torch.softmax(logits_TE.gather(1, ids_TK), dim=1)
    elif how.normalised:
        weights_TK = weights_TK / (weights_TK.sum(dim=1, keepdim=True) + 1e-20)
    return ChosenExperts(ids_TK, weights_TK * how.factor)


def expert_sums(
    x_TK: Tensor,
    chosen: ChosenExperts,
    experts: PackedExperts,
    *,
    linear: Callable[[Tensor, PackedLinear], Tensor],
    gated: Callable[[Tensor], Tensor],
) -> Tensor:
    """What ``Ops.experts_add`` adds, [T, D]: the experts of a group one after another, groups by the tree."""
    groups: list[Tensor | None] = [None] * EXPERT_GROUPS
    for expert in range(experts.count):
        tokens, places = (chosen.ids == expert).nonzero(as_tuple=True)
        if experts.data.gate_up[expert] is None or not len(tokens):
            continue
        weights_R1 = chosen.weights[tokens, places].unsqueeze(1)
        y_RD = _products(x_TK[tokens], weights_R1, experts.data, expert, linear=linear, gated=gated)
        group = expert_group(expert, experts.count)
        sums_TD = groups[group]
        if sums_TD is None:
            sums_TD = groups[group] = torch.zeros((len(x_TK), experts.n), device=x_TK.device)
        sums_TD[tokens] += y_RD
    sums_TD = join(groups, torch.add)
    # A zero has no sign: of another token's groups this one has zeros, which must be the same as nothing.
    return torch.zeros((len(x_TK), experts.n), device=x_TK.device) if sums_TD is None else sums_TD + 0.0


def _products(
    x_RK: Tensor,
    weights_R1: Tensor,
    own: ReferenceExperts,
    expert: int,
    *,
    linear: Callable[[Tensor, PackedLinear], Tensor],
    gated: Callable[[Tensor], Tensor],
) -> Tensor:
    """What one expert makes of its rows, times their weights."""
    if own.weighs_input:
        x_RK = (x_RK.float() * weights_R1).to(x_RK.dtype)
    gate_up, down = own.gate_up[expert], own.down[expert]
    assert gate_up is not None and down is not None, "an expert of this rank"  # noqa: PT018
    wide_RN = linear(x_RK, gate_up)
    if own.gate_up_bias is not None:
        wide_RN = wide_RN + own.gate_up_bias[expert]
    y_RD = linear(gated(wide_RN), down)
    if own.down_bias is not None:
        y_RD = y_RD + own.down_bias[expert]
    return y_RD if own.weighs_input else y_RD * weights_R1


def _scores(logits_TE: Tensor, how: Routing) -> Tensor:
    return torch.sigmoid(logits_TE) if how.score is Score.SIGMOID else torch.softmax(logits_TE, dim=1)


def _best(values: Tensor, count: int) -> Tensor:
    """Indices of the largest, of equal ones the lower index first."""
    return values.sort(dim=1, descending=True, stable=True).indices[:, :count]


def _dropped(choice_TE: Tensor, how: Routing) -> Tensor:
    """True for experts whose group is not selected."""
    grouped = choice_TE.view(-1, how.groups, how.group_size)
    best_TG = grouped.topk(2 if how.pairs else 1, dim=2).values.sum(dim=2)
    dropped_TG = torch.ones_like(best_TG, dtype=torch.bool).scatter(1, _best(best_TG, how.groups_kept), False)
    return dropped_TG.repeat_interleave(how.group_size, dim=1)
