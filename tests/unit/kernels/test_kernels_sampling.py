"""Drawing tokens: the published random numbers, the noise, and every rule against the plain oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import EVERY, ON_GPU, make, normal

from penstock.kernels import _native
from penstock.kernels.reference.sampling import candidate_ids, sample_row, with_logprobs
from penstock.kernels.sampling import SampleRow, gumbel, philox4x32

NATIVE_NAMES = [name for name in EVERY if name[0] != "reference" and name[1] == "fp32"]

# Random123, tests/kat_vectors, philox4x32 10: counter, key, result.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "wanted"), KNOWN_ANSWERS)
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, int], wanted: tuple[int, ...]) -> None:
    seed = key[0] | key[1] << 32
    assert tuple(philox4x32(seed, np.array(counter, np.uint32)).tolist()) == wanted
    assert _native.philox(seed, counter) == wanted


@pytest.fixture(params=[*NATIVE_NAMES, *ON_GPU[1:]], ids="-".join)
def ops(request: pytest.FixtureRequest) -> Any:
    return make(*request.param)


def test_noise_is_the_published_one(ops: Any) -> None:
    ids = np.arange(200_000, dtype=np.int32)
    wanted = gumbel(0x0123456789ABCDEF, 77, 3, ids)
    got = ops.gumbel(0x0123456789ABCDEF, 77, 3, ids)
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)
    assert ops.gumbel(0x0123456789ABCDEF, 77, 3, ids[5:6])[0] == got[5]


@cache
def find_extreme(largest: bool) -> tuple[int, np.ndarray[Any, Any]]:
    """A position and an id whose upper 24 bits are among the extreme ones of two million draws."""
    ids = np.arange(1 << 21, dtype=np.int32)
    noise = gumbel(5, 9, 0, ids)
    return 9, ids[[np.argmax(noise) if largest else np.argmin(noise)]]


@pytest.mark.parametrize("largest", [True, False])
def test_extreme_noise_is_exact(ops: Any, largest: bool) -> None:
    position, ids = find_extreme(largest)
    np.testing.assert_allclose(ops.gumbel(5, position, 0, ids), gumbel(5, position, 0, ids), rtol=2e-6)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_draws_follow_the_distribution(ops: Any, temperature: float) -> None:
    """Chi-square over 4,000 positions of one fixed seed (9 degrees of freedom; 33.7 has probability 1e-4)."""
    logits = np.linspace(-1.5, 1.5, 10, dtype=np.float32)
    draws = 4000
    rows = [SampleRow(seed=1234, position=i, choice=0, temperature=temperature) for i in range(draws)]
    drawn = ops.sample(ops.hidden(np.repeat(logits[None], draws, axis=0)), rows)
    counts = np.bincount([d.token for d in drawn], minlength=10)
    weights = np.exp(logits.astype(np.float64) / temperature)
    wanted = weights / weights.sum() * draws
    assert ((counts - wanted) ** 2 / wanted).sum() < 33.7


def test_draws_do_not_follow_each_other(ops: Any) -> None:
    """Choices and seeds of one position are independent: pairs over 3 x 3 cells (4 degrees of freedom)."""
    draws = 3000
    logits = ops.hidden(np.zeros((draws, 3), np.float32))
    first = ops.sample(logits, [SampleRow(seed=1, position=i, choice=0, temperature=1) for i in range(draws)])
    second = ops.sample(logits, [SampleRow(seed=1, position=i, choice=1, temperature=1) for i in range(draws)])
    pairs = np.bincount([a.token * 3 + b.token for a, b in zip(first, second, strict=True)], minlength=9)
    assert ((pairs - draws / 9) ** 2 / (draws / 9)).sum() < 33.4  # 8 degrees of freedom, 1e-4 and a little


def ids_of(*ids: int) -> np.ndarray[Any, Any]:
    return np.array(ids, np.int32)


BASE = SampleRow(seed=11, position=5, choice=0, temperature=0.9, logprobs=4)
SAID = {"output_ids": ids_of(3, 9), "output_counts": ids_of(5, 1)}


def mask_of(vocabulary: int, *allowed: int) -> np.ndarray[Any, Any]:
    """[ceil(V / 32)] words in which the bits of these tokens are set."""
    words = np.zeros(-(-vocabulary // 32), np.uint32)
    np.bitwise_or.at(words, np.array(allowed) // 32, np.uint32(1) << (np.array(allowed) % 32).astype(np.uint32))
    return words


RULES = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "hot": {"temperature": 2.0},
    "cold": {"temperature": 0.05},
    "top_k 1": {"top_k": 1},
    "top_k 40": {"top_k": 40},
    "top_k beyond the vocabulary": {"top_k": 99999},
    "top_p": {"top_p": 0.8},
    "tiny top_p": {"top_p": 1e-9},
    "wide top_p": {"top_p": 0.9999, "temperature": 5.0},
    "min_p": {"min_p": 0.2},
    "all three": {"top_k": 60, "top_p": 0.9, "min_p": 0.05},
    "repetition": {**SAID, "repetition_penalty": 1.7, "prompt_ids": ids_of(9, 20)},
    "presence": {**SAID, "presence_penalty": 1.5, "prompt_ids": ids_of(7)},
    "frequency, greedy": {**SAID, "temperature": 0.0, "frequency_penalty": 2.0},
    "bias": {"bias_ids": ids_of(17, 40), "bias_values": np.array([8.0, -100.0], np.float32)},
    "bans": {"temperature": 0.0, "banned_ids": ids_of(0, 1, 2)},
    "bans, sampled": {"top_k": 5, "banned_ids": ids_of(*range(90))},
    "everything": {
        "top_k": 50, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.2, "presence_penalty": 0.4,
        "frequency_penalty": -0.3, "output_ids": ids_of(1, 2, 3), "output_counts": ids_of(1, 7, 2),
        "prompt_ids": ids_of(2, 50, 51), "bias_ids": ids_of(60), "bias_values": np.array([3.0], np.float32),
        "banned_ids": ids_of(61),
    },
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("vocabulary", [100, 5003])
def test_rules_against_the_oracle(ops: Any, rule: str, vocabulary: int) -> None:
    draws = 40
    logits = normal(21, draws, vocabulary) * 3
    rows = [replace(BASE, position=i, **RULES[rule]) for i in range(draws)]
    for got, logits_V, row in zip(ops.sample(ops.hidden(logits), rows), logits, rows, strict=True):
        wanted = sample_row(logits_V, row)
        assert got.token == wanted.token
        assert got.logprob == pytest.approx(wanted.logprob, abs=2e-5)
        assert [i for i, _ in got.top] == [i for i, _ in wanted.top]
        assert [p for _, p in got.top] == pytest.approx([p for _, p in wanted.top], abs=2e-5)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("allowed", [range(0, 100, 3), (99,), (31, 32, 64, 95, 96), range(100)])
def test_a_mask_leaves_nothing_else(ops: Any, rule: str, allowed: Sequence[int]) -> None:
    """Every rule together with a mask; bits beyond the vocabulary mean nothing."""
    draws, vocabulary = 12, 100
    words = mask_of(vocabulary, *allowed)
    words[-1] |= np.uint32(0xF0) << np.uint32(24)
    logits = normal(22, draws, vocabulary) * 3
    rows = [replace(BASE, position=i, allowed=words, **RULES[rule]) for i in range(draws)]
    for got, logits_V, row in zip(ops.sample(ops.hidden(logits), rows), logits, rows, strict=True):
        assert got.token == sample_row(logits_V, row).token
        assert got.token in allowed
        assert got.logprob == pytest.approx(with_logprobs(logits_V, got.token, 0).logprob, abs=2e-5)  # as if unmasked


def test_a_mask_of_another_vocabulary_is_refused(ops: Any) -> None:
    for name in (ops, make("reference", "fp32")):
        with pytest.raises(ValueError, match="32 a word"):
            name.sample(name.hidden(np.zeros((1, 65), np.float32)), [replace(BASE, allowed=np.zeros(2, np.uint32))])


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.integers(-3, 3), min_size=2, max_size=70),
    top_k=st.none() | st.integers(1, 8),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.1]),
    min_p=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_ties_go_to_the_lower_id(values: list[int], top_k: int | None, top_p: float, min_p: float) -> None:
    """Many equal logits: whatever is drawn lies in the oracle's set, and greedy takes the first of the best."""
    logits = np.array([values], np.float32)
    kept = set(candidate_ids(logits[0].astype(np.float64), SampleRow(0, 0, 0, 1.0, top_k, top_p, min_p)).tolist())
    for name in NATIVE_NAMES:
        ops = make(*name)
        rows = [SampleRow(seed, 3, 0, 1.0, top_k, top_p, min_p) for seed in range(12)]
        drawn = {d.token for d in ops.sample(np.repeat(logits, 12, axis=0), rows)}
        if top_p == 1.0 or len(kept) == 1:  # else a sum on the edge of p may fall either way in another precision
            assert drawn <= kept
        assert ops.sample(logits, [SampleRow(0, 0, 0, 0.0)])[0].token == int(np.argmax(logits[0]))


def test_a_certain_token_is_always_drawn(ops: Any) -> None:
    logits = np.full((1, 50), -1e4, np.float32)
    logits[0, 31] = 1e4
    assert ops.sample(ops.hidden(logits), [SampleRow(3, 1, 0, 1.0, logprobs=1)])[0].token == 31
    only = np.full((1, 50), -np.inf, np.float32)
    only[0, 7] = 0.0
    assert ops.sample(ops.hidden(only), [SampleRow(3, 1, 0, 1.0)])[0].token == 7


def test_refuses_ids_outside_the_vocabulary(ops: Any) -> None:
    with pytest.raises(ValueError, match="outside the vocabulary"):
        ops.sample(ops.hidden(np.zeros((1, 10), np.float32)), [replace(BASE, banned_ids=ids_of(10))])
