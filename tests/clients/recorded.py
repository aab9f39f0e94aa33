"""What agents have asked of a service (``record_agents``): ``tests/fixtures/agents/NAME-VERSION.jsonl.xz``."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any, NamedTuple

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures/agents"
SESSION = "claude-session"
"""Of 20 turns."""

GENERATION = ("/v1/chat/completions", "/v1/messages", "/v1/responses")


class Recorded(NamedTuple):
    """One request."""

    method: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any] | None

    @property
    def route(self) -> str:
        """The path without a query."""
        return self.path.partition("?")[0]


def recordings() -> list[str]:
    """Their names, with versions."""
    return sorted(path.name.removesuffix(".jsonl.xz") for path in FIXTURES.glob("*.jsonl.xz"))


def read_recording(name: str) -> list[Recorded]:
    """The requests, in order."""
    lines = lzma.decompress((FIXTURES / f"{name}.jsonl.xz").read_bytes()).decode().splitlines()
    told = [json.loads(line) for line in lines]
    return [Recorded(one["method"], one["path"], one["headers"], one.get("body")) for one in told]


def session() -> list[Recorded]:
    """The turns of the recorded session: its requests for a response."""
    (name,) = [name for name in recordings() if name.startswith(SESSION)]
    return [request for request in read_recording(name) if request.route in GENERATION and request.method == "POST"]
