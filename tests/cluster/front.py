"""A gateway as the clients of its deployment reach it: one chat, streams of it, workers, metrics."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from .asking import Stream, body
from .server import PATIENCE_S

KEY = "a-key-of-the-clients-of-this-test"
HEADERS = {"Authorization": f"Bearer {KEY}"}
TOKENS = 600


@dataclass(frozen=True)
class Front:
    """A gateway as its clients reach it."""

    url: str

    def get(self, path: str, **headers: str) -> httpx.Response:
        return httpx.get(self.url + path, headers=headers or HEADERS, timeout=PATIENCE_S, trust_env=False)

    def ask(self) -> str:
        answer = httpx.post(
            f"{self.url}/v1/chat/completions", json=body(TOKENS), headers=HEADERS, timeout=110, trust_env=False
        )
        assert answer.status_code == 200, answer.text
        text = answer.json()["choices"][0]["message"]["content"]
        assert isinstance(text, str)
        return text

    @contextmanager
    def streams(self, count: int) -> Iterator[list[Stream]]:
        with ExitStack() as stack:
            client = stack.enter_context(httpx.Client(timeout=110, trust_env=False, headers=HEADERS))
            asked = [
                stack.enter_context(
                    client.stream("POST", f"{self.url}/v1/chat/completions", json=body(TOKENS, stream=True))
                )
                for _ in range(count)
            ]
            assert {one.status_code for one in asked} == {200}
            yield [Stream(one) for one in asked]

    def workers(self) -> dict[str, dict[str, Any]]:
        return {row["id"]: row for row in self.get("/admin/workers").json()["workers"]}

    def counted(self, name: str) -> float:
        found = re.findall(rf"^penstock:{name}(?:{{.*}})? (\S+)$", self.get("/metrics").text, re.MULTILINE)
        return sum(map(float, found))
