"""Stored responses of the Responses API: one SQLite file that all gateways of a host share.

::

    responses      id, tenant, stored_at, created, bytes | response (JSON), items (JSON), deltas (JSON)
    tenant_bytes   tenant, bytes            of all its responses
    host           boot                     the id of the boot that stored_at counts from

A response is kept for ``stored_responses_s`` of this host's time since boot, which no setting of its clock changes;
after a reboot, its age is what the wall clock says.  When all are larger than ``max_stored_responses_bytes``, the
oldest of the tenant with the most bytes go.  A tenant's name is part of every query.  SQLite's write-ahead log makes a
write complete or absent if a gateway dies, and lets others read meanwhile; content is overwritten when it is deleted.
Each process has one connection and one thread for it.  Knows nothing about the JSON of responses.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from penstock.config.limits import RequestLimits
from penstock.errors import ConfigError, StoreUnavailable
from penstock.telemetry.log import log_event

log = logging.getLogger("penstock.api")

_FILE = "responses.sqlite3"
RESPONSE_STORE_FILES = (_FILE, f"{_FILE}-wal", f"{_FILE}-shm")
"""Names of all files that a store may consist of."""

_VERSION = 1
_PAGE_BYTES = 8192
_PAGES_SPARE = 1.5
"""Pages that are partly filled, and indexes: the file never has more than this times the bytes that are stored."""
_LOG_BYTES = 4 << 20
_OVERHEAD_BYTES = 512
"""Of one response, counted with its content."""
_EXPIRED_AT_A_TIME = 64

_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL, stored_at REAL NOT NULL, created INTEGER NOT NULL,
    bytes INTEGER NOT NULL, response BLOB NOT NULL, items BLOB NOT NULL, deltas BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS responses_by_age ON responses (stored_at);
CREATE INDEX IF NOT EXISTS responses_by_tenant ON responses (tenant, stored_at);
CREATE TABLE IF NOT EXISTS tenant_bytes (tenant TEXT PRIMARY KEY, bytes INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS host (boot TEXT NOT NULL);
CREATE TRIGGER IF NOT EXISTS count_added AFTER INSERT ON responses BEGIN
    INSERT INTO tenant_bytes VALUES (new.tenant, new.bytes)
        ON CONFLICT (tenant) DO UPDATE SET bytes = bytes + new.bytes;
END;
CREATE TRIGGER IF NOT EXISTS count_removed AFTER DELETE ON responses BEGIN
    UPDATE tenant_bytes SET bytes = bytes - old.bytes WHERE tenant = old.tenant;
    DELETE FROM tenant_bytes WHERE tenant = old.tenant AND bytes <= 0;
END;
"""

T = TypeVar("T")


class StoredConversation(msgspec.Struct, frozen=True, kw_only=True):
    """One response, and the conversation that it belongs to."""

    id: str
    response: bytes  # JSON, as its client got it
    items: bytes  # JSON: the array of all input items, those of earlier responses included
    deltas: bytes = b"[]"  # JSON: characters of each delta, an array for each output item

    @property
    def nbytes(self) -> int:
        """What it counts among all that is stored."""
        return len(self.response) + len(self.items) + len(self.deltas) + _OVERHEAD_BYTES


class ResponseStore(Protocol):
    """Stored responses.  ``tenant`` is who asks: nobody finds another's."""

    async def save(self, tenant: str, response: StoredConversation) -> bool:
        """Keep a response, instead of one with its id.  Returns whether it is kept; never raises."""
        ...

    async def load(self, tenant: str, name: str) -> StoredConversation | None:
        """None: not stored.  Raises StoreUnavailable."""
        ...

    async def load_responses(self, tenant: str, names: Sequence[str]) -> dict[str, bytes]:
        """The JSON of those that are stored.  Raises StoreUnavailable."""
        ...

    async def delete(self, tenant: str, name: str) -> bool:
        """Returns whether it was stored.  Raises StoreUnavailable."""
        ...


