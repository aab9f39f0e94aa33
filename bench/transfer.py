"""How fast KV pages get from one process to another here: microseconds and GB/s, by size and carrier.

A forked sender offers all pages of a request at once; the clock runs in the receiver from asking for them to having
copied and verified the last and got the first token.  So a figure holds everything: checksums on both sides,
messages, encryption where there is any, copying.  ``socket`` is the measure for those over a network: one plain
connection, as many bytes out of and into the same memory, and nothing checked.  Carriers take turns, so that whatever
else the machine does is the same for all.

``copy`` is the receiver's copying and verifying alone, out of and into memory that is in no cache, ``memcpy`` the
copying without it; ``checksum`` is what the sender spends on a page.

``share`` is the median of the ratios, turn by turn: of ``socket`` for what goes over one, of ``memcpy`` for ``copy``,
which is what ``shm`` does with each page.  A whole hand-over by ``shm`` has neither for its measure: it holds the
sender's checksums and the messages, which a memcpy has not, and goes over no socket.

    python -m bench.transfer
    python -m bench.transfer --carriers tcp,socket --sizes 64MiB --page 1MiB --json
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from statistics import median
from time import perf_counter

from penstock.clock import MonotonicClock
from penstock.config.limits import KvTransferConfig
from penstock.kernels.operands import KvShape
from penstock.kv.checksum import PageChecksum
from penstock.kv.connectors.base import KvConnector
from penstock.kv.connectors.inline import InlineConnector
from penstock.kv.connectors.shm import ShmConnector
from penstock.kv.connectors.tcp.connector import TcpConnector
from penstock.kv.page_memory import KvLayout, KvMemory, KvMemoryFile
from penstock.kv.transfer.events import PageOffer, PagePull, PullFailed, PullGranted, TransferDone
from penstock.kv.transfer.receiver import KvReceiver, send_pulls
from penstock.kv.transfer.sender import KvSender, send_messages
from penstock.types import ModelIdentity, PageId, RequestId, WorkerId
from penstock.wire.curve_keys import CurveKeys
from penstock.wire.gateway_messages import PageSource, TokenItem
from penstock.wire.transfer_messages import PageReady, PagesReceived, PullPages
from penstock.wire.transport import Link, Listener
from penstock.wire.zeromq import ZmqTransport

OVER_SOCKETS = ("tcp", "tcp-sealed", "curve")
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "B": 1}
WORKER = WorkerId("prefill-0")
IDENTITY = ModelIdentity(fingerprint="f" * 64, numerics="bench")
CLOCK = MonotonicClock()


def size_of(text: str) -> int:
    for unit, scale in UNITS.items():
        if text.endswith(unit):
            return int(text[: -len(unit)]) * scale
    return int(text)


def shown(size: int) -> str:
    return next((f"{size >> shift} {unit}" for unit, shift in (("MiB", 20), ("KiB", 10)) if size >> shift), f"{size} B")


def layout_of(page_bytes: int) -> KvLayout:
    """A page of so many bytes: 16 tokens, one layer, one head."""
    return KvLayout.for_shape(KvShape.plain(layers=1, kv_heads=1, head_dim=page_bytes // 64), "bf16")


def send_forever(carrier: KvConnector, transport: ZmqTransport, ready: int, endpoint: str) -> None:
    """Give every request that pulls all its pages at once; the number of its blocks stands in its name."""
    sender = KvSender(KvTransferConfig(), carrier, incarnation=1)
    listener = transport.listen(endpoint)
    os.write(ready, listener.endpoint.encode() + b"\n")
    while True:
        transport.wait(None, [listener])
        while (received := listener.recv()) is not None:
            now = CLOCK.now()
            match received.message:
                case PagesReceived() as got:
                    send_messages(sender.on_received(got, now), listener, sender, now)
                case PullPages() as pull:
                    if pull.skip_blocks == 0 and not pull.resend:
                        send_messages(sender.open_transfer(pull.request, pull.epoch, now), listener, sender, now)
                    turn = sender.on_pull(received.peer, pull, now)
                    for effect in send_messages(turn, listener, sender, now):
                        if isinstance(effect, PullGranted):
                            give(sender, listener, effect)


def give(sender: KvSender, listener: Listener, granted: PullGranted) -> None:
    blocks = int(granted.request.split("-")[1])
    for block in range(blocks):
        offer = PageOffer(
            request=granted.request,
            epoch=granted.epoch,
            index=block,
            page=PageId(block),
            tokens=16,
            generation=1,
        )
        now = CLOCK.now()
        send_messages(sender.offer_page(offer, now, more=block + 1 < blocks), listener, sender, now)
    first = TokenItem(request=granted.request, epoch=granted.epoch, index=0, tokens=(1,))
    now = CLOCK.now()
    send_messages(sender.finish_prefill(first, blocks, now), listener, sender, now)


def carrier_of(kind: str, memory: KvMemory, peers: dict[WorkerId, KvMemory]) -> KvConnector:
    seal = PageChecksum(IDENTITY, memory.layout)
    match kind:
        case "shm":
            return ShmConnector(memory, peers, seal)
        case "curve":
            return InlineConnector(memory, seal)
        case "tcp" | "tcp-sealed":
            return TcpConnector(
                memory, seal, KvTransferConfig(), endpoint="tcp://127.0.0.1:0", port=0, sealed=kind == "tcp-sealed"
            )
        case _:
            raise SystemExit(f"--carriers: {kind!r} is none of shm, tcp, tcp-sealed, curve, socket")


@contextmanager
def sending(kind: str, file: KvMemoryFile, keys: CurveKeys) -> Iterator[str]:
    """A forked sender, and the endpoint where it listens."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            memory = file.map_own()
            memory.buffer[:] = os.urandom(1 << 16) * (memory.buffer.nbytes >> 16) + bytes(memory.buffer.nbytes & 0xFFFF)
            if kind == "socket":
                send_plainly(memory, write)
            endpoint = f"ipc://@penstock-bench-{os.getpid()}" if kind == "shm" else "tcp://127.0.0.1:0"
            send_forever(carrier_of(kind, memory, {}), ZmqTransport(keys), write, endpoint)
        finally:
            os._exit(1)
    try:
        os.close(write)
        with os.fdopen(read) as bound:
            yield bound.readline().strip()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def send_plainly(memory: KvMemory, ready: int) -> None:
    """As many bytes as are asked for in eight, for ever."""
    listening = socket.create_server(("127.0.0.1", 0))
    os.write(ready, b"%d\n" % listening.getsockname()[1])
    sock = listening.accept()[0]
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while asked := sock.recv(8):
        sock.sendall(memory.buffer[: int.from_bytes(asked, "little")])


