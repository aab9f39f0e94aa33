"""One frozen struct a role; each class gets only its own.  Every limit of the system has its name and default here.

Units are in the names (``_s`` seconds, ``_ms`` milliseconds, ``_bytes``).  Unknown keys are errors.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from penstock.config.base import Config, Positive
from penstock.config.hand_over import HandOverConfig
from penstock.config.scheduling import SchedulingConfig
from penstock.config.tracing import TraceConfig, TraceLimits
from penstock.config.turns import TurnLimits
from penstock.reach import EVERYTHING, Reach
from penstock.types import PAGE_TOKENS, Role, Task, WorkerId

BACKLOG = 2048
"""Connections that wait to be taken by a gateway."""

MAX_STEP_TOKENS = 2048
"""Tokens computed in one step unless told otherwise."""

MAX_CHUNK_TOKENS = 2048
"""Prompt tokens of one request in one step unless told otherwise."""


MAX_DRAFTING = 16
"""Requests in a step that a head or a draft model guesses for."""


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
    stoppable: bool = False  # several steps that were granted at once can be stopped after any of them
    batch_step_budget_ms: float = 250.0  # predicted time of a step that decodes batch work only
    long_prompt_ms: float = 0.0  # one that takes longer to read is read gently beside answers (core.gentle); 0: none
    gentle_read_s: float = 60.0  # no prompt takes longer to read for being read gently
    contended_step_ms: float = 10.0  # a piece of a prompt, while other tenants are there whom it keeps waiting
    batch_patience_s: float = 5.0  # batch work left out for so long has one request go on as an interactive one
    output_token_weight: float = 2.0  # what a token of an answer counts among tenants, against one of a prompt
    tenant_memory_s: float = 10.0  # so long after its last request a tenant counts as being there
    even_pace: bool = False  # answers give time to prompts that are read at cores which this worker lends
    mask_wait_ms: float = 5.0  # that a step waits for what grammars allow, once all else of it is computed
    max_queued: int = 4096  # requests waiting in one worker; the gateway's queue limit is reached long before
    max_draft_tokens: int = 0  # guessed tokens of one request in one step; 0: nothing is guessed
    max_step_draft_tokens: int = 64  # the same of all requests together
    max_drafting: int = MAX_DRAFTING  # requests in a step that are guessed for; in larger ones guides are silent
    pooling: PoolingConfig | None = None  # None: the model writes

    @property
    def whole_prompts(self) -> bool:
        """Is every prompt to be computed in one step?"""
        return self.pooling is not None and self.pooling.whole_prompts


class KvStoreLimits(Config, frozen=True, kw_only=True):
    """How long the tiers of the KV store may take, and how much may wait for them."""

    max_wait_s: float = 2.0  # that a request waits at most for pages of tiers; never longer than computing them takes
    hang_s: float = 1.0  # a tier that is at one page for so long is asked nothing more until it is done
    always: bool = False  # pages are written and fetched whatever that is worth
    max_queued_writes: int = 1024  # pages that wait to be written to one tier; others are not written
    direct_io: bool = True  # disk is read and written past the page cache
    remote_timeout_s: float = 0.5  # of one word with a remote tier
    remote_expire_s: float = 86_400.0  # pages in a Redis that nobody asks for are gone then
    mooncake_metadata: str = "P2PHANDSHAKE"  # where Mooncake's clients find each other
    mooncake_protocol: Literal["tcp", "rdma"] = "tcp"
    mooncake_devices: str = ""  # of RDMA; empty: Mooncake chooses
    close_s: float = 1.0  # for a worker that ends to write what waits


class KvStoreConfig(KvStoreLimits, frozen=True, kw_only=True):
    """Where a worker's KV pages stand beside its own memory."""

    peers: bool = True  # in other workers' memory on this host
    host_bytes: int = 0  # of host memory that all workers of the service share; 0: none
    disk: str | None = None  # folder
    disk_bytes: int = 8 << 30  # of this model's file there
    redis: str | None = None  # URL
    mooncake: str | None = None  # HOST:PORT of the master
    mooncake_bytes: int = 0  # of memory that each worker gives to Mooncake's store
    key_file: str | None = None  # with what pages on disk and in remote tiers are encrypted


