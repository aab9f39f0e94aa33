"""The file of API keys: hashes of keys, what each may be used for, and the weight and rate limits of each tenant.

Written by ``penstock keys``, read by gateways, which reload it when it changes.  A key is shown once, when it is made;
the file has its SHA-256, which is enough for keys of 256 random bits.  Knows nothing about HTTP.

::

    {"salt": "...", "tenants": {"search": {"weight": 2.0, ...}}, "keys": [{"id": "k-…", "tenant": "search", ...}]}
"""

from __future__ import annotations

import hashlib
import math
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec

from penstock.config.base import Config, Positive, expanded_path
from penstock.config.private_file import locked_folder, read_private_file, replace_file
from penstock.errors import ConfigError

MAX_FILE_BYTES = 4 << 20
NAME = r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$"
"""Of a tenant."""

ID_CHARS = 12
KEY_PREFIX = "sk-ps-"

MAX_KEY_MODELS = 64
"""Models that one key may list."""

MAX_MODEL_NAME_CHARS = 256

MAX_KEY_CONCURRENCY = 1_000_000

MAX_EXPIRES = 253_402_300_799
"""The last second of the year 9999, in Unix seconds."""

_Name = Annotated[str, msgspec.Meta(pattern=NAME)]
_ModelName = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_MODEL_NAME_CHARS)]
ServiceClassName = Literal["interactive", "batch"]
RouteName = Literal[
    "chat", "completions", "responses", "messages", "embeddings", "rerank", "classify", "audio", "tokenize"
]
"""Groups of paths that a key may be restricted to (``api.key_permissions``)."""


class TenantEntry(Config, frozen=True, kw_only=True):
    """Weight and rate limits of one tenant, over all its keys."""

    weight: Annotated[float, msgspec.Meta(gt=0, le=1e6)] = 1.0  # of its share, relative to other tenants
    tokens_per_minute: Positive | None = None  # of prompts and output
    requests_per_minute: Positive | None = None


class KeyEntry(Config, frozen=True, kw_only=True, omit_defaults=True):
    """One key.  What has its default is not written, so that earlier versions can read the file."""

    id: Annotated[str, msgspec.Meta(pattern="^k-[0-9a-f]{8}$")]
    tenant: _Name
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    classes: Annotated[tuple[ServiceClassName, ...], msgspec.Meta(min_length=1)] = (
        "interactive",
        "batch",
    )  # the first is the default
    operator: bool = False  # may also change roles, drain workers, load adapters and see all requests
    created: int = 0  # Unix seconds
    expires: Annotated[int, msgspec.Meta(ge=1, le=MAX_EXPIRES)] | None = None  # Unix seconds; None: never
    models: Annotated[tuple[_ModelName, ...], msgspec.Meta(min_length=1, max_length=MAX_KEY_MODELS)] | None = (
        None  # names of models, aliases and adapters that it is for; None: all
    )
    routes: Annotated[tuple[RouteName, ...], msgspec.Meta(min_length=1)] | None = None  # None: all
    max_concurrency: Annotated[int, msgspec.Meta(ge=1, le=MAX_KEY_CONCURRENCY)] | None = None  # open requests


