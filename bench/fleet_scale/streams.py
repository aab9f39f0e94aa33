"""Very many streams of a real ``penstock serve`` in front of played workers, and clients that go on with a key."""

from __future__ import annotations

import contextlib
import heapq
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.gateway.figures import Child, cpu_s, say
from bench.gateway.service import FOLDER, until_ready
from bench.gateway.workers import WORDS, played_report

from penstock.engine.service.idempotency_claims import GatewayProcess, IdempotencyClaims
from penstock.engine.service.saved_tokens import SavedTokens
from penstock.types import RequestId, WorkerId
from penstock.wire.curve_keys import CurveKeys
from penstock.wire.gateway_messages import (
    Cancel,
    ClaimIdempotencyKey,
    FindTokens,
    FoundTokens,
    Hello,
    SaveTokens,
    Submit,
    TokenItem,
    Tokens,
)
from penstock.wire.transport import Received
from penstock.wire.zeromq import ZmqTransport

GATEWAYS, STREAM_WORKERS, CLIENTS = 4, 8, 4
STREAMS = 20_000
"""That two cores hold with all that is played."""

PACE_S = 30.0  # between two tokens of a stream, at least, where nothing else is given
TOKENS_PER_S = 70.0
"""Of all streams together at most, where nothing else is given: two cores are kept for opening and for going on."""

SPARE_DESCRIPTORS = 1500
"""Of a gateway, for what is no stream."""

MAX_UNANSWERED = 128
"""Connections of a process of clients without a response.  All of them fit into the gateways' queue: the system drops
what does not, and tries it again seconds later."""

SLOWEST_PER_S = 25.0
"""Streams a second.  What opens or goes on more slowly is taken to hang."""

CONFIG = """
[limits]
max_queued_requests = 1000000
max_queued_tokens = 1000000000
first_byte_s = 600.0
stall_s = {stall_s}
"""


def most_streams(descriptors: int) -> int:
    """That all gateways together can hold if each may have so many descriptors."""
    return GATEWAYS * (descriptors - SPARE_DESCRIPTORS)


def default_pace_s(streams: int) -> float:
    """Seconds from token to token of each of so many."""
    return max(PACE_S, streams / TOKENS_PER_S)


def patience_s(streams: int) -> float:
    """How long to wait for so many streams."""
    return 60.0 + streams / SLOWEST_PER_S


@dataclass(slots=True)
class _Running:
    peer: bytes
    epoch: int
    seed: int | None
    index: int  # of the next token


class StreamWorker:
    """Answers every request with a token each ``pace_s`` since it was first asked for, by whichever gateway.

    It is a home of idempotency keys and saved tokens, by the objects that a worker has for that.
    """

    def __init__(self, name: str, transport: ZmqTransport, begun: dict[int | None, float], pace_s: float) -> None:
        self.name = WorkerId(name)
        self.listener = transport.listen("tcp://127.0.0.1:0")
        self._pace_s = pace_s
        self._begun = begun  # of all workers, by seed, which follows from a client's key: when it was asked for first
        self._gateways: dict[bytes, GatewayProcess] = {}
        self._claims, self._saved = IdempotencyClaims(), SavedTokens()
        self.running: dict[str, _Running] = {}
        self._due: list[tuple[float, str]] = []
        self._heard = self._steps = 0
        self._reported = 0.0

    def turn(self, now: float) -> None:
        while (received := self.listener.recv()) is not None:
            self._on_message(received, now)
        by_peer: dict[bytes, list[TokenItem]] = {}
        while self._due and self._due[0][0] <= now:
            _, name = heapq.heappop(self._due)
            request = self.running.get(name)
            if request is None:
                continue
            begun = self._begun[request.seed]
            index, last = request.index, 1 + int((now - begun) / self._pace_s)
            tokens = tuple(WORDS[at * 7 % len(WORDS)] for at in range(index, last))
            if tokens:
                item = TokenItem(request=RequestId(name), epoch=request.epoch, index=index, tokens=tokens)
                by_peer.setdefault(request.peer, []).append(item)
                request.index = last
            heapq.heappush(self._due, (begun + last * self._pace_s, name))
        for peer, items in by_peer.items():
            self.listener.send(peer, Tokens(worker=self.name, incarnation=1, items=tuple(items)))
        self._steps += len(by_peer)
        if now - self._reported >= 0.25:
            self._reported = now
            self._report()

    def _on_message(self, received: Received, now: float) -> None:
        message, peer = received.message, received.peer
        if isinstance(message, Hello):
            if peer not in self._gateways:
                self._gateways[peer] = GatewayProcess(message.gateway, message.incarnation)
                self._reported = 0.0
        elif isinstance(message, Submit):
            self._heard = max(self._heard, message.serial)
            # One that comes again, from another gateway, gets a new token at once.
            seed = message.sampling.seed
            self._begun[seed] = self._begun.get(seed, now + self._pace_s) - self._pace_s
            self.running[message.request] = _Running(peer, message.epoch, seed, len(message.emitted))
            heapq.heappush(self._due, (now, message.request))
        elif isinstance(message, Cancel):
            self.running.pop(message.request, None)
        elif isinstance(message, ClaimIdempotencyKey):
            gateway, known = self._gateways[peer], self._newest()
            state = self._claims.on_claim(gateway, message, known.__contains__, now)
            if message.serial:
                self.listener.send(peer, state)
        elif isinstance(message, SaveTokens):
            self._saved.save(message.pieces, now)
        elif isinstance(message, FindTokens):
            found = self._saved.find(message.names, now)
            self.listener.send(peer, FoundTokens(serial=message.serial, tokens=found))

    def _newest(self) -> set[GatewayProcess]:
        """The gateways, each by its last incarnation: one that was killed is followed by another under its name."""
        return set({gateway.name: gateway for gateway in self._gateways.values()}.values())

    def _report(self) -> None:
        self._steps += 1
        report = played_report(self.name, steps=self._steps, running=len(self.running), acked=self._heard)
        for peer in self._gateways:
            self.listener.send(peer, report)


