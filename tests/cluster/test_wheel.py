"""The wheel of ``scripts/wheel``: installed in a bare Debian 12 without a compiler, it serves the bundled model."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from .dockerfile import Stage, bare_root, run
from .server import PATIENCE_S, PenstockServer, free_port
from .test_dockerfile import ROOT, missing, stop, wait_ready

BUILD_S = 1500
COMPILERS = ("cc", "gcc", "g++", "clang", "cmake", "ninja")
REQUEST = {"model": "storyteller", "prompt": "Once upon a time", "max_tokens": 24, "temperature": 0}


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_the_wheel_installs_without_a_compiler_and_serves(tmp_path: Path) -> None:
    if why := missing():
        pytest.skip(why)
    wheel = build_wheel(tmp_path / "dist")
    stage = Stage(tmp_path / "root")
    bare_root(stage.root)
    inside(stage, "apt-get update && apt-get install -y --no-install-recommends ca-certificates python3 python3-venv")
    inside(stage, f"for name in {' '.join(COMPILERS)}; do ! command -v $name || exit 1; done")
    for file in (wheel, ROOT / "constraints.txt"):
        shutil.copy(file, stage.root / "tmp")
    inside(stage, "python3 -m venv /opt/penstock")
    inside(
        stage,
        "/opt/penstock/bin/pip install --no-cache-dir --disable-pip-version-check --only-binary :all: "
        f"-c /tmp/constraints.txt /tmp/{wheel.name}",
    )
    stage.user, stage.folder = "10001:10001", "/tmp"
    with PenstockServer(["--aggregated"]) as server:
        expected = completion(server.url)
    assert served(stage) == expected


def build_wheel(folder: Path) -> Path:
    """The wheel for the interpreter that runs the tests; its tag names the glibc that it needs."""
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/wheel", "--out", folder],
        capture_output=True,
        text=True,
        timeout=BUILD_S,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    (wheel,) = folder.iterdir()
    assert "-manylinux_2_" in wheel.name, wheel.name
    return wheel


def inside(stage: Stage, script: str) -> None:
    """Run a line of shell in the bare system."""
    run(stage.argv(["/bin/sh", "-ec", script]))


def served(stage: Stage) -> str:
    """The text that the installed ``penstock serve`` generates."""
    port = free_port()
    command = stage.argv(["/opt/penstock/bin/penstock", "serve", "--port", str(port)])
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as service:
        try:
            url = f"http://127.0.0.1:{port}"
            wait_ready(service, url)
            return completion(url)
        finally:
            stop(service)


def completion(url: str) -> str:
    with httpx.Client(base_url=url, timeout=PATIENCE_S, trust_env=False) as client:
        response = client.post("/v1/completions", json=REQUEST)
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["completion_tokens"] == REQUEST["max_tokens"]
    return str(response.json()["choices"][0]["text"])