class Plainly:
    """The receiving end of ``send_plainly``."""

    def __init__(self, own: KvMemory, port: str) -> None:
        self._own = own
        self._sock = socket.create_connection(("127.0.0.1", int(port)))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __call__(self, blocks: int) -> None:
        view = self._own.buffer[: blocks * self._own.layout.page_bytes]
        self._sock.sendall(view.nbytes.to_bytes(8, "little"))
        while view.nbytes:
            view = view[self._sock.recv_into(view) :]


class Receiving:
    """The receiving end of hand-overs from one sender."""

    def __init__(self, carrier: KvConnector, transport: ZmqTransport, endpoint: str) -> None:
        self._transport = transport
        self._receiver = KvReceiver(KvTransferConfig(), carrier)
        self._source = PageSource(worker=WORKER, incarnation=1, endpoint=endpoint)
        self._link: Link = transport.connect(endpoint)
        self._number = 0

    def __call__(self, blocks: int) -> None:
        """One request of so many pages, from asking for it to its first token."""
        self._number += 1
        pull = PagePull(
            request=RequestId(f"{self._number}-{blocks}"),
            epoch=1,
            source=self._source,
            pages=[PageId(page) for page in range(blocks)],
            skip_blocks=0,
            tokens=16 * blocks,
        )
        receiver = self._receiver
        send_pulls(receiver.start_pull(pull, CLOCK.now()), self._say)
        news: list[object] = []
        while not any(isinstance(effect, TransferDone) for effect in news):
            assert not any(isinstance(effect, PullFailed) for effect in news), news
            if not receiver.has_work:
                self._transport.wait(1.0, [self._link], receiver.descriptors)
            while (received := self._link.recv()) is not None:
                turn = receiver.on_message(self._source, received.message, received.payload, CLOCK.now())
                news += send_pulls(turn, self._say)
            news += send_pulls(receiver.fetch_pages(CLOCK.now()), self._say)

    def _say(self, _: PageSource, message: PullPages | PagesReceived) -> None:
        self._link.send(message)


def transfers(kinds: list[str], layout: KvLayout, sizes: list[int], seconds: float) -> Iterator[dict[str, object]]:
    """Wall time of whole hand-overs, the carriers taking turns."""
    pages = max(sizes) // layout.page_bytes
    keys = CurveKeys.ephemeral()
    with ExitStack() as stack:
        files = {kind: stack.enter_context(closing(KvMemoryFile.create(layout, pages))) for kind in kinds}
        # All forks before the first thread.
        endpoints = {kind: stack.enter_context(sending(kind, files[kind], keys)) for kind in kinds}
        transport = stack.enter_context(closing(ZmqTransport(keys)))
        ends: dict[str, Callable[[int], None]] = {}
        for kind in kinds:
            own = KvMemory.anonymous(layout, pages)
            own.buffer[:] = bytes(own.buffer.nbytes)  # the first touch of memory is not a hand-over's
            if kind == "socket":
                ends[kind] = Plainly(own, endpoints[kind])
                continue
            carrier = carrier_of(kind, own, {WORKER: files[kind].map_readonly()})
            if isinstance(carrier, TcpConnector):
                stack.callback(carrier.close)
            ends[kind] = Receiving(carrier, transport, endpoints[kind])
        for size in sizes:
            blocks = size // layout.page_bytes
            taken = in_turns({kind: lambda end=end: end(blocks) for kind, end in ends.items()}, seconds)  # noqa: B023
            for kind, times in taken.items():
                plain = taken.get("socket") if kind in OVER_SOCKETS else None
                yield row(kind, size, times) | ({"of_socket": share(plain, times)} if plain else {})


