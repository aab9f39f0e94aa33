"""Messages between gateways and workers: tagged, versioned, size-capped msgspec structs.

One frame is one message, optionally followed by one payload of raw bytes (a KV page).  ``wire.codec`` encodes and
decodes them.  Unknown tags, missing fields and wrong types are ``ProtocolError``.

Life of a disaggregated request::

    gateway --Submit(stage=decode, pages_from=P)> D     D queues it until it has room for the whole prompt
    gateway --Submit(stage=prefill)-------------> P     P waits for D's credit
    D --PullPages (the credit)------------------> P     P admits it and starts to compute
    P --PageReady*, PagesReady*, PrefillDone----> D     D copies and verifies pages into its own memory
    P --Tokens(index=0)-------------------------> gateway
    D --PagesReceived---------------------------> P     P's lease ends
    D --Tokens(index=0...)----------------------> gateway   (token 0 again: it counts once)

The credit before computing keeps admission free of deadlock: P holds pages only for a D that has reserved the room for
them.

A request migrates from D to E while D decodes it, and D stops only for the last piece::

    D --MigrateRequests-------------------> gateway
    gateway --Submit(stage=decode, joins)-> E         the same request and epoch; ``pages_from`` is D
    E --PullPages(ahead)------------------> D         E has room for all that is known, and for what D decodes meanwhile
    D --PageReady*------------------------> E         full pages; D goes on
    D --PageReady, PrefillDone------------> E         D has stopped: the last page, the tokens since MigrateRequests
    E --Tokens----------------------------> gateway
    E --PagesReceived(moved)--------------> D         D releases the request
    D --RequestReturned(handed over)------> gateway

If anything fails before the last message, D goes on, or the request is submitted anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Annotated, TypeVar

import msgspec

from penstock.adapter_records import MAX_ADAPTER_RECORDS, AdapterRecord
from penstock.poison_verdicts import DIGEST_BYTES, MAX_VERDICTS
from penstock.types import (
    DEFAULT_QOS,
    LOWER_TIERS,
    TOKEN_BYTES,
    AdapterRef,
    BlockHash,
    Count,
    Duty,
    FinishReason,
    Incarnation,
    MediaInput,
    ModelIdentity,
    Name,
    PlacedImage,
    PoolingParams,
    Qos,
    RequestId,
    RequestStage,
    Role,
    SamplingParams,
    Seconds,
    TokenId,
    TokenLogprob,
    WorkerId,
    WorkerState,
    read_token_ids,
)

_T = TypeVar("_T")


def in_parts(items: Sequence[_T], most: int) -> Iterator[tuple[_T, ...]]:
    """The items in order, for as many messages as it takes if each has ``most`` at most."""
    for start in range(0, len(items), most):
        yield tuple(items[start : start + most])


class WireMessage(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="t", forbid_unknown_fields=True, omit_defaults=True
):
    """Base of everything that crosses a process boundary."""


MAX_PHASE_FACTS = 16


PhaseFigure = Annotated[float, msgspec.Meta(ge=-1e18, le=1e18)]
PhaseFact = Annotated[str, msgspec.Meta(max_length=64)]


class PhaseTiming(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One phase of a leg.  Times count from the leg's arrival: clocks of two hosts are not compared."""

    name: Annotated[str, msgspec.Meta(max_length=32)]
    begin_s: PhaseFigure
    seconds: PhaseFigure
    facts: Annotated[dict[PhaseFact, PhaseFigure], msgspec.Meta(max_length=MAX_PHASE_FACTS)]


MAX_AGE_S = 86_400.0
"""The most that a request's age counts for.  Ages are compared, never the clocks of two hosts."""

# Fields have ranges, which the codec checks.  What depends on a model or on earlier messages is checked where that is
# known: tokens, those of ``Submit.emitted`` too, in ``engine.service.gateways.invalid_submit``.

HASH_BYTES = 32
CHECKSUM_BYTES = 16
MAX_COUNTERS = 1024
MAX_RANKS = 1024
MAX_REASON_CHARS = 4096
MAX_POOLED_BYTES = 1 << 20

MAX_NAMED_REQUESTS = 4096
"""Requests that one ``Hello``, ``MigrateRequests`` or ``ConfirmRequests`` names."""

MAX_TOKEN_ITEMS = 4096
"""Items in one ``Tokens``."""

