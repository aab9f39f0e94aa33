"""A collector of spans: an HTTP server that takes OTLP's JSON as a real one does, and keeps what it got."""

from __future__ import annotations

import gzip
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


@dataclass
class Got:
    """One span."""

    name: str
    trace: str
    own: str
    parent: str
    begin_ns: int
    end_ns: int
    facts: dict[str, Any]
    events: list[str]
    error: str
    resource: dict[str, Any]


def spans_of(body: Any) -> list[Got]:
    """All spans of a body of ``/v1/traces``, or of a line of a file."""
    groups = body.get("resourceSpans", [body])
    return [
        _span(span, _facts(group["resource"]["attributes"]))
        for group in groups
        for scope in group["scopeSpans"]
        for span in scope["spans"]
    ]


def _span(span: dict[str, Any], resource: dict[str, Any]) -> Got:
    return Got(
        name=span["name"],
        trace=span["traceId"],
        own=span["spanId"],
        parent=span.get("parentSpanId", ""),
        begin_ns=int(span["startTimeUnixNano"]),
        end_ns=int(span["endTimeUnixNano"]),
        facts=_facts(span.get("attributes", [])),
        events=[event["name"] for event in span.get("events", [])],
        error=span.get("status", {}).get("message", ""),
        resource=resource,
    )


def _facts(attributes: list[dict[str, Any]]) -> dict[str, Any]:
    return {item["key"]: next(iter(item["value"].values())) for item in attributes}


@dataclass
class Collector:
    """Use: ``with Collector() as collector: ... collector.url``."""

    spans: list[Got] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)  # of the last request
    refuses: bool = False

    def __enter__(self) -> Self:
        collector = self
        self._changed = threading.Condition()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    raw = gzip.decompress(raw)
                collector.took(self.path, dict(self.headers), raw)
                self.send_response(503 if collector.refuses else 200)
                self.send_header("content-length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def took(self, path: str, headers: dict[str, str], raw: bytes) -> None:
        assert path == "/v1/traces"
        with self._changed:
            self.headers = {name.lower(): value for name, value in headers.items()}
            if not self.refuses:
                self.spans += spans_of(json.loads(raw))
            self._changed.notify_all()

    def wait(self, enough: Callable[[list[Got]], bool], seconds: float = 60.0) -> list[Got]:
        """Until what came is enough."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while not enough(self.spans):
                left = deadline - time.monotonic()
                assert left > 0, f"only these came: {sorted(span.name for span in self.spans)}"
                self._changed.wait(left)
            return list(self.spans)
