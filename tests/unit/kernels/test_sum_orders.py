"""The orders of sums that devices will share: one bit pattern for any number of ranks, and the kernels' is the tree's.

First the arithmetic alone, then the kernels of every backend against it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np
import pytest
import torch
from kernel_cases import (
    EVERY,
    NATIVE,
    TRITONS,
    Heads,
    Story,
    Vector,
    Way,
    assert_same_bits,
    in_turn,
    make,
    normal,
    sum_of_experts,
)
from test_triton_attention import Last

from penstock.kernels import _native
from penstock.kernels.operands import SILU, AttentionSpec, PackedExperts, Routing, Score, segment_ends
from penstock.kernels.reference.attention import KeyPart, attend_keys, attend_partition
from penstock.kernels.sum_tree import (
    EXPERT_GROUPS,
    KEY_CLASSES,
    expert_group,
    experts_of,
    join,
    leaves_of,
    partition_class,
)
from penstock.kernels.triton.attention import TritonAttention

EXPERT_RANKS, KEY_RANKS = (1, 2, 4, 8, 16, 32, 64), (1, 2, 4, 8)
CHOICES = [(8, 2), (60, 4), (64, 8), (128, 8), (200, 20), (384, 8), (40, 8)]
"""Experts of a layer, and of a token."""


# --- the arithmetic ---------------------------------------------------------------------------------------------------


def test_the_tree_joins_neighbors_and_skips_what_is_missing() -> None:
    def both(left: str, right: str) -> str:
        return f"({left}{right})"

    assert join(list("01234567"), both) == "(((01)(23))((45)(67)))"
    assert join([None, "1", "2", None, None, None, "6", None], both) == "((12)6)"
    assert join([None, None], both) is None
    with pytest.raises(ValueError, match="not 3"):
        join(list("012"), both)


@pytest.mark.parametrize("experts", [1, 3, 8, 40, 60, 64, 65, 160, 384, 4096])
def test_groups_are_cut_evenly_and_ranks_have_whole_ones(experts: int) -> None:
    groups = [expert_group(expert, experts) for expert in range(experts)]
    ends = [(i + 1) * experts // EXPERT_GROUPS for i in range(EXPERT_GROUPS)]
    assert groups == [next(i for i, end in enumerate(ends) if end > expert) for expert in range(experts)]
    for ranks in EXPERT_RANKS:
        own = [experts_of(experts, rank, ranks) for rank in range(ranks)]
        assert [expert for each in own for expert in each] == list(range(experts))
        assert max(map(len, own)) - min(map(len, own)) <= 1
        for rank, each in enumerate(own):
            assert {groups[expert] for expert in each} <= set(leaves_of(EXPERT_GROUPS, rank, ranks))


@pytest.mark.parametrize(("experts", "chosen"), CHOICES)
def test_experts_over_any_number_of_ranks(experts: int, chosen: int) -> None:
    random = np.random.default_rng(experts)
    for token in range(20):
        ids = random.choice(experts, chosen, replace=False)
        parts = dict(zip(ids.tolist(), normal(token, chosen, 64), strict=True))
        whole = sum_of_experts(parts, experts)
        assert whole is not None
        for ranks in EXPERT_RANKS:
            own = [sum_of_experts(parts, experts, leaves_of(EXPERT_GROUPS, rank, ranks)) for rank in range(ranks)]
            assert_same_bits(join(own, np.add), whole, f"{ranks} ranks")  # type: ignore[arg-type]


Softmax = tuple[np.float32, np.float32, Vector]
"""Of some keys: largest score, sum of exponentials, their sum times values."""


def joined(left: Softmax, right: Softmax) -> Softmax:
    top = max(left[0], right[0])
    a, b = np.exp2(left[0] - top), np.exp2(right[0] - top)
    return top, left[1] * a + right[1] * b, left[2] * a + right[2] * b


def softmax_of_keys(partitions: Mapping[int, Softmax], classes: range = range(KEY_CLASSES)) -> Softmax | None:
    leaves: list[Softmax | None] = []
    for each in classes:
        own = [partitions[p] for p in sorted(partitions) if partition_class(p) == each]
        leaves.append(reduce(joined, own) if own else None)
    return join(leaves, joined)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 9, 40])
def test_keys_over_any_number_of_ranks(count: int) -> None:
    for first in (0, 5):  # a window's first partition
        tops, sums, values = normal(count, count) * 3, np.abs(normal(first, count)) + 1, normal(7, count, 32)
        partitions = {first + p: (tops[p], sums[p], values[p]) for p in range(count)}
        whole = softmax_of_keys(partitions)
        for ranks in KEY_RANKS:
            own = [softmax_of_keys(partitions, leaves_of(KEY_CLASSES, rank, ranks)) for rank in range(ranks)]
            for got, wanted in zip(join(own, joined), whole, strict=True):  # type: ignore[arg-type]
                assert_same_bits(np.atleast_1d(got), np.atleast_1d(wanted), f"{ranks} ranks")


# --- experts of the kernels -------------------------------------------------------------------------------------------


def packed_experts(ops: Any, count: int, *, weighs_input: bool) -> PackedExperts:
    return ops.pack_experts(
        [ops.pack_linear(normal(10 + e, 32, 20) / 4) for e in range(count)],
        [ops.pack_linear(normal(900 + e, 24, 16) / 4, segments=segment_ends(16, 4)) for e in range(count)],
        weighs_input=weighs_input,
    )  # type: ignore[no-any-return]


def added(ops: Any, experts: PackedExperts, x: Vector, logits: Vector, own: Sequence[int]) -> Vector:
    """What these experts add to zero for one token: those of a rank, say.  Weights do not depend on other experts."""
    how = Routing(experts=experts.count, top_k=len(own), score=Score.SIGMOID)
    only = np.full((1, experts.count), -40.0, np.float32)
    only[0, own] = logits[own]
    hidden = ops.hidden(np.zeros((1, experts.n), np.float32))
    ops.experts_add(ops.compute(x), ops.route(ops.hidden(only), how), experts, SILU, hidden)
    return np.array(ops.to_numpy(hidden))[0]


@pytest.mark.parametrize(("family", "compute"), [*EVERY, TRITONS[1]])
def test_experts_are_summed_by_the_tree(family: str, compute: str) -> None:
    """Unweighted, so that a sum of what each expert adds alone has no other rounding than the kernels'."""
    ops, count, chosen = make(family, compute), 70, 12
    experts = packed_experts(ops, count, weighs_input=True)
    own = np.random.default_rng(3).choice(count, chosen, replace=False).tolist()
    x, logits = normal(1, 1, 20), normal(2, count)
    parts = {expert: added(ops, experts, x, logits, [expert]) for expert in own}
    whole = added(ops, experts, x, logits, own)
    wanted = sum_of_experts(parts, count)
    assert wanted is not None
    assert_same_bits(whole, wanted)
    assert (whole != in_turn([parts[expert] for expert in sorted(own)])).any(), "one chain has the same bits here"


