"""examples/two_hosts: workers in network namespaces of their own, and the same answer as from one host."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .asking import ask
from .examples import EXAMPLES
from .server import PenstockServer

QUESTION = "Tell me a story about a fox and a boat."


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """With ``penstock`` in the PATH, whether it is installed or not."""
    command = tmp_path / "penstock"
    source = Path(__file__).resolve().parents[2] / "src"
    command.write_text(f'#!/bin/sh\nPYTHONPATH={source} exec {sys.executable} -m penstock "$@"\n')
    command.chmod(0o755)
    return {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "QUESTION": QUESTION}


@pytest.mark.long
@pytest.mark.parametrize("plan", ["", "pp2"], ids=["prefill and decode apart", "one model over both"])
def test_two_hosts_answer_as_one_does(environment: dict[str, str], plan: str) -> None:
    environment |= {"PLAN": plan}
    said = subprocess.run(
        [EXAMPLES / "two_hosts"], env=environment, capture_output=True, text=True, timeout=180, check=False
    )
    assert said.returncode == 0, said.stderr
    answer = said.stdout.partition(f"-- the question: {QUESTION}\n")[2].partition("\n-- the workers\n")[0]
    with PenstockServer() as server:
        alone = ask(server, messages=[{"role": "user", "content": QUESTION}], seed=1, max_tokens=120, temperature=None)
    assert answer.split() == alone.split()
    if plan:
        assert re.search(r"TX: +bytes", said.stdout)
        return
    pages = re.search(r'kv_transfer_pages_total\{[^}]*worker="writes"\} ([0-9.]+)', said.stdout)
    assert pages is not None
    assert float(pages[1]) > 0
