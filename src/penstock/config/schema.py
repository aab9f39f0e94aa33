"""One frozen struct a role; each class gets only its own.  Every limit of the system has its name and default here.

Units are in the names (``_s`` seconds, ``_ms`` milliseconds, ``_bytes``).  Unknown keys are errors.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from penstock.reach import EVERYTHING, Reach
from penstock.types import PAGE_TOKENS, Role, Task, WorkerId

BACKLOG = 2048
"""Connections that wait to be taken by a gateway."""

MAX_STEP_TOKENS = 2048
"""Tokens computed in one step unless told otherwise."""

MAX_CHUNK_TOKENS = 2048
"""Prompt tokens of one request in one step unless told otherwise."""


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all configuration: frozen, keyword-only, strict."""


class PoolingConfig(Config, frozen=True, kw_only=True):
    """How texts are read by a model that writes none."""

    whole_prompts: bool  # in one step each: every token reads all others
    share_prefixes: bool  # what was computed of an equal beginning is used again: only the last token's state counts


class SchedulerConfig(Config, frozen=True, kw_only=True):
    """What the pure scheduler needs to know."""

    pages: int  # KV pages in this worker's memory
    page_tokens: int = PAGE_TOKENS
    reaches: tuple[Reach, ...] = (EVERYTHING,)  # of each group of layers that has pages of its own
    max_model_len: int = 2048
    max_running: int = 256  # requests in one step
    max_step_tokens: int = MAX_STEP_TOKENS  # tokens computed in one step, all requests together
    max_chunk_tokens: int = MAX_CHUNK_TOKENS  # prompt tokens of one request in one step
    step_budget_ms: float = 100.0  # predicted time of a step that also decodes
    prefill_step_budget_ms: float = 250.0  # predicted time of a step that only reads prompts
    even_pace: bool = False  # answers give time to prompts that are read at cores which this worker lends
    max_queued: int = 4096  # requests waiting in one worker; the gateway's queue limit is reached long before
    max_draft_tokens: int = 0  # guessed tokens of one request in one step; 0: nothing is guessed
    max_step_draft_tokens: int = 64  # the same of all requests together
    max_drafting: int = 16  # requests in a step that a head or a draft model guesses for; in larger ones it is silent
    pooling: PoolingConfig | None = None  # None: the model writes

    @property
    def whole_prompts(self) -> bool:
        """Is every prompt to be computed in one step?"""
        return self.pooling is not None and self.pooling.whole_prompts


class HandOverConfig(Config, frozen=True, kw_only=True):
    """How long the two ends of a hand-over wait for each other, and how much is copied between two steps."""

    lease_s: float = 10.0  # without a sign of the other side, either end gives its pages back
    copy_budget_bytes: int = 32 << 20  # copied and verified between two steps of a decode worker
    window_bytes: int = 64 << 20  # sent to one receiver and not yet acknowledged
    peer_idle_s: float = 60.0  # a link to another worker that nobody uses for so long is closed


class Loan(Config, frozen=True, kw_only=True):
    """Cores that a worker may use while another one, whose they are, has nothing to do."""

    lender: WorkerId
    cores: int
    cpus: tuple[int, ...] = ()  # where they are; empty: wherever the system decides


class WorkerConfig(Config, frozen=True, kw_only=True):
    """Everything one worker process needs; given to it by the process that forks it."""

    worker: WorkerId
    incarnation: int
    role: Role
    endpoint: str  # where its mailbox listens
    carrier: str  # "shm" or "tcp": how pages travel
    scheduler: SchedulerConfig
    hand_over: HandOverConfig = HandOverConfig()
    threads: int = 1  # own kernel threads
    cpus: tuple[int, ...] = ()  # processors it may run on; empty: all
    niceness: int = 0  # of all its threads: above 0 it gives way to others
    loans: tuple[Loan, ...] = ()  # whose cores it may borrow
    image_cache_bytes: int = 256 << 20  # of encoded images that no request holds
    gateway_silence_s: float = 10.0  # a gateway silent for so long is gone, and its requests with it
    report_min_s: float = 0.02  # between two reports at least
    report_max_s: float = 0.25  # between two reports at most