class SqliteResponseStore:
    """``ResponseStore`` in a file.  Construct it in the process that uses it: connections do not survive forks."""

    def __init__(self, path: Path, limits: RequestLimits, now: Callable[[], float] | None = None) -> None:
        """``path`` was prepared by ``create_response_store``.  ``now``: seconds since boot."""
        self._path = path
        self._limits = limits
        self._now = now or _since_boot
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="response-store")
        self._connection: sqlite3.Connection | None = None

    def close(self) -> None:
        """Closes the connection, after what is queued."""
        self._thread.submit(self._disconnect)
        self._thread.shutdown()

    async def save(self, tenant: str, response: StoredConversation) -> bool:
        try:
            await self._run(lambda: self._save(tenant, response))
        except StoreUnavailable:
            return False
        return True

    async def load(self, tenant: str, name: str) -> StoredConversation | None:
        return await self._run(lambda: self._load(tenant, name))

    async def load_responses(self, tenant: str, names: Sequence[str]) -> dict[str, bytes]:
        return await self._run(lambda: self._load_responses(tenant, names))

    async def delete(self, tenant: str, name: str) -> bool:
        return await self._run(lambda: self._delete(tenant, name))

    async def _run(self, work: Callable[[], T]) -> T:
        """``work`` on the thread.  Work that has begun ends, whether or not it is still awaited."""

        def logged() -> T:
            try:
                return work()
            except sqlite3.Error as error:
                log_event(log, logging.WARNING, "stored responses are out of reach", error=str(error)[:200])
                self._disconnect()
                raise StoreUnavailable("The stored responses are out of reach now; try again.") from error

        return await asyncio.wrap_future(self._thread.submit(logged))

    def _connect(self) -> sqlite3.Connection:
        if self._connection is None:
            self._connection = _open(self._path, self._limits)
        return self._connection

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(sqlite3.Error):
                connection.close()

    def _oldest(self) -> float:
        """What was stored before this has expired."""
        return self._now() - self._limits.stored_responses_s

    def _save(self, tenant: str, response: StoredConversation) -> None:
        connection = self._connect()
        row = (response.id, tenant, self._now(), int(time.time()), response.nbytes)
        with _transaction(connection):
            connection.execute("DELETE FROM responses WHERE id = ? AND tenant = ?", (response.id, tenant))
            self._remove_expired(connection)
            self._make_room(connection, response.nbytes)
            connection.execute(
                "INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (*row, response.response, response.items, response.deltas),
            )

    def _remove_expired(self, connection: sqlite3.Connection) -> None:
        connection.execute(
            "DELETE FROM responses WHERE rowid IN (SELECT rowid FROM responses WHERE stored_at < ? LIMIT ?)",
            (self._oldest(), _EXPIRED_AT_A_TIME),
        )

    def _make_room(self, connection: sqlite3.Connection, nbytes: int) -> None:
        """Remove the oldest of the tenants with the most, until so many bytes more may be stored."""
        most = self._limits.max_stored_responses_bytes - nbytes
        if most < 0:
            raise sqlite3.DataError(f"a response of {nbytes} bytes is larger than max_stored_responses_bytes")
        while connection.execute("SELECT total(bytes) FROM tenant_bytes").fetchone()[0] > most:
            largest = connection.execute("SELECT tenant FROM tenant_bytes ORDER BY bytes DESC LIMIT 1").fetchone()
            connection.execute(
                "DELETE FROM responses WHERE rowid ="
                " (SELECT rowid FROM responses WHERE tenant = ? ORDER BY stored_at LIMIT 1)",
                largest,
            )

    def _load(self, tenant: str, name: str) -> StoredConversation | None:
        found = self._connect().execute(
            "SELECT response, items, deltas FROM responses WHERE id = ? AND tenant = ? AND stored_at >= ?",
            (name, tenant, self._oldest()),
        )
        row = found.fetchone()
        return None if row is None else StoredConversation(id=name, response=row[0], items=row[1], deltas=row[2])

    def _load_responses(self, tenant: str, names: Sequence[str]) -> dict[str, bytes]:
        loaded: dict[str, bytes] = {}
        for name in names:
            found = self._connect().execute(
                "SELECT response FROM responses WHERE id = ? AND tenant = ? AND stored_at >= ?",
                (name, tenant, self._oldest()),
            )
            row = found.fetchone()
            if row is not None:
                loaded[name] = row[0]
        return loaded

    def _delete(self, tenant: str, name: str) -> bool:
        """The content is gone from the file and from its log when this returns, unless others read at that moment."""
        connection = self._connect()
        with _transaction(connection):
            removed = connection.execute(
                "DELETE FROM responses WHERE id = ? AND tenant = ? AND stored_at >= ?", (name, tenant, self._oldest())
            )
            count = removed.rowcount
            self._remove_expired(connection)
        if count:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        return count > 0


def create_response_store(folder: Path, limits: RequestLimits) -> Path:
    """Prepare the file in ``folder``, which is created if it is missing, before any process uses it.

    Returns its path.  Raises ConfigError for a folder or file that cannot be used.
    """
    path = folder / _FILE
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        path.chmod(0o600)  # SQLite gives its other files the same mode
        connection = _open(path, limits)
        try:
            _prepare(connection, path)
        finally:
            connection.close()
    except OSError as error:
        raise ConfigError(f"--response-store {folder}: {error.strerror or error}") from None
    except sqlite3.Error as error:
        raise ConfigError(f"{path} is no store of responses ({error}): remove it, or choose another folder") from None
    return path


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version not in (0, _VERSION):
        raise ConfigError(f"{path} is of another version of Penstock ({version}): remove it, or choose another folder")
    connection.executescript(_SCHEMA)
    connection.execute(f"PRAGMA user_version = {_VERSION}")
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    known = connection.execute("SELECT boot FROM host").fetchone()
    if known is None or known[0] != boot:
        with _transaction(connection):
            connection.execute(
                "UPDATE responses SET stored_at = ? - max(0, ? - created)", (_since_boot(), int(time.time()))
            )
            connection.execute("DELETE FROM host")
            connection.execute("INSERT INTO host VALUES (?)", (boot,))


def _open(path: Path, limits: RequestLimits) -> sqlite3.Connection:
    connection = sqlite3.connect(
        path, timeout=limits.response_store_wait_s, isolation_level=None, check_same_thread=False
    )
    try:
        pages = int(limits.max_stored_responses_bytes * _PAGES_SPARE / _PAGE_BYTES) + 64
        for setting in (
            f"page_size = {_PAGE_BYTES}",
            "journal_mode = WAL",
            "synchronous = NORMAL",
            "secure_delete = ON",
            "trusted_schema = OFF",
            f"journal_size_limit = {_LOG_BYTES}",
            f"max_page_count = {pages}",
        ):
            connection.execute(f"PRAGMA {setting}").fetchall()
    except sqlite3.Error:
        connection.close()
        raise
    return connection


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        with suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def _since_boot() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class PendingResponses:
    """Bytes of the conversations of open requests that were loaded or are to be stored, in one gateway."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.nbytes = 0

    def reserve(self, nbytes: int) -> bool:
        """Returns whether there is room; then ``release`` them later."""
        if self.nbytes + nbytes > self._most:
            return False
        self.nbytes += nbytes
        return True

    def release(self, nbytes: int) -> None:
        """They are no longer held."""
        self.nbytes -= nbytes
