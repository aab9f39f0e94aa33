"""``penstock run``, ``ps`` and ``launch`` with the bundled model: services that run already, and services of their own.

Each test's model lies in a folder of its own, so that services of other tests are never taken for it.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.bundled import storyteller
from penstock.launch.run_folder import ServiceRecord, running_services

from .asking import penstock
from .processes import alive
from .server import PenstockServer

STORY = ("--seed", "3", "--max-tokens", "12", "Tell me a story.")
AGENT = """\
#!{python}
import json, os, sys, time, urllib.request
url = next(word for word in sys.argv if "base_url" in word).split('base_url="')[1].split('"')[0]
found = dict(url=url, models=json.load(urllib.request.urlopen(url + "/models")))
with open({record!r} + ".new", "w") as file:
    json.dump(found, file)
os.replace({record!r} + ".new", {record!r})
while "--wait" in sys.argv:
    time.sleep(1)
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The bundled model in a folder that no other service has."""
    folder = tmp_path / f"story-{secrets.token_hex(4)}"
    folder.mkdir()
    for file in Path(storyteller()).iterdir():
        (folder / file.name).symlink_to(file)
    return folder


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """Where an agent named codex, first on PATH, writes down what it found."""
    path = tmp_path / "record.json"
    agent = tmp_path / "bin" / "codex"
    agent.parent.mkdir()
    agent.write_text(AGENT.format(python=sys.executable, record=str(path)))
    agent.chmod(0o755)
    return path


def with_agent(record: Path) -> dict[str, str]:
    return {"PATH": f"{record.parent / 'bin'}:{os.environ['PATH']}"}


def services_of(model: Path) -> list[ServiceRecord]:
    return [one for one in running_services() if one.path == str(model)]


@pytest.mark.long
def test_a_service_that_runs_is_listed_and_used(model: Path, record: Path) -> None:
    with PenstockServer([str(model)]) as server:
        PenstockServer.wait_for(lambda: services_of(model) != [], 30.0, "listed")
        (row,) = [row for row in json.loads(penstock("ps", "--json").stdout)["services"] if row["pid"] == server.pid]
        assert (row["url"], row["model"], row["path"]) == (server.url, model.name, str(model))
        assert (row["workers"], row["running"], row["queued"], row["error"]) == (2, 0, 0, None)
        assert 0 < row["uptime_s"] < 120
        assert 20 << 20 < row["memory_bytes"] < 4 << 30
        (line,) = [line for line in penstock("ps").stdout.splitlines() if server.url in line]
        assert re.match(rf"{model.name}  +{server.url}  +{server.pid} +\d+ s +2 +0 +0 +\d+MiB$", line)

        run = penstock("run", str(model), *STORY)
        assert run.returncode == 0, run.stderr
        assert run.stdout == penstock("chat", *STORY, PENSTOCK_URL=server.url).stdout != ""
        assert "starting" not in run.stderr
        assert penstock("run", model.name, *STORY).stdout == run.stdout

        launched = penstock("launch", "codex", "--model", str(model), **with_agent(record))
        assert launched.returncode == 0, launched.stderr
        assert json.loads(record.read_text())["url"] == f"{server.url}/v1"
        assert f"{model.name} has a context of 2,048 tokens; Codex needs 32,000" in launched.stderr
        assert server.running


def test_run_starts_a_service_and_stops_it(model: Path) -> None:
    run = penstock("run", str(model), *STORY, given="Of a fox.")
    assert run.returncode == 0, run.stderr
    assert len(run.stdout) > 20
    assert "12 tokens, first after" in run.stderr
    assert services_of(model) == []


def test_why_a_service_cannot_start_is_one_line(tmp_path: Path) -> None:
    run = penstock("run", str(tmp_path), "Hello")
    assert (run.returncode, run.stdout) == (2, "")
    assert f"penstock: error: {tmp_path}: has no config.json" in run.stderr.splitlines()[-1]


@pytest.mark.long
@pytest.mark.parametrize("signum", [0, signal.SIGTERM, signal.SIGKILL])
def test_launch_starts_a_service_that_ends_with_it(signum: int, model: Path, record: Path) -> None:
    words = ["launch", "codex", "--model", str(model), *(["--", "--wait"] if signum else [])]
    environ = os.environ | with_agent(record) | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "penstock", *words]
    with subprocess.Popen(command, env=environ, start_new_session=True) as process:
        if signum:
            PenstockServer.wait_for(record.exists, 90.0, "launched")
            (service,) = services_of(model)
            assert service.stops_with_parent
            assert penstock("launch", "codex", "--model", str(model), "--print").stdout.startswith("# would start: ")
            process.send_signal(signum)
        assert process.wait(90) == {0: 0, signal.SIGTERM: 128 + signal.SIGTERM, signal.SIGKILL: -9}[signum]
        if signum == signal.SIGKILL:
            os.killpg(process.pid, signal.SIGKILL)  # the agent, which its terminal would end
            PenstockServer.wait_for(lambda: not alive(service.pid), 60.0, "ended with its parent")
    found = json.loads(record.read_text())
    assert [card["id"] for card in found["models"]["data"]] == [model.name]
    assert services_of(model) == []
