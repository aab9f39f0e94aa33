"""Requests as the router and the workers see them, made from a trace: no text, but real chains of block hashes.

A block of a trace becomes one page or several, whose hashes (``hashing.block_hash``) follow from its number and the
page's place in it: equal beginnings have equal hashes, as in the trace, and nothing else has.
"""

from __future__ import annotations

from penstock.hashing import block_hash, chain_root
from penstock.sim.trace import Trace
from penstock.types import (
    PAGE_TOKENS,
    TOKEN_BYTES,
    BlockHash,
    ModelIdentity,
    RequestId,
    SamplingParams,
    ValidRequest,
    read_token_ids,
)

IDENTITY = ModelIdentity(fingerprint="5" * 64, numerics="simulated")
"""Of all simulated workers."""

WORD, END = 1, 2
"""Tokens of answers: any, and the last."""

_REST = (0,) * (PAGE_TOKENS - 2)


class Prompts:
    """The requests of a trace."""

    def __init__(self, trace: Trace, page_tokens: int) -> None:
        self._trace = trace
        self._page_tokens = page_tokens
        self._names: dict[tuple[BlockHash, int, int], BlockHash] = {}
        self._root = chain_root(IDENTITY)
        self._most = max(job.answer for job in trace.jobs)
        self._seen: set[BlockHash] = set()
        self.ideal_tokens = 0  # of prompts asked for so far, that one infinite cache of all would have had

    def request(self, number: int, arrival: float) -> ValidRequest:
        """The trace's request of this number.  Callers ask in order of arrival, once for each."""
        job = self._trace.jobs[number]
        hashes = self._hashes(number)
        self._count_ideal(hashes, job.prompt)
        first = job.blocks[0] if job.blocks else number
        return ValidRequest(
            id=RequestId(f"{number}"),
            prompt=read_token_ids(first.to_bytes(TOKEN_BYTES, "little") + bytes(TOKEN_BYTES * (job.prompt - 1))),
            block_hashes=hashes,
            sampling=SamplingParams(seed=number, max_tokens=self._most, stop_token_ids=(END,)),
            arrival=arrival,
            open_ended=True,
        )

    def _hashes(self, number: int) -> tuple[BlockHash, ...]:
        job, size = self._trace.jobs[number], self._page_tokens
        pages = self._trace.block_tokens // size or job.prompt  # a block
        parent, hashes = self._root, list[BlockHash]()
        for page in range(job.prompt // size):
            block, place = divmod(page, pages)
            parent = self._name(parent, job.blocks[block] if job.blocks else number, place)
            hashes.append(parent)
        return tuple(hashes)

    def _name(self, parent: BlockHash, block: int, place: int) -> BlockHash:
        if not self._trace.block_tokens:
            return block_hash(parent, (block, place, *_REST))  # no two requests share any
        name = self._names.get((parent, block, place))
        if name is None:
            name = self._names[parent, block, place] = block_hash(parent, (block, place, *_REST))
        return name

    def _count_ideal(self, hashes: tuple[BlockHash, ...], tokens: int) -> None:
        known, limit = 0, (tokens - 1) // self._page_tokens
        if self._trace.block_tokens:
            while known < limit and hashes[known] in self._seen:
                known += 1
            self._seen.update(hashes)
        self.ideal_tokens += known * self._page_tokens