class Loan(Config, frozen=True, kw_only=True):
    """Cores that a worker may use while another one, whose they are, has nothing to do."""

    lender: WorkerId
    cores: int
    cpus: tuple[int, ...] = ()  # where they are; empty: wherever the system decides


COMPILED_GRAMMARS_BYTES = 256 << 20
"""Of compiled grammars in one worker, those that answers follow and those that are kept for others."""


class WorkerConfig(Config, frozen=True, kw_only=True):
    """Everything one worker process needs; given to it by the process that forks it."""

    worker: WorkerId
    incarnation: int
    role: Role
    endpoint: str  # where its mailbox listens
    carrier: str  # "shm", "tcp", "tcp-sealed" or "curve": how pages travel; after "nixl+" what NIXL does not bring
    vocabulary: int | None = None  # tokens that the model knows; None: requests are not compared with it
    pages_port: int = 0  # where they are fetched from over sockets; 0: any free one
    scheduler: SchedulerConfig
    hand_over: HandOverConfig = HandOverConfig()
    kv_store: KvStoreConfig = KvStoreConfig()
    threads: int = 1  # own kernel threads
    cpus: tuple[int, ...] = ()  # processors it may run on; empty: all
    niceness: int = 0  # of all its threads: above 0 it gives way to others
    yields: int = 0  # its niceness once it reads prompts only
    hands_over: bool = True  # its pages can pass to others, and theirs to it
    keeps_role: bool = False  # other roles are of another numerics class
    drain_s: float = 28.0  # to let others go on with its answers before it ends
    loans: tuple[Loan, ...] = ()  # whose cores it may borrow
    image_cache_bytes: int = 256 << 20  # of encoded images that no request holds
    compiled_grammars_bytes: int = COMPILED_GRAMMARS_BYTES
    max_compiling_grammars: int = 256  # that wait to be compiled in a worker
    gateway_silence_s: float = 10.0  # a gateway silent for so long is gone, and its requests with it
    report_min_s: float = 0.1  # between two reports at least, while anything changes
    report_waiting_s: float = 0.2  # between two answers to a gateway's Hellos at least, while requests wait here
    report_max_s: float = 0.5  # the same of a worker that has nothing to do


