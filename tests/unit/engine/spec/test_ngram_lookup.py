"""Looking up finds what a slow search finds, wherever tokens came in pieces."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.spec.proposer import CANDIDATES, LONGEST_MATCH, NgramDraft, NgramIndex

texts = st.lists(st.integers(0, 3), max_size=120)


def slow(text: list[int], most: int) -> NgramDraft | None:
    """Every earlier place where the last tokens stood; the longest match, then the latest."""
    found: list[tuple[int, int]] = []
    for at in range(len(text) - 1, 0, -1):
        match = 0
        while match < min(at, LONGEST_MATCH) and text[at - 1 - match] == text[-1 - match]:
            match += 1
        if match >= 2:
            found.append((match, at))
    if not found:
        return None
    match, at = max(found[:CANDIDATES])
    follows = text[at:]
    return NgramDraft(match, tuple(follows[index % len(follows)] for index in range(most)))


@given(texts, st.lists(st.integers(0, 120), min_size=1, max_size=4), st.integers(1, 12))
def test_the_longest_match_is_found_however_the_tokens_came(text: list[int], cuts: list[int], most: int) -> None:
    ends = sorted(min(cut, len(text)) for cut in cuts)
    lookup = NgramIndex(text[: ends[0]])
    for begin, end in zip(ends, [*ends[1:], len(text)], strict=True):
        lookup.extend(text[begin:end])
    assert lookup.token_count == len(text)
    assert lookup.propose(most) == slow(text, most)


def test_a_text_that_repeats_itself_is_expected_to_go_on() -> None:
    guess = NgramIndex([7, 8, 9, 7, 8, 9, 7, 8]).propose(7)
    assert guess == NgramDraft(5, (9, 7, 8, 9, 7, 8, 9))


def test_new_words_and_no_room_bring_no_guess() -> None:
    assert NgramIndex([1, 2, 3, 4, 5]).propose(4) is None
    assert NgramIndex([1, 2, 1, 2]).propose(0) is None
    assert NgramIndex([]).propose(4) is None
