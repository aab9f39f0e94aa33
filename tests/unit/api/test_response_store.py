"""Stored responses in SQLite: whose they are, how long and how many are kept, and what survives."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from penstock.api.response_store import (
    RESPONSE_STORE_FILES,
    PendingResponses,
    SqliteResponseStore,
    StoredConversation,
    create_response_store,
)
from penstock.config.limits import RequestLimits
from penstock.errors import ConfigError, StoreUnavailable

LIMITS = RequestLimits(stored_responses_s=100, max_stored_responses_bytes=1 << 20)


def response(name: str, text: str = "x", items: int = 10) -> StoredConversation:
    return StoredConversation(id=name, response=f'{{"text":"{text}"}}'.encode(), items=b"i" * items, deltas=b"[[1]]")


class FakeUptime:
    """Seconds since boot, as a test sets them."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


@asynccontextmanager
async def store_in(
    folder: Path, limits: RequestLimits = LIMITS, uptime: FakeUptime | None = None
) -> AsyncIterator[SqliteResponseStore]:
    store = SqliteResponseStore(create_response_store(folder, limits), limits, uptime)
    try:
        yield store
    finally:
        store.close()


async def test_what_is_stored_is_found_replaced_and_deleted(tmp_path: Path):
    async with store_in(tmp_path) as store:
        assert await store.save("a", response("r1"))
        assert await store.load("a", "r1") == response("r1")
        assert await store.save("a", response("r1", "again"))
        found = await store.load("a", "r1")
        assert found is not None
        assert found.response == b'{"text":"again"}'
        assert await store.load_responses("a", ["r1", "r2"]) == {"r1": found.response}
        assert await store.delete("a", "r1")
        assert not await store.delete("a", "r1")
        assert await store.load("a", "r1") is None


async def test_a_tenant_neither_finds_nor_replaces_nor_deletes_what_is_anothers(tmp_path: Path):
    async with store_in(tmp_path) as store:
        assert await store.save("a", response("r1"))
        assert await store.load("b", "r1") is None
        assert await store.load_responses("b", ["r1"]) == {}
        assert not await store.delete("b", "r1")
        assert not await store.save("b", response("r1", "stolen"))
        assert await store.load("a", "r1") == response("r1")


async def test_responses_expire_and_leave_the_file(tmp_path: Path):
    uptime = FakeUptime()
    async with store_in(tmp_path, uptime=uptime) as store:
        await store.save("a", response("r1"))
        uptime.seconds += 60
        await store.save("a", response("r2"))
        uptime.seconds += 41
        assert await store.load("a", "r1") is None
        assert await store.load_responses("a", ["r1"]) == {}
        assert not await store.delete("a", "r1")
        assert await store.load("a", "r2") is not None
        await store.save("b", response("r3"))  # any write removes what has expired
    assert names_in(tmp_path) == {"r2", "r3"}


def names_in(folder: Path) -> set[str]:
    connection = sqlite3.connect(folder / RESPONSE_STORE_FILES[0])
    try:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        totals = connection.execute("SELECT tenant, bytes FROM tenant_bytes ORDER BY tenant").fetchall()
        summed = "SELECT tenant, sum(bytes) FROM responses GROUP BY tenant ORDER BY tenant"
        assert totals == connection.execute(summed).fetchall()
        return {name for (name,) in connection.execute("SELECT id FROM responses")}
    finally:
        connection.close()


async def test_the_oldest_of_the_tenant_with_the_most_make_room(tmp_path: Path):
    uptime = FakeUptime()
    async with store_in(tmp_path, uptime=uptime) as store:
        await store.save("small", response("kept", items=100_000))
        for number in range(20):
            uptime.seconds += 1
            await store.save("large", response(f"r{number}", items=200_000))
        assert await store.load("small", "kept") is not None
        assert await store.load("large", "r19") is not None
        assert await store.load("large", "r0") is None
        assert not await store.save("large", response("huge", items=2 << 20)), "larger than all that may be kept"
    assert names_in(tmp_path) >= {"kept", "r19"}, "what cannot be kept makes no room"
    total = sum((tmp_path / name).stat().st_size for name in RESPONSE_STORE_FILES if (tmp_path / name).exists())
    assert total < 1.6 * LIMITS.max_stored_responses_bytes + (8 << 20), "the file is bounded, its log included"


async def test_deleted_content_is_in_no_file(tmp_path: Path):
    mark = b"the secret of the tenant"
    async with store_in(tmp_path) as store:
        await store.save("a", response("r1", mark.decode(), items=50_000))
        files = [tmp_path / name for name in RESPONSE_STORE_FILES]
        assert any(mark in path.read_bytes() for path in files), "the test looks where content is"
        await store.delete("a", "r1")
        assert not any(mark in path.read_bytes() for path in files if path.exists())


async def test_only_their_user_can_read_the_files(tmp_path: Path):
    folder = tmp_path / "made" / "here"
    async with store_in(folder) as store:
        await store.save("a", response("r1"))
        modes = [stat.S_IMODE((folder / name).stat().st_mode) for name in RESPONSE_STORE_FILES]
        assert modes == [0o600] * 3
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


