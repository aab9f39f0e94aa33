"""A recorded session of a coding agent finds in each turn what the turn before left in the prefix cache.

The session is Claude Code's, 20 turns (``clients.record_agents``), asked again of a split service whose model is
scripted; what the model says does not matter, for a turn's history is the recorded one.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import httpx
import pytest

from clients.recorded import Recorded, session
from penstock.types import PAGE_TOKENS
from tiers import of_default

from .scripted import MODEL, ScriptedServer
from .server import PATIENCE_S

TURNS = 20
LEAST_TOKENS = 27_000
"""Of the last prompt: 28 k, or a little less, for the tokenizer is trained on texts of this project, which change."""

OF_EARLIER_TURNS = 0.99
OF_ALL = 0.95


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    with ScriptedServer(tmp_path_factory.mktemp("scripted")) as running:
        yield running


def body_of(turn: Recorded, number: int, header: str) -> dict[str, Any]:
    """The turn's body, of a session that shares nothing with the other.

    ``with`` the header: as Claude Code writes it by default, its system prompt begins with a line that changes.
    """
    body = copy.deepcopy(turn.body)
    assert body is not None
    body["system"].insert(0, {"type": "text", "text": f"A session {header} the header."})
    if header == "without":
        return body
    line = (
        f"x-anthropic-billing-header: cc_version=2.1.197.{number:03x}; cc_entrypoint=sdk-cli; cch={number * 7919:05x};"
    )
    body["system"].insert(0, {"type": "text", "text": line})
    return body


def ask(server: ScriptedServer, turn: Recorded, body: Any, session_id: str) -> tuple[int, int]:
    """(tokens of the prompt, those of them from the cache).  The answer may be short: it is not what is looked at."""
    headers = {name: value for name, value in turn.headers.items() if name != "x-claude-code-session-id"}
    headers |= {"x-claude-code-session-id": session_id, "accept-encoding": "identity"}
    asked = body | {"stream": False, "max_tokens": 16, "model": MODEL}
    answer = httpx.post(server.url + turn.path, json=asked, headers=headers, timeout=PATIENCE_S, trust_env=False)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    return usage["input_tokens"] + usage["cache_read_input_tokens"], usage["cache_read_input_tokens"]


@pytest.mark.parametrize("header", of_default("with", among=["without", "with"]))
def test_each_turn_takes_what_earlier_turns_had_from_the_cache(header: str, server: ScriptedServer) -> None:
    turns = session()
    assert len(turns) == TURNS
    told = [ask(server, turn, body_of(turn, number, header), f"session {header}") for number, turn in enumerate(turns)]
    print(f"(prompt tokens, from the cache) of each turn: {told}")
    assert told[-1][0] >= LEAST_TOKENS
    for (before, _), (_, cached) in pairwise(told):
        assert cached >= OF_EARLIER_TURNS * (before - before % PAGE_TOKENS)
    assert sum(cached for _, cached in told[1:]) >= OF_ALL * sum(prompt for prompt, _ in told[1:])