class Limits(Config, frozen=True, kw_only=True):
    """What a client may ask for.  Each refusal names the limit and its value."""

    max_body_bytes: int = 16 << 20
    max_pending_body_bytes: int = 256 << 20  # of all requests whose bodies are being read, parsed or tokenized
    max_json_depth: int = 64
    max_header_bytes: int = 64 << 10
    max_n: int = 16  # choices of one prompt
    max_prompts: int = 64  # prompts in one /v1/completions request
    max_stops: int = 16
    max_stop_chars: int = 256
    max_stop_token_ids: int = 128
    max_logit_bias: int = 1024
    max_top_logprobs: int = 20
    max_messages: int = 4096
    max_tools: int = 512  # of a chat, and calls in one of its messages
    max_tokenize_chars: int = 4 << 20  # text for /tokenize, which need not fit into a context
    max_template_output_bytes: int = 16 << 20
    max_template_s: float = 5.0
    max_grammar_chars: int = 131_072  # of a schema, regular expression or grammar
    max_grammar_choices: int = 4096  # strings in structured_outputs.choice
    max_grammar_s: float = 1.0  # CPU time to compile one
    max_grammar_memory_bytes: int = 512 << 20  # to compile one
    max_queued_grammars: int = 64  # that wait to be checked
    max_images: int = 8  # of one chat
    max_image_bytes: int = 12 << 20  # of one image as it is sent or fetched
    max_image_pixels: int = 32_000_000  # of one image as it is stored; looked at before it is decoded
    max_image_tokens: int = 1024  # that one image becomes; a larger one is made smaller
    max_queued_images: int = 64  # that wait to be decoded, of all requests
    remote_image_s: float = 10.0  # to fetch one image, redirects included
    max_session_chars: int = 256  # of a session's name
    default_max_tokens: int = 1024  # when a chat request names none: this or what the context leaves
    max_inputs: int = 2048  # texts in one /v1/embeddings, /rerank or /classify request
    max_input_tokens: int = 300_000  # of all of them together
    max_inputs_at_once: int = 64  # of those, given to workers at one time
    max_queued_requests: int = 512  # accepted and without a first token
    max_queued_tokens: int = 262_144  # prompt tokens of those
    first_byte_s: float = 120.0  # to the first token, resubmissions included
    stall_s: float = 60.0  # between two tokens
    idle_client_s: float = 30.0  # a client that reads nothing for so long is hung up on
    slow_body_s: float = 30.0  # to receive a request's body
    header_s: float = 15.0  # to receive a request's head
    load_s: float = 120.0  # that a request waits for a model of the catalogue to be loaded
    max_queued_loads: int = 256  # requests that wait for models to be loaded


class FailoverConfig(Config, frozen=True, kw_only=True):
    """When the gateway gives up on a worker or a request."""

    max_attempts: int = 8  # submissions without a new token in between
    beat_s: float = 0.25  # between two Hellos to a worker
    silence_s: float = 2.0  # a worker with work that reports nothing for so long is suspected
    still_s: float = 4.0  # workers that report but compute nothing for so long lose what they have


class RoutingConfig(Config, frozen=True, kw_only=True):
    """How workers are chosen, and what the gateway remembers for it."""

    policy: Literal["penstock", "round-robin", "random", "least-loaded", "prefix"] = "penstock"
    split: Literal["auto", "always"] = (
        "auto"  # whether a decode worker may read a prompt that takes it less than a step
    )
    max_indexed_blocks: Annotated[int, msgspec.Meta(ge=1)] = 1 << 24  # of all workers' caches together; 20 bytes each
    max_indexed_workers: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)] = 1024  # whose caches are told apart
    remembered_requests: Annotated[int, msgspec.Meta(ge=0)] = 1024  # whose decisions can be asked for
    remembered_decisions: Annotated[int, msgspec.Meta(ge=0)] = 16  # the latest, of each of those


class NamedAdapter(Config, frozen=True, kw_only=True):
    """A LoRA adapter that clients can ask for by its name."""

    name: str
    folder: str
    fingerprint: str  # of its content
    nbytes: int  # of its file of tensors
    rank: int  # the largest of its matrices


class LoraConfig(Config, frozen=True, kw_only=True):
    """Adapters of a gateway: those of the start, and whether others may come."""

    adapters: tuple[NamedAdapter, ...] = ()
    allow_updating: bool = False
    max_adapters: int = 16
    max_bytes: int = 1 << 30  # of the files of all adapters together
    max_rank: int = 256


class Offers(Config, frozen=True, kw_only=True):
    """What a service takes beside text for its model."""

    remote_images: bool = False  # images may be fetched from public addresses
    lora: LoraConfig = LoraConfig()


class GatewayConfig(Config, frozen=True, kw_only=True):
    """Everything the gateway process needs."""

    name: str = "gateway-0"
    incarnation: int = 1
    host: str = "127.0.0.1"
    port: int = 8000
    model_path: str = ""  # folder with tokenizer and template
    model_name: str = ""  # as clients name it
    max_model_len: int = 2048
    split: bool = True
    task: Task = Task.GENERATE
    width: int = 0  # of a model that only reads: numbers of its vectors, or its labels
    api_key: str | None = None
    limits: Limits = Limits()
    failover: FailoverConfig = FailoverConfig()
    routing: RoutingConfig = RoutingConfig()
    join: tuple[str, ...] = ()  # mailboxes of workers on other hosts
    allow_mixed_numerics: bool = False  # an answer may go on in another numerics class
    remote_images: bool = False  # images may be fetched from public addresses
    lora: LoraConfig = LoraConfig()


