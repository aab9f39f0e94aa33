"""A session's prompts are compared, and where one leaves an earlier one is found, exactly and within bounds."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.session_prefixes import BREAKS_KEPT, PROMPTS_KEPT, SessionPrefixes, common_tokens
from penstock.clock import VirtualClock
from penstock.config.limits import RequestLimits
from penstock.types import PAGE_TOKENS, TokenIds, pack_token_ids

LONG = list(range(1000, 1000 + 20 * PAGE_TOKENS))


def ids(tokens: Sequence[int]) -> TokenIds:
    return pack_token_ids(tokens)


class Sessions:
    """Prefixes under a virtual clock, and what was counted."""

    def __init__(self, **limits: int) -> None:
        self.clock = VirtualClock()
        self.lost: list[int] = []
        self.prefixes = SessionPrefixes(RequestLimits(**limits), self.clock, self.lost.append)

    def turn(self, tokens: Sequence[int], session: str = "s", tenant: str = "t"):
        return self.prefixes.observe(tenant, session, ids(tokens))


def test_a_growing_transcript_breaks_nothing() -> None:
    on = Sessions()
    for end in range(PAGE_TOKENS, len(LONG), 7):
        assert on.turn(LONG[:end]) is None
    assert on.lost == []


def test_a_change_is_found_at_its_token_and_costs_the_pages_behind_it() -> None:
    on = Sessions()
    on.turn(LONG)
    at = 5 * PAGE_TOKENS + 3
    found = on.turn([*LONG[:at], 7, *LONG[at + 1 :], 8])
    assert found is not None
    assert (found.token, found.earlier_tokens, found.lost_tokens) == (at, len(LONG), 15 * PAGE_TOKENS)
    assert found.earlier[at - found.shown_from] == LONG[at]
    assert found.later[at - found.shown_from] == 7
    assert on.lost == [15 * PAGE_TOKENS]


def test_an_end_that_is_written_otherwise_within_its_last_page_is_no_break() -> None:
    """Templates end a prompt with the beginning of the response, which the next turn may write in another way."""
    on = Sessions()
    on.turn([*LONG, 1, 2, 3])
    assert on.turn([*LONG, 1, 9, 9, 9, 9]) is None


def test_a_prompt_that_is_asked_again_or_shorter_is_no_break() -> None:
    on = Sessions()
    on.turn(LONG)
    assert on.turn(LONG) is None
    assert on.turn(LONG[: 3 * PAGE_TOKENS]) is None


def test_a_small_conversation_beside_the_main_one_breaks_once() -> None:
    on = Sessions()
    side = list(range(5 * PAGE_TOKENS))
    assert on.turn(LONG) is None
    assert on.turn(side) is not None
    for grown in range(1, 6):
        assert on.turn([*LONG, *range(grown)]) is None
        assert on.turn([*side, *range(grown)]) is None


def test_a_line_that_changes_each_time_is_told_each_time() -> None:
    on = Sessions()
    for turn in range(6):
        on.turn([500 + turn, *LONG])
    assert on.lost == [20 * PAGE_TOKENS] * 5


def test_tenants_and_sessions_are_apart() -> None:
    on = Sessions()
    on.turn(LONG)
    assert on.turn(LONG[1:], tenant="u") is None
    assert on.turn(LONG[1:], session="z") is None
    assert on.turn(LONG[2:], session="") is None
    assert [tenant for tenant, _ in on.prefixes.find("s")] == ["t", "u"]
    assert on.prefixes.find("") == []


def test_what_is_kept_is_bounded_in_bytes_sessions_time_and_number() -> None:
    on = Sessions(max_session_prefix_bytes=10 * 4 * len(LONG), max_sessions=5, session_prefix_s=100)
    for number in range(50):
        on.turn([number, *LONG[1:]], session=f"s{number}")
    assert on.prefixes.nbytes == 5 * 4 * len(LONG)
    assert [bool(on.prefixes.find(f"s{number}")) for number in (44, 45, 49)] == [False, True, True]
    for number in range(3 * BREAKS_KEPT):
        on.turn([number + 100, *LONG[1:]], session="s49")
    ((_, record),) = on.prefixes.find("s49")
    assert (len(record.prompts), len(record.breaks), record.broken) == (PROMPTS_KEPT, BREAKS_KEPT, 3 * BREAKS_KEPT)
    assert on.prefixes.nbytes <= 10 * 4 * len(LONG)
    on.clock.advance(101)
    assert on.prefixes.find("s49") == []
    assert on.prefixes.nbytes == 0


def test_nothing_is_kept_where_there_is_no_room_for_anything() -> None:
    on = Sessions(max_session_prefix_bytes=0)
    on.turn(LONG)
    assert on.turn(LONG[1:]) is None
    assert on.prefixes.nbytes == 0


def test_the_log_has_a_line_a_second_at_most_and_no_text(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="penstock.api.sessions")
    on = Sessions()
    for turn in range(4):
        on.turn([turn, *LONG])
    on.clock.advance(2)
    on.turn([99, *LONG])
    assert len(caplog.records) == 2
    assert all(str(LONG[5]) not in record.getMessage() for record in caplog.records)


@given(st.lists(st.integers(0, 2), max_size=40), st.lists(st.integers(0, 2), max_size=40))
def test_common_tokens_are_those_of_the_definition(a: list[int], b: list[int]) -> None:
    expected = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert common_tokens(ids(a), ids(b)) == expected
