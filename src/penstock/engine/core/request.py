"""One request inside the engine: its tokens, how many of them are computed, and the pages they stand in.

Knows nothing about other requests, time or memory.  Only the scheduler and its parts change a request; runners read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from penstock.engine.core.events import AddRequest
from penstock.types import PAGE_TOKENS, BlockHash, FinishReason, PageId, RequestStage, TokenLogprob

NO_PAGE = PageId(0)
"""Stands for a page that was never held; tables must name pages that there are."""


class PageTable:
    """The pages of one request in one group of layers, by block; of a group of states, by cell of the grid.

    Grows at its end and frees at its front::

        blocks   0 ....... begin ............ len(pages)
        pages  | not held | held, one reference each |     what stands at the front is not read any more
    """

    __slots__ = ("first", "page_tokens", "pages")

    def __init__(self, begin: int = 0, pages: Sequence[PageId] = (), page_tokens: int = PAGE_TOKENS) -> None:
        """``page_tokens``: of one page."""
        self.first = begin
        self.page_tokens = page_tokens
        self.pages: list[PageId] = [NO_PAGE] * begin
        self.pages.extend(pages)

    def free_before(self, block: int) -> list[PageId]:
        """Hold nothing below ``block`` any more; the caller gives back what is returned."""
        end = min(block, len(self.pages))
        if end <= self.first:
            return []
        dropped = self.pages[self.first : end]
        self.first = end
        return dropped


def pages_of_all_groups(held: Sequence[PageTable]) -> list[PageId]:
    """Everything held, block by block: given back in this order, all groups lose the same blocks first."""
    if len(held) == 1:
        return held[0].pages[held[0].first :]
    last = max((len(own.pages) for own in held), default=0)
    first = min((own.first for own in held), default=0)
    return [own.pages[block] for block in range(first, last) for own in held if own.first <= block < len(own.pages)]


OrderKey = tuple[int, float, int]
"""Who is served first: (rank of the class, arrival, serial number); the last makes it unique."""


class RequestStatus(Enum):
    """The owner of a request now.  Prefill or decode is no status: it follows from the counts."""

    UNGRANTED = "waits for the receiver's credit"
    WAITING = "in the queue"
    RESERVED = "has its pages, waits for what will stand in them"
    RUNNING = "takes part in steps"
    HANDOVER = "computed, or stopped; its pages are held for the receiver"
    GONE = "forgotten; holds nothing"


class Request:
    """Tokens ``[0, computed)`` stand in the pages ``held``, as far as they are still read; tokens ``[0, known)`` are
    known.  The rest of the engine is bringing the first number up to the second.

    ::

        prompt ..................... | emitted elsewhere | drawn here     known = len(prompt) + len(output)
        computed ................................. |       missing = known - computed
        page | page | page | page | page | page | page |   room = tokens that fit the pages held
        settled: blocks full, final and hashed |
             fallen out | page | page | page | page |      of a group of layers with a window (``reach``)
    """

    __slots__ = (
        "adapter",
        "announced_pieces",
        "arrival",
        "awaited_block",
        "cached_tokens",
        "capacity",
        "chunks_in_flight",
        "computed",
        "deadline",
        "draws_in_flight",
        "emitted",
        "end",
        "epoch",
        "expected_tokens",
        "extra_tokens",
        "fairness_key",
        "grammar",
        "has_first_token",
        "hashes",
        "id",
        "images",
        "in_flight",
        "known",
        "local_end",
        "media",
        "open_ended",
        "order",
        "output",
        "paced_until",
        "page_tables",
        "pooling",
        "preemptions",
        "prompt",
        "prompt_logprobs",
        "prompt_pages_only",
        "qos",
        "rank",
        "retains_pages",
        "root",
        "sampling",
        "settled",
        "stage",
        "status",
        "stop_tokens",
        "verified_since",
    )

    def __init__(self, event: AddRequest, *, serial: int, max_model_len: int, now: float = 0.0) -> None:
        """Holds no page yet."""
        self.id = event.id
        self.epoch = event.epoch
        self.stage = event.stage
        self.prompt: Sequence[int] = event.prompt
        self.images = event.images  # that tokens of the prompt stand for, from left to right
        self.media = event.media  # one an image; none with stage=decode
        self.output: list[int] = list(event.emitted)  # emitted elsewhere, then drawn here
        self.emitted = len(self.output)
        self.sampling = event.sampling
        self.grammar = event.grammar  # held as long as the request is here
        self.pooling = event.pooling
        self.arrival = event.arrival
        self.qos = event.qos
        self.rank = int(event.qos.service)
        self.fairness_key: FairnessKey = (self.rank, event.qos.tenant)
        wait_s = event.qos.max_wait_s
        self.deadline = None if wait_s is None else now + wait_s  # for the next token; there is none once it came
        self.adapter = event.adapter.fingerprint if event.adapter is not None else ""
        self.root = event.root
        self.order: OrderKey = (self.rank, event.arrival, serial)
        self.known = len(event.prompt) + self.emitted
        self.computed = 0
        drawn = event.sampling.max_tokens if event.pooling is None else 0
        self.end = len(event.prompt) + drawn  # ``known`` at which the answer ends
        self.local_end = min(self.end, max_model_len)  # and beyond which nothing of it is computed here
        self.open_ended = event.open_ended
        self.expected_tokens = event.expected_tokens
        self.extra_tokens = max(
            0, min(event.extra_tokens, self.local_end - self.known)
        )  # room for tokens beyond the known ones
        self.prompt_pages_only = event.prompt_pages_only  # only they are shared or come from elsewhere
        self.retains_pages = False  # gives no page back that it does not read any more: another worker copies it
        self.stop_tokens = frozenset(event.sampling.stop_token_ids)
        self.page_tables: list[PageTable] = []  # one a group of layers; empty: no pages.  Made anew at every admission
        self.capacity = 0
        self.hashes: list[BlockHash] = list(event.hashes)
        self.settled = 0  # blocks whose content is final and was offered to the prefix cache
        self.announced_pieces = 0  # stage=prefill: pieces that were announced to the receiver
        self.cached_tokens = 0  # prompt tokens found in the prefix cache at the first admission
        self.verified_since: int | None = None  # the turn in which it first asked for cached pages
        self.preemptions = 0  # how often its pages were taken back
        self.paced_until: float | None = None  # a long prompt is not processed before then (``core.pacing``)
        self.has_first_token = False  # stage=decode: the prefill worker's token is here
        self.prompt_logprobs: list[TokenLogprob] = []
        self.awaited_block: BlockHash | None = None  # a block that another request is computing
        self.in_flight = 0  # micro-batches that compute tokens of it now; always 0 where there is one only
        self.chunks_in_flight = 0  # tokens of those, of chunks that are not the last of their prompt
        self.draws_in_flight = False  # one of those draws a token
        self.status = RequestStatus.UNGRANTED if event.stage is RequestStage.PREFILL else RequestStatus.WAITING

    @property
    def may_outgrow(self) -> bool:
        """Whether it may become longer than this worker's context."""
        return self.local_end < self.end

    @property
    def exceeds_context(self) -> bool:
        """Whether the answer is not over, though nothing more of it can be computed here."""
        return self.local_end <= self.known < self.end

    @property
    def remaining(self) -> int:
        """Tokens that will still be written here: as many as were asked for, or as are expected."""
        left = max(self.local_end - self.known, 0)
        return min(left, self.expected_tokens) if self.open_ended else left

    @property
    def uncomputed(self) -> int:
        """Known tokens that are not computed yet."""
        return self.known - self.computed

    @property
    def launched(self) -> int:
        """Known tokens that are computed, or that a micro-batch in flight computes."""
        return self.computed + self.chunks_in_flight

    @property
    def has_more_chunks(self) -> bool:
        """Whether more of its prompt can be launched, though a part of it is in flight."""
        return self.in_flight > 0 and not self.draws_in_flight and self.launched < self.known

    @property
    def remote_tokens(self) -> int:
        """stage=decode: tokens that others computed, once all their pages are here.  Of two numerics classes the prompt
        comes from elsewhere, and what was emitted of the answer is computed anew, here."""
        return len(self.prompt) + (0 if self.prompt_pages_only and not self.extra_tokens else self.emitted)

    @property
    def uncacheable_from(self) -> int | None:
        """Tokens from this one on give no page a name: a reader of the same tokens would compute other bits."""
        return len(self.prompt) if self.prompt_pages_only else None

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Every prompt position must be computed here; they go out with the answer's first token."""
        return self.sampling.prompt_logprobs is not None and not self.output and self.stage is not RequestStage.DECODE

    def promote(self) -> None:
        """From now on it is one of the first class: those below it waited for long enough."""
        self.rank = 0
        self.fairness_key = (0, self.qos.tenant)
        self.order = (0, *self.order[1:])

    def tokens(self, start: int, stop: int) -> tuple[int, ...]:
        """Known tokens ``[start, stop)``: of the prompt, then of the output."""
        border = len(self.prompt)
        if stop <= border:
            return tuple(self.prompt[start:stop])
        if start >= border:
            return tuple(self.output[start - border : stop - border])
        return (*self.prompt[start:border], *self.output[: stop - border])

    def append(self, token: int) -> FinishReason | None:
        """Know one token more; the reason if the answer ends with it."""
        self.output.append(token)
        self.known += 1
        if token in self.stop_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.known >= self.end else None

    def extend(self, tokens: Sequence[int]) -> tuple[int, FinishReason | None]:
        """Know these tokens, up to the one that ends the answer or for which there is no room any more: how many, and
        why it ends if it does."""
        sure = tokens[:-1]
        if self.known + len(sure) < self.local_end and self.stop_tokens.isdisjoint(sure):
            self.output.extend(sure)
            self.known += len(sure)
            tokens = tokens[len(sure) :]
        else:
            sure = ()
        for taken, token in enumerate(tokens, len(sure) + 1):
            finish = self.append(token)
            if finish is not None or self.exceeds_context:
                return taken, finish
        return len(sure) + len(tokens), None

    def set_page_tables(self, held: list[PageTable]) -> None:
        """Own these pages, one entry a group."""
        self.page_tables = held
        self.update_capacity()

    def update_capacity(self) -> None:
        """After the pages held have become more."""
        self.capacity = min(len(own.pages) * own.page_tokens for own in self.page_tables)

    def clear_pages(self) -> list[PageId]:
        """Own no page, and have nothing computed; the caller gives the pages back."""
        pages, self.page_tables = pages_of_all_groups(self.page_tables), []
        self.capacity = self.computed = self.settled = 0
        self.prompt_logprobs.clear()
        return pages


FairnessKey = tuple[int, str]
"""(rank of the class, tenant)."""
