"""Types shared by all packages: identifiers, roles, sampling parameters, streamed tokens.

Knows nothing about processes, arrays or HTTP.  Everything here is immutable and can cross a process boundary.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable
from enum import IntEnum, StrEnum
from typing import Annotated, NewType, TypeAlias

import msgspec

MAX_COUNT = (1 << 53) - 1
"""The largest number of things in a message: what every language and every float holds."""

Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
Uint32 = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]
TokenId = Uint32
"""Any id; code that knows the vocabulary compares it with that."""

Name = Annotated[str, msgspec.Meta(max_length=1024)]
"""Of a request, worker, gateway, class or place."""

RequestId = NewType("RequestId", str)
"""One engine request: one prompt and one choice of its answer (``cmpl-…/0`` and ``cmpl-…/1`` for n = 2)."""

WorkerId = NewType("WorkerId", str)
"""A worker's place in the fleet (``prefill-0``).  It survives restarts; the incarnation does not."""

RUN_BITS = 42
RESTART_BITS = 20
"""An incarnation is the number of a run of its supervisor, drawn at random, and behind it a count of restarts.  The
number of a run is 0 where only processes of that run can hear of it."""

MAX_INCARNATION = (1 << (RUN_BITS + RESTART_BITS)) - 1

Incarnation = Annotated[int, msgspec.Meta(ge=0, le=MAX_INCARNATION)]


def is_older_incarnation(one: int, other: int) -> bool:
    """Whether the incarnation ``one`` began before ``other`` in the same run.  Of two runs neither is older: no
    clock orders them."""
    return one >> RESTART_BITS == other >> RESTART_BITS and one < other


def same_run(one: int, other: int) -> bool:
    """Whether these incarnations belong to one run of a supervisor."""
    return one >> RESTART_BITS == other >> RESTART_BITS


PageId = NewType("PageId", int)
"""Index of a page in one worker's own KV memory."""

BlockHash = NewType("BlockHash", bytes)
"""Identity of the content of one full KV page: 32 bytes, chained over everything before it."""

PAGE_TOKENS = 16
"""Tokens in one KV page (and in one hashed block)."""

FP8_E4M3 = "fp8_e4m3"
"""Keys and values in KV pages as codes of 8 bits; else they have the compute type."""

LOWER_TIERS = 4
"""Below a worker's own KV memory, that gateways tell apart."""

MAX_GRAMMAR_CHARS = 1 << 20
"""The longest grammar in a message; the limit for clients is lower (``RequestLimits.max_grammar_chars``)."""

MIXED_CLASS_SEPARATOR = ">"
"""Between the two classes in the name of a mixed one: prompts are read in the first, answers written in the second."""

GREEDY = 0.0
"""The temperature that means: always take the most likely token."""


class Role(StrEnum):
    """What the router sends to a worker.  The engine knows no roles: it counts tokens."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"
    ENCODE = "encode"  # images for those who read prompts; no part of an answer


class RequestStage(StrEnum):
    """The part of a request that a worker computes."""

    WHOLE = "whole"  # read the prompt and write the answer
    PREFILL = "prefill"  # read the prompt, sample one token, hand the pages over
    DECODE = "decode"  # take the pages from a prefill worker and write the rest


class Duty(StrEnum):
    """The state that an operator wants a worker to be in."""

    SERVE = "serve"  # take whatever its role gets
    DRAIN = "drain"  # take nothing new, and let others go on with what is written here
    RESTART = "restart"  # the same, then end, to be started anew


class FinishReason(StrEnum):
    """Why a response ended, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"  # said by the gateway of an answer that stopped, never by a worker


class Task(StrEnum):
    """What a model is served for."""

    GENERATE = "generate"  # text that goes on
    EMBED = "embed"  # a vector for a text
    CLASSIFY = "classify"  # a score for each label of a text; with one label, how well two texts fit
    TRANSCRIBE = "transcribe"  # text for a sound

    @property
    def writes(self) -> bool:
        """Whether responses are generated token by token."""
        return self in (Task.GENERATE, Task.TRANSCRIBE)


