"""A chat whose answer is the same every time, in one piece or streamed and read as a test likes; and commands, run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from .server import PenstockServer

PROMPT = [{"role": "user", "content": "Tell me a story about a fox."}]


def body(max_tokens: int = 300, **more: Any) -> dict[str, Any]:
    """A request whose answer is the same every time."""
    return {
        "model": "storyteller",
        "messages": PROMPT,
        "max_tokens": max_tokens,
        "seed": 5,
        "ignore_eos": True,
        **more,
    }


def ask(server: PenstockServer, **more: Any) -> str:
    """The whole text, in one piece."""
    answer = httpx.post(
        f"{server.url}/v1/chat/completions",
        json=body(**more),
        headers=server.key_headers(),
        timeout=110,
        trust_env=False,
        verify=False,
    )
    assert answer.status_code == 200, answer.text
    text = answer.json()["choices"][0]["message"]["content"]
    assert isinstance(text, str)
    return text


class Stream:
    """A streamed answer that is read as the test likes."""

    def __init__(self, response: httpx.Response) -> None:
        self._lines = response.iter_lines()
        self.text = ""
        self.done = False

    def read(self, characters: int | None = None) -> str:
        """Read on until there are so many characters, or to the end; all text so far."""
        while not self.done and (characters is None or len(self.text) < characters):
            line = next(self._lines, None)
            assert line is not None, f"the stream broke off after {self.text!r}"
            if line == "data: [DONE]":
                self.done = True
            elif line.startswith("data: "):
                event = json.loads(line[6:])
                assert "error" not in event, event
                for choice in event["choices"]:
                    self.text += choice["delta"].get("content") or ""
        return self.text


@contextmanager
def streaming(server: PenstockServer, **more: Any) -> Iterator[Stream]:
    """A streamed chat answer."""
    with (
        httpx.Client(timeout=110, headers=server.key_headers(), trust_env=False, verify=False) as client,
        client.stream("POST", f"{server.url}/v1/chat/completions", json=body(stream=True, **more)) as response,
    ):
        assert response.status_code == 200
        yield Stream(response)


def penstock(*words: str, given: str | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; ``given`` is piped into it."""
    paths = os.pathsep.join(path for path in sys.path if path)
    return subprocess.run(
        [sys.executable, "-m", "penstock", *words],
        env=os.environ | {"PYTHONPATH": paths} | environ,
        input=given,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
