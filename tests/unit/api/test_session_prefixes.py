"""A session's prompts are compared, and where one leaves an earlier one is found, exactly and within bounds."""

from __future__ import annotations

import logging
import tracemalloc
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.session_prefixes import (
    BREAKS_KEPT,
    PROMPTS_KEPT,
    BreakReason,
    PrefixBreak,
    SessionPrefixes,
    common_tokens,
    shown_tokens,
)
from penstock.clock import VirtualClock
from penstock.config.limits import RequestLimits
from penstock.hashing import block_hashes, chain_root
from penstock.types import (
    PAGE_TOKENS,
    AdapterRef,
    ImageHash,
    ModelIdentity,
    PlacedImage,
    Qos,
    RequestId,
    SamplingParams,
    TokenIds,
    ValidRequest,
    pack_token_ids,
)

LONG = list(range(1000, 1000 + 20 * PAGE_TOKENS))
TURN_BYTES = 4 * len(LONG) + 8 * 20
"""Of one prompt, without what is counted for its objects."""


def ids(tokens: Sequence[int]) -> TokenIds:
    return pack_token_ids(tokens)


def request(
    tokens: Sequence[int],
    session: str = "s",
    tenant: str = "t",
    *,
    salt: str = "",
    adapter: str = "",
    image: bytes = b"",
    model: str = "m",
) -> ValidRequest:
    """A turn, with the hashes that its pages have; ``image``: one that its second page shows."""
    root = chain_root(ModelIdentity(fingerprint=model, numerics="n"), adapter=adapter, tenant_salt=salt)
    images = (PlacedImage(content=ImageHash(image), at=PAGE_TOKENS, rows=1, columns=PAGE_TOKENS),) if image else ()
    return ValidRequest(
        id=RequestId("r"),
        prompt=ids(tokens),
        block_hashes=tuple(block_hashes(root, list(tokens), images=images)),
        sampling=SamplingParams(seed=1, max_tokens=1),
        arrival=0.0,
        qos=Qos(tenant=tenant),
        session=session,
        cache_salt=salt,
        adapter=AdapterRef(fingerprint=adapter, folder="/") if adapter else None,
        images=images,
    )


class Sessions:
    """Prefixes under a virtual clock, and what was counted."""

    def __init__(self, **limits: int) -> None:
        self.clock = VirtualClock()
        self.lost: list[int] = []
        self.reasons: list[str] = []
        self.prefixes = SessionPrefixes(RequestLimits(**limits), self.clock, self.count)

    def count(self, reason: str, lost: int) -> None:
        self.reasons.append(reason)
        self.lost.append(lost)

    def turn(self, tokens: Sequence[int], session: str = "s", tenant: str = "t", **more: str | bytes):
        return self.prefixes.observe(request(tokens, session, tenant, **more))


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
    assert shown_tokens(found.earlier)[at - found.shown_from] == LONG[at]
    assert shown_tokens(found.later)[at - found.shown_from] == 7
    assert on.reasons == ["tokens"]
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
    on = Sessions(max_session_prefix_bytes=1 << 17, max_sessions=5, session_prefix_s=100)
    for number in range(50):
        on.turn([number, *LONG[1:]], session=f"s{number}")
    assert 5 * TURN_BYTES < on.prefixes.nbytes < 1 << 17
    assert [bool(on.prefixes.find(f"s{number}")) for number in (44, 45, 49)] == [False, True, True]
    for number in range(3 * BREAKS_KEPT):
        on.turn([number + 100, *LONG[1:]], session="s49")
    ((_, record),) = on.prefixes.find("s49")
    assert (len(record.prompts), len(record.breaks), record.broken) == (PROMPTS_KEPT, BREAKS_KEPT, 3 * BREAKS_KEPT)
    on.clock.advance(101)
    assert on.prefixes.find("s49") == []
    assert on.prefixes.nbytes == 0


def test_a_prompt_beyond_all_room_is_not_kept() -> None:
    on = Sessions(max_session_prefix_bytes=TURN_BYTES)
    on.turn(LONG)
    assert (on.prefixes.nbytes, on.prefixes.find("s")) == (0, [])


def test_all_that_is_kept_takes_no_more_memory_than_is_counted() -> None:
    """Small sessions with long names and many breaks: what counts is all around the tokens."""
    on = Sessions(max_session_prefix_bytes=1 << 30, max_sessions=1000)
    turns = [[request([turn, *LONG[: 3 * PAGE_TOKENS]], f"{s:0256}\u72d0") for turn in range(12)] for s in range(100)]
    copies = [[request(list(one.prompt), one.session) for one in session] for session in turns]
    del turns
    tracemalloc.start()
    for session in copies:
        for one in session:
            on.prefixes.observe(one)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    before_tokens = sum(one.prompt.nbytes for session in copies for one in session[-PROMPTS_KEPT:])
    names = sum(4 * len(session[0].session) for session in copies)
    assert used + before_tokens + names <= on.prefixes.nbytes


