"""Keys: kept as hashes, compared whole."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.edge.auth import KeyRing


@given(st.sets(st.text(min_size=1, max_size=20), min_size=1, max_size=4), st.text(max_size=20))
def test_a_ring_opens_for_its_keys_and_no_other(keys: set[str], other: str):
    ring = KeyRing.of(keys)
    assert not ring.open
    assert all(ring.find(key.encode()) is not None for key in keys)
    assert (ring.find(other.encode()) is not None) == (other in keys)


def test_keys_are_not_kept():
    ring = KeyRing.of(["sk-secret"])
    assert "sk-secret" not in repr(vars(ring))
    assert b"sk-secret" not in repr(vars(ring)).encode()


def test_an_empty_ring_is_an_open_door():
    assert KeyRing().open
    assert KeyRing().find(b"") is None
