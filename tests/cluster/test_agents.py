"""Coding agents, the packages that people install, do a task with a model that is served here.

Each is started by ``penstock launch``, reads a file by a call of its own tool, changes it by another, and ends; aider,
which gives its model no tools, gets the file as text.  The model is scripted (``scripted_model.coding``).  Service and
agent run in a network namespace without a way out.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from clients.coding_agents import AGENTS, DONE, RIGHT_FILE, TASK, make_project, need_agent, run_agent
from clients.private_network import private_network

from .scripted import ScriptedServer

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    if os.geteuid() != 0:
        pytest.skip("only root can make a network namespace")
    with private_network(), ScriptedServer(tmp_path_factory.mktemp("scripted"), ["--log-requests"]) as running:
        yield running


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_reads_a_file_and_changes_it(name: str, server: ScriptedServer, tmp_path: Path) -> None:
    need_agent(name)
    before = len(server.read_log())
    run = run_agent(name, server.url, tmp_path, TASK, make_project(tmp_path / "project"))
    assert run.code == 0, run.output
    assert DONE in run.output, run.output
    assert (run.project / "greeting.py").read_text() == RIGHT_FILE, run.output
    asked = [line for line in server.read_log()[before:].splitlines() if " status=" in line]
    assert asked, server.read_log()[before:]
    assert not [line for line in asked if " status=4" in line or " status=5" in line], asked
    server.wait_idle()