class WorkerState(StrEnum):
    """The state of a worker as shown to an operator."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    WEDGED = "wedged"
    DEAD = "dead"
    QUARANTINED = "quarantined"  # it was given up, speaks again, and is to prove that it computes
    FOREIGN = "foreign"  # it serves another model than its gateway, which gives it nothing


class GrammarKind(StrEnum):
    """The language that a grammar is written in."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"
    EBNF = "ebnf"  # as llama.cpp has it (GBNF); workers are given the same as Lark
    CHOICE = "choice"  # a JSON array of strings, one of which is the whole answer


class Grammar(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The form of a constrained response.  Validated by the gateway; workers compile it again (``grammar``)."""

    kind: GrammarKind
    text: Annotated[str, msgspec.Meta(max_length=MAX_GRAMMAR_CHARS)]
    compact: bool = False  # JSON without white space between its parts
    closed: bool = False  # objects of a schema that names properties have no others, where it says nothing
    of_tools: bool = False  # the rules are made from schemas of tools, and are not a client's own


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How the tokens of one choice are sampled.  Validated by the gateway; nothing below checks again.

    Penalties, ``min_tokens`` and ``max_tokens`` count every token of the response, those of earlier workers before a
    resubmission included.
    """

    seed: Annotated[int, msgspec.Meta(ge=0)]  # unsigned 64 bits, the generator's key
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_COUNT)]
    choice: Uint32 = 0  # index of the choice, part of the generator's counter
    temperature: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 1.0  # GREEDY: argmax of the penalised logits
    top_k: Annotated[int, msgspec.Meta(ge=1, le=MAX_COUNT)] | None = None
    top_p: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    presence_penalty: Annotated[float, msgspec.Meta(ge=-1e6, le=1e6)] = 0.0
    frequency_penalty: Annotated[float, msgspec.Meta(ge=-1e6, le=1e6)] = 0.0
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=1e6)] = 1.0
    logit_bias: dict[TokenId, Annotated[float, msgspec.Meta(ge=-1e6, le=1e6)]] = {}
    min_tokens: Count = 0  # below that a stop token is drawn only where the grammar allows nothing else
    stop_token_ids: tuple[TokenId, ...] = ()  # the model's end tokens are among them unless ignore_eos was asked for
    logprobs: Count | None = None  # how many alternatives to report; 0 reports the chosen token only
    prompt_logprobs: Count | None = None  # the same for every prompt token but the first
    grammar: Grammar | None = None  # no token is drawn that it does not allow; the end only where it is complete
    banned: tuple[TokenId, ...] = ()  # are never drawn; not together with a grammar
    banned_first: tuple[TokenId, ...] = ()  # nor these, as the first token of the answer


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Parameters of a pooling request.  Validated by the gateway; nothing below checks again."""

    # of an embedding: numbers to keep, from the first on; None: all
    dimensions: Annotated[int, msgspec.Meta(ge=1, le=MAX_COUNT)] | None = None
    normalised: bool | None = None  # an embedding is brought to length 1; None: as the model's makers do it
    second: Count | None = None  # where the second of two texts begins, for models that tell them apart


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probability (nats, of the unmodified distribution) of one token, and of the likeliest alternatives."""

    token: TokenId
    logprob: float
    top: tuple[tuple[TokenId, float], ...] = ()  # (token, logprob), likeliest first, ties to the lower id


IMAGE_HASH_BYTES = 32

MAX_IMAGE_SIDE = 1 << 12
"""Tokens a side of the largest image that may travel; what a client may send is limited further."""


ImageHash = Annotated[bytes, msgspec.Meta(min_length=IMAGE_HASH_BYTES, max_length=IMAGE_HASH_BYTES)]
"""``hashing.media_hash`` of a picture, or of a sound."""