class Limits(Config, frozen=True, kw_only=True):
    """What a client may ask for.  Each refusal names the limit and its value."""

    max_body_bytes: int = 16 << 20
    max_pending_body_bytes: int = 256 << 20  # of all requests whose bodies are being read, parsed or tokenized
    max_json_depth: int = 64
    max_json_values: int = 2_097_152  # members of all arrays and objects of a body
    max_json_containers: int = 131_072  # arrays and objects of a body
    max_ignored_chars: int = 65_536  # of a field that changes nothing here, such as metadata
    max_header_bytes: int = 64 << 10
    max_n: int = 16  # choices of one prompt
    max_prompts: int = 64  # prompts in one /v1/completions request
    max_stops: int = 16
    max_stop_chars: int = 256
    max_stop_token_ids: int = 128
    max_logit_bias: int = 1024
    max_top_logprobs: int = 20
    max_prompt_logprobs: int = 262_144  # with echo: prompt tokens x (1 + alternatives), of all choices of a request
    max_messages: int = 4096
    max_content_parts: int = 4096  # of all messages of a chat, calls of tools among them
    max_tools: int = 512  # of a chat, and calls in one of its messages
    max_tokenize_chars: int = 4 << 20  # text for /tokenize, which need not fit into a context
    max_chars_per_token: int = 32  # a text with more than so many for each token of the context does not fit into it
    max_template_output_bytes: int = 16 << 20
    max_template_s: float = 5.0
    max_grammar_chars: int = 131_072  # of a schema, regular expression or grammar
    max_grammar_choices: int = 4096  # strings in structured_outputs.choice
    max_grammar_s: float = 1.0  # CPU time to compile one
    max_grammar_memory_bytes: int = 512 << 20  # to compile one
    max_queued_grammars: int = 64  # that wait to be checked, of all tenants
    max_grammar_verdicts_bytes: int = 16 << 20  # of grammars that were checked and are remembered
    max_images: int = 8  # of one chat
    max_image_bytes: int = 12 << 20  # of one image as it is sent or fetched
    max_image_pixels: int = 32_000_000  # of one image as it is stored; looked at before it is decoded
    max_image_scans: int = 64  # of one JPEG file: each is a pass over all its pixels
    max_decoding_image_bytes: int = 512 << 20  # of all images that are being decoded, 12 bytes a pixel
    max_image_tokens: int = 1024  # that one image becomes; a larger one is made smaller
    max_queued_images: int = 64  # that wait to be decoded, of all requests
    remote_image_s: float = 10.0  # to fetch one image, redirects included
    max_audio_bytes: int = 25 << 20  # of one sound as it is sent
    max_audio_s: float = 1800.0  # that it may last
    max_audio_rate: int = 192_000  # samples a second
    max_audio_prompt_chars: int = 16_384  # of what is said to have been said before
    max_pending_audio_s: float = 7200.0  # of all sounds that are being heard; their samples take 64 kB a second
    max_reading_audio_bytes: int = 256 << 20  # of all sounds whose files are being read, some 8 bytes a sample
    max_queued_audio: int = 16  # sounds and windows that wait to be read, of all requests
    max_session_chars: int = 256  # of a session's name
    default_max_tokens: Positive | None = None  # of a chat that names no length: at most this;
    # None: what the context leaves
    max_inputs: int = 2048  # texts in one /v1/embeddings, /rerank or /classify request
    max_input_tokens: int = 300_000  # of all of them together
    max_inputs_at_once: int = 64  # of those, given to workers at one time
    max_queued_requests: int = 512  # accepted and without a first token, for each worker that is ready to read prompts
    max_queued_tokens: int = 262_144  # prompt tokens of those, for each such worker
    max_prompt_bytes: int = 1 << 30  # that the prompts of all open requests take in a gateway's memory
    first_byte_s: float = 120.0  # to the first token, resubmissions included
    max_stated_wait_s: float = 3600.0  # that a client may say it would wait for the first token
    stall_s: float = 60.0  # between two tokens
    idle_client_s: float = 30.0  # a client that reads nothing for so long is hung up on
    slow_body_s: float = 30.0  # to receive a request's body
    header_s: float = 15.0  # to receive a request's head
    metrics_cache_s: float = 1.0  # for which a page of metrics is shown again before it is made anew
    load_s: float = 120.0  # that a request waits for a model of the catalogue to be loaded
    max_queued_loads: int = 256  # requests that wait for models to be loaded
    max_idempotency_key_chars: int = 256
    max_idempotency_keys: int = 65_536  # that a gateway remembers, with what they were used for
    idempotency_s: float = 600.0  # and for how long
    max_logged_refusals: int = 20  # requests answered 4xx that have a line in the log, in 10 s; others are counted
    max_kept_tokens: int = 1 << 20  # of finished answers with a key, told again without being computed
    resume_grace_s: float = 1.0  # an answer with a key goes on for so long when its client has gone


class FailoverConfig(Config, frozen=True, kw_only=True):
    """When the gateway gives up on a worker or a request."""

    max_attempts: int = 8  # submissions without a new token in between, but for those that find full queues
    beat_s: float = 0.25  # between two Hellos to a worker
    silence_s: float = 1.0  # a worker with work that says nothing for so long is out of routing,
    overrun: float = 3.0  # beyond so many times the predicted length of the step that it is in
    still_s: float = 4.0  # workers that report but compute nothing for so long lose what they have
    quarantine_s: float = 1.0  # a worker that was given up and speaks again is probed after so long; doubles
    quarantine_max_s: float = 30.0  # and no more than this
    probe_s: float = 2.0  # to answer a probe
    pin_model_s: float = 5.0  # after the first worker was ready, that the model of most is the one that is served
    no_path_s: float = 2.0  # with every worker that could serve gone for so long, requests fail at once
    retry_share: float = 1.0  # repeated resubmissions after failures that each new request adds to the budget
    retry_burst: int = 1024  # the most that the budget holds; with more open streams, as many as there are of those
    retry_per_s: float = 10.0  # added to it each second
    retry_wait_s: float = 15.0  # the longest that a resubmission waits for the budget
    streams_per_turn: Positive = 24  # of a lost worker, moved in a turn of the event loop
    forget_s: float = 3600.0  # a worker that has been gone for so long is forgotten, its counters included
    poison_deaths: int = 2  # workers that died by themselves under one request: it is failed
    poison_tokens: int = 8  # new tokens after which a death before them is not held against a request


