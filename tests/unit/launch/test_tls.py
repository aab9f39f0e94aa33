"""Certificates: what is wrong with files is said in one line, and changed ones are taken while connections are made."""

from __future__ import annotations

import asyncio
import logging
import shutil
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest

from certificates import write_certificate
from penstock.config.load import load_serve
from penstock.config.schema import TlsConfig
from penstock.errors import ConfigError
from penstock.launch.tls import TlsCertificate, checked_tls


def files(folder: Path, name: str = "localhost") -> TlsConfig:
    cert, key = write_certificate(folder, name)
    return TlsConfig(cert=str(cert), key=str(key))


def _swap_keys(own: TlsConfig, folder: Path) -> None:
    other = write_certificate(folder / "other", "localhost")[1]
    Path(own.key).write_bytes(other.read_bytes())


BROKEN: dict[str, tuple[Callable[[TlsConfig, Path], object], str]] = {
    "no certificate": (lambda own, _: Path(own.cert).unlink(), "--tls-cert .*: cannot be read: No such file"),
    "no key": (lambda own, _: Path(own.key).unlink(), "--tls-key .*: cannot be read: No such file"),
    "swapped": (lambda own, _: Path(own.cert).write_bytes(Path(own.key).read_bytes()), "--tls-cert .*no certificate"),
    "not PEM": (lambda own, _: Path(own.key).write_bytes(b"\x30\x82"), "--tls-key .*: has no private key in PEM"),
    "another's key": (_swap_keys, "--tls-key .*: is not the key of the certificate"),
    "passphrase": (
        lambda own, _: Path(own.key).write_text("-----BEGIN ENCRYPTED PRIVATE KEY-----\n"),
        "is encrypted .* openssl pkey",
    ),
    "damaged": (
        lambda own, _: Path(own.cert).write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"),
        "cannot be read",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_files_that_cannot_be_used(tmp_path: Path, what: str) -> None:
    own = files(tmp_path)
    breaks, words = BROKEN[what]
    breaks(own, tmp_path)
    with pytest.raises(ConfigError, match=words) as caught:
        checked_tls(load_serve({"tls_cert": own.cert, "tls_key": own.key}, {}))
    assert "\n" not in str(caught.value)


def test_one_file_alone_is_not_enough(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--tls-key is missing"):
        load_serve({"tls_cert": "x.pem"}, {})
    assert checked_tls(load_serve({}, {})) is None


async def _name_of(context: ssl.SSLContext, authority: str) -> str:
    """The name in the certificate that a new connection is shown."""
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context)
    client = ssl.create_default_context(cafile=authority)
    client.check_hostname = False
    async with server:
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname(), ssl=client)
        subject = writer.get_extra_info("peercert")["subject"]
        writer.close()
    return dict(pair for part in subject for pair in part)["commonName"]


async def test_changed_files_are_taken_and_broken_ones_are_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("penstock"), "propagate", True)
    own = files(tmp_path, "one.example")
    tls = TlsCertificate(own)
    assert await _name_of(tls.context, own.cert) == "one.example"
    two = files(tmp_path / "two", "two.example")
    shutil.copy(two.cert, own.cert)  # the key does not fit yet
    tls.reload_if_changed()
    assert "the old certificate stays in force" in caplog.text
    shutil.copy(two.key, own.key)
    tls.reload_if_changed()
    assert await _name_of(tls.context, two.cert) == "two.example"
