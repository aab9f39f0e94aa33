"""Many words in long texts: found as one expression over the whole text would find them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pauses import longest_pause
from penstock.processing.tokenizer import tokenizer as module
from penstock.processing.tokenizer.tokenizer import WordMatcher, trie_pattern

few_words = st.sets(st.text(st.sampled_from("ab|"), min_size=1, max_size=4), max_size=6)


@given(few_words, st.text(st.sampled_from("ab|"), max_size=40), st.integers(1, 7))
def test_pieces_find_what_one_search_finds(words: set[str], text: str, piece: int):
    longest_first = sorted(words, key=len, reverse=True)
    expected = re.findall("|".join(map(re.escape, longest_first)) or "(?!)", text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE", piece)
        assert [match[0] for match in WordMatcher(words).matches(text)] == expected
        assert WordMatcher(words).found_in(text) == bool(expected)


@given(few_words, st.text(st.sampled_from("ab|"), max_size=8))
def test_a_trie_matches_the_longest_word(words: set[str], text: str):
    match = re.match(trie_pattern(words), text)
    expected = max((word for word in words if text.startswith(word)), key=len, default=None)
    assert (match and match[0]) == expected


def test_beginnings_of_words_hold_up_nobody():
    words = WordMatcher([f"<|reserved_{i}|>" for i in range(250)])
    text = "<|reserved_" * 100_000
    assert not words.found_in(text)
    assert longest_pause(lambda: words.found_in(text), allowed_s=0.1) < 0.1