class RoutingConfig(Config, frozen=True, kw_only=True):
    """How workers are chosen, and what the gateway remembers for it."""

    policy: Literal["penstock", "round-robin", "random", "least-loaded", "prefix"] = "penstock"
    split: Literal["auto", "always"] = (
        "auto"  # whether a decode worker may read a prompt that takes it less than a step
    )
    max_indexed_blocks: Positive = 1 << 24  # of all workers' caches together; 20 bytes each
    max_indexed_workers: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)] = 1024  # whose caches are told apart
    expected_answer_tokens: Positive = 256  # of an answer that nobody named a length for, before any has ended
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
    remote_image_hosts: tuple[str, ...] = ()  # the only ones; empty: any
    lora: LoraConfig = LoraConfig()


class RequestConfig(Config, frozen=True, kw_only=True):
    """How requests are read, as far as the operator has a say."""

    generation_config: Literal["auto", "none"] = "auto"  # sampling defaults are the model's own, or OpenAI's
    unknown_fields: Literal["refuse", "ignore"] = "refuse"
    disable_additional_properties: bool = True  # objects of JSON schemas have the properties that these name only


class TlsConfig(Config, frozen=True, kw_only=True):
    """Files in PEM with which clients are answered over HTTPS."""

    cert: str  # the server's certificate, then those between it and its authority
    key: str


EventLoop = Literal["auto", "uvloop", "asyncio"]
"""Of processes that speak HTTP; "auto": uvloop if it is installed."""


class GatewayConfig(Config, frozen=True, kw_only=True):
    """Everything the gateway process needs."""

    name: str = "gateway-0"
    incarnation: int = 1
    host: str = "127.0.0.1"
    port: int = 8000
    model_path: str = ""  # folder with tokenizer and template
    model_name: str = ""  # as clients name it
    max_model_len: int = 2048
    requests: RequestConfig = RequestConfig()
    split: bool = True
    task: Task = Task.GENERATE
    vocabulary: int | None = None  # tokens that the model knows; None: what workers say is not compared with it
    width: int = 0  # of a model that only reads: numbers of its vectors, or its labels
    api_key: str | None = None
    api_keys: str | None = None  # file of several keys
    limits: Limits = Limits()
    scheduling: SchedulingConfig = SchedulingConfig()
    failover: FailoverConfig = FailoverConfig()
    routing: RoutingConfig = RoutingConfig()
    turns: TurnLimits = TurnLimits()
    join: tuple[str, ...] = ()  # mailboxes of workers on other hosts
    allow_mixed_numerics: bool = False  # an answer may go on in another numerics class
    allow_model_upgrade: bool = False  # workers of another model than that of the first ones are used
    remote_images: bool = False  # images may be fetched from public addresses
    remote_image_hosts: tuple[str, ...] = ()  # the only ones; empty: any
    lora: LoraConfig = LoraConfig()
    response_cache: int = 0  # bytes of stored responses; 0: none
    trace: TraceConfig = TraceConfig()
    event_loop: EventLoop = "auto"
    allowed_origins: tuple[str, ...] = ()  # of web pages that may use the service from a browser
    allowed_hosts: tuple[str, ...] = ()  # names under which clients may reach it without a key, beside this host's own
    event_key: str = ""  # hex: proves that an event's id is one of this service's (docs/security.md)
    tls: TlsConfig | None = None  # None: HTTP in clear
    log_requests: bool = False  # each has a line in the log; else those that are refused
    fronted: bool = False  # the one key is that of a catalogue's front, which says for whom it asks