MAX_ITEM_TOKENS = 1 << 16
"""Tokens in one item, and log-probabilities."""

MAX_CACHE_CHANGES = 4096
"""``KvEvents`` in one ``WorkerReport``."""

MAX_ITEM_PHASES = 1024
MAX_EMITTED_TOKENS = 1 << 22
MAX_PROMPT_BLOCKS = 1 << 19
MAX_PLACED_IMAGES = 4096
MAX_ENCODERS = 1024

RATE_NAME_BYTES = 16
MAX_RATE_DEMANDS = 128
"""Token buckets in one ``RateDemands``: the busiest of a host."""

MAX_RATE_TOTALS = 512
"""Token buckets in one ``RateTotals``: the busiest of all hosts.  Of any other, each host has an equal share."""

MAX_GATEWAY_HOSTS = 1 << 16

KEY_DIGEST_BYTES = 16
KEY_MARK_BYTES = 8
MAX_CLAIMED_CHOICES = 64
"""Choices of a request with an idempotency key, in one message.  Requests with more are not claimed."""

MAX_SAVED_PIECES = 512
"""Responses in one ``SaveTokens``."""

MAX_SAVED_TOKENS = 65_536
"""Of one choice of a response, from its first on."""

MAX_OPEN_REQUEST_COUNTS = 512
"""API keys in one ``OpenRequestCounts``."""

KeyDigest = Annotated[bytes, msgspec.Meta(min_length=KEY_DIGEST_BYTES, max_length=KEY_DIGEST_BYTES)]
KeyMark = Annotated[bytes, msgspec.Meta(min_length=KEY_MARK_BYTES, max_length=KEY_MARK_BYTES)]
SentTokens = Annotated[
    tuple[Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)], ...], msgspec.Meta(max_length=MAX_CLAIMED_CHOICES)
]
"""Of each choice in order, how many of its tokens were sent to clients; empty: nothing of the request counts yet."""

PackedTokens = Annotated[bytes, msgspec.Meta(max_length=MAX_SAVED_TOKENS * TOKEN_BYTES)]
"""Token ids as ``types.TokenIds``, little-endian.  Whoever uses them checks that they are of the model's vocabulary."""

RateName = Annotated[bytes, msgspec.Meta(min_length=RATE_NAME_BYTES, max_length=RATE_NAME_BYTES)]
RateDemand = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
GatewayHosts = Annotated[int, msgspec.Meta(ge=0, le=MAX_GATEWAY_HOSTS)]

AnyRequest = Annotated[RequestId, msgspec.Meta(max_length=1024)]
AnyWorker = Annotated[WorkerId, msgspec.Meta(max_length=1024)]
AnyHash = Annotated[BlockHash, msgspec.Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]
Checksum = Annotated[bytes, msgspec.Meta(min_length=CHECKSUM_BYTES, max_length=CHECKSUM_BYTES)]
ReasonText = Annotated[str, msgspec.Meta(max_length=MAX_REASON_CHARS)]
Pid = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]
CounterValues = Annotated[
    dict[Name, Annotated[float, msgspec.Meta(ge=0, le=1e18)]], msgspec.Meta(max_length=MAX_COUNTERS)
]
Pooled = Annotated[bytes, msgspec.Meta(max_length=MAX_POOLED_BYTES)]
NamedRequests = Annotated[tuple[tuple[AnyRequest, Count], ...], msgspec.Meta(max_length=MAX_NAMED_REQUESTS)]
"""Each with its epoch."""

ItemLogprobs = Annotated[tuple[TokenLogprob, ...], msgspec.Meta(max_length=MAX_ITEM_TOKENS)]


MAX_EXPECTED_TOKENS = 1 << 31


class PageSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a decode stage fetches its pages, or a prefill stage the rows of its images."""

    worker: AnyWorker
    incarnation: Incarnation
    endpoint: Name


class Recipient(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, array_like=True):
    """The process that is meant.  An address outlives it: what waited for one must not be done by the next."""

    worker: AnyWorker
    incarnation: Incarnation
    identity: ModelIdentity


# --- gateway -> worker ---------------------------------------------------------------------------------------------


class AwaitedStage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, gc=False):
    """A leg that a gateway waits for."""

    request: AnyRequest
    epoch: Count


class Hello(WireMessage, frozen=True, kw_only=True, tag="hello"):
    """A gateway introduces itself, and again every ``FailoverConfig.beat_s``.

    A worker cancels what belongs to a gateway's earlier incarnation, or to a gateway that fell silent.  A message can
    be lost with its connection, and neither end hear of it; so the gateway names the legs that have been silent for a
    while, and the worker gives back (``ReturnReason.UNKNOWN``) those that it does not know.
    """

    gateway: Name
    incarnation: Incarnation
    connection: Count = 0  # grows with each connection that this gateway makes: the latest is the one to answer
    awaited: Annotated[tuple[AwaitedStage, ...], msgspec.Meta(max_length=MAX_NAMED_REQUESTS)] = ()
    kv_snapshot: bool = False  # tell me all that your prefix cache has: I am new, or have missed some of your KvEvents
    discovery: bool = False  # only asks who listens here: answered by one Report, and no gateway is remembered for it
    host: Annotated[str, msgspec.Meta(max_length=64)] = (
        ""  # the same for gateways that share buckets of rates in memory
    )


class Submit(WireMessage, frozen=True, kw_only=True, tag="submit", rename={"stage": "leg"}):
    """Please compute.  A later epoch of the same request replaces an earlier one.

    ``emitted`` are tokens of the answer that the client has already: they are counted as output, never sent again.
    Given back (``ReturnReason.OTHER_PROCESS``) by a process other than the ``recipient``.
    Raises ValueError for a prompt that is no whole number of token ids.
    """

    recipient: Recipient
    request: AnyRequest
    epoch: Count
    stage: RequestStage
    prompt: Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES)]  # ``types.TokenIds``, little-endian
    sampling: SamplingParams
    age_s: Annotated[float, msgspec.Meta(ge=0.0, le=MAX_AGE_S)] = 0.0  # since it came to its gateway: its place in line
    emitted: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_EMITTED_TOKENS)] = ()
    root: AnyHash  # parent of the first block, for hashing what is not hashed yet
    block_hashes: Annotated[tuple[AnyHash, ...], msgspec.Meta(max_length=MAX_PROMPT_BLOCKS)] = ()  # of its full pages
    qos: Qos = DEFAULT_QOS
    open_ended: bool = False  # no length was given: it may begin where it cannot end, and migrates in time
    expected_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_EXPECTED_TOKENS)] = 0  # more, of one that is open-ended
    adapter: AdapterRef | None = None  # what is added to the model's weights for this answer
    pages_from: PageSource | None = None  # with stage=decode
    mixed: bool = False  # prompt and answer are computed in two numerics classes
    joins: bool = False  # stage=decode: ``pages_from`` goes on writing this very answer while its pages are fetched
    images: Annotated[tuple[PlacedImage, ...], msgspec.Meta(max_length=MAX_PLACED_IMAGES)] = ()  # from left to right
    media: Annotated[tuple[MediaInput, ...], msgspec.Meta(max_length=MAX_PLACED_IMAGES)] = ()  # where it is read
    encoders: Annotated[tuple[PageSource, ...], msgspec.Meta(max_length=MAX_ENCODERS)] = ()  # for the prefill worker
    pooling: PoolingParams | None = None  # stage=whole: read the prompt, answer with ``TokenItem.pooled`` and one token
    serial: Count = (
        0  # grows with each Submit of a gateway: ``WorkerReport.acked`` says which of them are counted in it
    )
    traced: bool = False  # ``TokenItem.phases`` are wanted

    def __post_init__(self) -> None:
        read_token_ids(self.prompt)

    @property
    def prompt_tokens(self) -> int:
        """How many tokens the prompt has."""
        return len(self.prompt) // TOKEN_BYTES


class Cancel(WireMessage, frozen=True, kw_only=True, tag="cancel"):
    """Forget this request, whatever its state, if its epoch is not later than this one."""

    request: AnyRequest
    epoch: Count


class RateDemands(WireMessage, frozen=True, kw_only=True, tag="rate_demands"):
    """What tenants ask of the gateways of one host, once a second while there are other hosts, to the one worker that
    all of them choose.  Answered by ``RateTotals``.

    A name is a keyed digest of a tenant and a unit.  A demand is the recent one, as a part of what the tenant may use
    in a minute.
    """

    demands: Annotated[dict[RateName, RateDemand], msgspec.Meta(max_length=MAX_RATE_DEMANDS)]


class ClaimIdempotencyKey(WireMessage, frozen=True, kw_only=True, tag="claim_key"):
    """What a gateway does with a request that has an idempotency key, for the worker that is the home of the key
    (``router.idempotency_homes``).  Answered by ``IdempotencyKeyState``, unless ``serial`` is 0.

    ``key`` and ``tenant`` are keyed digests, ``mark`` is one of the body and the model.
    """

    key: KeyDigest
    tenant: KeyDigest
    mark: KeyMark
    serial: Count = 0
    running: bool = False  # this gateway computes it
    sent: SentTokens = ()  # it has sent so much, which is to be counted by one gateway only
    withdrawn: bool = False  # it was refused before it began


class SavedPiece(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Tokens of a response that has ``start`` tokens before them.  Raises ValueError for a partial token id."""

    name: KeyDigest
    start: Annotated[int, msgspec.Meta(ge=0, le=MAX_SAVED_TOKENS)]
    tokens: PackedTokens

    def __post_init__(self) -> None:
        read_token_ids(self.tokens)


