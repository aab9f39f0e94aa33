"""What the scenarios of all Python packages share: how steps are run and told, and what they expect.

A scenario is a script: it is run by the Python of ``tests/clients/requirements`` with ``PENSTOCK_URL`` and
``PENSTOCK_FLAKY_URL`` set, and prints one line of JSON for each step.  Needs the standard library only.
"""

from __future__ import annotations

import json
import os
import time
import traceback
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

URL = os.environ["PENSTOCK_URL"]
MODEL = "scripted"
EXPECTED: dict[str, Any] = json.loads(Path(__file__).with_name("expected.json").read_text(encoding="utf-8"))
FREE_WITHIN_S = 20.0


def flaky(name: str) -> str:
    """A service that refuses the first two requests of this name, with 503 and 429, and serves all others."""
    return f"{os.environ['PENSTOCK_FLAKY_URL']}/{name}"


def run(*steps: Callable[[], None]) -> None:
    """Each step, and one line about each."""
    for step in steps:
        began = time.monotonic()
        try:
            step()
        except Exception:  # noqa: BLE001 - told to whoever runs the scenario
            told = {"error": traceback.format_exc(limit=-6)}
        else:
            told = {}
        print(json.dumps({"step": step.__name__, "seconds": round(time.monotonic() - began, 2)} | told), flush=True)


class Town:
    """The functions that a model may call, and a record of the calls."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def get_weather(self, city: str) -> str:
        """The weather of a city."""
        self.calls.append({"name": "get_weather", "arguments": {"city": city}})
        return EXPECTED["weather"][city]

    def get_time(self, city: str, format: str) -> str:
        """The time in a city."""
        self.calls.append({"name": "get_time", "arguments": {"city": city, "format": format}})
        return EXPECTED["time"][city]

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """What a function gives."""
        return {"get_weather": self.get_weather, "get_time": self.get_time}[name](**arguments)

    def check(self, answer: str) -> None:
        """All three calls were made, and the answer tells what they gave."""
        assert sorted(self.calls, key=str) == sorted(EXPECTED["calls"], key=str), self.calls
        for result in (*EXPECTED["weather"].values(), *EXPECTED["time"].values()):
            assert result in answer, answer


PARAMETERS = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "get_time": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "format": {"enum": ["12h", "24h"]}},
        "required": ["city", "format"],
        "additionalProperties": False,
    },
}
DESCRIPTIONS = {"get_weather": "The weather of a city.", "get_time": "The time in a city."}

OPENAI_TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": DESCRIPTIONS[name], "parameters": schema}}
    for name, schema in PARAMETERS.items()
]


def check_joined(pieces: list[str], whole: str) -> None:
    """It was streamed, and is what was expected."""
    assert len(pieces) > 1, f"not streamed: {pieces}"
    assert "".join(pieces) == whole, pieces


def check_ada(found: Any) -> None:
    """The object that was asked for."""
    assert found == EXPECTED["ada"], found


def _text(path: str) -> str:
    with urllib.request.urlopen(URL + path, timeout=30) as answer:
        return answer.read().decode()


def aborted() -> int:
    """How many requests were given up by their clients."""
    mark = 'request_success_total{finished_reason="abort"'
    return int(sum(float(line.split()[-1]) for line in _text("/metrics").splitlines() if mark in line))


class Cancelled:
    """``with Cancelled(): ...`` begins an endless answer and leaves it; then nothing of it is left in the service."""

    def __enter__(self) -> None:
        self._before = aborted()

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            return
        until = time.monotonic() + FREE_WITHIN_S
        while True:
            rows = json.loads(_text("/admin/workers"))["workers"]
            held = {(row["id"], field): row[field] for row in rows for field in ("running", "queued", "kv_pages_used")}
            if not any(held.values()) and aborted() == self._before + 1:
                return
            assert time.monotonic() < until, f"still there: {held}; {aborted() - self._before} given up"
            time.sleep(0.02)  # between two looks
