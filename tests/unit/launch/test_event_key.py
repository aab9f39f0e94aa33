"""The key of event ids: the same in all gateways of a service, different in every other service."""

from __future__ import annotations

from pathlib import Path

from penstock.config.api_keys import edit_keys
from penstock.launch.compose import event_key
from penstock.wire.curve_keys import CurveKeys


def test_it_follows_from_the_file_of_keys(tmp_path: Path) -> None:
    one, other = str(tmp_path / "one"), str(tmp_path / "other")
    for path in (one, other):
        with edit_keys(Path(path), 10, make=True):
            pass
    # The same in every gateway, also after a restart.
    assert event_key(None, one, 10) == event_key(None, one, 10, CurveKeys.ephemeral())
    assert event_key(None, one, 10) != event_key(None, other, 10)


def test_without_one_it_follows_from_what_gateways_share() -> None:
    shared, others = CurveKeys.ephemeral(), CurveKeys.ephemeral()
    assert event_key("k", None, 10, shared) == event_key(None, None, 10, shared) != event_key("k", None, 10, others)


def test_or_from_the_one_key() -> None:
    assert event_key("k", None, 10) == event_key("k", None, 10)
    assert event_key("k", None, 10) != event_key("l", None, 10)
    assert len(bytes.fromhex(event_key(None, None, 10))) == 32