class KeyFile(Config, frozen=True, kw_only=True):
    """The content of the file."""

    version: Literal[1] = 1
    salt: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]  # of tenants' ids
    share_prefixes: bool = False  # tenants may use each other's cached pages
    tenants: dict[_Name, TenantEntry] = {}  # noqa: RUF012 - msgspec copies it
    keys: tuple[KeyEntry, ...] = ()

    def tenant_id(self, name: str) -> str:
        """A short pseudonym of a tenant for workers, metrics and logs, the same in every gateway."""
        return hashlib.blake2b(name.encode(), key=bytes.fromhex(self.salt), digest_size=ID_CHARS // 2).hexdigest()


class KeyChanges(NamedTuple):
    """Ids of keys that differ between two states of a file, in their order there."""

    added: tuple[str, ...] = ()
    revoked: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()  # what they may be used for, or what their tenant may use


def key_changes(before: KeyFile, after: KeyFile) -> KeyChanges:
    """What has become of the keys."""

    def meanings(file: KeyFile) -> dict[str, object]:
        shared = (file.salt, file.share_prefixes)
        return {key.id: (key, file.tenants[key.tenant], shared) for key in file.keys}

    old, new = meanings(before), meanings(after)
    return KeyChanges(
        added=tuple(key for key in new if key not in old),
        revoked=tuple(key for key in old if key not in new),
        changed=tuple(key for key in new if key in old and new[key] != old[key]),
    )


def load_keys(path: Path, max_keys: int) -> KeyFile:
    """Read and check the file.  Raises ConfigError with file and field."""
    hint = f"'penstock keys add {path} --tenant NAME' makes the file"
    raw = read_private_file(path, MAX_FILE_BYTES, what="the API keys", hint=hint)
    try:
        found = msgspec.json.decode(raw, type=KeyFile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    _check(found, path, max_keys)
    return found


def check_key_file(api_keys: str | None, max_keys: int) -> None:
    """Raises ConfigError, before any process starts, for a file that no gateway could read."""
    if api_keys is not None:
        load_keys(expanded_path(api_keys, "--api-keys"), max_keys)


def _check(file: KeyFile, path: Path, max_keys: int) -> None:
    if len(file.keys) > max_keys:
        raise ConfigError(f"{path} has {len(file.keys)} keys; at most {max_keys} are read ([scheduling] max_tenants)")
    for key in file.keys:
        if key.tenant not in file.tenants:
            raise ConfigError(f"{path}: key {key.id} is of tenant {key.tenant!r}, which is not among 'tenants'")
    for field in ("id", "sha256"):
        if len({getattr(key, field) for key in file.keys}) < len(file.keys):
            raise ConfigError(f"{path}: two keys have the same {field}")


@contextmanager
def edit_keys(path: Path, max_keys: int, *, make: bool = False) -> Iterator[list[KeyFile]]:
    """The file as a list of one, which is written back on leaving; concurrent edits wait.

    ``make``: create the file if there is none.  Raises ConfigError.
    """
    with locked_folder(path.absolute().parent, "API keys"):
        new = make and not path.exists()
        held = [KeyFile(salt=secrets.token_hex(16)) if new else load_keys(path, max_keys)]
        before = held[0]
        yield held
        if new or held[0] is not before:
            _check(held[0], path, max_keys)
            replace_file(path, msgspec.json.format(msgspec.json.encode(held[0]), indent=2) + b"\n")


class KeyLimits(Config, frozen=True, kw_only=True):
    """What a new key is restricted to; fields as in ``KeyEntry``."""

    operator: bool = False
    expires: int | None = None
    models: tuple[str, ...] | None = None
    routes: tuple[str, ...] | None = None
    max_concurrency: int | None = None


def new_key(
    tenant: str, classes: tuple[ServiceClassName, ...], limits: KeyLimits | None = None
) -> tuple[str, KeyEntry]:
    """A new key, and its entry for the file.  Raises msgspec.ValidationError for a field that cannot be."""
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    fields = {
        "id": f"k-{secrets.token_hex(4)}",
        "tenant": tenant,
        "sha256": hashlib.sha256(key.encode()).hexdigest(),
        "classes": classes,
        "created": int(time.time()),
        **msgspec.structs.asdict(limits or KeyLimits()),
    }
    return key, msgspec.convert(fields, KeyEntry)


_DURATION = re.compile(r"([0-9]{1,6})([hdw])", re.ASCII)
_UNIT_S = {"h": 3600, "d": 86_400, "w": 7 * 86_400}


def parse_expiry(text: str, now: float) -> int:
    """Unix seconds of ``30d``, ``12h``, ``2w``, or of a date or time as ISO 8601 has it; UTC unless it says otherwise.

    A date is its first moment.  Raises ConfigError, also for what is not after ``now`` (Unix seconds).
    """
    if match := _DURATION.fullmatch(text):
        at = int(now) + int(match[1]) * _UNIT_S[match[2]]
    else:
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            raise ConfigError(
                f"--expires {text!r:.80}: expected a duration as 12h, 30d or 4w, or a date as 2027-01-31 (UTC)"
            ) from None
        at = math.floor((moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp())
    if not now < at <= MAX_EXPIRES:
        raise ConfigError(f"--expires {text}: a key must expire after now and before the year 10000")
    return at
