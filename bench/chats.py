"""Chats of several turns on a real fleet: do they find what was computed before, and how soon do answers begin?

Starts, for each policy, workers that read and write (the bundled model unless told otherwise) and a gateway that joins
them, and lets clients chat: a common beginning, then turns, each of which appends the last answer and some new tokens.
Ideal hits are those of one endless cache that all workers share: all full pages of a prompt that anybody computed.

    python bench/chats.py                                        # penstock against round-robin
    python bench/chats.py --policies penstock random least-loaded prefix --json chats.json
    python bench/chats.py --policies penstock --serve="--prefill 2 --decode 2"       # one service, split
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

PAGE = 16
PENSTOCK = [sys.executable, "-m", "penstock"]


@dataclass
class Heard:
    """What all clients saw."""

    ttft_s: list[float] = field(default_factory=list)
    prompt: int = 0  # tokens
    cached: int = 0
    ideal: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, ttft_s: float, prompt: int, cached: int, ideal: int) -> None:
        """One turn."""
        with self.lock:
            self.ttft_s.append(ttft_s)
            self.prompt += prompt
            self.cached += cached
            self.ideal += ideal

    def row(self, policy: str) -> dict[str, Any]:
        """The figures."""
        p50, p90, p99 = (float(np.quantile(self.ttft_s, q)) for q in (0.5, 0.9, 0.99))
        return {
            "policy": policy,
            "turns": len(self.ttft_s),
            "hits_of_ideal": round(self.cached / max(1, self.ideal), 4),
            "hit_ratio": round(self.cached / max(1, self.prompt), 4),
            "ideal_hit_ratio": round(self.ideal / max(1, self.prompt), 4),
            "ttft_p50_ms": round(p50 * 1e3, 1),
            "ttft_p90_ms": round(p90 * 1e3, 1),
            "ttft_p99_ms": round(p99 * 1e3, 1),
        }


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@contextmanager
def running(words: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A command of ours, ended with SIGTERM."""
    with log.open("wb") as out:
        process = subprocess.Popen([*PENSTOCK, *words], stdout=out, stderr=out)
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


@contextmanager
def one_service(options: argparse.Namespace, config: Path) -> Iterator[int]:
    """The port of a service with workers of its own."""
    port = free_port()
    words = ["serve", *([options.model] if options.model else []), "--port", str(port), "--config", str(config)]
    with running([*words, *shlex.split(options.serve)], config.parent / "service.log") as service:
        try:
            wait_for_workers(port, None, service)
        except RuntimeError:
            print((config.parent / "service.log").read_text(), file=sys.stderr)
            raise
        yield port


@contextmanager
def fleet(options: argparse.Namespace, policy: str) -> Iterator[int]:
    """The port of a gateway that can serve."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        subprocess.run([*PENSTOCK, "keys", str(folder / "keys")], check=True, capture_output=True)
        model = [options.model] if options.model else []
        keys = ["--keys", str(folder / "keys")]
        config = folder / "penstock.toml"
        config.write_text(f'[routing]\npolicy = "{policy}"\n')
        if options.serve is not None:
            yield stack.enter_context(one_service(options, config))
            return
        join: list[str] = []
        for number in range(options.workers):
            endpoint = f"tcp://127.0.0.1:{free_port()}"
            words = ["worker", *model, "--role", "both", "--listen", endpoint, "--threads", "1", *keys]
            stack.enter_context(running([*words, "--name", f"both-{number}"], folder / f"worker-{number}.log"))
            join += ["--join", endpoint]
        port = free_port()
        words = ["serve", *model, "--port", str(port), "--config", str(config), *keys, *join]
        gateway = stack.enter_context(running(words, folder / "gateway.log"))
        try:
            wait_for_workers(port, options.workers, gateway)
        except RuntimeError:
            print((folder / "gateway.log").read_text(), file=sys.stderr)
            raise
        yield port


def wait_for_workers(port: int, count: int | None, gateway: subprocess.Popen[bytes]) -> None:
    """Until so many are ready, or (None) all that there are.  Raises RuntimeError."""
    until = time.monotonic() + 120
    while time.monotonic() < until and gateway.poll() is None:
        try:
            rows = get(port, "/admin/workers")["workers"]
        except OSError:
            rows = []
        if rows and sum(row["state"] == "ready" for row in rows) == (len(rows) if count is None else count):
            return
        time.sleep(0.1)
    raise RuntimeError("the fleet was not ready in time")


def get(port: int, path: str) -> Any:
    """A JSON answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", path)
    return json.loads(connection.getresponse().read())


def ask(port: int, prompt: list[int], options: argparse.Namespace) -> tuple[float, list[int], int]:
    """(seconds to the first token, tokens of the answer, cached tokens) of a streamed completion."""
    body = {
        "model": options.name,
        "prompt": prompt,
        "max_tokens": options.answer,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    began = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(response.read().decode())
    first, tokens, cached = 0.0, [], 0
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        for choice in event.get("choices", ()):
            if choice.get("token_ids"):
                first = first or time.perf_counter() - began
                tokens += choice["token_ids"]
        if event.get("usage"):
            cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
    connection.close()
    return first, tokens, cached


def chat(port: int, number: int, heard: Heard, options: argparse.Namespace) -> None:
    """One client's chats, one after the other."""
    rng = random.Random(number)
    common = [100 + i for i in range(options.system)]
    for _ in range(options.chats):
        prompt = common + [rng.randrange(100, 4000) for _ in range(options.first)]
        known = options.system
        for _ in range(options.turns):
            time.sleep(rng.expovariate(1 / options.think) if options.think else 0.0)
            ttft_s, answer, cached = ask(port, prompt, options)
            ideal = min(known // PAGE, (len(prompt) - 1) // PAGE) * PAGE
            heard.add(ttft_s, len(prompt), cached, ideal)
            known = len(prompt) + len(answer) - 1  # the last token is drawn, not computed
            prompt = prompt + answer + [rng.randrange(100, 4000) for _ in range(options.message)]


def measure(options: argparse.Namespace, policy: str) -> dict[str, Any]:
    """One fresh fleet under one policy."""
    with fleet(options, policy) as port:
        options.name = get(port, "/v1/models")["data"][0]["id"]
        ask(port, [100 + i for i in range(options.system)], options)  # the common beginning is somewhere
        for seed in range(4 * options.workers):  # and everybody has experience
            ask(port, [4000 - seed] * 200, options)
        heard = Heard()
        clients = [
            threading.Thread(target=chat, args=(port, number, heard, options)) for number in range(options.clients)
        ]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        return heard.row(policy)


def build_parser() -> argparse.ArgumentParser:
    """Flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder; default: the bundled model")
    parser.add_argument("--policies", nargs="+", default=["penstock", "round-robin"])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--serve", metavar="FLAGS", help="one service with these flags instead of joined workers")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--chats", type=int, default=1, help="of each client")
    parser.add_argument("--turns", type=int, default=14, help="of each chat")
    parser.add_argument("--system", type=int, default=128, help="tokens that all chats begin with")
    parser.add_argument("--first", type=int, default=200, help="tokens of the first message")
    parser.add_argument("--message", type=int, default=60, help="of each later one")
    parser.add_argument("--answer", type=int, default=32)
    parser.add_argument("--think", type=float, default=0.05, help="mean seconds between an answer and the next message")
    parser.add_argument("--json", type=Path)
    return parser


def main() -> None:
    """Measure and print."""
    options = build_parser().parse_args()
    rows = []
    for policy in options.policies:
        rows.append(measure(options, policy))
        print(json.dumps(rows[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
