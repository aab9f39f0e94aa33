"""Interfaces between packages: what a caller may rely on, whatever the implementation.

Each protocol has one real implementation and one in-memory double, and one suite in ``tests/contract`` for both.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import msgspec

from penstock.types import (
    AdapterRef,
    Duty,
    FinishReason,
    ModelIdentity,
    Qos,
    RequestId,
    Role,
    ServiceClass,
    TokenBatch,
    ValidRequest,
)

JsonObject = Mapping[str, Any]
"""A JSON object out of the strict parser: str, int, float, bool, None, lists and dicts, nothing else."""

IDEMPOTENCY_KEY = b"idempotency-key"
SESSION_HEADERS = (b"x-session-affinity", b"x-claude-code-session-id", b"session_id", b"session-id")
"""Headers that name the session that a request belongs to; the first of these counts.  The last two are Codex'."""

HIDDEN_THINKING = "penstock-thinking:"
"""How the signature of a thinking block begins whose text was not to be displayed; the text follows, in base64."""


class TokenStream(Protocol):
    """The tokens of one request; an async generator is one."""

    def __aiter__(self) -> AsyncIterator[TokenBatch]: ...

    def __anext__(self) -> Awaitable[TokenBatch]: ...

    def aclose(self) -> Awaitable[None]:
        """Frees everything the request holds, in every worker.  Harmless after the end, and twice."""
        ...


@runtime_checkable
class PollableTokenStream(TokenStream, Protocol):
    """A ``TokenStream`` that can be asked without waiting, for consumers that serve many of them in one go.

    Whoever polls does not iterate.
    """

    def begin(self, ready: Callable[[], None]) -> Callable[[], TokenBatch | None]:
        """Begin the stream, and give what to poll it with.  Once.  Raises what the first ``__anext__`` raises.

        A poll gives all that waits, up to some tokens, as one batch, and None when nothing does.  It raises what ends
        the stream, which is to be closed then.  It is not to be called again after a batch with ``finish``.  ``ready``
        is called, be it now, whenever there is something that was not there at the last poll; it must not poll itself.
        """
        ...

    def close(self) -> None:
        """``aclose``, at once."""
        ...