class PlacedImage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """An image in a prompt: tokens ``[at, end)`` stand for it, row by row.  Audio is one row."""

    content: ImageHash
    at: Count
    rows: Annotated[int, msgspec.Meta(ge=1, le=MAX_IMAGE_SIDE)]  # of tokens
    columns: Annotated[int, msgspec.Meta(ge=1, le=MAX_IMAGE_SIDE)]

    @property
    def end(self) -> int:
        """Position after its last token."""
        return self.at + self.rows * self.columns


MAX_SALT_BYTES = 32
"""Of a salt as it travels with an image: a hash."""


class ImageInput(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, tag="picture"):
    """A preprocessed image, resized for its model; ``hashing.media_hash`` names it.

    A value ``t`` of color c enters the model as ``(t * scale - mean[c]) / deviation[c]``.
    """

    rows: Annotated[int, msgspec.Meta(ge=1, le=MAX_IMAGE_SIDE)]  # of tokens
    columns: Annotated[int, msgspec.Meta(ge=1, le=MAX_IMAGE_SIDE)]
    pixels: bytes  # red, green, blue; row by row
    scale: float
    mean: tuple[float, float, float]
    deviation: tuple[float, float, float]
    salt: Annotated[bytes, msgspec.Meta(max_length=MAX_SALT_BYTES)] = b""  # of its tenant, which shares no rows


MAX_FEATURES_BYTES = 1 << 24
"""Of one sound that may travel; 30 seconds in 128 bands are a tenth of it."""


class AudioInput(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, tag="sound"):
    """Preprocessed audio; ``hashing.media_hash`` names it."""

    columns: Annotated[int, msgspec.Meta(ge=1, le=MAX_IMAGE_SIDE)]  # tokens that stand for it
    bands: Annotated[int, msgspec.Meta(ge=1, le=MAX_IMAGE_SIDE)]
    features: Annotated[bytes, msgspec.Meta(max_length=MAX_FEATURES_BYTES)]  # fp32, little-endian: [bands, frames]
    salt: Annotated[bytes, msgspec.Meta(max_length=MAX_SALT_BYTES)] = b""  # see ``ImageInput``

    @property
    def rows(self) -> int:
        """Rows of tokens: one."""
        return 1


MediaInput = ImageInput | AudioInput
"""What tokens of a prompt can stand for."""


