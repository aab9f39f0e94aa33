"""Sparse attention: every family and both compute types against plain float64, and law 1 within the option."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernel_cases import EVERY, NATIVE, TOLERANCE, Heads, Story, Way, assert_close, assert_same_bits, make
from kernel_ways import assert_recorded_as_run
from numpy.typing import NDArray
from test_kernels_attention import Layer, mixed, rounded

from penstock.kernels import _native
from penstock.kernels.operands import BLOCK_KEYS, Sparse

SPARSE = Sparse(sinks=1, window=2, chosen=2, start=350)
UNROTATED = Way(rotated=0)
SHAPES = {
    "groups": (Heads(4, 2, 32), UNROTATED),
    "one head of keys": (Heads(6, 1, 64, values=20), Way(rotated=0, sinks=True)),
    "small heads": (Heads(2, 2, 6), Way(rotated=0, masks=(("softcap", 3.0),))),
}
APART = {"bf16": 0.05, "fp32": 1e-4}
"""Blocks that are liked this much differently are chosen by all alike, whatever the rounding of mean keys."""


def story(ops: Any, heads: Heads, lengths: list[int], way: Way = UNROTATED, sparse: Sparse | None = SPARSE) -> Story:
    made = Story(ops, heads, lengths, way, poison=True)
    made.arguments = {**made.arguments, "sparse": sparse}
    return made


def read_keys(
    ops: Any, q: NDArray[np.float64], k: NDArray[np.float64], sparse: Sparse
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """(keys that each position's group reads [G, T, T], positions [T] whose choice no rounding can change)."""
    tokens, groups = k.shape[:2]
    read, sure = np.zeros((groups, tokens, tokens), bool), np.ones(tokens, bool)
    pages = tokens // 16
    means = rounded(ops, k[: pages * 16].reshape(pages, 16, groups, -1).mean(1))
    products = np.einsum("tghc,pgc->tghp", q.reshape(tokens, groups, -1, q.shape[2]), means).max(2)
    all_liked = products[..., : pages // 4 * 4].reshape(tokens, groups, -1, 4).max(3)
    for position in range(tokens):
        own = position // BLOCK_KEYS
        for group in range(groups):
            blocks = {*range(sparse.sinks), *range(own - sparse.window + 1, own + 1)}
            if not sparse.thins(position):
                blocks = {*range(own + 1)}
            else:
                candidates = np.array(sparse.candidates(position))
                liked = all_liked[position, group, candidates]
                order = np.argsort(-liked, kind="stable")
                blocks |= {*candidates[order[: sparse.chosen]].tolist()}
                last, next_best = liked[order[sparse.chosen - 1]], liked[order[sparse.chosen]]
                sure[position] &= last - next_best > APART[ops.compute_dtype]
            for block in blocks:
                read[group, position, block * BLOCK_KEYS : min(position + 1, (block + 1) * BLOCK_KEYS)] = True
    return read, sure


def plain(ops: Any, heads: Heads, way: Way, qkv: NDArray[np.float32]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """(attention [T, H value_dim] in float64, positions whose choice is sure [T])."""
    wide, tokens = rounded(ops, qkv), len(qkv)
    q, k, v = np.split(wide, np.cumsum([heads.query * heads.dim, heads.kv * heads.dim]), axis=1)
    q, k = (x.reshape(tokens, -1, heads.dim) for x in (q, k))
    v = v.reshape(tokens, heads.kv, heads.value_dim)
    read, sure = read_keys(ops, q, k, SPARSE)
    repeat = heads.query // heads.kv
    out = np.zeros((tokens, heads.query * heads.value_dim))
    arguments = way.arguments(heads)
    for group in range(heads.kv):
        own = slice(group * repeat, (group + 1) * repeat)
        sinks = {"sinks_H": arguments["sinks_H"][own]} if way.sinks else {}
        one = {**arguments, **sinks, "read": read[group]}
        columns = slice(own.start * heads.value_dim, own.stop * heads.value_dim)
        keys, values = (x[:, group : group + 1].repeat(repeat, axis=1) for x in (k, v))
        out[:, columns] = mixed(q[:, own], keys, values, heads.dim**-0.5, one)
    return out, sure


@pytest.mark.parametrize(("family", "compute"), EVERY)
@pytest.mark.parametrize("name", SHAPES)
def test_sparse_attention(family: str, compute: str, name: str) -> None:
    ops, (heads, way) = make(family, compute), SHAPES[name]
    told = story(ops, heads, [600], way)
    wanted, sure = plain(ops, heads, way, told.qkv[0])
    got = told.whole()[0]
    assert sure.mean() > 0.8
    assert_close(got[sure], wanted[sure], 2 * TOLERANCE[compute])


@pytest.mark.parametrize(("family", "compute"), EVERY)
def test_any_cut_in_any_company_chooses_the_same(family: str, compute: str) -> None:
    """Law 1: random pieces, others beside it, more threads, partitions apart, token by token."""
    ops, (heads, way) = make(family, compute), SHAPES["groups"]
    lengths = [170, 640] if family == "reference" else [170, 1300]
    together = story(ops, heads, lengths, way).whole()
    for seed in range(2):
        chance, apart, at = np.random.default_rng(seed), story(ops, heads, lengths, way), [0, 0]
        while at != lengths:
            steps = chance.choice([0, 1, 1, 7, 30, 64, 200], len(at))
            ends = np.minimum(lengths, at + steps).tolist()
            parts = [(s, at[s], ends[s]) for s in range(len(at)) if ends[s] > at[s]]
            _native.set_threads(int(chance.integers(1, 4)))
            if parts:
                apart.step(parts if chance.random() < 0.5 else parts[::-1])
            at = ends
        _native.set_threads(1)
        for a, b in zip(together, apart.out, strict=True):
            assert_same_bits(a, b, f"cut {seed}")


@pytest.mark.parametrize(("family", "compute"), EVERY)
def test_what_leaves_nothing_out_has_the_bits_of_full_attention(family: str, compute: str) -> None:
    ops, (heads, way) = make(family, compute), SHAPES["groups"]
    full, some = (story(ops, heads, [520], way, sparse).whole()[0] for sparse in (None, SPARSE))
    assert_same_bits(some[:350], full[:350])
    assert np.any(some[384:] != full[384:], axis=1).mean() > 0.9


@pytest.mark.parametrize(("family", "compute"), EVERY)
def test_of_equals_the_first_are_read(family: str, compute: str) -> None:
    """All keys alike: every value that is read has the same weight."""
    ops, heads, sparse = make(family, compute), Heads(2, 1, 16), Sparse(sinks=1, window=1, chosen=2, start=0)
    told = story(ops, heads, [640], UNROTATED, sparse)
    told.qkv[0][:, 32:48] = 1.0
    told.qkv[0][:, 48:] = np.repeat(2.0 ** np.arange(10), 64)[:, None]  # of each block of its own
    last = told.whole()[0][-1]
    assert_close(last, np.full(32, (1 + 2 + 4 + 512) / 4), 2e-2 if compute == "bf16" else 1e-5)


@pytest.mark.parametrize(("family", "compute"), NATIVE)
def test_recorded_steps_choose_as_direct_ones(family: str, compute: str) -> None:
    ops, (heads, way) = make(family, compute), SHAPES["groups"]
    steps = ([(0, 0, 430)], [(0, 430, 500), (1, 0, 40)])
    assert_recorded_as_run(ops, lambda: story(ops, heads, [500, 40], way), Layer, steps)


def test_arguments_without_sense_are_refused() -> None:
    for name in ("sinks", "window", "chosen"):
        with pytest.raises(ValueError, match=f"{name} must be at least 1"):
            Sparse(**{"sinks": 1, "window": 1, "chosen": 1, "start": 0, name: 0})
    with pytest.raises(ValueError, match="start must be at least 0"):
        Sparse(sinks=1, window=1, chosen=1, start=-1)
    windowed = story(make(*NATIVE[0]), Heads(2, 1, 16), [3], Way(rotated=0, masks=(("window", 2),)))
    with pytest.raises(ValueError, match="no window and no chunk"):
        windowed.whole()