class SaveTokens(WireMessage, frozen=True, kw_only=True, tag="save_tokens"):
    """New tokens of responses with idempotency keys, for the worker that saves them (``router.saved_tokens``), every
    ``FailoverConfig.save_tokens_s`` while there are any.  Names are keyed digests."""

    pieces: Annotated[tuple[SavedPiece, ...], msgspec.Meta(max_length=MAX_SAVED_PIECES)]


class FindTokens(WireMessage, frozen=True, kw_only=True, tag="find_tokens"):
    """A gateway takes over a request: what is saved of its choices?  Answered by ``FoundTokens``."""

    names: Annotated[tuple[KeyDigest, ...], msgspec.Meta(max_length=MAX_CLAIMED_CHOICES)]
    serial: Count = 0


class OpenRequestCounts(WireMessage, frozen=True, kw_only=True, tag="open_requests"):
    """How many requests of API keys with a limit a gateway has open, for the worker that is the home of the keys
    (``router.open_requests``).  Answered by ``OpenRequestAnswer``, unless ``serial`` is 0.

    Keys are keyed digests.  ``counts`` does not count the request that is ``wanted``.
    """

    counts: Annotated[dict[KeyDigest, Count], msgspec.Meta(max_length=MAX_OPEN_REQUEST_COUNTS)]
    serial: Count = 0
    wanted: KeyDigest | None = None  # one more of this key, which may have ``limit`` at all hosts together
    limit: Count = 0


class ChangeAdapter(WireMessage, frozen=True, kw_only=True, tag="change_adapter"):
    """A gateway to the worker that is the home of an adapter's name: it has loaded or unloaded one.  Answered by
    ``AdapterChanged``; other gateways get the record, if it was accepted."""

    serial: Count = 0
    record: AdapterRecord


# --- both ways ------------------------------------------------------------------------------------------------------


class AdapterNames(WireMessage, frozen=True, kw_only=True, tag="adapter_names"):
    """Names of adapters that were loaded or unloaded while serving.

    From the gateway that did so to all workers, and from workers to all other gateways.
    """

    records: Annotated[tuple[AdapterRecord, ...], msgspec.Meta(max_length=MAX_ADAPTER_RECORDS)]


class PoisonRequests(WireMessage, frozen=True, kw_only=True, tag="poison"):
    """Requests that have crashed workers, by ``penstock.poison_verdicts.request_digest``: nothing is to compute them.

    From the gateway that has found it to all workers, and from workers to all other gateways.
    """

    digests: Annotated[
        tuple[Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)], ...],
        msgspec.Meta(max_length=MAX_VERDICTS),
    ]


# --- worker -> gateway ---------------------------------------------------------------------------------------------


class TokenItem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """New tokens of one request.  ``index`` counts the answer's tokens before them, emitted ones included."""

    request: AnyRequest
    epoch: Count
    index: Count
    tokens: Annotated[tuple[TokenId, ...], msgspec.Meta(max_length=MAX_ITEM_TOKENS)]
    logprobs: ItemLogprobs | None = None
    prompt_logprobs: ItemLogprobs | None = None  # those that follow on ``prompt_start``
    prompt_start: Count = 0  # how many earlier items of this stage have brought
    prompt_more: bool = False  # more of them follow; such an item has no tokens
    finish: FinishReason | None = None
    cached_tokens: Count = 0  # prompt tokens that were not computed for this leg
    queued_s: Seconds = 0.0  # with a leg's first tokens: from its arrival to its first computed token
    pooled: Pooled | None = None  # see ``types.TokenBatch``; the one token that comes with it means nothing
    phases: Annotated[tuple[PhaseTiming, ...], msgspec.Meta(max_length=MAX_ITEM_PHASES)] = ()  # that have ended since


