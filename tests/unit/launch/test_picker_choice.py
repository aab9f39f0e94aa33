"""Which gateway a request is sent to: what its headers say, and what stays where it was when gateways come and go."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from penstock.interfaces import IDEMPOTENCY_KEY, SESSION_HEADERS
from penstock.launch.picker.choice import UNBOUND, AffinityKind, GatewayRanking, affinity_key

GATEWAYS = [f"10.0.0.{number}:8000" for number in range(1, 9)]
KEYS = [affinity_key({IDEMPOTENCY_KEY: b"key-%d" % number}).value for number in range(4000)]

ENDPOINTS = st.lists(st.sampled_from(GATEWAYS), min_size=1, unique=True)


def homes(ranking: GatewayRanking) -> list[str]:
    return [ranking.by_key(key, 1)[0] for key in KEYS]


# --- keys -------------------------------------------------------------------------------------------------------------


def test_an_idempotency_key_counts_before_the_session_and_alone() -> None:
    key = affinity_key({IDEMPOTENCY_KEY: b"a"})
    assert key.kind is AffinityKind.IDEMPOTENCY_KEY
    assert affinity_key({IDEMPOTENCY_KEY: b"a", b"session_id": b"s", b"authorization": b"Bearer k"}) == key
    assert affinity_key({IDEMPOTENCY_KEY: b"b"}) != key


def test_sessions_of_one_name_are_apart_by_credential_however_it_is_sent() -> None:
    one = affinity_key({b"session_id": b"s", b"authorization": b"Bearer one"})
    assert one.kind is AffinityKind.SESSION
    assert affinity_key({b"session_id": b"s", b"x-api-key": b"one"}) == one
    assert affinity_key({b"session_id": b"s", b"x-api-key": b"two"}) != one
    assert affinity_key({b"session_id": b"s"}) != one


def test_the_first_session_header_of_the_gateways_order_counts() -> None:
    values = {name: b"of %b" % name for name in SESSION_HEADERS}
    for place, name in enumerate(SESSION_HEADERS):
        left = dict(list(values.items())[place:])
        assert affinity_key(left) == affinity_key({name: values[name]})
        values[name] = b"  "
        assert affinity_key(values) == affinity_key(dict(list(values.items())[place + 1 :])), "an empty one is none"


def test_a_session_and_an_idempotency_key_of_one_text_are_two_keys() -> None:
    assert affinity_key({IDEMPOTENCY_KEY: b"same"}).value != affinity_key({b"session_id": b"same"}).value


def test_without_key_and_session_a_request_is_bound_to_no_gateway() -> None:
    assert affinity_key({}) == UNBOUND
    assert affinity_key({b"authorization": b"Bearer one"}) == UNBOUND
    assert affinity_key({IDEMPOTENCY_KEY: b"", b"session_id": b" \t"}) == UNBOUND


@given(st.dictionaries(st.sampled_from([IDEMPOTENCY_KEY, *SESSION_HEADERS, b"authorization"]), st.binary(max_size=9)))
def test_any_bytes_have_a_key(headers: dict[bytes, bytes]) -> None:
    key = affinity_key(headers)
    assert 0 <= key.value < 1 << 64
    assert affinity_key(headers) == key
    assert GatewayRanking(GATEWAYS).by_key(key.value, 3)


# --- gateways ---------------------------------------------------------------------------------------------------------


def test_only_the_keys_of_a_gateway_that_goes_move_and_each_to_the_next_of_its_own_order() -> None:
    whole = GatewayRanking(GATEWAYS)
    for gone in GATEWAYS:
        left = GatewayRanking(endpoint for endpoint in GATEWAYS if endpoint != gone)
        for key in KEYS:
            first, second = whole.by_key(key, 2)
            assert left.by_key(key, 1)[0] == (second if first == gone else first)


def test_a_gateway_that_comes_takes_its_share_from_all() -> None:
    before, after = homes(GatewayRanking(GATEWAYS[:-1])), homes(GatewayRanking(GATEWAYS))
    moved = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert {new for _, new in moved} == {GATEWAYS[-1]}
    assert 0.5 * len(KEYS) / len(GATEWAYS) < len(moved) < 1.5 * len(KEYS) / len(GATEWAYS)
    assert {old for old, _ in moved} == set(GATEWAYS[:-1])


def test_keys_are_spread_evenly() -> None:
    counts = Counter(homes(GatewayRanking(GATEWAYS)))
    assert counts.keys() == set(GATEWAYS)
    assert max(counts.values()) < 1.25 * len(KEYS) / len(GATEWAYS)


@given(ENDPOINTS, st.integers(0, (1 << 64) - 1), st.integers(1, 10))
def test_an_order_has_each_gateway_once_and_depends_on_no_other_order(
    endpoints: list[str], key: int, most: int
) -> None:
    order = GatewayRanking(endpoints).by_key(key, most)
    assert len(set(order)) == len(order) == min(most, len(endpoints))
    assert GatewayRanking(reversed(endpoints)).by_key(key, most) == order


def test_gateways_take_turns() -> None:
    ranking = GatewayRanking(GATEWAYS[:3])
    assert [ranking.in_turn(turn, 1)[0] for turn in range(6)] == GATEWAYS[:3] * 2
    assert ranking.in_turn(2, 9) == (GATEWAYS[2], GATEWAYS[0], GATEWAYS[1])


def test_a_subset_keeps_the_order() -> None:
    ranking = GatewayRanking(GATEWAYS)
    few = ranking.only([GATEWAYS[1], GATEWAYS[5], "10.9.9.9:8000"])
    assert few.endpoints == (GATEWAYS[1], GATEWAYS[5])
    for key in KEYS[:50]:
        order = ranking.by_key(key, len(GATEWAYS))
        assert few.by_key(key, 9) == tuple(endpoint for endpoint in order if endpoint in few.endpoints)


def test_without_gateways_there_is_no_choice() -> None:
    none = GatewayRanking(())
    assert none.by_key(1, 3) == none.in_turn(1, 3) == ()


def test_the_choice_is_the_same_in_every_version() -> None:
    """Pickers of two versions run at once during an update."""
    key = affinity_key({IDEMPOTENCY_KEY: b"9f1c0e64"})
    assert GatewayRanking(GATEWAYS).by_key(key.value, 3) == ("10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.6:8000")