def in_turns(runs: dict[str, Callable[[], None]], seconds: float) -> dict[str, list[float]]:
    """Durations in seconds, of as many rounds as fit, five at least, after two that do not count."""
    taken: dict[str, list[float]] = {kind: [] for kind in runs}
    rounds, end = -2, perf_counter() + seconds * len(runs)
    while rounds < 5 or perf_counter() < end:
        rounds += 1
        for kind, run in runs.items():
            start = perf_counter()
            run()
            if rounds > 0:
                taken[kind].append(perf_counter() - start)
    return taken


def parts(layout: KvLayout, seconds: float) -> Iterator[dict[str, object]]:
    """The two things that are done to every page, alone, over 256 MiB so that no cache helps."""
    pages = (256 << 20) // layout.page_bytes
    memory, own = KvMemory.anonymous(layout, pages), KvMemory.anonymous(layout, pages)
    memory.buffer[:] = os.urandom(1 << 16) * (memory.buffer.nbytes >> 16)
    own.buffer[:] = bytes(own.buffer.nbytes)
    seal = PageChecksum(IDENTITY, layout)
    frames = [
        PageReady(
            request=RequestId("r"),
            epoch=1,
            index=0,
            tokens=16,
            page=PageId(page),
            generation=1,
            checksum=seal.checksum(memory.view(PageId(page)), 1),
        )
        for page in range(pages)
    ]

    def copy() -> None:
        for frame in frames:
            seal.copy_checked(frame, memory.view(frame.page), own.view(frame.page))

    def memcpy() -> None:
        for frame in frames:
            own.view(frame.page)[:] = memory.view(frame.page)

    def checksum() -> None:
        for frame in frames:
            seal.checksum(memory.view(frame.page), 1)

    taken = in_turns({"memcpy": memcpy, "copy": copy, "checksum": checksum}, seconds)
    for name, times in taken.items():
        of = {"of_memcpy": share(taken["memcpy"], times)} if name == "copy" else {}
        yield row(name, layout.page_bytes, [each / pages for each in times]) | of


def share(measure: list[float], taken: list[float]) -> float:
    """How much of the measure's speed something has, turn by turn."""
    return median(one / other for one, other in zip(measure, taken, strict=True))


def row(what: str, size: int, taken: list[float]) -> dict[str, object]:
    return {
        "what": what,
        "bytes": size,
        "median_us": median(taken) * 1e6,
        "best_us": min(taken) * 1e6,
        "gb_per_s": size / median(taken) / 1e9,
        "runs": len(taken),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--carriers", default="socket,tcp,tcp-sealed,curve,shm", help="comma-separated")
    parser.add_argument("--sizes", default="64KiB,1MiB,64MiB", help="bytes in one hand-over, comma-separated")
    parser.add_argument("--page", default="64KiB", help="bytes in one page, a multiple of 64")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each figure")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    options = parser.parse_args()
    layout = layout_of(size_of(options.page))
    sizes = [size_of(size) for size in options.sizes.split(",")]
    if any(size % layout.page_bytes for size in sizes):
        parser.error(f"sizes must be multiples of the page's {layout.page_bytes} bytes")
    if not options.json:
        print(f"pages of {shown(layout.page_bytes)}, {os.cpu_count()} cores")
        print(f"{'what':10}{'size':>10}{'median us':>12}{'best us':>12}{'GB/s':>8}{'share':>11}{'runs':>7}")
    for result in rows(options, layout, sizes):
        if options.json:
            print(json.dumps(result), flush=True)
        else:
            figures = f"{result['median_us']:12.1f}{result['best_us']:12.1f}{result['gb_per_s']:8.2f}"
            ratio = result.get("of_socket") or result.get("of_memcpy")
            part = f"{ratio:.0%}" if ratio else ""
            print(f"{result['what']:10}{shown(result['bytes']):>10}{figures}{part:>11}{result['runs']:7}", flush=True)


def rows(options: argparse.Namespace, layout: KvLayout, sizes: list[int]) -> Iterator[dict[str, object]]:
    yield from transfers(options.carriers.split(","), layout, sizes, options.seconds)
    yield from parts(layout, options.seconds)


if __name__ == "__main__":
    main()
