"""The child that is asked for a numerics class: it may say much, and runs nothing of the current folder."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from penstock.errors import KernelError
from penstock.kernels.select import make_ops
from penstock.launch.numerics_probe import NumericsProbe


def test_a_child_may_complain_at_length_and_imports_nothing_of_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "msgspec.py").write_text("raise SystemExit('the current folder was executed')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONVERBOSE", "1")  # far more than a pipe holds
    with closing(NumericsProbe("portable", "fp32", "cpu")) as asked:
        assert asked.result(lambda: None) == make_ops(family="portable", compute_dtype="fp32").numerics


def test_the_last_line_of_its_complaint_is_the_reason() -> None:
    with closing(NumericsProbe("none-such", "fp32", "cpu")) as asked, pytest.raises(KernelError, match="'none-such'"):
        asked.result(lambda: None)
    asked.close()
