"""What a streamed token costs the gateway, and how long its event loop is held.

    python -m bench.gateway                          # every bar, five rounds: some six minutes
    python -m bench.gateway --only saturated,paced   # --rounds 1 --seconds 2 for a look
    python -m bench.gateway --json gateway.json

CPU seconds are those of the gateway's process (all threads, as getrusage tells), in rounds that alternate with a bare
ASGI application on the same server and event loop, which writes ready-made chunks of the same size at the same pace.
Ratios of one run are what counts.  Exits with 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from penstock.config.schema import EventLoop
from penstock.launch import event_loop

from . import bare, clients
from .figures import Child, anonymous_kib, cpu_s, hardware_line
from .service import Service, chat, listening, until_ready

CHAT = "/v1/chat/completions"
CHUNK = 264  # bytes of one event of one token of a chat, as the scenes below find it


@dataclass(frozen=True)
class Bar:
    """One line of the table."""

    scene: str
    what: str
    value: float
    bar: float
    unit: str
    beside: str = ""  # what else there is to know

    @property
    def met(self) -> bool:
        return self.value <= self.bar


class Bare:
    """The bare application's process, with the face of ``ServiceClassName``."""

    def __init__(self, loop: EventLoop) -> None:
        listener, self.port = listening()
        self._child = Child(lambda line: bare.serve(line, listener, CHUNK, loop))
        self._child.hear()
        listener.close()
        self.pid = self._child.pid
        self.workers = self._child

    def end(self) -> None:
        self._child.end()


@dataclass(frozen=True)
class Window:
    """What was measured of a server in some seconds."""

    cpu_us: float  # a token
    tokens_s: float
    tokens_event: float
    gap_p99_ms: float
    core: float  # share of one core
    bytes_event: float


def window(server: Service | Bare, crowd: Child, streams: int, pace: float, seconds: float) -> Window:
    """Open streams, warm up, and measure while nothing but tokens comes."""
    is_bare = isinstance(server, Bare)
    body = None if is_bare else chat()
    server.workers.ask({"pace": 0})
    crowd.ask({"open": streams, "port": server.port, "path": CHAT, "body": body})
    deadline = time.monotonic() + 60
    while server.workers.ask({})["running"] < streams:
        if time.monotonic() > deadline:
            raise TimeoutError("the streams are not open")
        time.sleep(0.05)
    server.workers.ask({"pace": pace})
    time.sleep(1.0)
    first, sent, cpu = crowd.ask({"gaps": True}), server.workers.ask({}), cpu_s(server.pid)
    time.sleep(seconds)
    cpu_end, last, sent_end = cpu_s(server.pid), crowd.ask({}), server.workers.ask({})
    took = last["at"] - first["at"]
    events = last["events"] - first["events"]
    tokens = sent_end["sent"] - sent["sent"] if is_bare else last["tokens"] - first["tokens"]
    server.workers.ask({"pace": 0})
    crowd.ask({"close": True})
    _wait(lambda: not server.workers.ask({"pace": 0, "drop": True})["running"])
    server.workers.ask({"pace": 0})
    return Window(
        cpu_us=(cpu_end - cpu) / max(1, tokens) * 1e6,
        tokens_s=tokens / took,
        tokens_event=tokens / max(1, events),
        gap_p99_ms=last["gap_p99"] * 1e3,
        core=(cpu_end - cpu) / took,
        bytes_event=(last["bytes"] - first["bytes"]) / max(1, events),
    )


