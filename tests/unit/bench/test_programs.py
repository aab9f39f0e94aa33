"""The programs of ``bench`` that pages name still run, at their smallest: figures of so little mean nothing.

Those that take minutes at least are tried by hand (``BY_HAND``), ``bench.faults`` by ``tests/cluster/test_faults.py``.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from bench import agents

from clients.packages import need_envoy

ROOT = Path(__file__).resolve().parents[3]

STORY = ROOT / "src/penstock/bundled/storyteller"

QUICK = {
    "closed_loop": "--clients 4 --requests 8 --prompt 64 --answer 8",
    "collectives": "--exchanges 20",
    "compression": "--outputs 64 --inputs 256 --rows 1 --rounds 1",
    "grammar": "--answers 1 --rounds 1",
    "kernels": "--outputs 64 --inputs 256 --rows 1 --seconds 0.01",
    "manifests": "--only kubernetes --fleets 2",
    "plans": f"--model {STORY} --rows 1 --chunks 16 --steps 2 --minutes 0.1",
    "quantized_entropy": "",
    "ranks": f"--model {STORY} --systems '2 replicas,tp2,pp2' --rows 1 --steps 2 --minutes 0.05",
    "reports": "--scenes idle --rounds 1 --seconds 0.2 --stretch 2",
    "router": "--tokens 1000 --workers 4 --blocks 10000 --rounds 8 --prompts 2",
    "scheduler": "--rows 1,4 --steps 8",
    "sparse": "speed --tokens 512 --rounds 1",
    "speculation": "quotes --tokens 8 --rounds 1",
    "step": "--rows 1 2 --steps 9",
    "transfer": "--carriers tcp,socket --sizes 1MiB --seconds 0.05",
    "two_builds": "src --experts 2 --keys 64 --turns 2",
    "worker_turns": "--held 8 --tokens 512 --gateways 2",
}
"""What needs no service, and its arguments."""

SERVED = {
    "agents": "--turns 3 --tokens 400 --figures-only",
    "chats": "--clients 2 --chats 2 --turns 2 --policies penstock",
    "drain": "--rounds 1 --answers 2 --tokens 32 --quiet 1 --kills",
    "fairness": "--real --seconds 1 --clients 1",
    "picker": "--rounds 2 --requests 20",
    "stutter": "--rounds 1 --duration 1 --setups split",
    "store": "restart --tokens 200 --dir DIR",
}
"""What starts services."""

BY_HAND = {"simulations", "reality", "rates", "members", "heads"}
"""``simulations`` takes traces, ``heads`` trains, the others take minutes; of ``tests/cluster`` ``test_rates.py``,
``test_four_gateways.py``, ``test_members_load.py`` and ``test_ray.py`` do what ``rates`` and ``members`` do, and
``test_manifests.py`` what ``manifests`` does with processes."""

FOLDERS_BY_HAND = {"gateway", "gpu", "peers", "ray_nodes"}
"""They need minutes, a GPU, other systems, or a Ray cluster: its scenes are those of ``tests/cluster/test_ray.py``."""

HAS_A_BAR = {"picker"}
"""Exits with 1 when it is missed, which so few requests and a busy machine may do."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("program", "words"),
    [pytest.param(*item, id=" ".join(item)) for item in (*QUICK.items(), *SERVED.items())],
)
def test_it_runs(program: str, words: str, tmp_path: Path) -> None:
    if program == "picker":
        need_envoy()
    words = words.replace("DIR", str(tmp_path))
    command = [sys.executable, ROOT / "bench" / f"{program}.py", *shlex.split(words)]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))}
    ended = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300, check=False)
    missed = program in HAS_A_BAR and "MISSED" in ended.stdout
    assert ended.returncode == int(missed), ended.stderr[-6000:]
    assert "Traceback" not in ended.stderr, ended.stderr[-6000:]
    assert any(character.isdigit() for character in ended.stdout)


@pytest.mark.long
def test_the_benchmark_of_fleets_runs(tmp_path: Path) -> None:
    few = "--seconds 0.2 --rounds 1 --workers 4 --gateways 1 9 --streams 32"
    command = [sys.executable, "-m", "bench.fleet_scale", "--only", "gateway,worker,streams", *few.split()]
    command += ["--json", str(tmp_path / "rows.json"), "--plot", str(tmp_path / "plot.png")]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))}
    ended = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr[-6000:]
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["value"] for row in rows if row["what"].startswith("streams that failed")] == [0]
    assert (tmp_path / "plot.png").stat().st_size > 0


def test_the_benchmark_of_agents_reads_the_recorded_session() -> None:
    (file,) = (ROOT / "tests/fixtures/agents").glob("claude-session-*.jsonl.xz")
    turns = agents.recorded(file)
    assert len(turns) == 20
    assert {turn.path for turn in turns} == {"/v1/messages?beta=true"}
    assert all(turn.body["messages"] for turn in turns)


def test_no_program_is_left_out() -> None:
    programs = {path.stem for path in (ROOT / "bench").glob("*.py")}
    assert programs == QUICK.keys() | SERVED.keys() | BY_HAND
    folders = {path.parent.name for path in (ROOT / "bench").glob("*/__main__.py")}
    assert folders == FOLDERS_BY_HAND | {"faults", "fleet_scale"}


@pytest.mark.parametrize("program", ["faults", "fleet_scale", "manifests", "members", "rates", "ray_nodes"])
def test_its_help_names_its_parts(program: str) -> None:
    """What is tried by hand is imported at least, tests and all."""
    environ = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))}
    command = [sys.executable, "-m", f"bench.{program}", "--help"]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=110, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "--only" in ended.stdout


@pytest.mark.long
@pytest.mark.parametrize(
    ("program", "scene", "lacks"),
    [("manifests", "helm", "helm"), ("rates", "redis", "redis-server"), ("ray_nodes", "up", "redis-server")],
)
def test_what_this_machine_lacks_is_named(program: str, scene: str, lacks: str, tmp_path: Path) -> None:
    """Without a traceback, which would take the rows of other scenes with it."""
    environ = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))}
    environ |= {"PATH": str(tmp_path), "PENSTOCK_CLIENTS": str(tmp_path)}
    environ.pop("CI", None)  # there helm has to be installed
    command = [sys.executable, "-m", f"bench.{program}", "--only", scene]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=110, check=False)
    assert ended.returncode == 1, ended.stderr
    assert f"needs {lacks}" in ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr
