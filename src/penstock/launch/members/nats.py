"""Members in a bucket of NATS JetStream: keys are the names of members, values are their JSON objects.

A session is a connection and a watch of all keys.  It ends with any error, and after ``nats_relist_s`` in any case.
The next one begins with all keys: what a watch may miss (an expired key, a consumer that a server forgot) is found
then.  While there is no session the last good members stay.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.clock import Clock
from penstock.config.base import expanded_path
from penstock.config.limits import MembershipConfig
from penstock.errors import ConfigError
from penstock.launch.members.interface import Member, MembersHandler, MembersProblem, SourceProblem, check_tcp_endpoint

if TYPE_CHECKING:
    from nats.js.kv import KeyValue

log = logging.getLogger(__name__)

_BUCKET = re.compile(r"((?:nats|tls)://[^/@\s]+)/([A-Za-z0-9_-]{1,128})")
_REMOVED = ("DEL", "PURGE")


class NatsMembers:
    """``interface.Members`` of ``URL/BUCKET``, with nats-py."""

    def __init__(self, text: str, limits: MembershipConfig, clock: Clock) -> None:
        """Raises ConfigError if nats-py is not installed."""
        match = _BUCKET.fullmatch(text)
        if match is None:
            raise ConfigError(
                f"--members nats:{text}: expected nats:nats://HOST:PORT/BUCKET (or tls://); a user and password, or a "
                "token, belong in the file that nats_credentials in [membership] names"
            )
        if find_spec("nats") is None:
            raise ConfigError(f"--members nats:{text}: nats-py is not installed: pip install 'penstock[nats]'")
        self._url, self._bucket = match.groups()
        self._limits = limits
        self._clock = clock
        self._members: dict[str, Member] = {}  # the last good ones, by key
        self._is_told = False  # of those
        self._invalid: dict[str, str] = {}  # why a key's value is not used
        self._problem = SourceProblem(f"{self._url}/{self._bucket}")

    async def watch(self, tell: MembersHandler) -> None:
        self._is_told = False
        while True:
            try:
                async with asyncio.timeout(self._limits.nats_relist_s + 5 * self._limits.nats_check_s):
                    await self._session(tell)
            except TimeoutError:
                self._problem.note("it does not answer")
            except Exception as error:  # noqa: BLE001 - nats-py raises many kinds, OSError and its own among them
                self._problem.note(str(error) or type(error).__name__)
            if self._problem.text is not None:
                await asyncio.sleep(self._limits.nats_check_s)

    def problems(self) -> Sequence[MembersProblem]:
        where = f"nats:{self._url}/{self._bucket}"
        own = () if self._problem.text is None else ((where, self._problem.text),)
        return (*own, *((f"{where} {key}", reason) for key, reason in sorted(self._invalid.items())))

    async def _session(self, tell: MembersHandler) -> None:
        import nats

        async def ignore(_error: Exception) -> None:
            """What ends a session is raised by its calls, too."""

        wait_s = self._limits.nats_check_s
        connection = await nats.connect(
            self._url,
            name="penstock gateway",
            error_cb=ignore,
            allow_reconnect=False,
            connect_timeout=wait_s,
            **self._credentials(),
        )
        try:
            await self._follow(await connection.jetstream(timeout=wait_s).key_value(self._bucket), tell)
        finally:
            await connection.close()

    async def _follow(self, bucket: KeyValue, tell: MembersHandler) -> None:
        import nats.errors

        watcher = await bucket.watchall()
        until = self._clock.now() + self._limits.nats_relist_s
        found, invalid, listed = dict[str, Member](), dict[str, str](), False
        while self._clock.now() < until:
            try:
                entry = await watcher.updates(self._limits.nats_check_s)  # type: ignore[no-untyped-call]
            except nats.errors.TimeoutError:
                await bucket.status()  # raises if the connection or the bucket is gone
                continue
            if entry is not None:
                self._apply(entry, found, invalid)
            elif not listed:  # these were all keys that there are
                listed = True
                self._problem.note(None)
            if listed:
                self._invalid = invalid
                if found != self._members or not self._is_told:
                    tell([found[key] for key in sorted(found)])
                    self._members, self._is_told = dict(found), True

    def _apply(self, entry: KeyValue.Entry, found: dict[str, Member], invalid: dict[str, str]) -> None:
        """Take a key's value.  One that is invalid leaves the last good one in use."""
        key, before = entry.key, found.pop(entry.key, self._members.get(entry.key))
        invalid.pop(key, None)
        if entry.operation in _REMOVED:
            return
        try:
            found[key] = _parse(key, entry.value or b"")
        except ConfigError as error:
            if self._invalid.get(key) != str(error):
                log.warning("%s in the bucket %s is not a member: %s", key, self._bucket, error)
            invalid[key] = str(error)
            if before is not None:
                found[key] = before
        if len(found) + len(invalid) > 2 * self._limits.max_members or len(found) > self._limits.max_members:
            raise ConfigError(f"the bucket has more keys than max_members, {self._limits.max_members}")

    def _credentials(self) -> dict[str, Any]:
        """Raises ConfigError."""
        if not self._limits.nats_credentials:
            return {}
        try:
            text = expanded_path(self._limits.nats_credentials, "nats_credentials").read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read nats_credentials: {error}") from None
        user, colon, password = text.partition(":")
        return {"user": user, "password": password} if colon else {"token": text}


def _parse(key: str, raw: bytes) -> Member:
    """Raises ConfigError in one line."""
    try:
        member = msgspec.json.decode(raw, type=Member)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(str(error).replace("\n", " ")) from None
    check_tcp_endpoint(member.endpoint, "endpoint")
    if member.name != key:
        raise ConfigError(f"its name is {member.name!r}; expected that of its key")
    return member
