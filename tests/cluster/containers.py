"""Containers as a host of them starts them: an address each on a bridge, a read-only root, mounts, another user.

Made of namespaces (unshare, nsenter, ip) and an overlay of this machine's root, without a container runtime; what they
run is what manifests say.  Everything ends with ``ContainerHost``, whose first process ends with this one.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

USER = 10001
NETWORK = "10.79.0"
REPOSITORY = Path(__file__).resolve().parents[2]
END_S = 20.0

SETUP = f"""
mount -t tmpfs none /run
ip link set lo up
ip link add bridge type bridge
ip address add {NETWORK}.1/24 dev bridge
ip link set bridge up
echo up
exec cat
"""

ENTER = """
layers=$1 mounts=$2; shift 2
mount -t tmpfs none "$layers"
mkdir "$layers/upper" "$layers/work" "$layers/root"
root=$layers/root
mount -t overlay overlay -o "lowerdir=/,upperdir=$layers/upper,workdir=$layers/work" "$root"
while IFS='=' read -r inside outside; do
    mkdir -p "$(dirname "$root$inside")"
    if [ -d "$outside" ]; then mkdir -p "$root$inside"; else : > "$root$inside"; fi
    mount --rbind "$outside" "$root$inside"
    above=$(dirname "$inside")
    while [ "$above" != / ]; do chmod a+x "$root$above"; above=$(dirname "$above"); done
done < "$mounts"
mount -o remount,ro "$root"
exec chroot "$root" "$@"
"""


class ContainerHost:
    """The bridge.  Use as a context manager; ``folder`` is for files of containers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.chmod(0o755)
        for parent in folder.parents[:2]:
            if parent.stat().st_uid == os.geteuid():
                parent.chmod(0o755)  # pytest's folders are for one user, and containers have others
        command = folder / "penstock"
        command.write_text(
            f"#!/bin/sh\nexport PYTHONPATH={REPOSITORY / 'src'} PYTHONDONTWRITEBYTECODE=1\n"
            f'exec {sys.executable} -m penstock "$@"\n'
        )
        command.chmod(0o755)
        self._relays: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> ContainerHost:
        """Raises NotHereError."""
        mapped = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        self._holder = subprocess.Popen(
            ["unshare", *mapped, "--net", "--mount", "sh", "-ec", SETUP], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != b"up\n":
            from bench.faults.result import NotHereError  # not at the top: the relay is this file as a program

            raise NotHereError("namespaces: root, or a kernel that gives them to all")
        return self

    def __exit__(self, *_: object) -> None:
        for relay in self._relays:
            relay.kill()
            relay.wait(END_S)
        self._holder.communicate(timeout=END_S)

    def inside(self, *words: str | Path) -> list[str]:
        """The command, on the bridge."""
        mapped = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        return ["nsenter", "--target", str(self._holder.pid), *mapped, "--net", "--mount", "--", *map(str, words)]

    def run(self, *words: str | Path) -> None:
        subprocess.run(self.inside(*words), check=True, timeout=END_S)

    def add_address(self, name: str, address: str) -> None:
        """A network namespace of this name."""
        self.run("ip", "netns", "add", name)
        link = f"veth{address.rpartition('.')[2]}"  # names of links have up to 15 characters
        self.run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
        self.run("ip", "link", "set", link, "master", "bridge", "up")
        for words in (f"address add {address}/24 dev eth0", "link set lo up", "link set eth0 up"):
            self.run("ip", "-n", name, *words.split())

    def relay(self, address: str, port: int) -> int:
        """The port of this host's loopback that leads to one on the bridge."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            words = self.inside(sys.executable, __file__, str(listener.fileno()), address, str(port))
            self._relays.append(subprocess.Popen(words, pass_fds=[listener.fileno()]))
            return int(listener.getsockname()[1])


class Container:
    """One.  Its first process is a child of this one and has its own pid."""

    def __init__(
        self, host: ContainerHost, name: str, address: str, *, mounts: Mapping[str, Path], environ: Mapping[str, str]
    ) -> None:
        """``mounts``: what it has, by its path there; ``environ`` is all of its environment, but for PATH."""
        self._host = host
        self.name = name
        self.address = address
        self._folder = host.folder / name
        (self._folder / "layers").mkdir(parents=True)
        own = {"/proc": Path("/proc"), "/dev": Path("/dev"), str(REPOSITORY): REPOSITORY}
        own |= {prefix: Path(prefix) for prefix in (sys.prefix, sys.base_prefix)}
        lines = [f"{inside}={outside}\n" for inside, outside in {**own, **mounts}.items()]
        lines.append(f"/usr/local/bin/penstock={host.folder / 'penstock'}\n")
        (self._folder / "mounts").write_text("".join(lines))
        self._environ = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", **environ}
        self._log = (self._folder / "log").open("wb")
        self._process: subprocess.Popen[bytes] | None = None
        host.add_address(name, address)

    def _as_user(self, words: Sequence[str]) -> list[str]:
        locked = ["--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]
        other = [f"--reuid={USER}", f"--regid={USER}", "--clear-groups"] if os.geteuid() == 0 else []
        return ["setpriv", *locked, *other, "--", "env", "-i", *(f"{k}={v}" for k, v in self._environ.items()), *words]

    def _enter(self, words: Sequence[str]) -> list[str]:
        layers, mounts = self._folder / "layers", self._folder / "mounts"
        entered = ["unshare", "--mount", "sh", "-ec", ENTER, "enter", layers, mounts, *self._as_user(words)]
        return self._host.inside("ip", "netns", "exec", self.name, *entered)

    def run_to_end(self, words: Sequence[str]) -> None:
        """As an init container: it must end with 0."""
        done = subprocess.run(self._enter(words), capture_output=True, text=True, timeout=END_S, check=False)
        assert done.returncode == 0, f"{shlex.join(words)}: {done.stdout}{done.stderr}"

    def start(self, words: Sequence[str]) -> None:
        """Start its main process, in a session of its own."""
        self._process = subprocess.Popen(
            self._enter(words), stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, start_new_session=True
        )

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "not started"
        return self._process

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def execute(self, words: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
        """Run a command in it, as exec probes do.  Raises subprocess.TimeoutExpired."""
        words = [
            "nsenter",
            "--target",
            str(self.process.pid),
            "--net",
            "--mount",
            "--root",
            "--",
            *self._as_user(words),
        ]
        return subprocess.run(words, capture_output=True, text=True, timeout=timeout_s, check=False)

    def read_log(self) -> str:
        return (self._folder / "log").read_text(errors="replace")

    def terminate(self, grace_s: float) -> int:
        """SIGTERM, SIGKILL after the grace period, and what it ends with: -9 where that was needed."""
        self.process.terminate()
        try:
            return self.process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait(END_S)

    def kill(self) -> None:
        """SIGKILL, if it runs."""
        if self.running:
            self.process.kill()
            self.process.wait(END_S)
        self._log.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while piece := await reader.read(1 << 16):
            writer.write(piece)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


async def _relay(descriptor: int, address: str, port: int) -> None:
    """Accept here, connect there: a socket stays in the namespace where it was made."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection(address, port)
        except OSError:
            writer.transport.abort()
            return
        await asyncio.gather(_copy(reader, back), _copy(there, writer))

    server = await asyncio.start_server(serve, sock=socket.socket(fileno=descriptor))
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_relay(int(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