def run_stream_workers(line: socket.socket, keys: CurveKeys, pace_s: float) -> None:
    """In a child."""
    transport = ZmqTransport(keys)
    begun: dict[int | None, float] = {}
    workers = [StreamWorker(f"both-{number}", transport, begun, pace_s) for number in range(STREAM_WORKERS)]
    say(line, [worker.listener.endpoint for worker in workers])
    while True:
        now = time.monotonic()
        for worker in workers:
            worker.turn(now)
        transport.wait(0.01, [worker.listener for worker in workers])


_EVENT = re.compile(rb"id: 0:(\d+)(\S*)\ndata: ([^\n]*)\n")


@dataclass(slots=True)
class Stream:
    """One client's stream."""

    key: bytes
    sock: socket.socket | None = None
    index: int = 0
    event: bytes = b""  # the id of the last one
    text: int = 0  # CRC of all that came
    rest: bytes = b""
    answered: bool = False  # the present connection has had the head of a response


class Clients:
    """Streams of one process.  ``texts``: the CRC of a response after each number of tokens, the same for all."""

    def __init__(self, number: int, port: int) -> None:
        self._source, self._number, self._port = (f"127.0.0.{number + 2}", 0), number, port
        self._epoll = select.epoll()
        self.streams: list[Stream] = []
        self._by_fd: dict[int, Stream] = {}
        self._texts: dict[int, int] = {}
        self._waiting: deque[Stream] = deque()  # to be connected
        self._unanswered = 0  # connections without the head of a response
        self.wrong = self.failed = self.breaks = self.tokens = 0
        self.back: list[float] = []  # when each broken stream had the head of its new response

    def add(self, streams: int) -> None:
        """As many more are to be opened."""
        for number in range(len(self.streams), len(self.streams) + streams):
            stream = Stream(b"c%d-%d" % (self._number, number))
            self.streams.append(stream)
            self._waiting.append(stream)

    def _open(self, stream: Stream) -> None:
        sock = socket.socket()
        sock.setsockopt(socket.IPPROTO_IP, 24, 1)  # IP_BIND_ADDRESS_NO_PORT
        sock.bind(self._source)
        try:
            sock.connect(("127.0.0.1", self._port))
            sock.sendall(self._request(stream))
        except OSError:
            sock.close()
            self._waiting.append(stream)
            return
        sock.setblocking(False)
        stream.sock, stream.rest, stream.answered = sock, b"", False
        self._unanswered += 1
        self._by_fd[sock.fileno()] = stream
        self._epoll.register(sock.fileno(), select.EPOLLIN)

    def _request(self, stream: Stream) -> bytes:
        body = b'{"model":"storyteller","prompt":"Once upon a time","max_tokens":1500,"stream":true,"ignore_eos":true}'
        last = b"Last-Event-ID: %s\r\n" % stream.event if stream.event else b""
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nContent-Type: application/json\r\n"
            b"Idempotency-Key: %s\r\n%sContent-Length: %d\r\n\r\n"
        )
        return head % (self._port, stream.key, last, len(body)) + body

    def turn(self, wait_s: float) -> None:
        for fd, _ in self._epoll.poll(wait_s, 512):
            stream = self._by_fd[fd]
            assert stream.sock is not None
            try:
                data = stream.sock.recv(1 << 16)
            except BlockingIOError:
                continue
            except OSError:
                data = b""
            if data:
                self._read(stream, data)
            else:
                self._close(stream)
                self.breaks += 1
                self._waiting.append(stream)
        for _ in range(min(len(self._waiting), MAX_UNANSWERED - self._unanswered)):
            self._open(self._waiting.popleft())

    def _close(self, stream: Stream) -> None:
        assert stream.sock is not None
        self._epoll.unregister(stream.sock.fileno())
        del self._by_fd[stream.sock.fileno()]
        stream.sock.close()
        stream.sock = None
        self._unanswered -= not stream.answered

    def _read(self, stream: Stream, data: bytes) -> None:
        if not stream.answered:
            stream.answered = True
            self._unanswered -= 1
            if not data.startswith(b"HTTP/1.1 200"):
                self.failed += 1
                sys.stderr.write(data[:400].decode(errors="replace") + "\n")
                return
            if stream.event:
                self.back.append(time.monotonic())
        data = stream.rest + data
        end = 0
        for found in _EVENT.finditer(data):
            end = found.end()
            index = int(found[1])
            event: dict[str, Any] = json.loads(found[3])
            text = "".join(choice["text"] for choice in event["choices"])
            stream.text = zlib.crc32(text.encode(), stream.text)
            self.tokens += index - stream.index
            self.wrong += index <= stream.index or self._texts.setdefault(index, stream.text) != stream.text
            stream.index, stream.event = index, b"0:%d%s" % (index, found[2])
        stream.rest = data[max(end, len(data) - 4096) :]

    def figures(self) -> dict[str, Any]:
        """For the bench."""
        return {
            "begun": sum(stream.index > 0 for stream in self.streams),
            "open": len(self._by_fd),
            "broken": self.breaks,
            "back": [min(self.back, default=0.0), max(self.back, default=0.0), len(self.back)],
            "tokens": self.tokens,
            "least": min((stream.index for stream in self.streams), default=0),
            "wrong": self.wrong,
            "failed": self.failed,
        }


