"""Traces of real traffic: arrival times, lengths of prompts and outputs, shared prefixes; and requests made of them.

Two formats, recognized by the first line, plain or gzipped:

- Mooncake (https://github.com/kvcache-ai/Mooncake, FAST25-release): a JSON object a line, ``timestamp`` in ms,
  ``input_length``, ``output_length``, ``hash_ids`` of the prompt's blocks of 512 tokens, the last one perhaps shorter;
- Azure (https://github.com/Azure/AzurePublicDataset, LLM inference 2023): CSV with ``TIMESTAMP``, ``ContextTokens``,
  ``GeneratedTokens``; prompts share nothing.

Requests have no text, but real chains of block hashes (``hashing.block_hash``): the same beginnings have the same
hashes, as in the trace.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Annotated, BinaryIO, cast

import msgspec

from penstock.errors import ConfigError
from penstock.hashing import block_hash, chain_root
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

BLOCK_TOKENS = 512
"""Tokens that one of Mooncake's ``hash_ids`` stands for."""

MAX_LINE_BYTES = 4 << 20
MAX_REQUESTS = 1 << 22
_AZURE = b"TIMESTAMP,ContextTokens,GeneratedTokens"
_GZIP = b"\x1f\x8b"
_WANTED = "expected a Mooncake JSONL or an Azure CSV, plain or gzipped"

TraceTokens = Annotated[int, msgspec.Meta(ge=0, le=1 << 24)]
HashId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class TraceRequest(msgspec.Struct, frozen=True, gc=False):
    """One request of a trace."""

    number: int
    at: float  # seconds since the trace's first request
    prompt: int  # tokens, 1 at least
    output: int  # tokens, 1 at least
    blocks: tuple[int, ...] = ()  # names of the prompt's blocks; none where the trace knows none


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace in order of arrival; ``block_tokens`` is 0 where it knows no blocks."""

    name: str
    requests: tuple[TraceRequest, ...]
    block_tokens: int = 0

    @property
    def span_s(self) -> float:
        """From the first arrival to the last."""
        return self.requests[-1].at - self.requests[0].at


class _Mooncake(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0, le=1e15)]
    input_length: TraceTokens
    output_length: TraceTokens
    hash_ids: tuple[HashId, ...]


def read_trace(path: Path, limit: int | None = None) -> Trace:
    """The trace, or its first ``limit`` requests.  Raises ConfigError that names file, line and reason."""
    try:
        with path.open("rb") as file:
            packed = file.read(2) == _GZIP
            file.seek(0)
            lines = _lines(cast(BinaryIO, gzip.GzipFile(fileobj=file)) if packed else file, path)
            return _read(lines, path, min(limit or MAX_REQUESTS, MAX_REQUESTS))
    except (OSError, EOFError, zlib.error) as error:  # but for OSError: the file was cut or damaged
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or error}; {_WANTED}") from None


def _lines(file: BinaryIO, path: Path) -> Iterator[tuple[int, bytes]]:
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise ConfigError(f"{path}, line {number}: longer than {MAX_LINE_BYTES} bytes; {_WANTED}")
        if line.strip():
            yield number, line.strip()


def _read(lines: Iterator[tuple[int, bytes]], path: Path, limit: int) -> Trace:
    first = next(lines, (0, b""))
    if first[1].removeprefix(b"\xef\xbb\xbf") == _AZURE:
        jobs, block_tokens = list(islice(_azure(lines, path), limit)), 0
    elif first[1].startswith(b"{"):
        jobs, block_tokens = list(islice(_mooncake(first, lines, path), limit)), BLOCK_TOKENS
    else:
        raise ConfigError(f"{path}: unknown format: {_WANTED}")
    if not jobs:
        raise ConfigError(f"{path}: no requests; {_WANTED}")
    jobs.sort(key=lambda job: (job.at, job.number))
    begin = jobs[0].at
    return Trace(
        name=path.name.removesuffix(".gz"),
        requests=tuple(
            TraceRequest(n, job.at - begin, job.prompt, job.output, job.blocks) for n, job in enumerate(jobs)
        ),
        block_tokens=block_tokens,
    )


def _mooncake(first: tuple[int, bytes], rest: Iterable[tuple[int, bytes]], path: Path) -> Iterator[TraceRequest]:
    decoder = msgspec.json.Decoder(_Mooncake)
    for number, line in (first, *rest):
        try:
            row = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from None
        blocks = -(-row.input_length // BLOCK_TOKENS)
        if len(row.hash_ids) != blocks:
            raise ConfigError(
                f"{path}, line {number}: {len(row.hash_ids)} hash_ids for {row.input_length} tokens, "
                f"which are {blocks} blocks of {BLOCK_TOKENS}"
            )
        if row.input_length:
            yield TraceRequest(number, row.timestamp / 1000, row.input_length, max(1, row.output_length), row.hash_ids)


def _azure(lines: Iterable[tuple[int, bytes]], path: Path) -> Iterator[TraceRequest]:
    for number, line in lines:
        try:
            when, context, generated = line.decode().split(",")
            moment = datetime.fromisoformat(when)  # in UTC where the file has no offset
            at, prompt, answer = moment.replace(tzinfo=moment.tzinfo or UTC).timestamp(), int(context), int(generated)
        except ValueError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from None
        if not (0 <= prompt <= 1 << 24 and 0 <= answer <= 1 << 24):
            raise ConfigError(f"{path}, line {number}: {prompt} and {answer} tokens: at most {1 << 24}")
        if prompt:
            yield TraceRequest(number, at, prompt, max(1, answer))


IDENTITY = ModelIdentity(fingerprint="5" * 64, numerics="simulated")
"""Of all simulated workers."""

PLAIN_TOKEN, STOP_TOKEN = 1, 2
"""Tokens of answers: any, and the last."""

_REST = (0,) * (PAGE_TOKENS - 2)


class TracePrompts:
    """The requests of a trace."""

    def __init__(self, trace: Trace, page_tokens: int) -> None:
        self._trace = trace
        self._page_tokens = page_tokens
        self._names: dict[tuple[BlockHash, int, int], BlockHash] = {}
        self._root = chain_root(IDENTITY)
        self._most = max(job.output for job in trace.requests)
        self._seen: set[BlockHash] = set()
        self.ideal_tokens = 0  # of prompts asked for so far, that one infinite cache of all would have had

    def request(self, number: int, arrival: float) -> ValidRequest:
        """The trace's request of this number.  Callers ask in order of arrival, once for each."""
        job = self._trace.requests[number]
        hashes = self._hashes(number)
        self._count_ideal(hashes, job.prompt)
        first = job.blocks[0] if job.blocks else number
        return ValidRequest(
            id=RequestId(f"{number}"),
            prompt=read_token_ids(first.to_bytes(TOKEN_BYTES, "little") + bytes(TOKEN_BYTES * (job.prompt - 1))),
            block_hashes=hashes,
            sampling=SamplingParams(seed=number, max_tokens=self._most, stop_token_ids=(STOP_TOKEN,)),
            arrival=arrival,
            open_ended=True,
        )

    def _hashes(self, number: int) -> tuple[BlockHash, ...]:
        job, size = self._trace.requests[number], self._page_tokens
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
