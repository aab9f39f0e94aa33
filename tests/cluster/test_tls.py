"""HTTPS: a real service with a certificate, and a client that checks it."""

from __future__ import annotations

import shutil
import socket
import ssl
from pathlib import Path

import httpx
import pytest

from certificates import write_certificate

from .server import PenstockServer

CHAT = {"model": "storyteller", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "stream": True}


def shown(port: int) -> str:
    """The certificate that a new connection gets, PEM."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection(("127.0.0.1", port)) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as secure,
    ):
        return ssl.DER_cert_to_PEM_cert(secure.getpeercert(binary_form=True) or b"")


def test_clients_are_answered_over_https(tmp_path: Path) -> None:
    cert, key = write_certificate(tmp_path, "localhost")
    server = PenstockServer(["--aggregated", "--tls-cert", str(cert), "--tls-key", str(key)])
    server.url = server.url.replace("http:", "https:")
    with server:
        trusting = ssl.create_default_context(cafile=str(cert))
        with httpx.Client(base_url=server.url, verify=trusting, timeout=60, trust_env=False) as client:
            answer = client.post("/v1/chat/completions", json=CHAT)
            assert (answer.status_code, answer.text[-14:]) == (200, "data: [DONE]\n\n")
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(server.url, verify=ssl.create_default_context(), trust_env=False)
        with pytest.raises(httpx.TransportError):
            httpx.get(server.url.replace("https:", "http:"), trust_env=False)
        server.wait_for(lambda: f": {server.url}" in server.read_log(), 30, "announced")
        before = cert.read_text()
        assert shown(server.port).split() == before.split()
        for old, new in zip((cert, key), write_certificate(tmp_path / "new", "localhost"), strict=True):
            shutil.copy(new, old)
        server.wait_for(lambda: shown(server.port).split() == cert.read_text().split() != before.split(), 30, "renewed")
