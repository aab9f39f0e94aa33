"""The messages between processes: tagged, versioned, size-capped msgspec structs.

One frame is one message, optionally followed by one payload of raw bytes (a KV page).  ``wire.codec`` encodes and
decodes them; nothing here knows how they travel.  Unknown tags, missing fields and wrong types are ``ProtocolError``.

Life of a split request::

    gateway --Submit(leg=decode, pages_from=P)--> D     D queues it until it has room for the whole prompt
    gateway --Submit(leg=prefill)---------------> P     P waits for D's credit
    D --PullPages (this is the credit)----------> P     P admits it and starts to compute
    P --PageReady*, PagesReady*, PrefillDone----> D     D copies and verifies pages into memory of its own
    P --Tokens(index=0)-------------------------> gateway
    D --PagesReceived---------------------------> P     P's lease ends
    D --Tokens(index=0…)------------------------> gateway   (token 0 again: whoever is first, it counts once)

Credit before computing is what makes admission free of deadlock: P only ever holds pages for a D that has already
reserved the room to take them.  How an answer moves while it is written is told in ``wire.duties``.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

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

# MERGED: What every message is: a tagged, strict, frozen struct.


class WireMessage(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="t", forbid_unknown_fields=True, omit_defaults=True
):
    """Base of everything that crosses a process boundary."""


# MERGED: What a worker measures of its part in one answer, for the answer's spans
# MERGED: (``telemetry.spans.OF_WORKERS``).

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

# Every field has a range.  What no process of ours can mean does not get through the codec, whoever says it; what
# depends on a model or on what was said before is looked at by whoever knows that.

HASH_BYTES = 32
CHECKSUM_BYTES = 16
MAX_COUNTERS = 1024
MAX_REASON_CHARS = 4096
MAX_POOLED_BYTES = 1 << 24

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


MAX_EXPECTED_TOKENS = 1 << 31


class PageSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a decode leg gets its pages, or whoever reads a prompt its images' rows."""

    worker: AnyWorker
    incarnation: Incarnation
    endpoint: Name


class Recipient(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, array_like=True):
    """The process that is meant.  An address outlives it: what waited for one must not be done by the next."""

    worker: AnyWorker
    incarnation: Incarnation
    identity: ModelIdentity


# --- gateway -> worker ---------------------------------------------------------------------------------------------