async def test_two_gateways_see_the_same_and_write_at_once(tmp_path: Path):
    async with store_in(tmp_path) as one, store_in(tmp_path) as two:
        saves = [store.save("a", response(f"r{i}")) for i in range(40) for store in (one, two)]
        assert all(await asyncio.gather(*saves))
        for i in range(40):
            assert await two.load("a", f"r{i}") == await one.load("a", f"r{i}") == response(f"r{i}")


def killed_writer(path: Path) -> list[int]:
    """Numbers of the responses that a process has stored when it is killed in the middle of storing more."""
    script = (
        "import asyncio, sys; from pathlib import Path\n"
        "from penstock.api.response_store import *; from penstock.config.limits import RequestLimits\n"
        "async def main():\n"
        "    store = SqliteResponseStore(Path(sys.argv[1]), RequestLimits())\n"
        "    number = 0\n"
        "    while await store.save('a', StoredConversation(id=f'r{number}', response=b'x' * 50_000, items=b'[]')):\n"
        "        print(number, flush=True); number += 1\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        seen = [int(writer.stdout.readline()) for _ in range(30)]
        writer.send_signal(signal.SIGKILL)
        return seen + [int(line) for line in writer.stdout.read().split()]


async def test_responses_survive_a_process_that_is_killed_while_it_writes(tmp_path: Path):
    """What ``save`` has returned for is there, whole; the next process writes at once."""
    seen = killed_writer(create_response_store(tmp_path, LIMITS))
    async with store_in(tmp_path, RequestLimits()) as store:
        began = time.monotonic()
        for number in seen:
            found = await store.load("a", f"r{number}")
            assert found is not None
            assert found.response == b"x" * 50_000
        assert await store.save("a", response("after"))
        assert time.monotonic() - began < 2
    names_in(tmp_path)


async def test_a_store_that_is_locked_for_too_long_fails_its_request_only(tmp_path: Path):
    limits = RequestLimits(response_store_wait_s=0.05)
    async with store_in(tmp_path, limits) as store:
        await store.save("a", response("r1"))
        other = sqlite3.connect(tmp_path / RESPONSE_STORE_FILES[0], isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        assert not await store.save("a", response("r2"))
        with pytest.raises(StoreUnavailable):
            await store.delete("a", "r1")
        assert await store.load("a", "r1") is not None, "reading does not wait"
        other.execute("ROLLBACK")
        other.close()
        assert await store.save("a", response("r2"))


async def test_a_store_whose_disk_is_full_goes_on_when_it_is_not(tmp_path: Path):
    async with store_in(tmp_path) as store:
        await store.save("a", response("r1"))
        await store._run(lambda: store._connect().execute("PRAGMA max_page_count = 1").fetchall())  # SQLITE_FULL
        assert not await store.save("a", response("r2", items=500_000))
        assert await store.save("a", response("r2", items=500_000)), "a new connection has its own bound"
        assert await store.load("a", "r1") is not None


@pytest.mark.parametrize(
    ("content", "words"), [(b"not a database at all" * 100, "is no store of responses"), (b"", None)]
)
def test_another_file_is_refused_before_the_service_starts(tmp_path: Path, content: bytes, words: str | None):
    (tmp_path / RESPONSE_STORE_FILES[0]).write_bytes(content)
    if words is None:
        create_response_store(tmp_path, LIMITS)
        return
    with pytest.raises(ConfigError, match=words):
        create_response_store(tmp_path, LIMITS)


def test_a_store_of_another_version_a_link_and_a_file_for_a_folder_are_refused(tmp_path: Path):
    path = create_response_store(tmp_path / "newer", LIMITS)
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 9")
    connection.close()
    with pytest.raises(ConfigError, match=r"another version of Penstock \(9\)"):
        create_response_store(tmp_path / "newer", LIMITS)
    (tmp_path / "link").mkdir()
    os.symlink(path, tmp_path / "link" / RESPONSE_STORE_FILES[0])
    with pytest.raises(ConfigError, match="--response-store"):
        create_response_store(tmp_path / "link", LIMITS)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--response-store"):
        create_response_store(tmp_path / "file", LIMITS)


@pytest.mark.parametrize(("age_s", "kept"), [(50, True), (150, False), (-3600, True)])
async def test_after_a_reboot_the_age_is_that_of_the_wall_clock(tmp_path: Path, age_s: int, kept: bool):
    """A clock that was set back makes nothing older."""
    async with store_in(tmp_path) as store:
        await store.save("a", response("r1"))
    connection = sqlite3.connect(tmp_path / RESPONSE_STORE_FILES[0])
    with connection:
        connection.execute("UPDATE host SET boot = 'another'")
        connection.execute("UPDATE responses SET stored_at = 9e9, created = ?", (int(time.time()) - age_s,))
    connection.close()
    async with store_in(tmp_path) as store:
        assert (await store.load("a", "r1") is not None) is kept


def test_pending_bytes_are_bounded_in_sum():
    pending = PendingResponses(100)
    assert pending.reserve(60)
    assert not pending.reserve(41)
    assert pending.reserve(40)
    pending.release(60)
    assert pending.reserve(60)
    assert pending.nbytes == 100
