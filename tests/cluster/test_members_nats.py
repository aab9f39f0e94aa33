"""Members in a real NATS server: what its bucket says is followed, and its death loses none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from penstock.clock import MonotonicClock
from penstock.config.limits import MembershipConfig
from penstock.launch.members.registry import open_members
from penstock.wire.curve_keys import CurveKeys

from .asking import ask
from .nats_server import NatsServer, member, nats_program
from .server import PATIENCE_S, PenstockServer, PenstockWorker

pytest.importorskip("nats", reason="the extra nats is not installed")
pytestmark = pytest.mark.skipif(nats_program() is None, reason="needs nats-server")

LIMITS = MembershipConfig(nats_check_s=0.2)


class Followed:
    """What is told of the members."""

    def __init__(self, text: str) -> None:
        self.source = open_members(text, LIMITS, MonotonicClock())
        self.now: dict[str, str] | None = None

    def _tell(self, members) -> None:
        self.now = {one.name: one.endpoint for one in members}

    async def until(self, **expected: str) -> None:
        await until(lambda: self.now == expected)


@asynccontextmanager
async def following(text: str) -> AsyncIterator[Followed]:
    followed = Followed(text)
    task = asyncio.create_task(followed.source.watch(followed._tell))
    yield followed
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def until(condition) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - what is waited for is a state, not an event
            await asyncio.sleep(0.01)


async def test_keys_come_change_and_go_and_what_is_no_member_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with NatsServer(tmp_path) as server:
        await server.put("w0", member("w0", "tcp://10.0.0.1:9000"))
        async with following(f"nats:{server.url}/workers") as found:
            await found.until(w0="tcp://10.0.0.1:9000")
            await server.put("w1", member("w1", "tcp://10.0.0.2:9000"))
            await found.until(w0="tcp://10.0.0.1:9000", w1="tcp://10.0.0.2:9000")
            await server.put("w0", "half")
            await until(lambda: "malformed" in str(found.source.problems()))
            await server.put("w2", member("w3", "tcp://10.0.0.3:9000"))
            await until(lambda: "expected that of its key" in str(found.source.problems()))
            assert found.now == {"w0": "tcp://10.0.0.1:9000", "w1": "tcp://10.0.0.2:9000"}
            await server.put("w2", None)
            await server.put("w0", member("w0", "tcp://10.0.0.9:9000"))
            await found.until(w0="tcp://10.0.0.9:9000", w1="tcp://10.0.0.2:9000")
            await until(lambda: found.source.problems() == ())
            await server.put("w1", None)
            await found.until(w0="tcp://10.0.0.9:9000")
    assert [record.getMessage() for record in caplog.records if "is not a member" in record.getMessage()][2:] == []


async def test_a_server_that_is_killed_loses_no_member_and_is_followed_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with NatsServer(tmp_path) as server:
        await server.put("w0", member("w0", "tcp://10.0.0.1:9000"))
        async with following(f"nats:{server.url}/workers") as found:
            await found.until(w0="tcp://10.0.0.1:9000")
            server.kill()
            await until(lambda: found.source.problems() != ())
            assert found.now == {"w0": "tcp://10.0.0.1:9000"}
            server.start()
            await until(lambda: found.source.problems() == ())
            assert found.now == {"w0": "tcp://10.0.0.1:9000"}
            await server.put("w1", member("w1", "tcp://10.0.0.2:9000"))
            await found.until(w0="tcp://10.0.0.1:9000", w1="tcp://10.0.0.2:9000")
    assert caplog.text.count("the last good ones stay") == 1, "logged once"


async def test_a_bucket_that_does_not_exist_is_waited_for(tmp_path: Path) -> None:
    async with NatsServer(tmp_path) as server, following(f"nats:{server.url}/others") as found:
        await until(lambda: found.source.problems() != ())
        assert found.now is None or found.now == {}
        connection = await server.connect()
        bucket = await connection.jetstream().create_key_value(bucket="others")
        await bucket.put("w0", member("w0", "tcp://10.0.0.1:9000").encode())
        await connection.close()
        await found.until(w0="tcp://10.0.0.1:9000")


async def test_a_gateway_uses_the_workers_in_a_bucket(tmp_path: Path) -> None:
    keys = str(tmp_path / "keys")
    CurveKeys.ephemeral().save(Path(keys))
    async with NatsServer(tmp_path) as server:
        with PenstockWorker(["--keys", keys, "--name", "one"]) as one:
            await server.put("one", member("one", one.endpoint))
            flags = ["--keys", keys, "--members", f"nats:{server.url}/workers"]
            with PenstockServer(flags) as gateway:
                text = ask(gateway, max_tokens=60)
                server.kill()
                gateway.wait_for(lambda: "the last good ones stay" in gateway.read_log(), PATIENCE_S, "told of")
                assert ask(gateway, max_tokens=60) == text
                assert [row["id"] for row in gateway.workers()] == ["one"]
