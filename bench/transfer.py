"""How fast KV pages get from one process to another here: microseconds and GB/s, by size and carrier.

A forked sender offers all pages of a request at once; the clock runs in the receiver from asking for them to having
copied and verified the last and got the first token.  So a figure holds everything: checksums on both sides,
messages, encryption (TCP: of the bytes too), copying.  ``copy`` is the receiver's copying and verifying alone, out
of and into memory that is in no cache; ``checksum`` is what the sender spends on a page.

    PYTHONPATH=src python bench/transfer.py
    PYTHONPATH=src python bench/transfer.py --carriers tcp --sizes 64MiB --page 1MiB --json
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from statistics import median
from time import perf_counter

from penstock.clock import MonotonicClock
from penstock.config.schema import HandOverConfig
from penstock.kernels.operands import KvShape
from penstock.kv.layout import KvLayout
from penstock.kv.memory import KvFile, KvMemory
from penstock.kv.transfer.drive import post, post_pulls
from penstock.kv.transfer.effects import FirstToken, Granted, Offer, Pull, PullFailed
from penstock.kv.transfer.port import PageCarrier, PageSeal
from penstock.kv.transfer.receiver import HandOverReceiver
from penstock.kv.transfer.sender import HandOverSender
from penstock.kv.transfer.shm import ShmCarrier
from penstock.kv.transfer.tcp import TcpCarrier
from penstock.types import ModelIdentity, PageId, RequestId, WorkerId
from penstock.wire.keys import Keys
from penstock.wire.messages import PageReady, PageSource, PagesReceived, PullPages, TokenItem
from penstock.wire.transport import Listener
from penstock.wire.zeromq import ZmqTransport

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
    return KvLayout.of(KvShape.plain(layers=1, kv_heads=1, head_dim=page_bytes // 64), "bf16")


def send_forever(carrier: PageCarrier, transport: ZmqTransport, ready: int, endpoint: str) -> None:
    """Give every request that pulls all its pages at once; the number of its blocks stands in its name."""
    sender = HandOverSender(HandOverConfig(), carrier, incarnation=1)
    listener = transport.listen(endpoint)
    os.write(ready, listener.endpoint.encode() + b"\n")
    while True:
        transport.wait(None, [listener])
        while (received := listener.recv()) is not None:
            now = CLOCK.now()
            match received.message:
                case PagesReceived() as got:
                    post(sender.received(got, now), listener, sender, now)
                case PullPages() as pull:
                    if pull.skip_blocks == 0 and not pull.resend:
                        post(sender.open(pull.request, pull.epoch, now), listener, sender, now)
                    turn = sender.pull(received.peer, pull, now)
                    for effect in post(turn, listener, sender, now):
                        if isinstance(effect, Granted):
                            give(sender, listener, effect)


def give(sender: HandOverSender, listener: Listener, granted: Granted) -> None:
    blocks = int(granted.request.split("-")[1])
    for block in range(blocks):
        offer = Offer(
            request=granted.request,
            epoch=granted.epoch,
            block=block,
            page=PageId(block),
            tokens=16,
            generation=1,
        )
        now = CLOCK.now()
        post(sender.offer(offer, now), listener, sender, now)
    first = TokenItem(request=granted.request, epoch=granted.epoch, index=0, tokens=(1,))
    now = CLOCK.now()
    post(sender.done(first, blocks, now), listener, sender, now)


@contextmanager
def sending(kind: str, file: KvFile, keys: Keys) -> Iterator[str]:
    """A forked sender, and the endpoint where it listens."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            memory = file.map_own()
            memory.buffer[:] = os.urandom(1 << 16) * (memory.buffer.nbytes >> 16) + bytes(memory.buffer.nbytes & 0xFFFF)
            seal = PageSeal(IDENTITY, file.layout)
            carrier: PageCarrier = ShmCarrier(memory, {}, seal) if kind == "shm" else TcpCarrier(memory, seal)
            endpoint = f"ipc://@penstock-bench-{os.getpid()}" if kind == "shm" else "tcp://127.0.0.1:0"
            send_forever(carrier, ZmqTransport(keys), write, endpoint)
        finally:
            os._exit(1)
    try:
        os.close(write)
        with os.fdopen(read) as bound:
            yield bound.readline().strip()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def transfers(kind: str, layout: KvLayout, sizes: list[int], seconds: float) -> Iterator[dict[str, object]]:
    """Wall time of whole hand-overs."""
    pages = max(sizes) // layout.page_bytes
    keys = Keys.ephemeral()
    with closing(KvFile.create(layout, pages)) as file, sending(kind, file, keys) as endpoint:
        own = KvMemory.anonymous(layout, pages)
        own.buffer[:] = bytes(own.buffer.nbytes)  # the first touch of memory is not a hand-over's
        seal = PageSeal(IDENTITY, layout)
        peers = {WORKER: file.map_readonly()}
        receiver = HandOverReceiver(
            HandOverConfig(), ShmCarrier(own, peers, seal) if kind == "shm" else TcpCarrier(own, seal)
        )
        source = PageSource(worker=WORKER, incarnation=1, endpoint=endpoint)
        with closing(ZmqTransport(keys)) as transport:
            link = transport.connect(endpoint)
            number = 0

            def say(_: PageSource, message: PullPages | PagesReceived) -> None:
                link.send(message)

            def hand_over(blocks: int) -> None:
                nonlocal number
                number += 1
                pull = Pull(
                    request=RequestId(f"{number}-{blocks}"),
                    epoch=1,
                    source=source,
                    pages=[PageId(page) for page in range(blocks)],
                    skip_blocks=0,
                    tokens=16 * blocks,
                )
                post_pulls(receiver.expect(pull, CLOCK.now()), say)
                news: list[object] = []
                while not any(isinstance(effect, FirstToken) for effect in news):
                    assert not any(isinstance(effect, PullFailed) for effect in news), news
                    if not receiver.has_work:
                        transport.wait(1.0, [link])
                    while (received := link.recv()) is not None:
                        turn = receiver.receive(source, received.message, received.payload, CLOCK.now())
                        news += post_pulls(turn, say)
                    news += post_pulls(receiver.work(CLOCK.now()), say)

            for size in sizes:
                blocks = size // layout.page_bytes
                yield row(kind, size, measured(lambda: hand_over(blocks), seconds))  # noqa: B023