class Tokens(WireMessage, frozen=True, kw_only=True, tag="tokens"):
    """All tokens of one step for one gateway, in one message.  A process sends its own only."""

    worker: AnyWorker
    incarnation: Incarnation
    items: Annotated[tuple[TokenItem, ...], msgspec.Meta(max_length=MAX_TOKEN_ITEMS)]


class ReturnReason(StrEnum):
    """Why a request comes back to its gateway unfinished.

    A worker sends the value, followed by ": " and details where there are any.
    """

    QUEUE_FULL = "queue_full"
    TOO_LONG = "too_long"  # the worker's context has no room for it; that of another may
    DEADLINE = "deadline"  # it has waited as long as it may
    PREEMPTED = "preempted"
    YIELDED = "yielded"  # batch work that makes room for interactive requests
    DRAINING = "draining"
    ROLE_CHANGED = "role changed"
    HANDED_OVER = "handed over"  # it has migrated to another worker
    PAGES_LOST = "pages_lost"  # the KV transfer failed; the other end may be at fault
    UNKNOWN = "unknown"  # the worker does not have it: its Submit or its last messages were lost
    NO_HELLO = "no Hello"  # its gateway has not sent Hello over this connection
    OTHER_PROCESS = "other_process"  # it was meant for an earlier process at this address, or for another model
    TOO_LARGE = "too_large"  # one of its messages exceeds the largest frame
    UNSENT = "unsent"
    CONNECTION_LOST = "connection lost"
    GATEWAY_SILENT = "the gateway was silent"
    GRAMMAR = "grammar"
    IMAGE = "image"
    ADAPTER = "adapter"
    WORKER_LOST = "lost"  # the router's own: the worker has ended or was given up
    STALLED = "still"  # the router's own: its workers make no progress
    OTHER = "other"

    @classmethod
    def from_text(cls, text: str) -> ReturnReason:
        """The reason that a worker's text begins with; OTHER for an unknown one."""
        try:
            return cls(text.partition(":")[0])
        except ValueError:
            return cls.OTHER

    def with_details(self, details: str) -> str:
        """The text that a worker sends."""
        return f"{self}: {details}"

    @property
    def label(self) -> str:
        """The value as a metric label."""
        return self.lower().replace(" ", "_")

    @property
    def harmless(self) -> bool:
        """Whether it says nothing against the worker that returned the request."""
        return self in _HARMLESS

    @property
    def is_attempt(self) -> bool:
        """Whether the submission counts as a failed attempt of the request."""
        return self not in _NO_ATTEMPT

    @property
    def is_failure(self) -> bool:
        """Whether the next submission counts as a retry."""
        return self not in _NO_FAILURE

    @property
    def concerns_request(self) -> bool:
        """Whether the worker lacks what this one request needs: a grammar, an image, an adapter."""
        return self in _OF_REQUEST


_NO_ATTEMPT = frozenset(
    {ReturnReason.DRAINING, ReturnReason.ROLE_CHANGED, ReturnReason.HANDED_OVER, ReturnReason.YIELDED}
)
_NO_FAILURE = frozenset(
    {
        ReturnReason.QUEUE_FULL,
        ReturnReason.PREEMPTED,
        ReturnReason.YIELDED,
        ReturnReason.DEADLINE,
        ReturnReason.DRAINING,
        ReturnReason.TOO_LONG,
        ReturnReason.NO_HELLO,
        ReturnReason.OTHER_PROCESS,
    }
)
_HARMLESS = (
    _NO_ATTEMPT
    | _NO_FAILURE
    | {
        ReturnReason.UNKNOWN,
        ReturnReason.UNSENT,
        ReturnReason.CONNECTION_LOST,
        ReturnReason.GATEWAY_SILENT,
        ReturnReason.TOO_LARGE,
        ReturnReason.PAGES_LOST,
    }
)
_OF_REQUEST = frozenset({ReturnReason.GRAMMAR, ReturnReason.IMAGE, ReturnReason.ADAPTER})


