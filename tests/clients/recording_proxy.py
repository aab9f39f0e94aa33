"""Records what a client asks of a service: ``python -m clients.recording_proxy URL FILE [PORT]`` in ``tests``.

Each request becomes a line of JSON in FILE, with method, path, headers and body; it is forwarded, and its response is
streamed back as it comes.
"""

from __future__ import annotations

import http.client
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

HOP_BY_HOP = frozenset({"connection", "transfer-encoding", "keep-alive", "host"})


class _Handler(BaseHTTPRequestHandler):
    target = ""
    file: Path
    lock = threading.Lock()
    protocol_version = "HTTP/1.1"

    def _forward(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        self._record(body)
        address = urlsplit(self.target)
        there = http.client.HTTPConnection(address.hostname or "", address.port, timeout=600)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP_BY_HOP}
        there.request(self.command, self.path, body or None, headers)
        answer = there.getresponse()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in HOP_BY_HOP | {"content-length"}:
                self.send_header(name, value)
        if self.command == "HEAD":
            self.end_headers()
            return
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        while piece := answer.read1(65536):
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")
        there.close()

    do_GET = do_POST = do_HEAD = do_DELETE = _forward

    def _record(self, body: bytes) -> None:
        told: dict[str, Any] = {"method": self.command, "path": self.path, "headers": dict(self.headers.items())}
        if body:
            try:
                told["body"] = json.loads(body)
            except ValueError:
                told["raw"] = body.decode("latin-1")
        with self.lock, self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(told) + "\n")

    def log_message(self, *_: object) -> None:
        """Nothing: the file has it."""


def recording_server(target: str, file: Path, port: int = 0) -> ThreadingHTTPServer:
    """A server that is to be started."""
    handler = type("Handler", (_Handler,), {"target": target, "file": file})
    return ThreadingHTTPServer(("127.0.0.1", port), handler)


if __name__ == "__main__":
    recording_server(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0).serve_forever()
