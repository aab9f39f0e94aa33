"""A coding agent's session on one service: what it takes from the cache, and how soon a warm turn begins.

Sends the recorded turns of a session one after the other, as an agent does: each has the whole transcript so far and
some new tokens.  Beside each warm turn, in the same run, a *bare prefill* of as many new tokens behind as many cached
ones is measured: a completion of token ids, without a template, a tokenizer, tools or parsers.

    python bench/agents.py                              # 100 M shape, random weights, made-up turns up to 28 k tokens
    python bench/agents.py --session tests/fixtures/agents/claude-session-2.1.197.jsonl.xz     # recorded here
    python bench/agents.py --serve="--aggregated" --json agents.json

Exits with 1 when a bar is missed: from turn 2 on at least 99 % of the tokens that an earlier turn had, in whole pages,
and 95 % of all prompt tokens come from the cache, and the median warm turn begins within 1.2 times its bare prefill.
"""

from __future__ import annotations

import argparse
import gzip
import http.client
import importlib
import json
import lzma
import random
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a script it finds bench.peers, too

from bench.chats import free_port, running, wait_for_workers
from bench.peers.checkpoint import write_checkpoint
from bench.peers.places import SHAPES

from penstock.cli.benchmark.workload import WORDS

ROOT = Path(__file__).resolve().parents[1]
PAGE = 16
CONTEXT = 32_768
LEAST_OF_EARLIER, LEAST_OF_ALL, MOST_TTFT = 0.99, 0.95, 1.2
PATIENCE_S = 900.0
PATIENT = {"x-penstock-max-wait-s": f"{PATIENCE_S:g}"}
ANSWER = 8
"""Tokens of each response: what an agent goes on with stands in the recording."""

GENERATION = ("/v1/chat/completions", "/v1/messages", "/v1/responses")
OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}

CHAT_TEMPLATE = (
    "{% for message in messages %}<|begin_of_text|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}{{ call | tojson }}{% endfor %}<|end_of_text|>{% endfor %}"
    "<|begin_of_text|>assistant\n"
)


@dataclass(frozen=True)
class Request:
    """One recorded request."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str]


@dataclass(frozen=True)
class Turn:
    """What one turn was measured to be; seconds to the first token."""

    prompt: int
    cached: int
    earlier: int  # tokens of the prompt that the turn before had, in whole pages
    ttft_s: float
    bare_s: float = 0.0

    @property
    def new(self) -> int:
        """Tokens to be computed."""
        return self.prompt - self.cached


def recorded(path: Path) -> list[Request]:
    """The requests for responses in a session, in order: JSON Lines with "path", "headers" and "body", or packed."""
    opener = OPENERS.get(path.suffix, open)
    with opener(path, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines if line.strip()]
    asked = [row for row in rows if row["path"].split("?")[0] in GENERATION]
    return [Request(row["path"], row["body"], row.get("headers", {})) for row in asked]


def made_up(turns: int, tokens: int) -> list[Request]:
    """Chats that grow to about ``tokens`` tokens: a long beginning, then files that are read and short answers."""
    dice, first = random.Random(1), tokens // 2

    def words(count: int) -> str:
        return " ".join(dice.choices(WORDS, k=count))

    messages = [{"role": "system", "content": words(first)}]
    requests: list[Request] = []
    for _ in range(turns):
        messages.append({"role": "user", "content": words((tokens - first) // turns - 40)})
        body = {"messages": list(messages), "temperature": 0}
        requests.append(Request("/v1/chat/completions", body, {"x-session-affinity": "agent"}))
        messages.append({"role": "assistant", "content": words(30)})
    return requests


def first_token(port: int, request: Request) -> tuple[float, dict[str, Any]]:
    """Seconds to the first event that shows something, and the usage."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    raw = json.dumps(request.body)
    began = time.perf_counter()
    connection.request("POST", request.path, raw, {"Content-Type": "application/json", **request.headers})
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(f"{request.path}: {response.status} {response.read().decode()[:500]}")
    first, usage = 0.0, dict[str, Any]()
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        first = first or time.perf_counter() - began  # no event comes before the first token
        for holder in (event, event.get("message"), event.get("response")):
            usage |= (holder or {}).get("usage") or {}
    connection.close()
    return first, usage


def counts(usage: dict[str, Any]) -> tuple[int, int]:
    """(tokens of the prompt, those from the cache), in the words of whichever API."""
    if "cache_read_input_tokens" in usage:
        cached = int(usage["cache_read_input_tokens"])
        return int(usage["input_tokens"]) + cached, cached
    if "input_tokens" in usage:
        return int(usage["input_tokens"]), int(usage["input_tokens_details"]["cached_tokens"])
    return int(usage["prompt_tokens"]), int(usage["prompt_tokens_details"]["cached_tokens"])


LENGTH_FIELD = {"/v1/messages": "max_tokens", "/v1/responses": "max_output_tokens"}


