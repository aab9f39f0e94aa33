"""The benchmark of fleets: what it opens when nothing is said, and what its plot shows of rows that were saved."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from bench.fleet_scale.__main__ import main
from bench.fleet_scale.streams import PACE_S, STREAMS, TOKENS_PER_S, default_pace_s, most_streams
from bench.scenes import Row, save

SCENES = ("idle", "gateway", "worker")


@pytest.mark.parametrize("streams", [STREAMS, 74_000, 100_000])
def test_more_streams_get_no_more_tokens_a_second(streams: int) -> None:
    assert streams / default_pace_s(streams) == pytest.approx(TOKENS_PER_S)


def test_few_streams_have_the_shortest_pace() -> None:
    assert default_pace_s(32) == PACE_S
    assert default_pace_s(round(PACE_S * TOKENS_PER_S)) == PACE_S


def test_descriptors_limit_the_streams() -> None:
    assert most_streams(20_000) == 74_000
    assert most_streams(6_500) == STREAMS


def test_a_plot_of_saved_rows_has_each_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        Row("idle", "gateway of 16, 200 idle workers", 4.1, "% of a core", 5.0),
        Row("worker", "1 gateways, idle", 0.9, "% of a core"),
        Row("worker", "300 gateways, idle", 8.9, "% of a core"),
        Row("worker", "beats and events of 300 gateways, idle", 8.0, "% of a core", 5.0),
        Row("mesh", "300 gateways, 4,096 idle workers", 1.2, "million messages/s"),
    ]
    saved, plotted = tmp_path / "rows.json", tmp_path / "plot.svg"
    save(saved, rows, SCENES)
    monkeypatch.setattr(sys, "argv", ["fleet_scale", "--json", str(saved), "--plot", str(plotted), "--plot-only"])
    assert main() == 0
    texts = plotted.read_text()  # matplotlib writes each text as a comment, too
    for shown in (
        "idle: gateway of 16, 200 idle workers",
        "worker: beats and events of 300 gateways, idle",
        "gateways",
    ):
        assert f"<!-- {shown} -->" in texts
    assert "<!-- a worker and its gateways -->" in texts
    assert "mesh" not in texts


def test_only_a_plot_needs_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--json", str(tmp_path / "none.json"), "--plot", str(tmp_path / "plot.svg"), "--plot-only"]
    monkeypatch.setattr(sys, "argv", ["fleet_scale", *words])
    with pytest.raises(SystemExit):
        main()
    assert "--plot-only needs --plot FILE, and a --json FILE" in capsys.readouterr().err
