"""A server that speaks the Hub's routes for one model, as a process of its own: what ``huggingface_hub`` asks for.

    python hub_server.py FOLDER '{"breaks": {"model.safetensors": [1000]}}'

FOLDER has the files; those that end in .safetensors are large ones, which the Hub redirects to another host, here
``localhost`` instead of ``127.0.0.1``.  Of the faults, ``breaks`` ends the n-th connection to a file after some bytes,
``damaged`` changes a byte of files, ``token`` is needed by every request, ``no_ranges`` ignores Range, ``stalls`` names
files whose connection stays open without a byte after the first thousand.  Prints its port, then each request: method,
path, Range, whether a token came.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

MODEL = "org/tiny"
COMMIT = "c" * 40


def is_large(name: str) -> bool:
    return name.endswith(".safetensors")


def git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def tree_entry(path: Path, root: Path) -> dict[str, Any]:
    content = path.read_bytes()
    entry = {"type": "file", "path": str(path.relative_to(root)), "size": len(content), "oid": git_hash(content)}
    if is_large(path.name):
        lfs = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
        entry |= {"oid": git_hash(b"a pointer to " + lfs["oid"].encode()), "lfs": lfs}
    return entry


class HubHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    root = Path()
    faults: ClassVar[dict[str, Any]] = {}
    visits: ClassVar[Counter[str]] = Counter()
    output = threading.Lock()

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._serve()

    def do_GET(self) -> None:
        self._serve()

    def _serve(self) -> None:
        path = urlsplit(self.path).path
        has_token = self.headers["Authorization"] is not None
        with self.output:
            print(json.dumps([self.command, path, self.headers["Range"], has_token]), flush=True)
        if path.startswith("/cdn/"):
            return self._file(path.removeprefix("/cdn/"))
        token = self.faults.get("token")
        if token is not None and self.headers["Authorization"] != f"Bearer {token}":
            return self._send(401, b"{}", {"X-Error-Code": "GatedRepo", "X-Error-Message": "gated"})
        if match := re.fullmatch(rf"/api/models/{MODEL}(?:/revision/([^/]+))?", path):
            if match[1] not in (None, "main", "v1", COMMIT):
                return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            return self._json({"id": MODEL, "sha": COMMIT, "siblings": [], "private": False, "gated": False})
        if path == f"/api/models/{MODEL}/tree/{COMMIT}":
            files = sorted(found for found in self.root.rglob("*") if found.is_file())
            return self._json([tree_entry(file, self.root) for file in files])
        if path.startswith(f"/{MODEL}/resolve/{COMMIT}/"):
            return self._resolve(path.split("/", 5)[5])
        return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def _resolve(self, name: str) -> None:
        entry = tree_entry(self.root / name, self.root)
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{entry["oid"]}"'}
        if is_large(name):
            headers |= {"X-Linked-ETag": f'"{entry["lfs"]["oid"]}"', "X-Linked-Size": str(entry["size"])}
            port = self.server.server_address[1]
            return self._send(302, b"", {**headers, "Location": f"http://localhost:{port}/cdn/{name}"})
        return self._file(name, headers)

    def _file(self, name: str, headers: dict[str, str] | None = None) -> None:
        content = (self.root / name).read_bytes()
        if name in self.faults.get("damaged", ()):
            content = bytes([content[0] ^ 1]) + content[1:]
        begin, status, more = 0, 200, dict(headers or {})
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers["Range"] or "")
        if asked and not self.faults.get("no_ranges"):
            begin, status = int(asked[1]), 206
            more["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
        breaks = self.faults.get("breaks", {}).get(name, [])
        if self.command == "GET":
            self.visits[name] += 1
            if name in self.faults.get("stalls", ()):
                self._send(status, content[begin:], more, only=1000)
                threading.Event().wait()
            if self.visits[name] <= len(breaks):
                self._send(status, content[begin:], more, only=breaks[self.visits[name] - 1])
                self.close_connection = True
                return
        self._send(status, content[begin:], more)

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str], only: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body if only is None else body[:only])
            self.wfile.flush()


class HubProcess:
    """A running server, for tests."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"
        self._requests: list[list[Any]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._requests.append(json.loads(line))

    def close(self) -> list[list[Any]]:
        """End it; all requests that came."""
        self.process.kill()
        self.process.wait()
        self._reader.join()
        return self._requests

    def fetched(self, name: str) -> list[str | None]:
        """The Range of each GET of a file's content so far, after the server has ended."""
        return [asked for method, path, asked, _ in self._requests if method == "GET" and path == f"/cdn/{name}"]


@contextmanager
def hub_server(folder: Path, **faults: Any) -> Iterator[HubProcess]:
    """A server of ``folder`` until the end of the block."""
    command = [sys.executable, __file__, str(folder), json.dumps(faults)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        hub = HubProcess(process, int(process.stdout.readline()))
        try:
            yield hub
        finally:
            hub.close()


if __name__ == "__main__":
    HubHandler.root, HubHandler.faults = Path(sys.argv[1]), json.loads(sys.argv[2])
    server = ThreadingHTTPServer(("127.0.0.1", 0), HubHandler)
    server.daemon_threads = True
    print(server.server_address[1], flush=True)
    server.serve_forever()
