"""Gateways 2 -> 4 -> 1 and workers 2 -> 6 -> 2 while clients ask, by each source of members but Ray's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.wire.curve_keys import CurveKeys

from .keyed_load import KeyedLoad, leave_one_gateway, undisturbed
from .server import PATIENCE_S, PenstockServer, PenstockWorker
from .test_members import QUICK, MembersFile, rows

CLIENTS = 6
FAILOVER = "[failover]\nno_path_s = 120.0\n"

USED_S = 10.0
"""From a change of the members until the last of four gateways uses the last of four new workers, all on two cores.  Of
one gateway and one worker it is 3 s (``test_members.USED_S``)."""

Publish = Callable[[Sequence[PenstockWorker]], None]
"""Makes these the members."""


@contextmanager
def file_members(folder: Path) -> Iterator[tuple[str, str, Publish]]:
    file = MembersFile(folder / "members.json")
    yield f"file:{file.path}", FAILOVER, lambda workers: void(file.write(*workers))


@contextmanager
def srv_members(_: Path) -> Iterator[tuple[str, str, Publish]]:
    pytest.importorskip("dns", reason="the extra dns is not installed")
    from .name_server import NameServer

    with NameServer("_penstock._tcp.workers.test", "SRV", ("127.0.0.1", 0)) as names:

        def publish(workers: Sequence[PenstockWorker]) -> None:
            names.records = [f"0 0 {worker.port} localhost." for worker in workers]

        config = FAILOVER + QUICK + f'name_server = "127.0.0.1:{names.address[1]}"\n'
        yield "dns:_penstock._tcp.workers.test", config, publish


@contextmanager
def nats_members(folder: Path) -> Iterator[tuple[str, str, Publish]]:
    from .test_members_nats import SERVER, NatsServer, member

    if SERVER is None:
        pytest.skip("needs nats-server")
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
        yield f"nats:{server.url}/workers", FAILOVER, lambda workers: asyncio.run(put(workers))
    finally:
        server.kill()


def void(_: object) -> None:
    """Drops a result."""


def uses(gateway: PenstockServer, *names: str) -> bool:
    return rows(gateway) == dict.fromkeys(names, "ready")


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("source", [file_members, srv_members, nats_members], ids=["file", "dns", "nats"])
def test_gateways_and_workers_come_and_go_under_load_and_no_request_fails(source: Any, tmp_path: Path) -> None:
    keys = str(tmp_path / "keys")
    CurveKeys.ephemeral().save(Path(keys))
    names = [f"w{number}" for number in range(6)]
    workers = [PenstockWorker(["--keys", keys, "--name", name, "--kv-memory", "64MiB"]) for name in names]
    with ExitStack() as stack:
        members, config, publish = stack.enter_context(source(tmp_path))
        for worker in workers[:2]:
            stack.enter_context(worker)
        publish(workers[:2])
        flags = ["--keys", keys, "--members", members]
        gateways = [PenstockServer(flags, config=config, folder=tmp_path) for _ in range(4)]
        for gateway in gateways[:2]:
            stack.enter_context(gateway)
        for gateway in gateways[:2]:
            gateway.wait_for(lambda gateway=gateway: uses(gateway, *names[:2]), PATIENCE_S, "joined")
        wanted = undisturbed(gateways[0], CLIENTS)

        load = KeyedLoad([gateway.url for gateway in gateways[:2]], CLIENTS)
        with load.running():
            for gateway in gateways[2:]:
                stack.enter_context(gateway)
                load.urls.append(gateway.url)
            for worker in workers[2:]:
                stack.enter_context(worker)
            pids = {gateway.url: gateway.gateway_pid() for gateway in gateways}
            publish(workers)
            published = time.monotonic()
            for gateway in gateways:
                gateway.wait_for(lambda gateway=gateway: uses(gateway, *names), PATIENCE_S, "used")
            used_s = time.monotonic() - published
            print(f"\n{members.partition(':')[0]}: four workers used by four gateways after {used_s:.2f} s")
            gateways[0].wait_for(lambda: gateways[0].worker("w5")["running"] > 0, PATIENCE_S, "asked")

            leave_one_gateway(gateways, load)
            publish(workers[:2])
            gateways[0].wait_for(lambda: uses(gateways[0], *names[:2]), 2 * PATIENCE_S, "forgotten")
            for worker in workers[2:]:
                worker.stop()
            load.wait_answers(CLIENTS, 2 * PATIENCE_S)
        assert load.failed == []
        assert load.differing(wanted) == 0
        assert load.resumed > 0, "no stream was open when its gateway ended"
        assert gateways[0].gateway_pid() == pids[gateways[0].url]
        assert all(worker.running for worker in workers[:2])
        assert used_s <= USED_S
        gateways[0].wait_idle()
        assert all(row["kv_pages_leaked"] == 0 for row in gateways[0].workers())