class RequestReturned(WireMessage, frozen=True, kw_only=True, tag="returned"):
    """This worker gives the request back unfinished; the gateway resubmits it with what it has emitted."""

    request: AnyRequest
    epoch: Count
    reason: ReasonText  # a ``ReturnReason``, perhaps with details


KV_KEY_BYTES = 8
"""Of a block's hash in ``KvEvents``.  They serve the router's estimates; no pages are found by them."""

KV_EVENT_BLOCKS = 4096
"""Most blocks of a kind in one ``KvEvents``."""

_Keys = Annotated[bytes, msgspec.Meta(max_length=KV_EVENT_BLOCKS * KV_KEY_BYTES)]


class KvEvents(WireMessage, frozen=True, kw_only=True, tag="kv_events"):
    """What has changed in a worker's prefix cache since the message before it, or (with ``parts``) all that is in it.

    Changes are numbered from 1 without gaps within an incarnation.  A snapshot is what stands after change
    ``sequence``; its parts come in order.  Blocks are named by the first ``KV_KEY_BYTES`` of their hashes.
    """

    worker: AnyWorker
    incarnation: Incarnation
    sequence: Count
    stored: _Keys = b""
    removed: _Keys = b""
    sunk: Annotated[tuple[_Keys, ...], msgspec.Meta(max_length=LOWER_TIERS)] = ()  # now nearest in these lower tiers
    part: Count = 0
    parts: Count = 0


CacheChanges = Annotated[tuple[KvEvents, ...], msgspec.Meta(max_length=MAX_CACHE_CHANGES)]


class RateTotals(WireMessage, frozen=True, kw_only=True, tag="rate_totals"):
    """The answer to ``RateDemands``: the demand of all hosts that send theirs to this worker."""

    hosts: GatewayHosts  # with gateways that speak to this worker
    sharing: GatewayHosts  # of those, hosts that have sent their demands lately
    totals: Annotated[dict[RateName, RateDemand], msgspec.Meta(max_length=MAX_RATE_TOTALS)]


class IdempotencyKeyStatus(StrEnum):
    """What the home of an idempotency key knew before a ``ClaimIdempotencyKey``."""

    NEW = "new"  # nothing
    RUNNING = "running"  # another gateway, which is connected here, computes it and counts its tokens as they come
    KNOWN = "known"  # a gateway has had it, and none counts its tokens as they come
    REUSED = "reused"  # another mark: the key belongs to another request
    UNTRACKED = "untracked"  # nothing, and there is no room for more


class IdempotencyKeyState(WireMessage, frozen=True, kw_only=True, tag="key_state"):
    """The answer to ``ClaimIdempotencyKey``."""

    serial: Count
    status: IdempotencyKeyStatus
    sent: SentTokens = ()  # by all gateways, and counted, before that message


class FoundTokens(WireMessage, frozen=True, kw_only=True, tag="found_tokens"):
    """The answer to ``FindTokens``: of each name all that is saved, from the first token on.

    Raises ValueError for a partial token id.
    """

    serial: Count
    tokens: Annotated[tuple[PackedTokens, ...], msgspec.Meta(max_length=MAX_CLAIMED_CHOICES)]

    def __post_init__(self) -> None:
        for packed in self.tokens:
            read_token_ids(packed)


class OpenRequestAnswer(WireMessage, frozen=True, kw_only=True, tag="open_request_answer"):
    """The answer to ``OpenRequestCounts``."""

    serial: Count
    admitted: bool


class AdapterChanged(WireMessage, frozen=True, kw_only=True, tag="adapter_changed"):
    """The answer to ``ChangeAdapter``."""

    serial: Count
    record: AdapterRecord | None = None  # that stands now: the one that was sent, or a later one; None: no room


