"""What is said of pages that are under way: in order, and not before they are there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.engine.core.events import AddRequest
from penstock.engine.core.page_pool import PagePool
from penstock.engine.core.plan import CompletedPage
from penstock.engine.core.request import PageTable, Request
from penstock.engine.service.kv_transfer import PageExporter
from penstock.kv.transfer.events import PageOffer
from penstock.types import BlockHash, PageId, RequestId, RequestStage, SamplingParams
from penstock.wire.gateway_messages import TokenItem


@dataclass
class Copy:
    """A copy that is over when the test says so."""

    pages: list[int]
    is_complete: bool = False


@dataclass
class SlowWriter:
    copies: list[Copy] = field(default_factory=list)

    def begin_export(self, pages: Sequence[int]) -> Copy:
        self.copies.append(Copy(list(pages)))
        return self.copies[-1]


class World:
    """Departures of one worker, and what they said: (block, page) of an offer, the token's index of an end."""

    def __init__(self, *, slow: bool = True) -> None:
        self.pool = PagePool(8)
        self.writer = SlowWriter()
        self.said: list[tuple[int, int] | int] = []
        self.more: list[bool] = []
        self.departures = PageExporter(self.pool, self._offer, self._done, self.writer if slow else None)

    def _offer(self, offer: PageOffer, now: float, *, more: bool = False) -> None:
        self.said.append((offer.index, offer.page))
        self.more.append(more)

    def _done(self, first: TokenItem, tokens: int, now: float) -> None:
        self.said.append(tokens)

    def request(self, *pages: int) -> Request:
        event = AddRequest(
            id=RequestId("r"),
            epoch=1,
            stage=RequestStage.PREFILL,
            prompt=tuple(range(40)),
            sampling=SamplingParams(seed=1, max_tokens=4),
            arrival=0.0,
            root=BlockHash(bytes(32)),
        )
        request = Request(event, serial=1, max_model_len=64)
        request.set_page_tables([PageTable(0, [PageId(page) for page in pages])])
        return request

    def ended(self, tokens: int) -> None:
        self.departures.on_prefill_end(TokenItem(request=RequestId("r"), epoch=1, index=0, tokens=(5,)), tokens, 0.0)


def full(request: Request, *blocks: int, tokens: int = 16) -> list[CompletedPage]:
    return [CompletedPage(request, block, block, 0, tokens) for block in blocks]


def test_pages_of_the_hosts_memory_leave_at_once():
    world = World(slow=False)
    request = world.request(3, 1, 2)
    world.departures.on_pages_completed(full(request, 0, 1), 0.0)
    world.ended(40)
    assert world.said == [(0, 3), (1, 1), 40]
    assert world.more == [True, False]
    assert len(world.departures) == 0


def test_nothing_is_said_of_a_page_before_it_is_there_and_everything_in_order():
    world = World()
    request = world.request(3, 1, 2)
    world.departures.on_pages_completed(full(request, 0), 0.0)
    world.departures.on_pages_completed([*full(request, 1), *full(request, 2, tokens=8)], 0.0)
    world.ended(40)
    assert [copy.pages for copy in world.writer.copies] == [[3], [1, 2]]
    world.writer.copies[1].is_complete = True  # the first is behind: no device does so, and it would not matter
    world.departures.send_written(0.0)
    assert world.said == []
    assert len(world.departures) == 2
    world.writer.copies[0].is_complete = True
    world.departures.send_written(0.0)
    assert world.said == [(0, 3), (1, 1), (2, 2), 40]


def test_a_prompt_whose_pages_are_all_there_ends_at_once():
    world = World()
    world.departures.on_pages_completed(full(world.request(3), 0), 0.0)
    world.writer.copies[0].is_complete = True
    world.departures.send_written(0.0)
    world.ended(16)
    assert world.said == [(0, 3), 16]


def test_a_shared_page_is_written_once_until_it_is_given_out_anew():
    world = World()
    (page,) = world.pool.allocate(1).detach()
    for _ in range(2):
        world.departures.on_pages_completed(full(world.request(page), 0), 0.0)
    assert [copy.pages for copy in world.writer.copies] == [[page], []]
    world.pool.release([page])
    taken = world.pool.allocate(8).detach()
    assert page in taken
    world.departures.on_pages_completed(full(world.request(page), 0), 0.0)
    assert world.writer.copies[-1].pages == [page]


def test_a_page_that_was_filled_further_is_written_again():
    world = World()
    world.departures.on_pages_completed(full(world.request(2), 0, tokens=5), 0.0)
    world.departures.on_pages_completed(full(world.request(2), 0, tokens=9), 0.0)
    assert [copy.pages for copy in world.writer.copies] == [[2], [2]]


def test_pages_that_their_request_lost_meanwhile_are_still_told_by_number():
    """The hand-over knows the request no more, and makes nothing of it."""
    world = World()
    request = world.request(4, 6)
    world.departures.on_pages_completed(full(request, 0, 1), 0.0)
    request.clear_pages()
    world.writer.copies[0].is_complete = True
    world.departures.send_written(0.0)
    assert world.said == [(0, 4), (1, 6)]
