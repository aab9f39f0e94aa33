"""The TLS certificate of a gateway and its key, reloaded when the files change.

New connections get the new certificate, open ones keep theirs.  If the files do not match, as while they are being
replaced, the old ones stay in force.  Knows nothing about HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

from penstock.config.load import tls_config
from penstock.config.schema import ServeConfig, TlsConfig
from penstock.errors import ConfigError
from penstock.telemetry.log import log_event

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Between two checks for changes of the files."""


def checked_tls(config: ServeConfig) -> TlsConfig | None:
    """The TLS settings of ``config``; None: plain HTTP.  Raises ConfigError if the files cannot be used."""
    tls = tls_config(config)
    if tls is not None:
        TlsCertificate(tls)
    return tls


class TlsCertificate:
    """A certificate chain and its private key, PEM."""

    def __init__(self, config: TlsConfig) -> None:
        """Raises ConfigError."""
        self._config = config
        self._seen = self._stamp()
        self.context = self._read(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))

    async def watch_files(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.reload_if_changed()

    def reload_if_changed(self) -> None:
        """Load the files if they have changed."""
        stamp = self._stamp()
        if stamp == self._seen:
            return
        self._seen = stamp
        try:
            # In a new context first: files that cannot be read must not touch the one in use.
            self._read(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
            self._read(self.context)
        except ConfigError as error:
            log_event(log, logging.WARNING, "the old certificate stays in force", reason=str(error))
            return
        log.info("the certificate was read again")

    def _stamp(self) -> tuple[tuple[int, int, int], ...]:
        found: list[tuple[int, int, int]] = []
        for path in (self._config.cert, self._config.key):
            try:
                stat = Path(path).stat()
                found.append((stat.st_mtime_ns, stat.st_ino, stat.st_size))
            except OSError:
                found.append((0, 0, 0))
        return tuple(found)

    def _read(self, context: ssl.SSLContext) -> ssl.SSLContext:
        cert, key = self._config.cert, self._config.key
        if b"-----BEGIN CERTIFICATE-----" not in _content(cert, "--tls-cert"):
            raise ConfigError(f"--tls-cert {cert}: has no certificate in PEM (-----BEGIN CERTIFICATE-----)")
        private = _content(key, "--tls-key")
        if b"PRIVATE KEY-----" not in private:
            raise ConfigError(f"--tls-key {key}: has no private key in PEM (-----BEGIN PRIVATE KEY-----)")
        if b"ENCRYPTED" in private:
            plain = "openssl pkey -in KEY -out KEY_WITHOUT_PASSPHRASE"
            raise ConfigError(f"--tls-key {key}: is encrypted and cannot be opened; decrypt it: {plain}")
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(cert, key)
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                raise ConfigError(f"--tls-key {key}: is not the key of the certificate in {cert}") from None
            why = (error.reason or str(error)).lower().replace("_", " ")
            raise ConfigError(f"--tls-cert {cert}, --tls-key {key}: cannot be read ({why})") from None
        return context


def _content(path: str, flag: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{flag} {path}: cannot be read: {error.strerror}") from None