def run_clients(line: socket.socket, number: int, port: int) -> None:
    """In a child.  ``{"open": N}`` opens streams; any message is answered with the figures."""
    os.nice(5)
    clients = Clients(number, port)
    say(line, "ready")
    line.setblocking(False)
    while True:
        clients.turn(0.005)
        with contextlib.suppress(BlockingIOError):
            raw = line.recv(1 << 16)
            if not raw:
                return
            clients.add(json.loads(raw).get("open", 0))
            say(line, clients.figures())


@dataclass
class Service:
    """The service, its workers and its clients."""

    server: subprocess.Popen[bytes]
    port: int
    workers: Child
    clients: list[Child] = field(default_factory=list)

    def gateways(self) -> list[int]:
        """Process ids."""
        children = Path(f"/proc/{self.server.pid}/task/{self.server.pid}/children").read_text().split()
        return [int(pid) for pid in children if Path(f"/proc/{pid}/comm").read_text().startswith("gateway")]

    def cpu(self) -> dict[str, float]:
        """CPU seconds so far of the gateways that there are, of the played workers and of the clients."""
        return {
            "gateways": sum(map(cpu_s, self.gateways())),
            "played workers": cpu_s(self.workers.pid),
            "clients": sum(cpu_s(child.pid) for child in self.clients),
        }

    def figures(self, **what: int) -> dict[str, Any]:
        """Of all clients; sums, and the least of ``least``."""
        found = [child.ask(what) for child in self.clients]
        sums: dict[str, Any] = {
            name: sum(one[name] for one in found) for name in ("begun", "open", "broken", "tokens", "wrong", "failed")
        }
        backs = [one["back"] for one in found if one["back"][2]]
        sums["back"] = sum(one["back"][2] for one in found)
        sums["back_at"] = max((back[1] for back in backs), default=0.0)
        sums["least"] = min(one["least"] for one in found)
        return sums

    def until(self, done: Callable[[dict[str, Any]], bool], seconds: float, what: str) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while not done(figures := self.figures()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not {what} within {seconds:g} s: {figures}")
            time.sleep(0.5)
        return figures


@contextlib.contextmanager
def running(folder: Path, pace_s: float) -> Iterator[Service]:
    keys = CurveKeys.ephemeral()
    keys.save(folder)
    (folder / "config.toml").write_text(CONFIG.format(stall_s=max(600.0, 4 * pace_s)))
    workers = Child(lambda line: run_stream_workers(line, keys, pace_s))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    joins = [word for endpoint in workers.hear() for word in ("--join", endpoint)]
    flags = ["--gateways", str(GATEWAYS), "--keys", str(folder), "--config", str(folder / "config.toml")]
    command = [sys.executable, "-m", "penstock", "serve", str(FOLDER), "--port", str(port), *flags, *joins]
    with (folder / "log").open("wb") as log:
        service = Service(subprocess.Popen(command, stdout=log, stderr=log), port, workers)
    try:
        until_ready(port)
        time.sleep(3.0)
        for number in range(CLIENTS):
            service.clients.append(Child(lambda line, number=number: run_clients(line, number, port)))  # type: ignore[misc]
            service.clients[-1].hear()
        yield service
    except BaseException:
        sys.stderr.write((folder / "log").read_text()[-4000:])
        raise
    finally:
        for child in (*service.clients, workers):
            child.end()
        service.server.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            service.server.wait(5)
        service.server.kill()
        service.server.wait()