@pytest.mark.parametrize("limit", [{"max_sessions": 10}, {"max_session_prefix_bytes": 10 * 8192}])
def test_a_tenant_of_many_sessions_makes_room_itself(limit: dict[str, int]) -> None:
    on = Sessions(**limit)
    on.turn(LONG, "quiet", "quiet")
    for number in range(50):
        on.turn(LONG, f"s{number}", "loud")
    assert on.prefixes.find("quiet")
    for number in range(4):
        on.turn(LONG, f"q{number}", "quiet")
    assert all(on.prefixes.find(name) for name in ("quiet", "q0", "q3", "s49"))


def test_sessions_of_all_tenants_are_forgotten_in_time() -> None:
    on = Sessions(session_prefix_s=100)
    on.turn(LONG, "old", "a")
    on.clock.advance(50)
    on.turn(LONG, "new", "b")
    on.turn(LONG, "newer", "a")
    on.clock.advance(60)
    assert [bool(on.prefixes.find(name)) for name in ("old", "new", "newer")] == [False, True, True]


@pytest.mark.parametrize(
    ("change", "reason", "pages"),
    [
        ({"salt": "x"}, BreakReason.CACHE_SALT, 0),
        ({"adapter": "a" * 64}, BreakReason.ADAPTER, 0),
        ({"model": "m2"}, BreakReason.MODEL, 0),
        ({"image": b"2" * 32}, BreakReason.IMAGES, 1),
    ],
)
def test_what_makes_pages_differ_under_the_same_tokens_is_a_break(change, reason, pages) -> None:
    on = Sessions()
    before = {"image": b"1" * 32} if "image" in change else {}
    on.turn(LONG, **before)
    found = on.turn([*LONG, 1], **before | change)
    assert found is not None
    assert (found.reason, found.token, found.lost_tokens) == (reason, pages * PAGE_TOKENS, (20 - pages) * PAGE_TOKENS)
    assert on.turn([*LONG, 1, 2], **before | change) is None


def test_a_prompt_is_compared_with_the_one_that_it_has_most_in_common_with_whatever_came_between() -> None:
    on = Sessions()
    side = list(range(PAGE_TOKENS))
    assert on.turn(LONG) is None
    assert on.turn(side) is not None  # a small conversation begins
    assert on.turn([7]) is None  # a prompt without a page
    assert on.turn(side) is None
    assert on.turn([*LONG, 1]) is None
    assert on.lost == [len(LONG)]


def test_prompts_shorter_than_a_page_break_nothing() -> None:
    on = Sessions()
    assert [on.turn(tokens) for tokens in ([1, 2], [3], LONG, [4, 5])] == [None] * 4


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
    assert [record.fields["more_since_last_line"] for record in caplog.records] == [0, 2]
    assert all(str(LONG[5]) not in record.getMessage() for record in caplog.records)


@given(st.lists(st.integers(0, 2), max_size=40), st.lists(st.integers(0, 2), max_size=40))
def test_common_tokens_are_those_of_the_definition(a: list[int], b: list[int]) -> None:
    expected = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert common_tokens(ids(a), ids(b)) == expected


turns = st.lists(st.lists(st.integers(0, 1), min_size=0, max_size=5 * PAGE_TOKENS).map(tuple), min_size=1, max_size=8)


@given(turns)
def test_a_break_is_where_the_pages_in_common_end(prompts: list[tuple[int, ...]]) -> None:
    """Against the definition: of the kept prompts, none has more pages in common with the new one."""
    on = Sessions()
    for prompt in prompts:
        kept = [list(one.tokens) for _, record in on.prefixes.find("s") for one in record.prompts]
        found: PrefixBreak | None = on.turn(prompt)
        most = max([common_tokens(ids(one), ids(prompt)) // PAGE_TOKENS for one in kept], default=0)
        whole = len(prompt) // PAGE_TOKENS
        assert all(len(one) >= PAGE_TOKENS for one in kept)
        left = [one for one in kept if common_tokens(ids(one), ids(prompt)) // PAGE_TOKENS == most]
        goes_on = any(len(one) // PAGE_TOKENS == most for one in left)
        if not kept or most == whole or goes_on:
            assert found is None
        else:
            assert found is not None
            assert found.token // PAGE_TOKENS == most
            assert found.lost_tokens == (found.earlier_tokens // PAGE_TOKENS - most) * PAGE_TOKENS > 0
            side = shown_tokens(found.later)
            assert side == list(prompt[found.shown_from : found.shown_from + len(side)])
            assert side[found.token - found.shown_from] != shown_tokens(found.earlier)[found.token - found.shown_from]