def adapted(request: Request, model: str) -> Request:
    """The same, of this model, streamed, with a short response and no demand that random weights could not meet."""
    path = request.path.split("?")[0]
    body = {key: value for key, value in request.body.items() if key not in ("max_tokens", "max_completion_tokens")}
    body |= {"model": model, "stream": True, LENGTH_FIELD.get(path, "max_tokens"): ANSWER}
    if path == "/v1/chat/completions":
        body["stream_options"] = {"include_usage": True}
    return replace(request, body=body, headers=request.headers | PATIENT)


def measured(port: int, model: str, requests: list[Request], announce: Callable[[str], None]) -> Iterator[Turn]:
    """Each turn, and from the second on its bare prefill in a context of its own that grows alike."""
    dice = random.Random(2)
    context: list[int] = []
    before = 0
    for number, request in enumerate(requests):
        ttft_s, usage = first_token(port, adapted(request, model))
        prompt, cached = counts(usage)
        turn = Turn(prompt, cached, min(before, prompt) // PAGE * PAGE, ttft_s)
        context = context[:cached]
        context += dice.choices(range(1000, 20_000), k=prompt - len(context))
        body = {"model": model, "prompt": context, "max_tokens": ANSWER, "temperature": 0, "stream": True}
        bare = Request(
            "/v1/completions",
            body | {"stream_options": {"include_usage": True}},
            PATIENT | {"x-session-affinity": "bare"},
        )
        bare_s, usage = first_token(port, bare)
        announce(
            f"turn {number + 1}: {prompt} tokens, {cached} cached, {1e3 * ttft_s:.0f} ms; bare "
            f"{counts(usage)[1]} cached, {1e3 * bare_s:.0f} ms"
        )
        yield replace(turn, bare_s=bare_s)
        before = prompt


def figures(turns: list[Turn]) -> dict[str, float]:
    """What the bars are about."""
    warm = turns[1:]
    return {
        "turns": len(turns),
        "last prompt": turns[-1].prompt,
        "cached / earlier": sum(turn.cached for turn in warm) / sum(turn.earlier for turn in warm),
        "cached / prompt": sum(turn.cached for turn in warm) / sum(turn.prompt for turn in warm),
        "TTFT warm p50 ms": 1e3 * statistics.median(turn.ttft_s for turn in warm),
        "bare prefill p50 ms": 1e3 * statistics.median(turn.bare_s for turn in warm),
        "TTFT / bare p50": statistics.median(turn.ttft_s / turn.bare_s for turn in warm),
        "new tokens p50": statistics.median(turn.new for turn in warm),
    }


def write_model(folder: Path, *, for_agents: bool) -> None:
    """The 100 M shape with random weights.

    For agents with the scripted model's tokenizer, which was trained on code and English, and its template, which tells
    of tools: the made-up vocabulary of the others cuts an agent's prompt into twice as many tokens as a real one.
    """
    write_checkpoint(folder, replace(SHAPES["100m"], max_positions=CONTEXT), 1, lambda *_: None)
    template = CHAT_TEMPLATE
    if for_agents:
        sys.path.append(str(ROOT / "tests"))
        scripted = importlib.import_module("scripted_model.folder")
        scripted.agent_tokenizer().save(str(folder / "tokenizer.json"))
        template = scripted.TEMPLATE.read_text(encoding="utf-8")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--session", type=Path, metavar="FILE", help="recorded requests (default: made-up chats)")
    parser.add_argument("--model", metavar="FOLDER", help="default: the 100 M shape with random weights")
    parser.add_argument("--turns", type=int, default=20, help="of made-up sessions (default: 20)")
    parser.add_argument("--tokens", type=int, default=28_000, help="of their last prompt (default: 28000)")
    parser.add_argument("--serve", default="", metavar="FLAGS", help="more flags of penstock serve")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--figures-only", action="store_true", help="a missed bar is no failure")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = options.model or str(folder / "model")
        if options.model is None:
            write_model(folder / "model", for_agents=options.session is not None)
        port = free_port()
        words = ["serve", model, "--served-model-name", "agent-model", "--port", str(port), "--kv-memory", "1GiB"]
        with running([*words, *shlex.split(options.serve)], folder / "service.log") as service:
            wait_for_workers(port, None, service)
            requests = recorded(options.session) if options.session else made_up(options.turns, options.tokens)
            turns = list(measured(port, "agent-model", requests, lambda line: print(line, file=sys.stderr)))
    found = figures(turns)
    for key, value in found.items():
        print(f"{key:22} {value:.4g}")
    if options.json:
        options.json.write_text(json.dumps({"turns": [asdict(turn) for turn in turns], **found}, indent=1))
    met = (
        found["cached / earlier"] >= LEAST_OF_EARLIER
        and found["cached / prompt"] >= LEAST_OF_ALL
        and found["TTFT / bare p50"] <= MOST_TTFT
    )
    return 0 if met or options.figures_only else 1


if __name__ == "__main__":
    sys.exit(main())
