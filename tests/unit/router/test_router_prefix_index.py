"""The prefix index against a memory without bounds or grid."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.router.prefix_index import PrefixIndex
from penstock.types import BlockHash


def chain(blocks: int, branch: str = "a", fork: int = 0) -> list[BlockHash]:
    """Names of blocks: common to all prompts below ``fork``, those of this very branch from there on."""
    return [BlockHash((f"{i}" if i < fork else f"{branch}@{fork}:{i}").encode()) for i in range(blocks)]


def test_nothing_recorded_matches_nothing():
    assert PrefixIndex().match(chain(5), 0, 1) == 0
    assert PrefixIndex().match([], 0, 1) == 0


def test_a_whole_short_prompt_matches_exactly():
    index = PrefixIndex()
    index.record(chain(37), 0, 1)
    assert index.match(chain(37), 0, 1) == 37
    assert index.match(chain(50), 0, 1) == 37
    assert index.match(chain(5), 0, 1) == 5


def test_a_common_prefix_matches_as_far_as_it_goes():
    index = PrefixIndex()
    index.record(chain(40, "a", fork=21), 0, 1)
    assert index.match(chain(40, "b", fork=21), 0, 1) == 21


def test_another_worker_or_incarnation_has_none_of_it():
    index = PrefixIndex()
    index.record(chain(10), 0, 1)
    assert index.match(chain(10), 1, 1) == 0
    assert index.match(chain(10), 0, 2) == 0


def test_a_fork_of_a_worker_replaces_its_earlier_incarnation():
    index = PrefixIndex()
    index.record(chain(10), 0, 1)
    index.record(chain(4), 0, 2)
    assert index.match(chain(10), 0, 2) == 4


def test_the_least_recently_used_prompt_goes_first():
    index = PrefixIndex(capacity=10)
    index.record(chain(5, "a"), 0, 1)
    index.record(chain(5, "b"), 0, 1)
    index.record(chain(5, "a"), 0, 1)
    index.record(chain(5, "c"), 0, 1)
    assert index.match(chain(5, "b"), 0, 1) == 0
    assert index.match(chain(5, "a"), 0, 1) == index.match(chain(5, "c"), 0, 1) == 5


def test_eviction_shortens_a_prompt_from_its_end():
    index = PrefixIndex(capacity=8)
    index.record(chain(6, "a"), 0, 1)
    index.record(chain(5, "b"), 0, 1)
    assert index.match(chain(6, "a"), 0, 1) == 3


def test_a_long_prompt_costs_the_logarithm_of_its_length():
    index = PrefixIndex()
    index.record(chain(6250), 0, 1)  # 100,000 tokens
    assert len(index) < 300
    assert index.match(chain(6250), 0, 1) > 6250 * 31 / 32


def test_a_popular_block_remembers_few_holders():
    index = PrefixIndex()
    for slot in range(100):
        index.record(chain(1), slot, 1)
    assert sum(index.match(chain(1), slot, 1) for slot in range(100)) == 8
    assert index.match(chain(1), 99, 1) == 1


def test_an_index_of_nothing_is_refused():
    with pytest.raises(ValueError, match="remembers nothing"):
        PrefixIndex(capacity=0)


Prompt = st.tuples(st.integers(0, 300), st.sampled_from("ab"), st.sampled_from([0, 1, 20, 100, 300]))


@given(st.lists(st.tuples(Prompt, st.integers(0, 2)), max_size=8), Prompt)
def test_a_match_is_real_and_nearly_the_longest(recorded, asked):
    index = PrefixIndex()
    full: dict[int, set[BlockHash]] = {0: set(), 1: set(), 2: set()}
    for prompt, slot in recorded:
        index.record(chain(*prompt), slot, 1)
        full[slot].update(chain(*prompt))
    prompt = chain(*asked)
    for slot, known in full.items():
        longest = next((i for i, block in enumerate(prompt) if block not in known), len(prompt))
        assert longest * 31 / 32 - 1 <= index.match(prompt, slot, 1) <= longest
