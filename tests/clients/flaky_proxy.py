"""A proxy that refuses the first two requests to each of its names, as a busy service does, and forwards the rest.

``{url}/NAME/v1/...`` is forwarded to ``/v1/...``.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx

REFUSALS = (503, 429)
SHORT_S = "0.01"
LEFT_OUT = frozenset({"host", "content-length", "connection", "transfer-encoding", "accept-encoding"})


class _Handler(BaseHTTPRequestHandler):
    target = ""
    seen: Counter[str]
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        name, _, path = self.path.removeprefix("/").partition("/")
        self.seen[name] += 1
        if self.seen[name] <= len(REFUSALS):
            refusal = b'{"error": {"message": "later", "type": "server_error"}}'
            self._answer(REFUSALS[self.seen[name] - 1], {"retry-after": SHORT_S, "retry-after-ms": "10"}, refusal)
            return
        headers = {name: value for name, value in self.headers.items() if name.lower() not in LEFT_OUT}
        answer = httpx.post(f"{self.target}/{path}", content=body, headers=headers, timeout=60, trust_env=False)
        kept = {name: value for name, value in answer.headers.items() if name.lower() not in LEFT_OUT}
        self._answer(answer.status_code, kept, answer.content)

    def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in ({"content-type": "application/json"} | headers).items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing: what matters is ``seen``."""


class FlakyProxy:
    """Its URL, and how many requests each name got."""

    def __init__(self, url: str, seen: Counter[str]) -> None:
        self.url = url
        self.seen = seen


@contextmanager
def flaky_proxy(target: str) -> Iterator[FlakyProxy]:
    """A proxy before ``target``."""
    seen: Counter[str] = Counter()
    handler = type("Handler", (_Handler,), {"target": target, "seen": seen})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield FlakyProxy(f"http://127.0.0.1:{server.server_address[1]}", seen)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