@pytest.mark.parametrize(("family", "compute"), [*EVERY, TRITONS[1]])
def test_partial_sums_of_ranks_join_to_the_whole(family: str, compute: str) -> None:
    ops, count, chosen = make(family, compute), 40, 8
    experts = packed_experts(ops, count, weighs_input=False)
    own = sorted(np.random.default_rng(4).choice(count, chosen, replace=False).tolist())
    x, logits = normal(1, 1, 20), normal(2, count)
    whole = added(ops, experts, x, logits, own)
    for ranks in (2, 8, 64):
        shares = [[e for e in own if e in experts_of(count, rank, ranks)] for rank in range(ranks)]
        partial = [added(ops, experts, x, logits, share) if share else None for share in shares]
        assert_same_bits(join(partial, np.add), whole, f"{ranks} ranks")  # type: ignore[arg-type]


# --- attention of the kernels -----------------------------------------------------------------------------------------

LENGTH, TOKENS, KEYS = 9700, 3, 8192


class FarKeys(Last):
    """All scores are zero, and of each partition only the first key has values: of very different sizes, so that every
    rounding of their sum tells of its order."""

    attending = TOKENS

    def __init__(self, ops: Any, way: Way, length: int = LENGTH) -> None:
        super().__init__(ops, Heads(4, 2, 16), [length], way)
        qkv = self.qkv[0]
        qkv[:, 64:] = 0
        firsts = qkv[::512, 96:]
        firsts[:] = normal(1, *firsts.shape) * 2.0 ** np.random.default_rng(2).integers(-20, 20, firsts.shape)

    def write(self, s: int, start: int, end: int) -> Any:
        if "cpp" not in self.ops.numerics:
            return super().write(s, start, end)
        return self.rotate(self.ops.hidden(self.qkv[s][start:end]), self.batch([(s, start, end)]))

    def wanted(self, window: int, *, divides: bool) -> Vector:
        """Of the last tokens, by the tree; ``divides``: a sum is not multiplied by 1 / keys."""
        values = np.array(self.ops.to_numpy(self.ops.compute(self.qkv[0][::512, 96:])), np.float32)
        rows = []
        for position in range(LENGTH - TOKENS, LENGTH):
            first, keys = max(0, position - window + 1), np.float32(min(window, position + 1))
            seen = {p: value for p, value in enumerate(values) if first <= p * 512 <= position}
            leaves = [[seen[p] for p in sorted(seen) if partition_class(p) == each] for each in range(KEY_CLASSES)]
            total = join([in_turn(own) if own else None for own in leaves], np.add)
            assert total is not None
            mean = total / keys if divides else total * (np.float32(1) / keys)
            rows.append(mean.reshape(2, 1, 16).repeat(2, axis=1).reshape(-1))  # two heads share keys
        return np.array(self.ops.to_numpy(self.ops.compute(np.stack(rows))), np.float32)