class ModelPlace(Config, frozen=True, kw_only=True):
    """One model of a catalogue, as its front knows it."""

    name: str
    aliases: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()  # names of its LoRA adapters
    nbytes: int = 0  # of memory while it is loaded
    pinned: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """All that mean it."""
        return (self.name, *self.aliases, *self.adapters)


class StoreConfig(Config, frozen=True, kw_only=True):
    """Everything the front process of a catalogue needs."""

    models: tuple[ModelPlace, ...]
    model_memory: int | None = None  # bytes of all loaded models together
    api_key: str | None = None
    upstream_key: str  # that the models' own gateways want
    limits: Limits = Limits()
    created: int = 0  # Unix seconds


class SuperviseConfig(Config, frozen=True, kw_only=True):
    """How dead and stuck processes are dealt with."""

    wedge_s: float = 2.0  # no progress beyond the predicted end of a step, nor computing: killed and forked anew
    busy_s: float = 60.0  # the same for a process that computes all the while: a step may be far longer than predicted
    backoff_first_s: float = 0.05
    backoff_max_s: float = 5.0
    rapid_deaths: int = 10  # so many deaths of one worker that never became ready: give up, loudly
    stable_s: float = 5.0  # a process that was ready for so long has its earlier deaths forgiven
    start_s: float = 120.0  # from fork to ready; a process that takes longer is wedged
    drain_s: float = 30.0  # to finish running answers after SIGTERM
    grace_s: float = 2.0  # between SIGTERM and SIGKILL of a child
    look_s: float = 0.1  # between two looks at the heartbeat board


Positive = Annotated[int, msgspec.Meta(ge=1)]


class EngineSettings(Config, frozen=True, kw_only=True):
    """What both commands that start workers are asked.  None means: decide for me."""

    model: str | None = None  # None: the bundled storyteller; a folder or .gguf file; or a Hub name as "org/name"
    max_model_len: Positive | None = None  # tokens of prompt and answer together
    kv_memory: Positive | None = None  # bytes of KV pages in each worker
    image_cache: Positive = 256 << 20  # bytes of encoded images kept in each worker
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    threads: Positive | None = None  # own kernel threads of each worker
    max_chunk_tokens: Positive | None = None
    max_running: Positive = 256
    speculate: Literal["off", "auto", "lookup", "head", "draft"] = "off"  # how tokens are guessed ahead
    draft_model: str | None = None  # folder of a head or a small model that guesses
    max_draft_tokens: Positive = 8
    kernels: str = "auto"  # a kernel family, or "reference"
    device: Literal["cpu", "cuda"] = "cpu"
    max_loras: Positive = 16  # adapters in memory at once
    lora_memory: Positive = 1 << 30  # bytes of adapters in memory of a worker, and of the files of all that are listed
    max_lora_rank: Positive = 256
    log_json: bool = False
    keys: str | None = None  # folder of the keys that hosts share
    weights_cache: str = "auto"  # folder of the manifests of weights; "auto": in the user's cache; "off": none
    accept_new_weights: bool = False  # serve weights that are not those of the last load, and remember them
    hand_over: HandOverConfig = HandOverConfig()
    supervise: SuperviseConfig = SuperviseConfig()


class ServeConfig(EngineSettings, frozen=True, kw_only=True):
    """``penstock serve`` as it was asked for, from flags, environment and file."""

    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8000  # 0: any free port
    prefill: Positive | None = None
    decode: Positive | None = None
    encode_workers: Positive | None = None  # that encode images; None: whoever reads a prompt encodes its images
    aggregated: bool = False
    prefill_cores: str | None = None  # processors of the prefill workers, as "0-3,8"
    decode_cores: str | None = None
    lend_cores: bool = True  # an idle worker's cores work for the others
    transfer: Literal["auto", "shm", "tcp"] = "auto"
    api_key: str | None = None
    served_model_name: str | None = None
    catalogue: str | None = None  # file that names several models, loaded on demand
    model_memory: Positive | None = None  # bytes of all loaded models of the catalogue; None: no limit
    lora: tuple[str, ...] = ()  # adapters, each NAME=FOLDER
    allow_lora_updating: bool = False  # clients may load and unload adapters
    join: tuple[str, ...] = ()  # mailboxes of workers on other hosts, instead of workers here
    allow_mixed_numerics: bool = False  # an answer may go on in another numerics class when its own has no worker left
    remote_images: bool = False  # images may be fetched from public addresses; else they come within the request only
    limits: Limits = Limits()
    failover: FailoverConfig = FailoverConfig()
    routing: RoutingConfig = RoutingConfig()


class WorkerServeConfig(EngineSettings, frozen=True, kw_only=True):
    """``penstock worker`` as it was asked for: one worker that gateways on other hosts join."""

    role: Role = Role.BOTH
    listen: str = "tcp://127.0.0.1:9000"
    name: Annotated[str, msgspec.Meta(pattern="^[a-z0-9][a-z0-9.-]{0,63}$")] | None = None
