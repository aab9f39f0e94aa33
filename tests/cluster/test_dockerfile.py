"""The Dockerfile: its steps in bare root file systems, and the service in a read-only one, as its own user."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from .dockerfile import SOURCES, build, instructions
from .server import PATIENCE_S, free_port

ROOT = Path(__file__).parents[2]
NEEDED = ("mmdebstrap", "unshare", "chroot")
READY_S = 120.0
KEY = "sk-container"


def missing() -> str:
    """What keeps the steps from being run here."""
    lacks = [name for name in NEEDED if shutil.which(name) is None]
    if os.geteuid() != 0 or lacks or not SOURCES.exists():
        return f"NOT RUN: the Dockerfile's steps need root, Debian and {', '.join(NEEDED)}"
    probe = subprocess.run(["unshare", "--mount", "--pid", "--fork", "true"], check=False, capture_output=True)
    return "" if probe.returncode == 0 else "NOT RUN: the Dockerfile's steps need mount namespaces"


def context() -> list[str]:
    """What would be sent to the builder: tracked files, less those of .dockerignore."""
    ignored = {line.strip() for line in (ROOT / ".dockerignore").read_text().splitlines() if line.strip()}
    told = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in told.splitlines() if name.split("/")[0] not in ignored]


def test_no_stage_runs_as_root_at_the_end() -> None:
    steps = instructions(ROOT / "Dockerfile")
    last = [argument for instruction, argument in steps if instruction == "USER"][-1]
    assert last.split(":")[0] not in ("0", "root")
    assert {"HEALTHCHECK", "ENTRYPOINT", "CMD", "EXPOSE"} <= {instruction for instruction, _ in steps}


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_the_image_is_built_and_serves_in_a_read_only_root(tmp_path: Path) -> None:
    if why := missing():
        pytest.skip(why)
    image = build(ROOT / "Dockerfile", context(), tmp_path)
    home = tmp_path / "stage-1/home"
    before = written(home)
    port = free_port()
    environ = {"PENSTOCK_API_KEY": KEY, "PENSTOCK_PORT": str(port)}
    command = image.argv([*image.entrypoint, *image.command], readonly=True, **environ)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as service:
        try:
            url, headers = f"http://127.0.0.1:{port}", {"Authorization": f"Bearer {KEY}"}
            wait_ready(service, url)
            body = {"model": "storyteller", "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
            with httpx.Client(base_url=url, timeout=PATIENCE_S, trust_env=False) as client:
                answer = client.post("/v1/completions", json=body, headers=headers)
                assert answer.status_code == 200, answer.text
                assert answer.json()["usage"]["completion_tokens"] == 8
                assert client.post("/v1/completions", json=body).status_code == 401
            healthy = subprocess.run(image.argv(image.health, **environ), capture_output=True, text=True, check=False)
            assert healthy.returncode == 0, healthy.stderr
            users = {pid.stat().st_uid for pid in children_of(service.pid) if b"penstock" in cmdline(pid)}
            assert users == {10001}
        finally:
            stop(service)
    assert written(home) == before


def written(folder: Path) -> dict[Path, int]:
    """What lies there, and when each was last written, in nanoseconds."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def wait_ready(service: subprocess.Popen[str], url: str) -> None:
    until = time.monotonic() + READY_S
    while time.monotonic() < until:
        assert service.poll() is None, service.stdout.read() if service.stdout else ""
        try:
            if httpx.get(f"{url}/ready", trust_env=False).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.1)
    raise AssertionError("not ready in time")


def children_of(pid: int) -> list[Path]:
    """``/proc`` folders of a process's descendants; those that end meanwhile may be missing."""
    found = []
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            found += [Path(f"/proc/{child}"), *children_of(int(child))]
    return found


def cmdline(process: Path) -> bytes:
    with contextlib.suppress(OSError):
        return (process / "cmdline").read_bytes()
    return b""


def stop(service: subprocess.Popen[str]) -> None:
    """As ``docker stop``: SIGTERM to the service's first process, and what is left is killed."""
    for process in children_of(service.pid):
        if cmdline(process).startswith((b"/opt/penstock", b"penstock")):
            os.kill(int(process.name), signal.SIGTERM)
            break
    try:
        service.wait(60)
    except subprocess.TimeoutExpired:
        service.kill()
