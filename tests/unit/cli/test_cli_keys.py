from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from penstock.cli import keys
from penstock.errors import ConfigError
from penstock.wire.keys import Keys


def test_keys_are_written_once_and_for_their_owner_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / "keys"
    assert keys.run(argparse.Namespace(folder=folder)) == 0
    paths = [Path(line) for line in capsys.readouterr().out.split()]
    assert {path.parent for path in paths} == {folder}
    assert {path.stat().st_mode & 0o777 for path in paths} == {0o600}
    first = Keys.load(folder)
    with pytest.raises(ConfigError, match="File exists"):
        keys.run(argparse.Namespace(folder=folder))
    assert Keys.load(folder) == first
