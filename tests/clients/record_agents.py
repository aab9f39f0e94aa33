"""Records what agents ask of a service, for ``tests/fixtures/agents``: ``python -m clients.record_agents``, in tests.

Each agent does its task against a scripted service (``clients.coding_agents``), and Claude Code a session of 20 turns.
Kept is what a service reads: method, path, headers, body.  Keys are left out and ids are numbered.  Long texts that
are an agent's own, its system prompt and the descriptions of its tools, are replaced by as many letters of other words:
what matters of them is how long they are, and that they are the same in each turn.
"""

from __future__ import annotations

import json
import lzma
import re
import sys
import tempfile
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from cluster.scripted import ScriptedServer

from .coding_agents import AGENTS, DONE, LONG_TASK, TASK, make_project, run_agent, version_of
from .recorded import FIXTURES, SESSION
from .recording_proxy import recording_server

CHAPTERS = 17
CHAPTER_WORDS = 330
LONGEST_KEPT = 160
LEFT_OUT = frozenset({"authorization", "x-api-key", "host", "content-length", "connection", "accept-encoding"})
OWN = ("chapter_", "of chapter", "greeting.py", "def greet")
UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
HEX = re.compile(r"\b[0-9a-f]{40,64}\b")
WORDS = (
    *("the", "request", "response", "worker", "service", "token", "prompt", "model"),
    *("session", "stream", "message", "events", "tenant", "gateway", "and", "for"),
)


def filler(text: str) -> str:
    """Other words, as long, the same for the same text."""
    dice, words, length = Random(zlib.crc32(text.encode())), list[str](), 0
    while length < len(text):
        words.append(dice.choice(WORDS))
        length += len(words[-1]) + 1
    return " ".join(words)[: len(text)]


def masked(value: Any) -> Any:
    """Without an agent's long texts."""
    if isinstance(value, dict):
        return {key: masked(item) for key, item in value.items()}
    if isinstance(value, list):
        return [masked(item) for item in value]
    if isinstance(value, str) and len(value) > LONGEST_KEPT and not any(word in value for word in OWN):
        return filler(value)
    return value


def normalized(lines: list[str], folder: Path) -> Iterator[dict[str, Any]]:
    """Recorded requests without what differs from one recording to the next, or is nobody else's business."""
    text = "\n".join(lines).replace(str(folder), "/work")
    for number, found in enumerate(dict.fromkeys(UUID.findall(text)), 1):
        text = text.replace(found, f"00000000-0000-4000-8000-{number:012}")
    text = HEX.sub(lambda found: "0" * len(found[0]), text)
    for line in text.splitlines():
        told = json.loads(line)
        headers = {name.lower(): value for name, value in told["headers"].items()}
        told["headers"] = {name: value for name, value in headers.items() if name not in LEFT_OUT}
        yield masked(told)


def record(name: str, task: str, file: Path, *, chapters: int = 0) -> None:
    """One task of one agent, into a file."""
    with tempfile.TemporaryDirectory() as temporary, ScriptedServer(Path(temporary)) as server:
        folder = Path(temporary)
        raw = folder / "requests.jsonl"
        proxy = recording_server(server.url, raw)
        thread = threading.Thread(target=proxy.serve_forever)
        thread.start()
        try:
            project = make_project(folder / "project", chapters=chapters, words=CHAPTER_WORDS)
            run = run_agent(name, f"http://127.0.0.1:{proxy.server_address[1]}", folder, task, project)
        finally:
            proxy.shutdown()
            thread.join()
            proxy.server_close()
        assert run.code == 0, run.output
        assert DONE in run.output, run.output
        lines = [json.dumps(told) + "\n" for told in normalized(raw.read_text(encoding="utf-8").splitlines(), folder)]
    file.write_bytes(lzma.compress("".join(lines).encode(), preset=9))
    print(f"{file}: {len(lines)} requests, {file.stat().st_size} bytes")


def main(names: list[str]) -> None:
    """All, or those that are named."""
    FIXTURES.mkdir(exist_ok=True)
    for name in AGENTS:
        if not names or name in names:
            record(name, TASK, FIXTURES / f"{name}-{version_of(name)}.jsonl.xz")
    if not names or SESSION in names:
        file = FIXTURES / f"{SESSION}-{version_of('claude')}.jsonl.xz"
        record("claude", LONG_TASK.format(count=CHAPTERS), file, chapters=CHAPTERS)


if __name__ == "__main__":
    main(sys.argv[1:])
