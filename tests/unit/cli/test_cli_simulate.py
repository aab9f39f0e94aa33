"""``penstock simulate`` and ``penstock calibrate``: figures, pictures, errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.sim.fleet import load_fleet

LINE = '{{"timestamp": {at}, "input_length": {tokens}, "output_length": 20, "hash_ids": [{ids}]}}\n'


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "talk.jsonl"
    turns = [
        LINE.format(at=900 * n, tokens=512 * (n + 1) - 12, ids=", ".join(map(str, range(n + 1)))) for n in range(8)
    ]
    path.write_text("".join(turns))
    return str(path)


def test_a_run_as_json(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", trace, "--workers", "2", "--policy", "prefix", "--rate-scale", "2", "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["requests"], found["failed"], found["policy"], found["rate_scale"]) == (8, 0, "prefix", 2.0)
    assert set(found["ttft_s"]) == set(found["itl_s"]) == {"p50", "p90", "p99", "mean"}
    assert 0 < found["hit_ratio"] <= found["ideal_hit_ratio"] < 1
    assert found["goodput"] > 0
    assert found["wall_s"] > 0


def test_a_run_for_people_with_a_picture(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", trace, "--workers", "1:1", "--plot", str(tmp_path / "run.png")]) == 0
    shown = capsys.readouterr().out
    assert "8 requests at 1 times their rate, policy penstock" in shown
    assert "1 prefill, 1 decode" in shown
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "because"),
    [
        (["--rate-scale", "0"], "--rate-scale must be above 0"),
        (["--fleet", "nowhere.toml"], "fleet nowhere.toml"),
        (["--workers", "many"], "--workers many"),
        (["--page-tokens", "100"], "--page-tokens 100"),
    ],
)
def test_what_cannot_be_simulated_is_said_in_a_line(
    trace: str, words: list[str], because: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", trace, *words]) == 2
    said = capsys.readouterr().err
    assert because in said
    assert said.count("\n") == 1


def test_this_machine_as_a_fleet_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "here.toml"
    words = ["calibrate", "--context", "128", "--rounds", "1", "--workers", "1:2", "--out", str(out), "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    fleet = load_fleet(str(out))
    assert fleet.count == 3
    assert fleet.source.startswith("measured")
    steps = fleet.steps
    assert found["fleet"]["steps"]["token_s"] == steps.token_s
    assert min(steps.token_s, steps.pair_s, steps.read_step_s) >= 0
    assert steps.token_s + steps.pair_s + steps.read_step_s > 0  # which of them, noise decides with so few readings
    assert len(found["readings"]) >= 3
    assert {each["rows"] for each in found["writings"]} == {1, 2, 4, 8, 16}


def test_a_wrong_extent_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--context", "5"]) == 2
    assert "--context must be from 128" in capsys.readouterr().err