def beside(scene: str, options: argparse.Namespace, *, streams: int, pace: float, bar: float) -> list[Bar]:
    """The gateway's cost a token over the bare application's, in alternating rounds."""
    crowd = Child(clients.run)
    crowd.hear()
    ours: list[Window] = []
    theirs: list[Window] = []
    gateway, plain = Service(workers=1, loop=options.loop), Bare(options.loop)
    try:
        for _ in range(options.rounds):
            ours.append(window(gateway, crowd, streams, pace, options.seconds))
            theirs.append(window(plain, crowd, streams, pace, options.seconds))
            print(f"  {scene}: {ours[-1]}\n  {' ' * len(scene)}  {theirs[-1]}", file=sys.stderr)
    finally:
        for each in (gateway, plain, crowd):
            each.end()
    ratio = statistics.median(a.cpu_us / b.cpu_us for a, b in zip(ours, theirs, strict=True))
    told = f"{median(ours, 'cpu_us'):.1f} us against {median(theirs, 'cpu_us'):.1f}; {median(ours, 'tokens_s'):,.0f}"
    told += f" and {median(theirs, 'tokens_s'):,.0f} tokens/s; {median(ours, 'tokens_event'):.2f} tokens an event"
    told += f"; p99 of gaps {median(ours, 'gap_p99_ms'):.0f} and {median(theirs, 'gap_p99_ms'):.0f} ms"
    return [Bar(scene, f"CPU a token beside a bare application, {streams} streams", ratio, bar, "x", told)]


def median(windows: list[Window], name: str) -> float:
    return statistics.median(getattr(each, name) for each in windows)


def served(options: argparse.Namespace) -> list[Bar]:
    """``penstock serve`` with the bundled model and its workers, 64 streams."""
    listener, port = listening()
    listener.close()
    command = [sys.executable, "-m", "penstock", "serve", "--port", str(port), "--event-loop", options.loop]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    crowd = Child(clients.run)
    crowd.hear()
    costs: list[float] = []
    told: list[tuple[float, float]] = []
    try:
        pid = _gateway_of(server.pid, port)
        for _ in range(options.rounds):
            crowd.ask({"open": 64, "port": port, "path": CHAT, "body": chat(1800)})
            _wait(lambda: crowd.ask({})["begun"] == 64)
            time.sleep(0.5)
            first, cpu = crowd.ask({}), cpu_s(pid)
            time.sleep(options.seconds)
            cpu_end, last = cpu_s(pid), crowd.ask({})
            tokens = last["tokens"] - first["tokens"]
            costs.append((cpu_end - cpu) / max(1, tokens) * 1e6)
            told.append((tokens / (last["at"] - first["at"]), tokens / max(1, last["events"] - first["events"])))
            print(f"  served: {costs[-1]:.1f} us, {told[-1]}", file=sys.stderr)
            crowd.ask({"close": True})
            time.sleep(1.0)
    finally:
        crowd.end()
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
    rate = statistics.median(rate for rate, _ in told)
    joined = statistics.median(joined for _, joined in told)
    words = f"{rate:,.0f} tokens/s; {joined:.2f} tokens an event"
    return [Bar("served", "CPU a token, 64 streams of the bundled model", statistics.median(costs), 30, "us", words)]


def _gateway_of(pid: int, port: int) -> int:
    """The gateway among the children of ``penstock serve``, once it serves."""
    until_ready(port)
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        if Path(f"/proc/{child}/comm").read_text().startswith("gateway"):
            return int(child)
    raise LookupError("no gateway among the children of penstock serve")


