"""Where gateways learn of workers: a file, DNS and NATS, each a real one that says what a test wants it to say."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from bench.faults.result import NotHereError

from .server import PenstockWorker

QUICK = "[membership]\ndns_poll_s = 0.5\ndns_empty_s = 3.0\ndns_timeout_s = 1.0\n"
AS_INSTALLED = "[membership]\n"
"""For ``settings``: how often is looked, by default."""


class MembersFile:
    """The file, written in place, not atomically."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, *workers: PenstockWorker, **labels: str) -> float:
        """Returns when it was written."""
        members = [{"name": f"at-{w.port}", "endpoint": w.endpoint, "labels": labels} for w in workers]
        self.path.write_text(json.dumps({"members": members}))
        return time.monotonic()


@dataclass(frozen=True)
class Members:
    """One source: its name for ``--members``, the configuration that a gateway needs, and how it is changed."""

    name: str
    config: str
    publish: Callable[[Sequence[PenstockWorker]], object]


Source = Callable[[Path, str], AbstractContextManager[Members]]
"""By a folder of its own and ``settings``, the gateways' table [membership].  Raises NotHereError."""


@contextmanager
def file_members(folder: Path, settings: str) -> Iterator[Members]:
    """``--members file:PATH``."""
    file = MembersFile(folder / "members.json")
    yield Members(f"file:{file.path}", settings, lambda workers: file.write(*workers))


@contextmanager
def srv_members(_: Path, settings: str) -> Iterator[Members]:
    """``--members dns:NAME``, by SRV records."""
    if find_spec("dns") is None:
        raise NotHereError("the extra dns")
    from .name_server import NameServer

    with NameServer("_penstock._tcp.workers.test", "SRV", ("127.0.0.1", 0)) as names:

        def publish(workers: Sequence[PenstockWorker]) -> None:
            names.records = [f"0 0 {worker.port} localhost." for worker in workers]

        config = settings + f'name_server = "127.0.0.1:{names.address[1]}"\n'
        yield Members("dns:_penstock._tcp.workers.test", config, publish)


@contextmanager
def nats_members(folder: Path, settings: str) -> Iterator[Members]:
    """``--members nats:URL/BUCKET``."""
    from .nats_server import BUCKET, NatsServer, member, nats_program

    if nats_program() is None:
        raise NotHereError("nats-server")
    if find_spec("nats") is None:
        raise NotHereError("the extra nats")
    server, known = NatsServer(folder), set[str]()
    asyncio.run(server.__aenter__())

    async def put(workers: Sequence[PenstockWorker]) -> None:
        wanted = {f"at-{worker.port}": worker.endpoint for worker in workers}
        for name in known - wanted.keys():
            await server.put(name, None)
        for name in wanted.keys() - known:
            await server.put(name, member(name, wanted[name]))
        known.clear()
        known.update(wanted)

    try:
        yield Members(f"nats:{server.url}/{BUCKET}", settings, lambda workers: asyncio.run(put(workers)))
    finally:
        server.kill()


SOURCES: dict[str, Source] = {"file": file_members, "dns": srv_members, "nats": nats_members}
