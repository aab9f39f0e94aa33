"""What the benchmarks of scenes share: the selection, the bars, and the file of rows."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from bench.scenes import Row, save, selected

SCENES = ("idle", "busy")


def test_rows_replace_those_of_their_scene_only(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    busy, idle = Row("busy", "core", 4.0, "%", 5.0), Row("idle", "core", 8.0, "%", 5.0)
    save(path, [busy, idle, Row("idle", "memory", 3.0, "KiB"), Row("mesh", "messages", 1.0, "")], SCENES)
    again = Row("idle", "core", 4.5, "%", 5.0, "a second run")
    assert save(path, [again], SCENES) == [again, busy, Row("mesh", "messages", 1.0, "")]
    assert save(path, [], SCENES) == [again, busy, Row("mesh", "messages", 1.0, "")]


def test_a_row_says_whether_its_bar_is_met() -> None:
    assert "<= 5, met" in Row("idle", "core", 5.0, "%", 5.0).line()
    assert "<= 5, MISSED" in Row("idle", "core", 5.01, "%", 5.0).line()
    assert Row("idle", "core", 1e9, "%").met


def test_a_scene_that_does_not_exist_is_refused_with_those_that_do(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    assert selected(parser, None, SCENES) == ["idle", "busy"]
    assert selected(parser, "busy", SCENES) == ["busy"]
    with pytest.raises(SystemExit):
        selected(parser, "busy,bussy", SCENES)
    assert "no such scene: bussy; there are idle, busy" in capsys.readouterr().err