def _wait(until: Callable[[], bool], seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not until():
        if time.monotonic() > deadline:
            raise TimeoutError("nothing came")
        time.sleep(0.1)


def crowded(options: argparse.Namespace) -> list[Bar]:
    """Many streams that are slow: turns of the loop, and memory.  On asyncio's loop, whose turns can be seen."""
    streams, paused = options.streams, options.seconds * 4
    crowd = Child(clients.run)
    crowd.hear()
    gateway = Service(workers=options.workers, loop="asyncio", watched=True)
    try:
        time.sleep(2.0)
        _warm(gateway, crowd)
        before = anonymous_kib(gateway.pid)
        gateway.gateway.ask({"reset": True})
        for _ in range(0, streams, 500):
            crowd.ask({"open": 500, "port": gateway.port, "path": CHAT, "body": chat()}, 300)
        _wait(lambda: gateway.workers.ask({})["running"] >= streams, 180)
        opening = gateway.gateway.ask({})
        gateway.workers.ask({"pace": 0.5})
        time.sleep(3.0)
        gateway.gateway.ask({"reset": True})
        first, cpu = crowd.ask({"gaps": True}), cpu_s(gateway.pid)
        time.sleep(paused)
        cpu_end, last = cpu_s(gateway.pid), crowd.ask({})
        steady = gateway.gateway.ask({})
        memory = (anonymous_kib(gateway.pid) - before) / streams
    finally:
        for each in (gateway, crowd):
            each.end()
    tokens = last["tokens"] - first["tokens"]
    cost = (cpu_end - cpu) / max(1, tokens) * 1e6
    said = f"{tokens / (last['at'] - first['at']):,.0f} tokens/s, {cost:.1f} us a token (watched)"
    return [
        Bar("crowded", f"longest turn, CPU, {streams} streams", _longest(steady), 20, "ms", f"{_who(steady)}; {said}"),
        Bar("crowded", "longest turn, CPU, while they are opened", _longest(opening), 20, "ms", _who(opening)),
        Bar("crowded", "resident memory a stream", memory, 16, "KiB"),
    ]


def _warm(gateway: Service, crowd: Child) -> None:
    """A few streams, so that what is made once is made."""
    crowd.ask({"open": 64, "port": gateway.port, "path": CHAT, "body": chat()})
    _wait(lambda: bool(gateway.workers.ask({})["running"] >= 64))
    gateway.workers.ask({"pace": 0.05})
    time.sleep(1.0)
    gateway.workers.ask({"pace": 0})
    crowd.ask({"close": True})
    _wait(lambda: not gateway.workers.ask({})["running"])


def _longest(figures: dict[str, Any]) -> float:
    return float(figures["worst"][0][0]) * 1e3 if figures["worst"] else 0.0


def _who(figures: dict[str, Any]) -> str:
    if not figures["worst"]:
        return ""
    turns = "; ".join(f"{cpu * 1e3:.1f} ms: {who}" for cpu, _, who in figures["worst"][:3])
    return f"{turns}; stalls by the clock over 20 ms: {figures['stalls']}, longest {figures['longest'] * 1e3:.0f} ms"


SCENES: dict[str, Callable[[argparse.Namespace], list[Bar]]] = {
    "saturated": lambda options: beside("saturated", options, streams=300, pace=0.001, bar=0.7),
    "paced": lambda options: beside("paced", options, streams=300, pace=0.06, bar=1.7),
    "served": served,
    "crowded": crowded,
}


def hardware(options: argparse.Namespace) -> str:
    """In a line."""
    loop = event_loop.event_loop_name(options.loop)
    return f"{hardware_line()}; Python {platform.python_version()}, {loop}"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gateway", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="SCENES", help=f"of {', '.join(SCENES)}")
    parser.add_argument("--rounds", type=int, default=5, help="medians of so many (default: 5)")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each round (default: 5)")
    parser.add_argument("--streams", type=int, default=10_000, help="of the scene crowded (default: 10000)")
    parser.add_argument("--workers", type=int, default=16, help="of the scene crowded (default: 16)")
    parser.add_argument(
        "--loop", choices=("auto", "uvloop", "asyncio"), default="auto", help="of both servers (default: auto)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="save the table there")
    options = parser.parse_args()
    wanted = options.only.split(",") if options.only else list(SCENES)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    bars = [bar for name in wanted for bar in SCENES[name](options)]
    print(hardware(options) + "\n")
    print("| scene | | measured | bar | | |\n|---|---|---:|---:|---|---|")
    for bar in bars:
        value = f"{bar.value:.2f} {bar.unit} | <= {bar.bar:g}"
        print(f"| {bar.scene} | {bar.what} | {value} | {'met' if bar.met else 'MISSED'} | {bar.beside} |")
    if options.json:
        options.json.write_text(json.dumps({"machine": hardware(options), "bars": [asdict(b) for b in bars]}, indent=1))
    return 0 if all(bar.met for bar in bars) else 1


if __name__ == "__main__":
    sys.exit(main())
