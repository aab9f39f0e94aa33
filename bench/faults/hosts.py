"""Several hosts on this machine: network namespaces, joined pairwise by links that can be cut and slowed.

Needs root (or a user namespace with it: ``unshare -Urnm python -m bench.faults``) and iproute2.  Everything is taken
down again.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from bench.faults.result import NotHereError

from cluster.server import PenstockNode, PenstockServer, PenstockWorker

WORLD = "world"
"""Where clients are: this very namespace."""


class Hosts:
    """Namespaces named ``names``, each with an address of its own, and a link between any two; and to the world.

    Host i has the address 10.77.<i>.1 whatever link it is reached by.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = (WORLD, *names)
        self._tag = f"pf{os.getpid() % 100000}"
        self._made: list[str] = []

    def __enter__(self) -> Hosts:
        if shutil.which("ip") is None:
            raise NotHereError("iproute2's ip")
        try:
            for name in self._names[1:]:
                run("ip", "netns", "add", self._space(name))
                self._made.append(name)
                run("ip", "-n", self._space(name), "link", "set", "lo", "up")
            for name in self._names:
                self._ip(name, "addr", "add", f"{self.address(name)}/32", "dev", "lo")
            for one, other in itertools.combinations(self._names, 2):
                self._join(one, other)
        except subprocess.CalledProcessError as error:
            self.__exit__(None, None, None)
            raise NotHereError(f"network namespaces: {error.stderr.decode().strip()}") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in self._made:
            subprocess.run(["ip", "netns", "del", self._space(name)], capture_output=True, check=False)
        subprocess.run(
            ["ip", "addr", "del", f"{self.address(WORLD)}/32", "dev", "lo"], capture_output=True, check=False
        )
        for name in self._names[1:]:
            subprocess.run(["ip", "link", "del", self._device(WORLD, name)], capture_output=True, check=False)

    def address(self, name: str) -> str:
        """Of a host."""
        return f"10.77.{self._names.index(name)}.1"

    def inside(self, name: str) -> list[str]:
        """The words that make a command run there."""
        return ["ip", "netns", "exec", self._space(name)]

    def cut(self, one: str, other: str) -> None:
        """Nothing arrives between two hosts any more, and neither is told: frames go to an address that nobody has."""
        for here, there in ((one, other), (other, one)):
            nobody = ("lladdr", "02:00:00:00:00:01", "nud", "permanent")
            self._ip(here, "neigh", "replace", self.address(there), "dev", self._device(here, there), *nobody)

    def mend(self, one: str, other: str) -> None:
        """As it was."""
        for here, there in ((one, other), (other, one)):
            self._ip(here, "neigh", "del", self.address(there), "dev", self._device(here, there))

    def slow(self, one: str, other: str, rate: str) -> None:
        """A token bucket in both directions; ``rate`` as tc has it (``20mbit``)."""
        for here, there in ((one, other), (other, one)):
            tbf = ("root", "tbf", "rate", rate, "burst", "64kb", "latency", "100ms")
            self._tool("tc", here, "qdisc", "replace", "dev", self._device(here, there), *tbf)

    def _join(self, one: str, other: str) -> None:
        near, far = self._device(one, other), self._device(other, one)
        run("ip", "link", "add", near, "type", "veth", "peer", "name", far)
        for here, device in ((one, near), (other, far)):
            if here != WORLD:
                run("ip", "link", "set", device, "netns", self._space(here))
        for here, there in ((one, other), (other, one)):
            self._ip(here, "link", "set", self._device(here, there), "up")
            self._route(here, there)

    def _route(self, here: str, there: str) -> None:
        device = self._device(here, there)
        route = ("route", "replace", self.address(there), "dev", device, "scope", "link", "src", self.address(here))
        self._ip(here, *route)

    def _device(self, here: str, there: str) -> str:
        return f"{self._tag}{self._names.index(here)}{self._names.index(there)}"

    def _space(self, name: str) -> str:
        return f"{self._tag}-{name}"

    def _ip(self, name: str, *words: str) -> None:
        self._tool("ip", name, *words)

    def _tool(self, tool: str, name: str, *words: str) -> None:
        run(tool, *(() if name == WORLD else ("-n", self._space(name))), *words)


class HostServer(PenstockServer):
    """A ``penstock serve`` on a host."""

    def __init__(self, hosts: Hosts, name: str, flags: Sequence[str]) -> None:
        address = hosts.address(name)
        super().__init__(["--host", address, "--api-key", "bench", *flags])
        self.url = f"http://{address}:{self.port}"
        self.launcher = hosts.inside(name)

    def _port_is_free(self) -> bool:
        return True  # it was another namespace's


class HostWorker(PenstockWorker):
    """A ``penstock worker`` on a host."""

    def __init__(self, hosts: Hosts, name: str, flags: Sequence[str]) -> None:
        super().__init__(flags)
        self._address = hosts.address(name)
        self.launcher = hosts.inside(name)

    @property
    def endpoint(self) -> str:
        return f"tcp://{self._address}:{self.port}"

    def _port_is_free(self) -> bool:
        return True


class HostNode(PenstockNode):
    """A ``penstock node`` on the host of its name; its fleet file has the addresses of ``hosts``."""

    def __init__(self, hosts: Hosts, fleet: Path, name: str, http_port: int, api_key: str) -> None:
        super().__init__(fleet, name, http_port, environ={"PENSTOCK_API_KEY": api_key})
        self.url = f"http://{hosts.address(name)}:{http_port}"
        self.launcher = hosts.inside(name)

    def _port_is_free(self) -> bool:
        return True

    def signal_all(self, signum: int) -> None:
        """To every process of the node, as if it befell the host."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)


def run(*words: str) -> None:
    """Raises CalledProcessError."""
    subprocess.run(words, check=True, capture_output=True)
