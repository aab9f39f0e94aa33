"""``penstock simulate`` and ``penstock calibrate``: figures, pictures, errors."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from penstock.cli import simulate as command
from penstock.cli.console import _ProgressLines
from penstock.cli.main import main
from penstock.parallel.plan import parse_devices
from penstock.sim.fleet import load_fleet
from penstock.sim.roofline import fleet_of
from penstock.weights.inspect import read_outline

CONFIGS = Path(__file__).parents[2] / "fixtures/configs"

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


@pytest.mark.long
def test_a_run_for_people_with_a_picture(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", trace, "--workers", "1:1", "--plot", str(tmp_path / "run.png")]) == 0
    shown = capsys.readouterr().out
    assert "8 requests at 1 times their rate, policy penstock" in shown
    assert "1 prefill, 1 decode" in shown
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


def test_what_a_plot_needs_is_looked_for_before_the_run(
    trace: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    monkeypatch.setattr(command, "simulate", lambda *_: pytest.fail("the run began"))
    assert main(["simulate", trace, "--plot", "run.png"]) == 2
    assert "pip install 'penstock[plot]'" in capsys.readouterr().err


def test_a_fleet_of_a_model_on_devices(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", trace, "--model", str(CONFIGS / "llama_3_2_1b.json"), "--devices", "4xA100"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "fleet 4xA100 (4 both); computed, not measured: llama_3_2_1b.json on A100, 1 a worker" in shown


@pytest.mark.parametrize("name", ["h100", "h200"])
def test_fleets_of_the_package_agree_with_the_roofline(name: str, llama_8b: Path) -> None:
    """Both are arithmetic over the same data sheets."""
    given, found = load_fleet(name), fleet_of(read_outline(llama_8b), parse_devices(f"8x{name.upper()}"))
    for field in ("step_s", "row_s", "context_s", "read_step_s", "token_s", "pair_s"):
        assert getattr(found.steps, field) == pytest.approx(getattr(given.steps, field), rel=0.15), field
    assert found.memory.token_bytes == given.memory.token_bytes


def test_a_worker_of_several_devices_divides_the_time_of_one() -> None:
    """7 billion parameters and a request of full length do not fit in 12 GiB."""
    outline = read_outline(CONFIGS / "mistral_7b.json")
    one, eight = (fleet_of(outline, parse_devices(text)) for text in ("1xA100", "8xL4:12GiB"))
    assert [(own.count, own.group) for own in (*one.workers, *eight.workers)] == [(1, ""), (4, "tp2")]
    assert eight.ranks.layers == 32
    assert eight.steps.step_s > one.steps.step_s  # of one device
    assert eight.memory.device_bytes < 2 * (5 << 30)  # of both together


def test_long_runs_without_a_terminal_say_how_far_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = iter([0.0, 3.0, 11.0, 12.0, 22.0])
    lines = _ProgressLines("talk", 8, "requests", lambda: next(seconds))
    for _ in range(4):
        lines.add(2)
    said = capsys.readouterr().err.splitlines()
    assert said == ["talk: 4 of 8 requests (50%), 11 s", "talk: 8 of 8 requests (100%), 22 s"]


@pytest.mark.parametrize(
    ("words", "because"),
    [
        (["--model", "x"], "--model and --devices go together"),
        (["--model", str(CONFIGS / "kimi_k2_bf16.json"), "--devices", "8xH100"], "does not fit on 8 x H100"),
        (["--model", str(CONFIGS / "bge_large.json"), "--devices", "8xH100"], "only models that generate text"),
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


def test_the_fleet_file_of_the_documentation_is_simulated_with_the_figures_of_this_machine(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As docs/fleet.md says it: `penstock calibrate --profile` is appended to the file of the nodes."""
    page = (Path(__file__).parents[3] / "docs/fleet.md").read_text(encoding="utf-8")
    nodes, groups, *_ = re.findall(r"(?ms)^```toml\n(.*?)^```$", page)
    assert 'group = "tp2"' in nodes
    assert groups.startswith("[[groups]]")
    file = tmp_path / "fleet.toml"
    file.write_text(nodes + groups, encoding="utf-8")
    assert main(["simulate", trace, "--fleet", str(file)]) == 2
    assert "penstock calibrate --profile" in capsys.readouterr().err
    assert main(["calibrate", "--context", "128", "--rounds", "1", "--profile", "here"]) == 0
    with file.open("a", encoding="utf-8") as appended:
        appended.write(capsys.readouterr().out)
    # The bundled model has 2,048 positions.
    assert main(["simulate", trace, "--fleet", str(file), "--requests", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["requests"], found["failed"]) == (3, 0)
    assert load_fleet(str(file)).ranks.layers == 8
    assert main(["node", str(file), "--name", "b", "--print-config"]) == 0  # the same file is what runs


@pytest.mark.parametrize("name", ["Here", "", "a.b"])
def test_a_name_that_no_table_can_have_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--profile", name]) == 2
    assert "lower-case letters, digits and -" in capsys.readouterr().err


def test_a_wrong_extent_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--context", "5"]) == 2
    assert "--context must be from 128" in capsys.readouterr().err
