"""Stop strings: found wherever they lie, whatever the pieces."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from penstock.processing.detokenizer import StopStringScanner

words = st.text(st.sampled_from("ab"), min_size=1, max_size=5)


def first_complete(text: str, stops: list[str]) -> int | None:
    """By definition: the first character at which a stop is complete, and of those complete there the longest."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return end - max(map(len, complete))
    return None


def held_by_definition(text: str, stops: list[str]) -> int:
    return max((k for stop in stops for k in range(len(stop)) if text.endswith(stop[:k])), default=0)


@given(st.lists(st.text(st.sampled_from("abc"), max_size=4), max_size=10), st.lists(words, min_size=1, max_size=4))
def test_any_pieces_give_what_the_text_gives(pieces: list[str], stops: list[str]):
    scanner = StopStringScanner(stops)
    seen = ""
    for piece in pieces:
        seen += piece
        found = scanner.feed(piece)
        assert found == first_complete(seen, stops)
        if found is not None:
            return
        assert scanner.held == held_by_definition(seen, stops)


@given(st.text(st.sampled_from("ab"), max_size=12), st.text(st.sampled_from("ab"), max_size=12), words)
def test_what_does_not_count_is_passed_over(early: str, late: str, stop: str):
    scanner = StopStringScanner([stop])
    assert scanner.feed(early, counts=False) is None
    expected = next(
        (
            end - len(stop)
            for end in range(len(early) + 1, len(early + late) + 1)
            if (early + late)[:end].endswith(stop)
        ),
        None,
    )
    assert scanner.feed(late) == expected


def test_nothing_is_held_without_a_beginning():
    scanner = StopStringScanner(["\n\n", "END"])
    assert scanner.feed("a story\n") is None
    assert scanner.held == 1
    assert scanner.feed("goes on") is None
    assert scanner.held == 0


def test_the_worst_words_stay_linear():
    stops = ["a" * i + "b" for i in range(200, 216)]

    def took(count: int) -> float:
        scanner = StopStringScanner(stops)
        began = time.process_time()
        scanner.feed("a" * count)
        return time.process_time() - began

    assert min(took(4000) for _ in range(2)) < 4 * 4 * max(min(took(1000) for _ in range(2)), 1e-3)
