"""What a worker keeps of responses that run at gateways: beginnings of them, bounded, from whichever gateway."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

import msgspec
import pytest

from penstock.engine.service import saved_tokens
from penstock.engine.service.saved_tokens import SAVED_S, SavedTokens
from penstock.wire.gateway_messages import SavedPiece

NAMES = [number.to_bytes(16, "big") for number in range(8)]


def piece(start: int, tokens: Sequence[int], name: int = 0) -> SavedPiece:
    return SavedPiece(NAMES[name], start, array("I", tokens).tobytes())


def found(saved: SavedTokens, name: int = 0, now: float = 0.0) -> list[int]:
    (packed,) = saved.find([NAMES[name]], now)
    return list(array("I", packed))


def test_parts_follow_on_each_other_and_come_again() -> None:
    saved = SavedTokens()
    saved.save([piece(0, [1, 2]), piece(2, [3]), piece(1, [2, 3, 4]), piece(0, [1, 2])], 0.0)
    assert found(saved) == [1, 2, 3, 4]
    assert saved.tokens == 4
    assert saved.find([NAMES[1], NAMES[0]], 0.0)[0] == b""


def test_what_follows_on_something_unknown_is_left_out() -> None:
    saved = SavedTokens()
    saved.save([piece(3, [4, 5])], 0.0)
    assert len(saved) == 0
    saved.save([piece(0, [1]), piece(3, [4, 5])], 0.0)
    assert found(saved) == [1]


def test_of_gateways_that_contradict_each_other_nothing_is_kept() -> None:
    saved = SavedTokens()
    saved.save([piece(0, [1, 2, 3]), piece(1, [2, 9, 4])], 0.0)
    assert found(saved) == []
    assert (len(saved), saved.tokens) == (0, 0)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_lost_or_comes_late_the_beginning_of_the_response_is_found(seed: int) -> None:
    """Two gateways save one response, each from its first token on; the earlier one's messages come late."""
    rng, saved = random.Random(seed), SavedTokens()
    response = [rng.randrange(1 << 31) for _ in range(200)]
    messages = []
    for _ in range(2):
        at = 0
        while at < len(response):
            end = at + rng.randint(1, 20)
            messages.append(piece(at, response[at:end]))
            at = end
    late = messages[: len(messages) // 3]
    messages = [each for each in messages[len(late) :] if rng.random() < 0.8]
    for each in late:
        messages.insert(rng.randint(0, len(messages)), each)
    longest = 0
    for each in messages:
        saved.save([each], 0.0)
        assert found(saved) == response[: saved.tokens]
        assert saved.tokens >= longest
        longest = saved.tokens
    assert longest > 0


def test_the_sum_is_bounded_and_those_saved_longest_ago_make_way() -> None:
    saved = SavedTokens(max_tokens=10, max_responses=3)
    saved.save([piece(0, range(4), 0), piece(0, range(4), 1)], 0.0)
    saved.save([piece(4, [4], 0)], 0.0)
    saved.save([piece(0, range(2), 2)], 0.0)
    assert [len(found(saved, name)) for name in range(3)] == [5, 0, 2]
    saved.save([piece(4, [4], 1)], 0.0)
    assert found(saved, 1) == [], "what was forgotten does not go on in the middle"
    saved.save([piece(0, [1], name) for name in (3, 4)], 0.0)
    assert (len(saved), saved.tokens) == (3, 4)
    saved.save([piece(0, range(11), 5)], 0.0)
    assert (len(saved), saved.tokens) == (0, 0)


def test_one_response_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_tokens, "MAX_SAVED_TOKENS", 6)
    saved = SavedTokens()
    saved.save([piece(0, range(4)), piece(4, [4, 5, 6, 7]), piece(6, [6, 7])], 0.0)
    assert found(saved) == [0, 1, 2, 3, 4, 5]
    assert saved.tokens == 6


def test_it_is_kept_for_a_while_after_the_last_message() -> None:
    saved = SavedTokens()
    saved.save([piece(0, [1])], 0.0)
    saved.save([piece(1, [2])], SAVED_S - 1)
    assert found(saved, now=2 * SAVED_S - 2) == [1, 2]
    assert found(saved, now=2 * SAVED_S - 1) == []
    assert (len(saved), saved.tokens) == (0, 0)


def test_a_partial_token_is_none() -> None:
    with pytest.raises(ValueError, match="whole number"):
        SavedPiece(NAMES[0], 0, b"12345")
    raw = msgspec.msgpack.encode([NAMES[0], 0, b"12345"])
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(raw, type=SavedPiece)