class AdapterRef(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A LoRA adapter, identified by its content; every worker of the request can read ``folder``."""

    fingerprint: Name  # BLAKE3 of its files, hexadecimal
    folder: Annotated[str, msgspec.Meta(max_length=4096)]


class ServiceClass(IntEnum):
    """Priority of a request.  The lower value is served first; the other uses the remaining capacity."""

    INTERACTIVE = 0  # somebody waits for it
    BATCH = 1  # it only has to be done some time


MAX_TENANT_CHARS = 32


class Qos(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A request's tenant, weight, priority and deadline."""

    tenant: Annotated[str, msgspec.Meta(max_length=MAX_TENANT_CHARS)] = ""  # a short name, never a key
    weight: Annotated[float, msgspec.Meta(gt=0, le=1e9)] = 1.0  # of its tenant, against those of others
    service: ServiceClass = ServiceClass.INTERACTIVE
    max_wait_s: Seconds | None = None  # to the first token, from now on; who waits longer is not served any more


DEFAULT_QOS = Qos()
"""Of a request that says nothing."""


class ResumeFrom(msgspec.Struct, frozen=True):
    """The beginning of a response that is known already, and the identity that computed it."""

    tokens: tuple[int, ...] = ()
    identity: ModelIdentity | None = None


NO_RESUME = ResumeFrom()


class ResumeKey(msgspec.Struct, frozen=True):
    """Where the tokens of a request with an idempotency key are saved while it runs, for another gateway to resume from
    (``router.saved_tokens``)."""

    key: bytes  # digest of the idempotency key, by which a worker is chosen
    name: bytes  # digest of all that the tokens follow from: an equal request has the same, at any gateway
    identity: ModelIdentity  # of workers whose tokens are saved
    tokens: tuple[int, ...] = ()  # that another gateway has saved: replayed, then followed by computed ones


TOKEN_BYTES = 4

TokenIds: TypeAlias = memoryview
"""The token ids of a prompt, ``TOKEN_BYTES`` each and read only: a sequence of integers that numpy takes as it is.

A tuple of them would take 36 bytes a token.  Equal to others of its kind; ``tuple(ids)`` is to be compared with tuples.
"""


def pack_token_ids(tokens: Iterable[int]) -> TokenIds:
    """Raises OverflowError for negative ids and those of more than 32 bits."""
    return read_token_ids(array("I", tokens).tobytes())


def read_token_ids(packed: bytes) -> TokenIds:
    """The ids whose ``bytes()`` these are.  Raises ValueError for a partial id."""
    if len(packed) % TOKEN_BYTES:
        raise ValueError(f"{len(packed)} bytes are no whole number of token ids")
    return memoryview(packed).cast("I")


class ValidRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt and one choice, parsed and validated.  Below this there is no JSON and no text."""

    id: RequestId
    prompt: TokenIds  # one object for all choices of a prompt
    block_hashes: tuple[BlockHash, ...]  # of the prompt's full pages
    sampling: SamplingParams
    open_ended: bool = False  # no length was asked for: ``max_tokens`` is what the context leaves, and seldom reached
    arrival: float  # monotonic seconds on the gateway's host
    pooling: PoolingParams | None = None  # the text is only read; then ``max_tokens`` is 1 (see ``TokenBatch.pooled``)
    qos: Qos = DEFAULT_QOS
    images: tuple[PlacedImage, ...] = ()  # in the prompt, from left to right; a sound is one of them
    pictures: tuple[MediaInput, ...] = ()  # one an image
    session: str = ""  # a hint: requests of one session go to one worker, where that costs little
    adapter: AdapterRef | None = None
    cache_salt: str = ""  # requests with different salts share no cached pages (hashing.chain_root's tenant_salt)
    begun: ResumeFrom = NO_RESUME  # its tokens count as output and are not delivered; fewer than ``max_tokens``
    usage_deferred: bool = False  # its tokens are counted at its end, as far as no other gateway has counted them
    resume: ResumeKey | None = None  # None: its tokens are not saved
    trace: str = ""  # the span that it is a part of, as a ``traceparent`` of W3C Trace Context; "": none is recorded


class TokenBatch(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The next tokens of one response, in order, each exactly once."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None  # one a token when asked for
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None  # with the first batch when asked for
    finish: FinishReason | None = None  # set on the last batch
    cached_tokens: int = 0  # prompt tokens found in a prefix cache, on the first batch
    pooled: bytes | None = None  # the vector or scores of a text that was only read: fp32, little-endian
    stored: bool = False  # replayed from a stored response, not computed
    resumed: bool = False  # computed for another gateway of this very request, and saved (``ResumeKey``)


_KERNEL_VERSION = re.compile(r"-\d+(?=-)")


class ModelIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """What the bits of KV pages and responses depend on."""

    fingerprint: Name  # BLAKE3 of configuration and weights, hexadecimal
    numerics: Name  # numerics class: kernel family, its version and the compute type, as "cpp-avx512_bf16-1-bf16"

    @property
    def mixed(self) -> bool:
        """Whether prefill and decode run in different numerics classes."""
        return MIXED_CLASS_SEPARATOR in self.numerics

    @property
    def unversioned(self) -> tuple[str, str]:
        """The same for all versions of the kernels: their bits differ, and later versions do not use earlier ones'."""
        return self.fingerprint, _KERNEL_VERSION.sub("", self.numerics)

    @property
    def system_fingerprint(self) -> str:
        """OpenAI's ``system_fingerprint``: names model hash and numerics class."""
        return f"ps-{self.fingerprint[:12]}-{self.numerics}"
