"""The CURVE keys of one deployment: who may listen, who may connect.

Every process of a deployment holds one ``CurveKeys``: listeners prove themselves with the server pair, links with the
client pair, and each side accepts nothing but the other pair's public key.  ``penstock serve`` makes them in memory
(``CurveKeys.ephemeral``) and children inherit them over fork; between hosts they are files made by
``penstock host-keys DIR`` and copied by the operator.  Knows nothing about endpoints or roles.

Format: Z85, 40 characters a key (https://rfc.zeromq.org/spec/32); key agreement: https://rfc.zeromq.org/spec/26.
"""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass, fields
from pathlib import Path

import zmq

from penstock.errors import ConfigError

KEY_CHARS = 40
_LOOSE = stat.S_IRWXG | stat.S_IRWXO


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CurveKeys:
    """Two key pairs, each part as Z85 text in bytes.  Never shown by ``repr``."""

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes

    def __repr__(self) -> str:
        return "Keys(...)"

    @classmethod
    def ephemeral(cls) -> CurveKeys:
        """New keys that live in this process and its children only.  Starts no thread and opens no socket."""
        server_public, server_secret = zmq.curve_keypair()
        client_public, client_secret = zmq.curve_keypair()
        return cls(
            server_public=server_public,
            server_secret=server_secret,
            client_public=client_public,
            client_secret=client_secret,
        )

    def save(self, folder: Path) -> tuple[Path, ...]:
        """Write one file a key, readable by their owner only.

        Raises ConfigError when one of the files exists (nothing is overwritten) or the folder cannot be written.
        """
        written: list[Path] = []
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for field in fields(self):
                path = _path(folder, field.name)
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
                written.append(path)
                with os.fdopen(descriptor, "wb") as file:
                    file.write(getattr(self, field.name) + b"\n")
        except OSError as error:
            for path in written:
                path.unlink(missing_ok=True)
            raise ConfigError(f"cannot write keys to {folder}: {error.strerror or error} ({error.filename})") from error
        return tuple(written)

    @classmethod
    def load(cls, folder: Path) -> CurveKeys:
        """Read what ``save`` wrote.

        Raises ConfigError for a missing file, one that others may read or write, one that belongs to somebody else,
        a key of a wrong length, or pairs whose halves do not belong together.
        """
        read = {field.name: read_secret(_path(folder, field.name)) for field in fields(cls)}
        keys = cls(**read)
        for role in ("server", "client"):
            if public_key(read[f"{role}_secret"]) != read[f"{role}_public"]:
                raise ConfigError(f"the {role} keys in {folder} do not belong together")
        return keys


_KEY_HINTS = {
    errno.ENOENT: "; `penstock host-keys` makes keys on one host, and the others get copies: docs/fleet.md",
    errno.EACCES: "; the folder and its files must belong to the user who runs this",
    errno.ELOOP: "; it is a link, and has to be the file itself",
}


def _path(folder: Path, name: str) -> Path:
    return folder / f"{name.replace('_', '.')}"


def public_key(secret: bytes) -> bytes | None:
    try:
        return zmq.curve_public(secret)
    except zmq.ZMQError:
        return None


def read_secret(path: Path) -> bytes:
    try:
        # O_NONBLOCK: a pipe in the key's place must not make us wait.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        hint = _KEY_HINTS.get(error.errno or 0, "")
        raise ConfigError(f"cannot read the key {path}: {error.strerror}{hint}") from error
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode) or facts.st_mode & _LOOSE:
            raise ConfigError(f"{path} must be a file with mode 0600; it has {stat.filemode(facts.st_mode)}")
        if facts.st_uid not in (os.geteuid(), 0):
            raise ConfigError(f"{path} belongs to user {facts.st_uid}, and this process runs as {os.geteuid()}")
        key = os.read(descriptor, KEY_CHARS + 2).rstrip(b"\n")
    finally:
        os.close(descriptor)
    if len(key) != KEY_CHARS:
        raise ConfigError(f"{path} holds {len(key)} characters; a key has {KEY_CHARS}")
    return key
