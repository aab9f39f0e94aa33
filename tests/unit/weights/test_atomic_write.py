"""A file is there whole, or the old one is."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.weights.files import atomic_write


def test_a_file_takes_its_place_when_it_is_whole(tmp_path: Path) -> None:
    target, partial = tmp_path / "file", tmp_path / "file.partial"
    target.write_bytes(b"old")

    def fail_half_way() -> None:
        with atomic_write(target, partial) as file:
            file.write(b"half of")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_half_way()
    assert target.read_bytes() == b"old"
    with atomic_write(target, partial, go_on=True) as file:
        file.seek(0, 2)
        file.write(b" the new")
    assert target.read_bytes() == b"half of the new"
    assert not partial.exists()