WINDOWS = [LENGTH, 5000, 1200]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("family", "compute"), NATIVE)
def test_partitions_are_joined_by_classes_and_the_tree(family: str, compute: str, window: int) -> None:
    """With one thread partitions are computed one after another, with two each by itself."""
    story = FarKeys(make(family, compute), Way(rotated=0, masks=(("window", window),)))
    for threads in (1, 2):
        _native.set_threads(threads)
        got = story.attend(0, story.ops)
        _native.set_threads(1)
        assert_same_bits(got, story.wanted(window, divides=False), f"{threads} threads")


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("window", [LENGTH, pytest.param(5000, marks=pytest.mark.long)])
def test_partitions_on_a_gpu_are_joined_by_classes_and_the_tree(window: int, apart: bool) -> None:
    ops = make(*TRITONS[1])
    story = FarKeys(ops, Way(rotated=0, masks=(("window", window),)))
    got = story.attend(0, TritonAttention(ops.form, apart=apart))
    assert_same_bits(got, story.wanted(window, divides=True))


class KeysOfRank(FarKeys):
    """A token that reads 2^n keys, whose scores are zero for keys of some classes, and too low to count elsewhere: what
    comes out, times the number of keys that count, is the rank's sum, and in fp32 nothing of that is rounded."""

    attending = 1

    def __init__(self, ops: Any, classes: range) -> None:
        super().__init__(ops, Way(rotated=0), length=KEYS)
        qkv = self.qkv[0]
        qkv[:, :64] = 1
        for partition in range(KEYS // 512):
            if partition_class(partition) not in classes:
                qkv[partition * 512 : (partition + 1) * 512, 64:96] = -1000

    def sums(self, kernels: Any, counted: int) -> Vector:
        return self.attend(0, kernels)[0] * np.float32(counted)


FP32 = [(family, compute) for family, compute in NATIVE if compute == "fp32"]


@pytest.mark.parametrize(("family", "compute"), [*FP32, pytest.param(*TRITONS[1], marks=pytest.mark.long)])
def test_keys_of_ranks_join_to_the_whole(family: str, compute: str) -> None:
    """Partitions of all classes but a rank's are there and count nothing, so the kernels make a node of the tree."""
    ops = make(family, compute)
    kernels = TritonAttention(ops.form, apart=True) if "triton" in family else ops
    whole = KeysOfRank(ops, range(KEY_CLASSES)).sums(kernels, KEYS)
    assert len(np.unique(whole)) > 16
    for ranks in KEY_RANKS[1:]:
        classes = [leaves_of(KEY_CLASSES, rank, ranks) for rank in range(ranks)]
        parts = [KeysOfRank(ops, own).sums(kernels, KEYS // ranks) for own in classes]
        assert_same_bits(join(parts, np.add), whole, f"{ranks} ranks")  # type: ignore[arg-type]
        if ranks == KEY_CLASSES:
            assert (in_turn(parts) != whole).any(), "one chain has the same bits here"


@pytest.mark.parametrize("count", [1, 3, 8, 20])
def test_keys_of_ranks_join_to_the_whole_of_the_oracle(count: int) -> None:
    """It keeps means and logarithms of sums, which ranks would hand over."""
    shapes = (2, 16, 16), (2, count * 512, 16), (2, count * 512, 16)
    q_GMC, k_GNC, v_GNC = (torch.from_numpy(normal(seed, *shape)) for seed, shape in enumerate(shapes))
    hidden_GMN, spec = torch.zeros((2, 16, count * 512), dtype=torch.bool), AttentionSpec(0.25)
    whole = attend_keys(q_GMC, k_GNC, v_GNC, hidden_GMN, spec)
    cuts = [slice(p * 512, (p + 1) * 512) for p in range(count)]
    parts = [attend_partition(q_GMC, k_GNC[:, cut], v_GNC[:, cut], hidden_GMN[..., cut], spec) for cut in cuts]
    for ranks in KEY_RANKS:
        nodes: list[KeyPart | None] = []
        for rank in range(ranks):
            own = [parts[each::KEY_CLASSES] for each in leaves_of(KEY_CLASSES, rank, ranks)]
            nodes.append(join([reduce(KeyPart.joined, some) if some else None for some in own], KeyPart.joined))
        joined_nodes = join(nodes, KeyPart.joined)
        assert joined_nodes is not None
        assert_same_bits(joined_nodes.out.numpy(), whole.numpy(), f"{ranks} ranks")


@pytest.mark.parametrize(("family", "compute"), EVERY)
def test_a_token_behind_many_partitions_alone_and_in_company(family: str, compute: str) -> None:
    """Law 1 where classes have several partitions: rotated keys, a sink, tokens one by one and together."""
    ops, length = make(family, compute), 4700
    way = Way(rotated=0, sinks=True)
    together, apart = (Story(ops, Heads(4, 2, 16), [length], way) for _ in range(2))
    batch = together.batch([(0, 0, length)])
    for story in (together, apart):
        qkv = ops.hidden(story.qkv[0])
        ops.rope_and_write(qkv, None, story.kv, 1, batch, heads=4, kv_heads=2)
    together.step([(0, length - 40, length)])
    for threads, first in ((1, length - 40), (2, length - 20)):
        _native.set_threads(threads)
        for position in range(first, first + 20):
            apart.step([(0, position, position + 1)])
        _native.set_threads(1)
    assert_same_bits(apart.out[0][length - 40 :], together.out[0][length - 40 :])
