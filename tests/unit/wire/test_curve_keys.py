"""Keys on disk are their owner's alone, whole, and belong together."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.wire.curve_keys import KEY_CHARS, CurveKeys


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "keys"


def test_keys_survive_the_disk(folder: Path) -> None:
    keys = CurveKeys.ephemeral()
    written = keys.save(folder)
    assert sorted(path.name for path in written) == ["client.public", "client.secret", "server.public", "server.secret"]
    assert {path.stat().st_mode & 0o777 for path in written} == {0o600}
    assert folder.stat().st_mode & 0o777 == 0o700
    assert CurveKeys.load(folder) == keys


def test_keys_differ_and_are_not_shown() -> None:
    keys = CurveKeys.ephemeral()
    assert keys != CurveKeys.ephemeral()
    assert keys.server_secret.decode() not in repr(keys) + str(keys)


def test_nothing_is_overwritten_and_nothing_is_left_behind(folder: Path) -> None:
    first = CurveKeys.ephemeral()
    first.save(folder)
    with pytest.raises(ConfigError, match="File exists"):
        CurveKeys.ephemeral().save(folder)
    assert CurveKeys.load(folder) == first
    (folder / "server.public").unlink()
    with pytest.raises(ConfigError):
        CurveKeys.ephemeral().save(folder)
    assert not (folder / "server.public").exists()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file"):
        CurveKeys.ephemeral().save(tmp_path / "file")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o700 | 0o010])
def test_loose_permissions_are_refused(folder: Path, mode: int) -> None:
    CurveKeys.ephemeral().save(folder)
    (folder / "client.secret").chmod(mode)
    with pytest.raises(ConfigError, match="0600"):
        CurveKeys.load(folder)


@pytest.mark.parametrize("content", [b"", b"a" * (KEY_CHARS - 1), b"a" * (KEY_CHARS + 1), b"a" * 10_000])
def test_a_wrong_length_is_refused(folder: Path, content: bytes) -> None:
    CurveKeys.ephemeral().save(folder)
    (folder / "server.secret").write_bytes(content)
    with pytest.raises(ConfigError, match="characters"):
        CurveKeys.load(folder)


@pytest.mark.parametrize("content", [b"\x00" * KEY_CHARS, b"~" * KEY_CHARS, b"a" * KEY_CHARS])
def test_a_key_that_does_not_fit_its_other_half_is_refused(folder: Path, content: bytes) -> None:
    CurveKeys.ephemeral().save(folder)
    (folder / "server.secret").write_bytes(content)
    with pytest.raises(ConfigError, match="belong together"):
        CurveKeys.load(folder)


def test_a_missing_key_is_refused_with_what_makes_one(folder: Path) -> None:
    with pytest.raises(ConfigError, match="makes keys on one host, and the others get copies"):
        CurveKeys.load(folder)


def test_links_and_pipes_are_not_keys(folder: Path) -> None:
    CurveKeys.ephemeral().save(folder)
    secret = folder / "server.secret"
    moved = secret.rename(folder / "elsewhere")
    secret.symlink_to(moved)
    with pytest.raises(ConfigError):
        CurveKeys.load(folder)
    secret.unlink()
    os.mkdir(secret, 0o600)
    with pytest.raises(ConfigError, match="must be a file"):
        CurveKeys.load(folder)
    secret.rmdir()
    os.mkfifo(secret, 0o600)
    with pytest.raises(ConfigError, match="must be a file"):
        CurveKeys.load(folder)
