"""Packages that people talk to a service with, each in its own scenario (``tests/clients``), and a split service.

The model is scripted, for the bundled one calls no tools.  Service and clients run in a network namespace without a
way out.  The packages are those of ``tests/clients/requirements`` and ``tests/clients/package.json``, installed by
``scripts/client-packages``; ``openai`` is in the test environment, too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from clients.flaky_proxy import REFUSALS, FlakyProxy, flaky_proxy
from clients.packages import FOLDER, need_node, need_python
from clients.private_network import private_network

from .scripted import ScriptedServer

SCENARIOS = Path(__file__).resolve().parents[1] / "clients/scenarios"
SCENARIO_S = 240
ALWAYS = {"chat", "stream", "tools", "error", "retry", "cancel"}
"""Steps that each scenario has."""


@dataclass(frozen=True)
class Reached:
    """What clients talk to."""

    server: ScriptedServer
    proxy: FlakyProxy


@pytest.fixture(scope="module")
def reached(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reached]:
    if os.geteuid() != 0:
        pytest.skip("only root can make a network namespace")
    with (
        private_network(),
        ScriptedServer(tmp_path_factory.mktemp("scripted")) as server,
        flaky_proxy(server.url) as proxy,
    ):
        yield Reached(server, proxy)


def run_scenario(reached: Reached, command: list[str], folder: Path) -> dict[str, str]:
    """What went wrong in each step, nothing where all was well."""
    environ = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "PENSTOCK_URL": reached.server.url,
        "PENSTOCK_FLAKY_URL": reached.proxy.url,
        "PENSTOCK_NODE_MODULES": str(FOLDER / "npm"),
    }
    run = subprocess.run(
        command, env=environ, cwd=folder, capture_output=True, text=True, timeout=SCENARIO_S, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    told = [json.loads(line) for line in run.stdout.splitlines() if line.startswith('{"step"')]
    print(*(f"{one['step']}: {one['seconds']} s" for one in told), sep="\n")
    return {one["step"]: one.get("error", "") for one in told}


def check_scenario(reached: Reached, command: list[str], folder: Path, name: str) -> None:
    reached.proxy.seen.clear()
    steps = run_scenario(reached, command, folder)
    wrong = {step: error for step, error in steps.items() if error}
    assert not wrong, "\n\n".join(f"{step}: {error}" for step, error in wrong.items())
    assert steps.keys() >= ALWAYS
    assert reached.proxy.seen[name] == len(REFUSALS) + 1, "the client did not retry as often as it was refused"
    reached.server.wait_idle()


def test_the_openai_package(reached: Reached, tmp_path: Path) -> None:
    check_scenario(reached, [sys.executable, str(SCENARIOS / "openai_scenario.py")], tmp_path, "openai")


PACKAGES = ("openai", "anthropic", "litellm", "langchain", "llama_index", "instructor", "pydantic_ai", "openai_agents")


@pytest.mark.long
@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_of_python(name: str, reached: Reached, tmp_path: Path) -> None:
    python = need_python("llama_index" if name == "llama_index" else "python")
    check_scenario(reached, [python, str(SCENARIOS / f"{name}_scenario.py")], tmp_path, name)


@pytest.mark.long
def test_the_ai_package_of_node(reached: Reached, tmp_path: Path) -> None:
    check_scenario(reached, [need_node(), str(SCENARIOS / "ai_scenario.mjs")], tmp_path, "ai")