class StepRates(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """How long a step of a worker takes, as it has learned from its own: seconds of a step and of each thing in it."""

    step: Seconds = 0.0
    token: Seconds = 0.0
    pair: Seconds = 0.0  # a (query, key) pair of causal attention
    sample: Seconds = 0.0  # a position whose logits are needed


class RankReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rank of a worker whose ranks divide the model."""

    rank: Count
    node: Count = 0  # the machine that it is on
    pid: Count  # 0: it has not begun
    weight_bytes: Count
    kv_bytes: Count  # of all pages, those that it writes
    step_cpu_s: Seconds  # of all its threads


class WorkerReport(WireMessage, frozen=True, kw_only=True, tag="report"):
    """A worker as it is now.  At most every ``WorkerConfig.report_min_s`` while anything changes, to every gateway;
    otherwise as the answer to a Hello, to the gateway that said it, at most every ``report_max_s``.

    Counters only grow in an incarnation.  A report holds those that have changed since the gateway's last report; the
    first one over a connection, and one every ten seconds, all that are not 0.
    """

    worker: AnyWorker
    incarnation: Incarnation
    role: Role
    state: WorkerState
    pid: Pid
    identity: ModelIdentity
    max_model_len: Count
    cores: Count = 0  # its own
    steps: Count = 0
    step_s: Seconds = 0.0  # predicted seconds of the latest step
    running: Count = 0
    queued: Count = 0
    tokens_in_flight: Count = 0  # prompt tokens still to compute, and output tokens asked for or expected
    kv_pages_used: Count = 0
    kv_pages_free: Count = 0  # cached pages count as free: they can be evicted
    kv_pages_leaked: Count = 0
    kv_pages_loading: Count = 0  # of those used, pages that a tier of the KV store fills for no request
    counters: CounterValues = msgspec.field(default_factory=dict[str, float])  # name in telemetry.metrics -> value
    prompt_tokens: Count = 0  # known tokens still to compute here, queued ones included; what hand-overs bring is not
    prompt_pairs: Count = 0  # (query, key) pairs of their attention
    batch_tokens: Count = 0  # of prompt_tokens, those of batch work: they wait for interactive requests
    batch_pairs: Count = 0  # the same of prompt_pairs
    decodes: Count = 0  # requests whose answers are written here, or will be
    context_tokens: Count = 0  # known tokens of those
    page_bytes: Count = 0  # of one KV page
    domain: Name = ""  # workers of one domain take pages out of each other's caches
    fetch_s: Seconds = 0.0  # how long that takes this worker, a page
    tier_s: Annotated[tuple[Seconds, ...], msgspec.Meta(max_length=LOWER_TIERS)] = ()  # the same out of its lower tiers
    rates: StepRates = StepRates()
    measured: Count = 0  # steps that the rates were learned from; before the first they are only a guess
    kv_sequence: Count = 0  # of the last KvEvents
    cached: CacheChanges = ()  # what has changed in its prefix cache since the report before
    hands_over: bool = True  # its pages can pass to others and theirs to it, so it may have any part of an answer
    acked: Count = 0  # the latest ``Submit.serial`` of the receiving gateway
    gateways: Count = 1  # that give this worker work
    gateway_hosts: GatewayHosts = 0  # with gateways that speak to this worker; 0: not known
    ranks: Annotated[tuple[RankReport, ...], msgspec.Meta(max_length=MAX_RANKS)] = ()  # of a worker that has several
    core_group: Name = ""  # workers of one group share or lend each other cores
    local_prefill: bool = False  # prompts should be computed here, not by prefill workers of its group
    predecessor_fault: ReasonText = ""  # how the incarnation before this one crashed; empty: it did not


# --- worker <-> worker ---------------------------------------------------------------------------------------------


# --- supervisor <-> gateway (one SEQPACKET socket pair, inherited) ---------------------------------------------------


class AssignRole(WireMessage, frozen=True, kw_only=True, tag="assign"):
    """A gateway to a worker, because an operator said so.  What is None stays as it is.

    The worker answers all gateways with a Report that shows it.  Said twice it changes nothing.
    """

    role: Role | None = None
    duty: Duty | None = None


class MigrateRequests(WireMessage, frozen=True, kw_only=True, tag="relieve"):
    """A worker to a gateway: these answers are being written here and should go on elsewhere.

    Repeated while no worker has taken them over.
    """

    requests: NamedRequests


class ConfirmRequests(WireMessage, frozen=True, kw_only=True, tag="still_wanted"):
    """A worker to a gateway: asks whether these old requests are still wanted.  The gateway cancels the others again.

    A Cancel can be lost, with or without its connection; a request has no lease before the first pull for its pages.
    """

    requests: NamedRequests
