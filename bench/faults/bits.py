"""F6: one bit flips in a page on its way, or in a cached page before it is used: found every time, answers right.

On the way: both ends of a real hand-over, over shared memory and over TCP.  In the cache: a real worker's scheduler,
prefix cache and page memory under the bundled model, and the answer is compared.  Pages on disk or at remote stores
are those stores' own matter.
"""

from __future__ import annotations

import random
from contextlib import closing, suppress

from bench.faults.result import Budget, Result, judged

from contract.transfer_rig import IDENTITY, LAYOUT, THEIRS, TOKENS, Rig, make_rig, start
from penstock.errors import PageCorrupt
from penstock.kv.checksum import PageChecksum
from penstock.types import PageId, RequestId
from penstock.wire.transfer_messages import PageReady

FLIPS = 10_000
THROUGH_ENDS = 0.02
"""Of the flips on the wire, those that go through both ends of a hand-over; the others meet the carriers' own check."""


def f6(budget: Budget) -> Result:
    """On the wire, then in the cache."""
    flips = budget.count(FLIPS, least=50)
    dice = random.Random(6)
    wire = flips // 2
    ends = max(6, round(wire * THROUGH_ENDS))
    found = _copied(wire - ends, dice)
    through = sum(_handed_over(carrier, ends // 2, dice) for carrier in ("shm", "tcp"))
    cached = flips - wire
    adopted, wrong = _adopted(cached, dice)
    checks = {
        f"{wire - ends - found} not found by a carrier": found == wire - ends,
        f"{2 * (ends // 2) - through} not found in a hand-over": through == 2 * (ends // 2),
        f"{cached - adopted} not found in the cache": adopted == cached,
        f"{wrong} wrong answers": wrong == 0,
    }
    figures = {
        "flips": wire - ends + 2 * (ends // 2) + cached,
        "on the wire": wire - ends,
        "through hand-overs": 2 * (ends // 2),
        "in caches": cached,
        "found": found + through + adopted,
        "wrong answers": wrong,
    }
    return judged("F6", "flipped bits in pages on the wire and in caches", checks, figures)


def _flip(memory: memoryview, bit: int) -> None:
    memory[bit // 8] ^= 1 << (bit % 8)


def _copied(count: int, dice: random.Random) -> int:
    """Flips that the one pass of copying and checking finds: in the page, or in what is announced of it."""
    seal = PageChecksum(IDENTITY, LAYOUT)
    page, into = bytearray(dice.randbytes(LAYOUT.page_bytes)), bytearray(LAYOUT.page_bytes)
    checksum = seal.checksum(memoryview(page), 1)
    found = 0
    for number in range(count):
        said = bytearray(checksum)
        target = said if number % 50 == 0 else page
        bit = dice.randrange(8 * len(target))
        _flip(memoryview(target), bit)
        frame = PageReady(
            request=RequestId("r"), epoch=1, index=0, tokens=16, page=PageId(0), generation=1, checksum=bytes(said)
        )
        try:
            seal.copy_checked(frame, memoryview(page), memoryview(into))
        except PageCorrupt:
            found += 1
        _flip(memoryview(target), bit)
    return found


def _handed_over(carrier: str, count: int, dice: random.Random) -> int:
    """Flips in the sender's memory after a page was announced, over a real transport: the hand-over fails, or the page
    is asked for again and comes whole.  Never is a flipped page taken."""
    found = 0
    for _ in range(count):
        rig, closing_ = make_rig(carrier)
        with suppress(BufferError):
            found += _one_hand_over(rig, dice)
        for one in closing_:
            with suppress(BufferError):
                one.close()
    return found


def _one_hand_over(rig: Rig, dice: random.Random) -> bool:
    start(rig)
    block = dice.randrange(len(THEIRS))
    whole = rig.sender_page(THEIRS[block])
    view = rig.sender_memory.view(PageId(THEIRS[block]))
    bit = dice.randrange(8 * len(whole))
    seal = rig.sender._carrier.seal
    plain = type(seal).checksum

    def sealed(page: memoryview, generation: int) -> bytes:
        """The page is whole when it is sealed, and damaged before it leaves."""
        told = plain(seal, page, generation)
        if bytes(page) == whole:
            _flip(view, bit)
        return told

    seal.checksum = sealed  # type: ignore[method-assign]
    try:
        for number, page in enumerate(THEIRS):
            rig.offer(number, page, tokens=min(16, TOKENS - 16 * number))
        rig.until(lambda: bool(rig.failed) or rig.receiver.counters.corrupt > 0)
    finally:
        del seal.checksum
    damaged = rig.sender_page(THEIRS[block])
    return damaged != whole and rig.receiver.counters.corrupt > 0 and not rig.firsts


def _adopted(count: int, dice: random.Random) -> tuple[int, int]:
    """(found, wrong answers): each time a bit of a cached page flips, and a request comes that would use it."""
    from bench.faults.engine import Engine

    with closing(Engine()) as engine:
        prompt = [dice.randrange(6, 4000) for _ in range(5 * 16 + 3)]
        wanted = engine.answer(prompt)
        wrong = 0
        for _ in range(count):
            page = dice.choice(engine.cached_pages(prompt))
            view = engine.memory.view(page)
            _flip(view, dice.randrange(8 * view.nbytes))
            wrong += engine.answer(prompt) != wanted
        return engine.damaged, wrong