class TtftForecast(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted time to first token of a request that arrives now, by what workers report."""

    wait_s: float  # of the queue before it, served in order of arrival
    prefill_s: float  # its own prompt


class TokenStreams(Protocol):
    """From ``ValidRequest`` to tokens, whatever happens to workers in between (``router.service``)."""

    def stream(self, request: ValidRequest) -> TokenStream:
        """Tokens in order, each once; the last batch has ``finish``.

        Closing the iterator early frees everything the request holds, in every worker.
        Raises CapacityError before the first batch, WorkerError when resubmitting did not help.
        """
        ...

    def mark_stopped(self, request: RequestId) -> None:
        """The caller has found the end, such as a stop string: closing the stream now is no abort."""
        ...

    def serving_identity(self, request: RequestId) -> ModelIdentity | None:
        """The model identity that computes this request, from its first batch to its end."""
        ...

    def identity(self) -> ModelIdentity | None:
        """What is served, or None while no worker has reported yet."""
        ...

    async def wait_identity(self) -> ModelIdentity | None:
        """As ``identity``; a gateway that has just started waits for its first worker, but not for long."""
        ...

    def ready(self) -> bool:
        """Whether a request can be served now."""
        ...

    def stall_reason(self) -> str | None:
        """Why requests make no progress; None while they do."""
        ...

    def prefill_workers(self) -> int:
        """The number of workers that are ready for prefill."""
        ...

    def predict_ttft(self, tokens: int, service: ServiceClass) -> TtftForecast | None:
        """For a prompt of ``tokens``; None without experience of how long requests take."""
        ...

    def workers(self) -> Sequence[dict[str, Any]]:
        """One mapping a worker, as ``penstock status --json`` prints it."""
        ...

    def routing_decisions(self, request: RequestId) -> Sequence[dict[str, Any]]:
        """Why its workers were chosen: one JSON object a decision, oldest first; none for a request not remembered."""
        ...

    def routing_decision_line(self, request: RequestId) -> str | None:
        """The latest of those decisions in printable ASCII, None for a request not remembered."""
        ...


class WorkerAdmin(Protocol):
    """What an operator may do to workers."""

    async def assign(
        self, worker: str, *, role: Role | None = None, duty: Duty | None = None, force: bool = False
    ) -> dict[str, Any]:
        """Give a worker another role or duty, wait until it has taken it, and return its row of ``workers``.

        Raises UnknownWorker; Conflict when it cannot, or when no worker would be left for a part of the service and
        ``force`` is not given; NotTaken when the worker does not answer in time.
        """
        ...


# --- between api and processing: requests in, text out -------------------------------------------------------------


class TokenText(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One token as a client sees it."""

    raw: bytes  # the bytes that the token adds to the text; may be part of a character
    shown: str  # the token's own text, or "\\xe4\\xbd" for part of a character
    partial: bool = False  # it is part of a character
    offset: int  # in characters, from the start of the text that the client gets
    logprob: float | None = None  # nats; None for the first token of an echoed prompt
    top: tuple[TokenText, ...] = ()  # likeliest first


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A part of a tool call.  The first of a call has ``id`` and ``name``."""

    index: int  # of the call within the answer
    id: str | None = None
    name: str | None = None
    arguments: str = ""  # more of the JSON text


class OutputDelta(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one batch of tokens adds to one choice.  Joined, the deltas are the whole output, however batched."""

    text: str = ""
    reasoning: str = ""  # what the model thought before it answered
    calls: tuple[ToolCallDelta, ...] = ()
    parts: tuple[OutputDelta, ...] = ()  # where it has more than one kind of these: each kind in its turn
    tokens: int  # tokens of the answer so far, those that show no text included
    logprobs: tuple[TokenText, ...] = ()  # of tokens whose text is now out, when asked for
    token_ids: tuple[int, ...] = ()  # when asked for
    reasoning_tokens: int = 0  # of ``tokens``
    stop_text: str | None = None  # the stop string that ended the answer; None with other finishes than STOP
    finish: FinishReason | None = None  # set on the last piece, which a stop string may bring before the engine does


class OutputDetokenizer(Protocol):
    """Turns the tokens of one choice into text: UTF-8, stop strings and echo."""

    def push(self, batch: TokenBatch) -> OutputDelta:
        """The next tokens.  Not to be called again after a piece with ``finish``."""
        ...

    def escaped(self, tokens: tuple[int, ...]) -> bytes | None:
        """As ``push``, for tokens of which only the text is needed, returned as it stands inside a JSON string.  None:
        nothing was consumed, and ``push`` is needed."""
        ...


class ResponseOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the response."""

    model: str
    seed: int  # as the client gave it, or as it was drawn for them
    n: int = 1  # choices of each prompt
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False  # in every event
    logprobs: bool = False
    token_ids: bool = False
    length_clamped: bool = False  # the output may be as long as the context allows, less than was asked for


class PreparedGeneration(msgspec.Struct, frozen=True, kw_only=True):
    """A checked HTTP request: one engine request and one answer text for each choice of each prompt.

    Choice ``i`` belongs to prompt ``i // reply.n``.
    """

    requests: tuple[ValidRequest, ...]
    answers: tuple[OutputDetokenizer, ...]
    reply: ResponseOptions

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, each prompt once."""
        return sum(len(request.prompt) for request in self.requests[:: self.reply.n])


class BucketLevel(NamedTuple):
    """The level of a token bucket of a tenant's rate, at one moment."""

    left: float
    share: float = 1.0  # of the rate, that this host has: the bucket holds and fills by as much less


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """The caller, as far as it affects how a request is served."""

    tenant: str = ""  # a short name
    weight: float = 1.0
    salt: str = ""  # tenants with different ones share no cached pages
    service: ServiceClass = ServiceClass.INTERACTIVE  # of a request that says nothing
    requested_class: ServiceClass | None = None  # said outside the body, which goes before what stands in it
    max_wait_s: float | None = None  # the same
    waits_s: tuple[float | None, ...] = ()  # what the requests of each class may wait; nothing said: any time

    def cache_salt(self, own: str) -> str:
        """The salt of a request's cached pages; ``own``: the salt that the request names, or none.

        No two pairs have the same, whatever is in them: a tenant's salt has no NUL.
        """
        return f"{self.salt}\0{own}" if own else self.salt

    def qos(self, said: ServiceClass | None = None) -> Qos:
        """The quality of service of a request whose body says ``said``."""
        service = self.service if said is None else said
        service = service if self.requested_class is None else self.requested_class
        wait_s = self.waits_s[service] if self.waits_s else None
        return Qos(
            tenant=self.tenant,
            weight=self.weight,
            service=service,
            max_wait_s=wait_s if self.max_wait_s is None else self.max_wait_s,
        )


class RequestContext(msgspec.Struct, frozen=True, kw_only=True):
    """What the API knows of a request before it is checked."""

    id: RequestId  # choices are named after it: ``<id>/<choice>``
    arrival: float  # monotonic seconds
    identity: ModelIdentity  # of the model as it is served now; goes into the block hashes
    session: str = ""  # that the client says the request belongs to
    caller: Caller = Caller()
    clamps_length: bool = False  # a length beyond what the context leaves is cut to that
    response_id: str = ""  # the answer's id for the client, when it is another one: a repeat has the same

    @property
    def name(self) -> str:
        """The answer's id for the client."""
        return self.response_id or self.id


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """A served model, as in ``/v1/models``."""

    name: str
    created: int  # Unix seconds
    max_model_len: int  # tokens, prompt and answer together
    parent: str | None = None  # of an adapter: the model that it adds to
    stands_for: str | None = None  # of an alias: the model or adapter that it means
    vision: bool = False  # it reads images
    sampling: Mapping[str, float] = {}  # defaults of requests that differ from OpenAI's


class TokenizeResult(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of ``/tokenize``, in vLLM's words."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class ResponseHistory(Protocol):
    """Stored responses of one tenant, as far as requests of the Responses API go on from them."""

    async def conversation(self, response: str) -> Sequence[Any]:
        """The items up to the end of a response, its output included.  Raises RequestError where it is not stored."""
        ...

    async def items(self, names: Sequence[str]) -> Mapping[str, Any]:
        """Output items by id; those that are not stored are absent.  Raises RequestError for too many."""
        ...


class ToolTarget(msgspec.Struct, frozen=True, kw_only=True):
    """The tool that a function of a chat stands for."""

    name: str
    namespace: str | None = None
    text_argument: str | None = None  # of a custom tool, whose input is a text: the function's only argument


class ResponsesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A body of ``/v1/responses``, translated."""

    chat: JsonObject  # the body of a chat
    tools: Mapping[str, ToolTarget]  # by the name of the chat's function
    items: Sequence[Any]  # the new items of the conversation, as they came
    echo: JsonObject  # fields that the response repeats
    store: bool
    summary: bool  # reasoning is told as a summary
    seal: Callable[[str], str] | None  # makes ``encrypted_content`` of reasoning, where that is wanted


class PreparedPooling(msgspec.Struct, frozen=True, kw_only=True):
    """A checked HTTP request whose texts are only read, and how its client wants to be answered."""

    requests: tuple[ValidRequest, ...]  # one a text
    model: str
    base64: bool = False  # vectors as text
    labels: tuple[str, ...] = ()  # of a classifier, by number
    documents: tuple[str, ...] | None = None  # returned with their scores
    top_n: int | None = None  # return only the highest; None: all, in order

    @property
    def tokens(self) -> int:
        """Tokens of all texts."""
        return sum(len(request.prompt) for request in self.requests)


class PoolingProcessor(Protocol):
    """Processes requests of pooling models; refusals as in ``RequestProcessor``."""

    async def embeddings(self, body: JsonObject, envelope: RequestContext) -> PreparedPooling:
        """A body of ``/v1/embeddings``."""
        ...

    async def rerank(self, body: JsonObject, envelope: RequestContext) -> PreparedPooling:
        """A body of ``/rerank``."""
        ...

    async def classify(self, body: JsonObject, envelope: RequestContext) -> PreparedPooling:
        """A body of ``/classify``."""
        ...


class MultipartForm(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a form (RFC 7578), by name."""

    fields: Mapping[str, Sequence[str]]
    files: Mapping[str, bytes]  # parts that have a file name


class PreparedTranscription(Protocol):
    """A checked recording to transcribe, window by window."""

    model: str
    task: str  # "transcribe" or "translate"
    language: str  # "": not known yet
    response_format: str  # of the answer, as OpenAI calls them
    stream: bool
    temperature: float
    seed: int  # as the client gave it, or as it was drawn for them
    tokens: int  # that stand for a window

    @property
    def seconds(self) -> float:
        """Its duration."""
        ...

    @property
    def windows(self) -> Sequence[tuple[float, float]]:
        """Begin and end of each, in seconds."""
        ...

    async def language_request(self) -> ValidRequest | None:
        """The request that detects the language; its token is for ``set_language``.  None for a known language."""
        ...

    def set_language(self, token: int) -> None:
        """Sets the language by its token."""
        ...

    async def window_request(self, index: int) -> tuple[ValidRequest, OutputDetokenizer]:
        """The request for a window.  To be asked for one after another; raises RequestError, QueueFull."""
        ...

    def close(self) -> None:
        """Frees the recording.  Idempotent."""
        ...


class TranscriptionProcessor(Protocol):
    """Processes transcription requests; refusals as in ``RequestProcessor``."""

    async def prepare(
        self, form: MultipartForm, envelope: RequestContext, *, translates: bool
    ) -> PreparedTranscription:
        """A form of ``/v1/audio/transcriptions``, or of ``/v1/audio/translations``."""
        ...


class RequestProcessor(Protocol):
    """From parsed JSON to checked requests.  Every refusal is a RequestError; nothing here blocks the event loop."""

    def cards(self) -> Sequence[ModelCard]:
        """The names that ``model`` may have: the model, its adapters, and aliases without a wildcard."""
        ...

    def card(self, name: str) -> ModelCard | None:
        """What a request for ``name`` is served by, which bears that name; None: nothing."""
        ...

    def adapter(self, body: JsonObject) -> AdapterRef | None:
        """The LoRA adapter that the body's ``model`` names now; None: the model is served without one."""
        ...

    async def load_adapter(self, body: JsonObject) -> JsonObject:
        """A body of ``/v1/load_lora_adapter``: ``lora_name`` and ``lora_path``."""
        ...

    async def unload_adapter(self, body: JsonObject) -> JsonObject:
        """A body of ``/v1/unload_lora_adapter``: ``lora_name``."""
        ...

    async def chat(self, body: JsonObject, envelope: RequestContext) -> PreparedGeneration:
        """A body of ``/v1/chat/completions``."""
        ...

    async def completion(self, body: JsonObject, envelope: RequestContext) -> PreparedGeneration:
        """A body of ``/v1/completions``."""
        ...

    async def messages(self, body: JsonObject) -> JsonObject:
        """A body of ``/v1/messages`` as one of ``chat``."""
        ...

    async def count_message_tokens(self, body: JsonObject) -> int:
        """The tokens of the prompt that a body of ``/v1/messages/count_tokens`` asks for."""
        ...

    async def responses(self, body: JsonObject, history: ResponseHistory) -> ResponsesRequest:
        """A body of ``/v1/responses``, to be served by ``chat``."""
        ...

    async def tokenize(self, body: JsonObject) -> TokenizeResult:
        """A body of ``/tokenize``: ``prompt`` or ``messages``."""
        ...

    async def detokenize(self, body: JsonObject) -> str:
        """A body of ``/detokenize``: ``tokens``."""
        ...