def parts(layout: KvLayout, seconds: float) -> Iterator[dict[str, object]]:
    """The two things that are done to every page, alone, over 256 MiB so that no cache helps."""
    pages = (256 << 20) // layout.page_bytes
    memory, own = KvMemory.anonymous(layout, pages), KvMemory.anonymous(layout, pages)
    memory.buffer[:] = os.urandom(1 << 16) * (memory.buffer.nbytes >> 16)
    own.buffer[:] = bytes(own.buffer.nbytes)
    seal = PageSeal(IDENTITY, layout)
    frames = [
        PageReady(
            request=RequestId("r"),
            epoch=1,
            block=0,
            tokens=16,
            page=PageId(page),
            generation=1,
            checksum=seal.checksum(memory.view(PageId(page)), 1),
        )
        for page in range(pages)
    ]

    def copy() -> None:
        for frame in frames:
            seal.copy(frame, memory.view(frame.page), own.view(frame.page))

    def checksum() -> None:
        for frame in frames:
            seal.checksum(memory.view(frame.page), 1)

    for name, run in (("copy", copy), ("checksum", checksum)):
        times = [taken / pages for taken in measured(run, seconds)]
        yield row(name, layout.page_bytes, times)


def measured(run: Callable[[], None], seconds: float) -> list[float]:
    """Durations in seconds, of at least five runs after two that do not count."""
    run()
    run()
    taken: list[float] = []
    end = perf_counter() + seconds
    while len(taken) < 5 or perf_counter() < end:
        start = perf_counter()
        run()
        taken.append(perf_counter() - start)
    return taken


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
    parser.add_argument("--carriers", default="shm,tcp", help="comma-separated: shm, tcp")
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
        print(f"{'what':10}{'size':>10}{'median us':>12}{'best us':>12}{'GB/s':>8}{'runs':>7}")
    for result in rows(options, layout, sizes):
        if options.json:
            print(json.dumps(result), flush=True)
        else:
            figures = f"{result['median_us']:12.1f}{result['best_us']:12.1f}{result['gb_per_s']:8.2f}"
            print(f"{result['what']:10}{shown(result['bytes']):>10}{figures}{result['runs']:7}", flush=True)


def rows(options: argparse.Namespace, layout: KvLayout, sizes: list[int]) -> Iterator[dict[str, object]]:
    for carrier in options.carriers.split(","):
        yield from transfers(carrier, layout, sizes, options.seconds)
    yield from parts(layout, options.seconds)


if __name__ == "__main__":
    main()
