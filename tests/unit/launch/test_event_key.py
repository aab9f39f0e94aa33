"""The secret behind events' ids: the same for all gateways of a service, and for nobody else."""

from __future__ import annotations

from pathlib import Path

from penstock.config.api_keys import changing
from penstock.config.schema import ServeConfig
from penstock.launch.event_key import event_key
from penstock.wire.keys import Keys


def test_it_follows_from_the_file_of_keys(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for path in (one, other):
        with changing(path, 10, make=True):
            pass
    config = ServeConfig(api_keys=str(one))
    assert event_key(config) == event_key(config, Keys.ephemeral())  # of whichever gateway, after a restart, too
    assert event_key(config) != event_key(ServeConfig(api_keys=str(other)))


def test_without_one_it_follows_from_what_gateways_share() -> None:
    shared, others = Keys.ephemeral(), Keys.ephemeral()
    config = ServeConfig(api_key="k")
    assert event_key(config, shared) == event_key(ServeConfig(), shared) != event_key(config, others)


def test_or_from_the_one_key() -> None:
    assert event_key(ServeConfig(api_key="k")) == event_key(ServeConfig(api_key="k"))
    assert event_key(ServeConfig(api_key="k")) != event_key(ServeConfig(api_key="l"))
    assert len(bytes.fromhex(event_key(ServeConfig()))) == 32