class SuperviseConfig(Config, frozen=True, kw_only=True):
    """How dead and stuck processes are dealt with."""

    wedge_s: float = 2.0  # no progress beyond the predicted end of a step, nor computing: killed and forked anew
    busy_s: float = 60.0  # the same for a process that computes, or queues for a processor, all the while
    backoff_first_s: float = 0.05
    backoff_max_s: float = 5.0
    rapid_deaths: int = 10  # so many deaths of one worker that never became ready: give up, loudly
    stable_s: float = 5.0  # a process that was ready for so long has its earlier deaths forgiven
    start_s: float = 120.0  # from fork, or the last sign of progress, to ready; a process that takes longer is wedged
    drain_s: float = 30.0  # to finish running answers after SIGTERM
    grace_s: float = 2.0  # between SIGTERM and SIGKILL of a child
    look_s: float = 0.1  # between two looks at the heartbeat board


class EngineSettings(Config, frozen=True, kw_only=True):
    """What both commands that start workers are asked.  None means: decide for me."""

    model: str | None = None  # None: the bundled storyteller; a folder or .gguf file; or a Hub name as "org/name"
    max_model_len: Positive | None = None  # tokens of prompt and answer together
    kv_memory: Positive | None = None  # bytes of KV pages in each worker
    image_cache: Positive = 256 << 20  # bytes of encoded images kept in each worker
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    kv_dtype: Literal["auto", "fp8_e4m3"] = "auto"  # what KV pages keep keys and values in; "auto": the compute type
    threads: Positive | None = None  # own kernel threads of each worker
    max_chunk_tokens: Positive | None = None
    max_running: Positive = 256
    speculate: Literal["off", "auto", "lookup", "head", "draft"] = "off"  # how tokens are guessed ahead
    draft_model: str | None = None  # folder of a head or a small model that guesses
    max_draft_tokens: Positive = 8
    sparse_attention: bool = False  # tokens far into a context read a part of it: faster, and other answers
    sparse_sinks: Positive = 64  # tokens at the beginning that are always read, in whole blocks of 64
    sparse_window: Positive = 1024  # the same of those before a token
    sparse_blocks: Positive = 32  # blocks of 64 tokens that each token chooses between them
    sparse_from: Annotated[int, msgspec.Meta(ge=0)] = 4096  # positions before it read everything
    kernels: str = "auto"  # a kernel family, or "reference"
    device: Literal["auto", "cpu", "cuda"] = "auto"  # "auto": a GPU if there is one that suits the model
    gpu_lanes: Literal["off", "auto", "priority", "green"] = "off"  # removed: another value is reported and ignored
    max_loras: Positive = 16  # adapters in memory at once
    lora_memory: Positive = 1 << 30  # bytes of adapters in memory of a worker, and of the files of all that are listed
    max_lora_rank: Positive = 256
    log_json: bool = False
    keys: str | None = None  # folder of the keys that hosts share
    weights_cache: str = "auto"  # folder of the manifests of weights; "auto": in the user's cache; "off": none
    accept_new_weights: bool = False  # serve weights that are not those of the last load, and remember them
    kv_peers: bool = True  # workers take KV pages out of each other's caches
    kv_host: Positive | None = None  # bytes of KV pages in memory that all workers share, beside their own
    kv_disk: str | None = None  # folder for KV pages
    kv_disk_size: Positive = 8 << 30  # bytes of a model's pages there
    kv_redis: str | None = None  # URL of a Redis for KV pages
    kv_mooncake: str | None = None  # HOST:PORT of the master of a Mooncake store for KV pages
    kv_mooncake_size: Positive | None = None  # bytes of memory that each worker gives to it
    kv_key: str | None = None  # file of the key that pages on disk and in remote tiers are encrypted with
    hand_over: HandOverConfig = HandOverConfig()
    kv_store: KvStoreLimits = KvStoreLimits()
    supervise: SuperviseConfig = SuperviseConfig()
    scheduling: SchedulingConfig = SchedulingConfig()