class AwaitedStage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A leg that a gateway waits for."""

    request: AnyRequest
    epoch: Count


class Hello(WireMessage, frozen=True, kw_only=True, tag="hello"):
    """A gateway introduces itself, and again every ``GATEWAY_BEAT_S``.

    A worker cancels what belongs to a gateway's earlier incarnation, or to a gateway that fell silent.  A message can
    be lost with its connection, and neither end hear of it; so the gateway names the legs that have been silent for a
    while, and the worker gives back (``UNKNOWN``) those that it does not know.
    """

    gateway: Name
    incarnation: Incarnation
    connection: Count = 0  # grows with each connection that this gateway makes: the latest is the one to answer
    awaited: tuple[AwaitedStage, ...] = ()
    kv_snapshot: bool = False  # tell me all that your prefix cache has: I am new, or have missed some of your KvEvents
    discovery: bool = False  # only asks who listens here: answered by one Report, and no gateway is remembered for it


class Submit(WireMessage, frozen=True, kw_only=True, tag="submit"):
    """Please compute.  A later epoch of the same request replaces an earlier one.

    ``emitted`` are tokens of the answer that the client has already: they are counted as output, never sent again.
    Given back (``OTHER_PROCESS``) by whoever is not the ``recipient``.
    Raises ValueError for a prompt that is no whole number of token ids.
    """

    recipient: Recipient
    request: AnyRequest
    epoch: Count
    leg: RequestStage
    prompt: Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES)]  # ``types.TokenIds``, little-endian
    sampling: SamplingParams
    age_s: Annotated[float, msgspec.Meta(ge=0.0, le=MAX_AGE_S)] = 0.0  # since it came to its gateway: its place in line
    emitted: tuple[int, ...] = ()
    root: AnyHash  # parent of the first block, for hashing what is not hashed yet
    block_hashes: tuple[AnyHash, ...] = ()  # of the prompt's full pages
    claim: Qos = DEFAULT_QOS
    open_ended: bool = False  # nobody named a length: it may begin where it cannot end, and goes on elsewhere in time
    expected_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_EXPECTED_TOKENS)] = 0  # more, of one that is open-ended
    adapter: AdapterRef | None = None  # what is added to the model's weights for this answer
    pages_from: PageSource | None = None  # with leg=decode
    mixed: bool = False  # prompt and answer are computed in two numerics classes
    joins: bool = False  # leg=decode: ``pages_from`` goes on writing this very answer while its pages are fetched
    images: tuple[PlacedImage, ...] = ()  # in the prompt, from left to right
    media: tuple[MediaInput, ...] = ()  # one an image, where the prompt is read
    encoders: tuple[PageSource, ...] = ()  # workers that encode images for whoever reads the prompt
    pooling: PoolingParams | None = None  # leg=whole: read the prompt, answer with ``TokenItem.pooled`` and one token
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


# --- worker -> gateway ---------------------------------------------------------------------------------------------


class TokenItem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """New tokens of one request.  ``index`` counts the answer's tokens before them, emitted ones included."""

    request: AnyRequest
    epoch: Count
    index: Count
    tokens: tuple[TokenId, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None  # those that follow on ``prompt_start``
    prompt_start: Count = 0  # so many earlier items of this leg have brought
    prompt_more: bool = False  # more of them follow; such an item has no tokens
    finish: FinishReason | None = None
    cached_tokens: Count = 0  # prompt tokens that were not computed for this leg
    queued_s: Seconds = 0.0  # with a leg's first tokens: from its arrival to its first computed token
    pooled: Pooled | None = None  # see ``types.TokenBatch``; the one token beside it means nothing
    phases: tuple[PhaseTiming, ...] = ()  # of a leg that is traced: what has ended since its last item


class Tokens(WireMessage, frozen=True, kw_only=True, tag="tokens"):
    """All tokens of one step for one gateway, in one message.  Nobody tells of another process's."""

    worker: AnyWorker
    incarnation: Incarnation
    items: tuple[TokenItem, ...]


UNKNOWN = "unknown"
"""The reason of a leg that its worker does not have (any more): its Submit or its last words were lost."""

TOO_LARGE = "too_large"
"""The reason of a leg of which a message cannot be sent at all, to whomever: it is larger than any may be."""

TOO_LONG = "too_long"
"""The reason of a leg that its worker's context has no room for (any more): one with more of it can go on."""

OTHER_PROCESS = "other_process"
"""The reason of a leg that was meant for another process, which had this address before, or for another model."""

NO_HELLO = "no Hello"
"""The reason of a leg that came over a connection whose gateway has not said Hello yet: nothing was computed."""


OF_REQUEST = ("grammar: ", "image: ", "adapter: ")
"""How reasons begin that say nothing against the worker: what this one request needs cannot be had there."""


class RequestReturned(WireMessage, frozen=True, kw_only=True, tag="returned"):
    """This worker gives the request back unfinished; the gateway resubmits it with what it has emitted."""

    request: AnyRequest
    epoch: Count
    reason: ReasonText  # "preempted", "pages_lost", "draining", TOO_LONG, UNKNOWN, ...


KV_KEY_BYTES = 8
"""Of a block's hash in ``KvEvents``: the router guesses with them, nobody's pages are found by them."""

KV_EVENT_BLOCKS = 4096
"""Most blocks of a kind in one ``KvEvents``."""

_Keys = Annotated[bytes, msgspec.Meta(max_length=KV_EVENT_BLOCKS * KV_KEY_BYTES)]


class KvEvents(WireMessage, frozen=True, kw_only=True, tag="kv_events"):
    """What has changed in a worker's prefix cache since the message before it, or (with ``parts``) all that is in it.

    Changes are numbered from 1 without gaps within an incarnation.  A snapshot is what stands after change
    ``sequence``; its parts come in order.  Blocks are told by the first ``KV_KEY_BYTES`` of their hashes.
    """

    worker: AnyWorker
    incarnation: Incarnation
    sequence: Count
    stored: _Keys = b""
    removed: _Keys = b""
    sunk: Annotated[tuple[_Keys, ...], msgspec.Meta(max_length=LOWER_TIERS)] = ()  # now nearest in these lower tiers
    part: Count = 0
    parts: Count = 0


class StepRates(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """How long a step of a worker takes, as it has learned from its own: seconds of a step and of each thing in it."""

    step: Seconds = 0.0
    token: Seconds = 0.0
    pair: Seconds = 0.0  # a (query, key) pair of causal attention
    sample: Seconds = 0.0  # a position whose logits are needed


class WorkerReport(WireMessage, frozen=True, kw_only=True, tag="report"):
    """A worker as it is now.  At most every ``WorkerConfig.report_min_s`` while anything changes, to every gateway;
    otherwise as the answer to a Hello, to the gateway that said it, at most every ``report_max_s``.

    Counters only grow in an incarnation.  A report holds those that have changed since the gateway was told last; the
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
    cached: tuple[KvEvents, ...] = ()  # what has changed in its prefix cache since the report before
    hands_over: bool = True  # its pages can pass to others and theirs to it, so it may have any part of an answer
    acked: Count = 0  # the latest ``Submit.serial`` of the gateway that this is told to
    gateways: Count = 1  # that give this worker work


# --- worker <-> worker ---------------------------------------------------------------------------------------------


# --- supervisor <-> gateway (one SEQPACKET socket pair, inherited) ---------------------------------------------------


# MERGED: The messages by which workers are given other duties, and by which they ask what is to become of
# MERGED: what they have.
# MERGED:
# MERGED: An answer that is being written moves like this; D writes it all the while, and stops only for the
# MERGED: last piece::
# MERGED:
# MERGED:     D --Relieve---------------------------> gateway   may others go on with these?
# MERGED:     gateway --Submit(leg=decode, joins)---> E         the same request and epoch; ``pages_from`` is
# MERGED: D
# MERGED:     E --PullPages(ahead)------------------> D         E has room for all that is known, and for what
# MERGED: D writes meanwhile
# MERGED:     D --PageReady*------------------------> E         pages that are full; D goes on writing
# MERGED:     D --PageReady, PrefillDone------------> E         D has stopped: the page that is not full, the
# MERGED: tokens since Relieve
# MERGED:     E --Tokens----------------------------> gateway
# MERGED:     E --PagesReceived(taken)--------------> D         D forgets the answer
# MERGED:     D --Returned(handed over)-------------> gateway
# MERGED:
# MERGED: Whatever goes wrong before the last word, D goes on writing, or the request is submitted anew.

HANDED_OVER = "handed over"
"""The reason of a leg that another worker goes on with."""


REASON_DRAINING, ROLE_CHANGED = "draining", "role changed"
"""Reasons of legs that have not begun and go back to their gateways, because an operator said something."""

NO_FAULT = (REASON_DRAINING, ROLE_CHANGED, HANDED_OVER, "yielded")
"""Reasons that say nothing against the request or its workers: no attempt that failed.  Who yields makes room."""


class AssignRole(WireMessage, frozen=True, kw_only=True, tag="assign"):
    """A gateway to a worker, because an operator said so.  What is None stays as it is.

    The worker answers all gateways with a Report that shows it.  Said twice it changes nothing.
    """

    role: Role | None = None
    duty: Duty | None = None


class MigrateRequests(WireMessage, frozen=True, kw_only=True, tag="relieve"):
    """A worker to a gateway: these answers are being written here and should go on elsewhere.

    Said again every so often while nobody has come for them.
    """

    requests: tuple[tuple[Annotated[RequestId, msgspec.Meta(max_length=1024)], Count], ...]  # each with its epoch


class ConfirmRequests(WireMessage, frozen=True, kw_only=True, tag="still_wanted"):
    """A worker to a gateway: these were asked for a while ago.  What is not wanted any more is cancelled once more.

    A cancel can be lost with its connection, or on a connection that lives; and what nobody has asked for pages yet has
    no lease that would end.
    """

    requests: tuple[tuple[Annotated[RequestId, msgspec.Meta(max_length=1024)], Count], ...]  # each with its epoch
