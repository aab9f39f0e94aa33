"""The first commands of docs/fleet.md as they are printed, on two hosts: network namespaces with a home folder each.

Other than on the page: addresses are those of the namespaces, KEY is the printed one, `scp` copies between the homes,
and `penstock` runs from the sources.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from bench.faults.hosts import Hosts
from bench.faults.result import NotHereError

from .processes import children
from .server import PATIENCE_S, START_S, STOP_S, PenstockServer

PAGE = Path(__file__).resolve().parents[2] / "docs/fleet.md"
COMMAND_S = 110.0
JOINED_S = 3 * START_S
"""Both nodes start at once, with seven processes that compute."""

ADDRESSES = {"10.0.0.1": "a", "10.0.0.2": "b"}
"""Those of the page: whose they are."""

PENSTOCK = """#!/bin/sh
export PYTHONPATH={paths}
exec {python} -m penstock "$@"
"""
SCP = """#!/bin/sh
# scp -rp FILE ... HOST-OF-B:
for last; do true; done
[ "$last" = HOST-OF-B: ] || exit 2
while [ $# -gt 2 ]; do shift; cp -rp "$1" {home}/ || exit 1; done
"""


def printed(before: str) -> str:
    """The block of commands that follows this line of the page."""
    _, _, rest = PAGE.read_text(encoding="utf-8").partition(f"\n{before}\n\n")
    found = re.match(r"(?:    .*\n)+", rest)
    assert found, f"{PAGE.name} has no commands after {before!r}"
    return re.sub("(?m)^    ", "", found[0])


class TypedHost:
    """A host of the page, at which its commands are typed, in the home folder."""

    def __init__(self, hosts: Hosts, name: str, folder: Path) -> None:
        self.home = folder / name
        self.home.mkdir()
        self._inside = hosts.inside(name)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
        self._environ = kept | {"HOME": str(self.home), "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}

    def type(self, text: str, given: str = "") -> str:
        """Commands that end, each with 0; what they print."""
        words = [*self._inside, "bash", "-ec", text]
        done = subprocess.run(
            words,
            env=self._environ,
            cwd=self.home,
            input=given,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
        return done.stdout

    @contextmanager
    def typed(self, text: str) -> Iterator[Path]:
        """A command that runs until the block ends; the file with what it prints.  SIGTERM must end it with 0."""
        log = self.home / "log"
        with log.open("wb") as out:
            words = [*self._inside, "bash", "-ec", f"exec {text}"]
            running = subprocess.Popen(
                words, env=self._environ, cwd=self.home, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )
        try:
            yield log
            started = children(running.pid)
            running.terminate()
            assert running.wait(STOP_S) == 0, log.read_text()
            assert started, "a supervisor has children"
        except BaseException:
            print(log.read_text())
            raise
        finally:
            running.kill()
            running.wait(PATIENCE_S)


@contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[dict[str, str], TypedHost, TypedHost]]:
    """The namespaces' address for each of the page's, and both hosts."""
    tools = folder / "bin"
    tools.mkdir()
    paths = os.pathsep.join(path for path in sys.path if path)
    (tools / "penstock").write_text(PENSTOCK.format(paths=paths, python=sys.executable))
    (tools / "scp").write_text(SCP.format(home=folder / "b"))
    for tool in tools.iterdir():
        tool.chmod(0o755)
    try:
        with Hosts(["a", "b"]) as hosts:
            here = {address: hosts.address(name) for address, name in ADDRESSES.items()}
            yield here, TypedHost(hosts, "a", folder), TypedHost(hosts, "b", folder)
    except NotHereError as error:
        pytest.skip(f"NOT RUN: {error}")


@pytest.mark.long
def test_the_commands_of_the_page_start_two_nodes_that_answer(tmp_path: Path) -> None:
    with two_hosts(tmp_path) as (here, a, b):

        def ours(text: str) -> str:
            for address, own in here.items():
                text = text.replace(address, own)
            return text

        fleet = re.search(r"(?ms)^```toml\n(.*?)^```$", PAGE.read_text(encoding="utf-8"))
        assert fleet is not None
        (a.home / "fleet.toml").write_text(ours(fleet[1]))
        (key,) = re.findall("sk-[A-Za-z0-9_-]+", a.type(printed("On the first host, once:")))
        start_a, start_b, chat = ours(printed("Then start the nodes, in any order:")).splitlines()
        with a.typed(start_a) as log, b.typed(start_b):
            for name in ("b-decode-0", "b-decode-1"):
                PenstockServer.wait_for(lambda name=name: f"joined {name}" in log.read_text(), JOINED_S, name)
            answer = a.type(chat.replace("KEY", key), "Tell me a story.")
            assert len(answer.split()) > 5