class ServeConfig(EngineSettings, frozen=True, kw_only=True):
    """``penstock serve`` as it was asked for, from flags, environment and file."""

    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8000  # 0: any free port
    gateways: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1  # processes that answer HTTP, on one port
    event_loop: EventLoop = "auto"
    prefill: Positive | None = None
    decode: Positive | None = None
    encode_workers: Positive | None = None  # that encode images; None: whoever reads a prompt encodes its images
    aggregated: bool = False
    prefill_device: Literal["cpu", "cuda"] | None = None  # where prefill workers compute, if elsewhere than the others
    prefill_kernels: str | None = None  # their kernel family, if not that of the decode workers
    prefill_cores: str | None = None  # processors of the prefill workers, as "0-3,8"
    decode_cores: str | None = None
    lend_cores: bool = True  # an idle worker's cores work for the others
    transfer: Literal["auto", "shm", "tcp", "curve", "nixl"] = "auto"
    api_key: str | None = None
    api_keys: str | None = None  # file of several keys, each of a tenant (`penstock keys add`)
    allowed_host: tuple[str, ...] = ()  # names under which it is reached without a key; "*": all
    tls_cert: str | None = None  # file of the certificate for HTTPS, PEM; None: HTTP in clear
    tls_key: str | None = None  # file of its private key
    log_requests: bool = False  # each has a line in the log; else those that are refused
    allowed_origin: tuple[str, ...] = ()  # of web pages that may use the service from a browser; "*": all
    served_model_name: str | None = None
    generation_config: Literal["auto", "none"] = "auto"  # whose sampling defaults: the model's own file's, or OpenAI's
    unknown_fields: Literal["refuse", "ignore"] = "refuse"  # fields of requests that are not known
    disable_additional_properties: bool = True  # objects of JSON schemas are closed where the schema says nothing
    catalogue: str | None = None  # file that names several models, loaded on demand
    model_memory: Positive | None = None  # bytes of all loaded models of the catalogue; None: no limit
    lora: tuple[str, ...] = ()  # adapters, each NAME=FOLDER
    allow_lora_updating: bool = False  # clients may load and unload adapters
    join: tuple[str, ...] = ()  # mailboxes of workers on other hosts, instead of workers here
    allow_mixed_numerics: bool = False  # prompts may be read in another numerics class than answers are written in, and
    # an answer may go on in another when its own has no worker left
    allow_model_upgrade: bool = False  # joined workers of another model than that of the first ones are used
    remote_images: bool = False  # images may be fetched from public addresses; else they come within the request only
    remote_image_host: tuple[str, ...] = ()  # the only hosts that they are fetched from; empty: any
    response_cache: Positive | None = None  # bytes of stored responses, all gateways together; None: none are stored
    trace_endpoint: str | None = None  # URL of an OpenTelemetry collector that spans of requests are sent to
    trace_file: str | None = None  # that they are written to
    trace_sample: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0  # of requests, where the caller does not say
    limits: Limits = Limits()
    failover: FailoverConfig = FailoverConfig()
    routing: RoutingConfig = RoutingConfig()
    turns: TurnLimits = TurnLimits()
    trace: TraceLimits = TraceLimits()


class WorkerServeConfig(EngineSettings, frozen=True, kw_only=True):
    """``penstock worker`` as it was asked for: one worker that gateways on other hosts join."""

    role: Role = Role.BOTH
    listen: str = "tcp://127.0.0.1:9000"
    transfer: Literal["auto", "tcp", "tcp-clear", "curve", "nixl"] = (
        "auto"  # how pages travel to and from other workers
    )
    pages_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0  # where they are fetched; 0: any free one
    mixed_with: str | None = None  # numerics class of the workers of the other role, where it is not this one's
    name: Annotated[str, msgspec.Meta(pattern="^[a-z0-9][a-z0-9.-]{0,63}$")] | None = None
