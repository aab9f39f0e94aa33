"""The lines that docs/clients.md and docs/agents.md give to paste work as they stand, for a user of the service.

Only the address and the model's name are put in.  Clients and agents are their own packages
(``scripts/client-packages``), the model is scripted, and nothing has a way out of its network namespace.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from clients.coding_agents import AGENTS, DONE, RIGHT_FILE, TASK, arguments, make_project, need_agent
from clients.packages import FOLDER, need_node, need_python
from clients.private_network import private_network

from .scripted import MODEL, ScriptedServer

pytestmark = pytest.mark.long

DOCS = Path(__file__).resolve().parents[2] / "docs"
ADDRESS, NAME = "127.0.0.1:8000", "NAME"
RUN_S = 240
GREETING = "Hello from Penstock!"
ADA = "name='Ada Lovelace' born=1815 languages=['English', 'French']"
REPLIES = {"openai": [GREETING] * 2, "litellm": [GREETING] * 2, "instructor": [ADA]}
"""How the lines begin that are printed, where that is not one greeting."""

PYTHON = (
    "openai",
    "anthropic",
    "litellm",
    "langchain-openai",
    "llama-index-llms-openai-like",
    "instructor",
    "pydantic-ai-slim",
    "openai-agents",
)
TITLES = {"claude": "Claude Code", "codex": "Codex", "opencode": "opencode", "aider": "aider"}


def block(text: str) -> str:
    """The first indented block of a text."""
    found = re.search(r"(?:^    .*\n|\n(?=    ))+", text, re.MULTILINE)
    assert found is not None, f"nothing to paste in {text[:200]!r}"
    return re.sub(r"^    ", "", found[0], flags=re.MULTILINE).strip()


def of_client(name: str) -> str:
    """What docs/clients.md gives for this client."""
    page = (DOCS / "clients.md").read_text(encoding="utf-8")
    return block(page.partition(f"\n## {name}\n")[2].partition("\n## ")[0])


def of_agent(name: str) -> str:
    """The command that docs/agents.md gives for this agent."""
    page = (DOCS / "agents.md").read_text(encoding="utf-8").partition("\n## By hand\n")[2]
    return block(page.partition(f"\n{TITLES[name]}:\n")[2])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    if os.geteuid() != 0:
        pytest.skip("only root can make a network namespace")
    with private_network(), ScriptedServer(tmp_path_factory.mktemp("scripted"), ["--log-requests"]) as running:
        yield running


def filled(text: str, server: ScriptedServer) -> str:
    """With this service's address and model."""
    assert ADDRESS in text
    assert NAME in text
    return re.sub(rf"\b{NAME}\b", MODEL, text.replace(ADDRESS, f"127.0.0.1:{server.port}"))


def run(command: list[str], folder: Path, home: Path, **environ: str) -> str:
    """What it prints to stdout, having ended well."""
    environ = {"PATH": os.environ["PATH"], "HOME": str(home), "TERM": "dumb", "PYTHONDONTWRITEBYTECODE": "1"} | environ
    done = subprocess.run(
        command,
        env=environ,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=RUN_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check_printed(name: str, output: str) -> None:
    lines = output.strip().splitlines()
    expected = REPLIES.get(name, [GREETING])
    assert len(lines) == len(expected), output
    assert all(line.startswith(begin) for line, begin in zip(lines, expected, strict=True)), output


@pytest.mark.parametrize("name", PYTHON)
def test_the_lines_of_a_python_client(name: str, server: ScriptedServer, tmp_path: Path) -> None:
    python = need_python("llama_index" if name.startswith("llama-index") else "python")
    program = tmp_path / "pasted.py"
    program.write_text(filled(of_client(name), server), encoding="utf-8")
    local = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"} if name == "litellm" else {}
    check_printed(name, run([python, str(program)], tmp_path, tmp_path, **local))


def test_the_lines_of_the_client_of_node(server: ScriptedServer, tmp_path: Path) -> None:
    node = need_node()
    program = tmp_path / "pasted.mjs"
    program.write_text(filled(of_client("ai"), server), encoding="utf-8")
    (tmp_path / "node_modules").symlink_to(FOLDER / "npm/node_modules")
    check_printed("ai", run([node, str(program)], tmp_path, tmp_path))


def test_the_line_of_curl(server: ScriptedServer, tmp_path: Path) -> None:
    assert GREETING in run(["sh", "-c", filled(of_client("curl"), server)], tmp_path, tmp_path)


@pytest.mark.parametrize("name", AGENTS)
def test_the_line_of_an_agent(name: str, server: ScriptedServer, tmp_path: Path) -> None:
    path = os.pathsep.join((need_agent(name), os.environ["PATH"]))
    line = filled(of_agent(name), server)
    command = f"{line} {shlex.join(arguments(name, TASK))}"
    project = make_project(tmp_path / "project")
    before = len(server.read_log())
    output = run(["sh", "-c", command], project, tmp_path, PATH=path)
    assert DONE in output, output
    assert (project / "greeting.py").read_text() == RIGHT_FILE, output
    asked = [line for line in server.read_log()[before:].splitlines() if " status=" in line]
    assert asked, "the service was not asked"
    assert not [line for line in asked if " status=4" in line or " status=5" in line], asked
