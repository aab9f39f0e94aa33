"""Configuration structs: one per process and command, frozen.  Each class gets only its own.

Units are in the names (``_s`` seconds, ``_ms`` milliseconds, ``_bytes``).  Unknown keys are errors.  Limits and their
defaults are in ``limits``.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from penstock.config.base import Config, NotNegative, Positive
from penstock.config.limits import (
    AuditLimits,
    FailoverConfig,
    KvStoreLimits,
    KvTransferConfig,
    MembershipConfig,
    PickerLimits,
    RequestLimits,
    RoutingConfig,
    SchedulingConfig,
    SuperviseConfig,
    TraceConfig,
    TraceLimits,
    TurnLimits,
)
from penstock.kv_spec import FULL_ATTENTION, KvSpec
from penstock.types import PAGE_TOKENS, Role, Task, WorkerId

PortOrFree = Annotated[int, msgspec.Meta(ge=0, le=65535)]
"""A port to listen at; 0: any free one."""

BACKLOG = 2048
"""Length of the listening socket's queue."""

MAX_STEP_TOKENS = 2048
"""Default of the tokens computed in one step."""

MAX_CHUNK_TOKENS = 2048
"""Default of one request's prompt tokens in one step."""


MAX_DRAFTING = 16
"""The most requests in a step for which a draft head or draft model proposes tokens."""


class PoolingConfig(Config, frozen=True, kw_only=True):
    """How a pooling model processes its input."""

    whole_prompts: bool  # in one step each: attention is not causal
    share_prefixes: bool  # cached prefixes are reused: only the last token's state is pooled


class SchedulerConfig(Config, frozen=True, kw_only=True):
    """The configuration of a worker's scheduler."""

    pages: int  # KV pages in this worker's memory
    page_tokens: int = PAGE_TOKENS
    reaches: tuple[KvSpec, ...] = (FULL_ATTENTION,)  # of each group of layers that has pages of its own
    max_model_len: int = 2048
    max_running: int = 256  # requests in one step
    max_step_tokens: int = MAX_STEP_TOKENS  # tokens computed in one step, all requests together
    max_chunk_tokens: int = MAX_CHUNK_TOKENS  # prompt tokens of one request in one step
    step_budget_ms: float = 100.0  # predicted time of a step that also decodes
    prefill_step_budget_ms: float = 250.0  # predicted time of a step that only prefills
    stoppable: bool = False  # several steps that were granted at once can be stopped after any of them
    batch_step_budget_ms: float = 250.0  # predicted time of a step that decodes batch requests only
    long_prompt_ms: float = 0.0  # longer prefills are paced while requests decode (``core.pacing``); 0: none
    gentle_read_s: float = 60.0  # the most time that pacing adds to a prefill
    contended_step_ms: float = 10.0  # length of a prefill chunk while other tenants wait
    batch_patience_s: float = 5.0  # batch work that waits for this long has one request promoted to interactive
    output_token_weight: float = 2.0  # cost of an output token for fairness, in prompt tokens
    tenant_memory_s: float = 10.0  # for which a tenant counts as active after its last request
    even_pace: bool = False  # decode yields time to prefill on the cores that this worker lends
    mask_wait_ms: float = 5.0  # for which a step waits for grammar masks when all else is computed
    max_queued: int = 4096  # requests waiting in one worker; the gateway's queue limit is reached long before
    max_draft_tokens: int = 0  # draft tokens of one request in one step; 0: no speculation
    max_step_draft_tokens: int = 64  # the same of all requests together
    max_drafting: int = MAX_DRAFTING  # requests in a step with draft tokens; larger steps have none
    pooling: PoolingConfig | None = None  # None: a generative model

    @property
    def whole_prompts(self) -> bool:
        """Whether every prompt is computed in one step."""
        return self.pooling is not None and self.pooling.whole_prompts


class KvStoreConfig(KvStoreLimits, frozen=True, kw_only=True):
    """The tiers of a worker's KV store."""

    peers: bool = True  # in other workers' memory on this host
    host_bytes: int = 0  # of host memory that all workers of the service share; 0: none
    disk: str | None = None  # folder
    disk_bytes: int = 8 << 30  # of this model's file there
    redis: str | None = None  # URL
    mooncake: str | None = None  # HOST:PORT of the master
    mooncake_bytes: int = 0  # of memory that each worker gives to Mooncake's store
    key_file: str | None = None  # with what pages on disk and in remote tiers are encrypted


class CoreLoan(Config, frozen=True, kw_only=True):
    """Cores that a worker may borrow while their owner is idle."""

    lender: WorkerId
    cores: int
    cpus: tuple[int, ...] = ()  # their processors; empty: not pinned


COMPILED_GRAMMARS_BYTES = 256 << 20
"""Memory of compiled grammars in one worker, in use or cached."""


class WorkerConfig(Config, frozen=True, kw_only=True):
    """The configuration of one worker process, inherited over fork."""

    worker: WorkerId
    incarnation: int
    predecessor_fault: str = ""  # how the incarnation before this one crashed; empty: it did not
    role: Role
    endpoint: str  # where it listens
    connector: str  # "shm", "tcp", "tcp-sealed" or "curve"; after "nixl+" the fallback of NIXL
    vocabulary: int | None = None  # size of the vocabulary; None: requests are not checked against it
    pages_port: int = 0  # where others fetch its pages; 0: any free one
    scheduler: SchedulerConfig
    hand_over: KvTransferConfig = KvTransferConfig()
    kv_store: KvStoreConfig = KvStoreConfig()
    threads: int = 1  # own kernel threads
    cpus: tuple[int, ...] = ()  # processors it may run on; empty: all
    niceness: int = 0  # of all its threads
    prefill_niceness: int = 0  # its niceness in the prefill role
    transfers_pages: bool = True  # its KV pages can be transferred
    fixed_role: bool = False  # other roles have another numerics class
    drain_s: float = 28.0  # to migrate its requests before it ends
    loans: tuple[CoreLoan, ...] = ()  # cores that it may borrow
    core_group: str = ""  # names the workers that share or lend each other cores
    image_cache_bytes: int = 256 << 20  # of encoded images that no request holds
    compiled_grammars_bytes: int = COMPILED_GRAMMARS_BYTES
    max_compiling_grammars: int = 256  # that wait to be compiled in a worker
    gateway_silence_s: float = 10.0  # a gateway silent for this long counts as gone, with its requests
    report_min_s: float = 0.1  # between two reports at least, while anything changes
    reports_per_s: int = 600  # to all gateways together, while anything changes: with many, each gets fewer
    report_waiting_s: float = 0.2  # between two responses to a gateway's Hellos at least, while requests are queued
    report_max_s: float = 0.5  # between two reports of an idle worker


class NamedAdapter(Config, frozen=True, kw_only=True):
    """A LoRA adapter that clients select by its name."""

    name: str
    folder: str
    fingerprint: str  # of its content
    nbytes: int  # of its file of tensors
    rank: int  # the largest of its matrices


class LoraConfig(Config, frozen=True, kw_only=True):
    """The adapters of a gateway, and whether clients may load others."""

    adapters: tuple[NamedAdapter, ...] = ()
    allow_updating: bool = False
    max_adapters: int = 16
    max_bytes: int = 1 << 30  # of the files of all adapters together
    max_rank: int = 256


class InputFeatures(Config, frozen=True, kw_only=True):
    """What a service accepts besides text."""

    remote_images: bool = False  # images may be fetched from public addresses
    remote_image_hosts: tuple[str, ...] = ()  # the only ones; empty: any
    lora: LoraConfig = LoraConfig()


class RequestConfig(Config, frozen=True, kw_only=True):
    """How requests are parsed, as far as the operator decides it."""

    generation_config: Literal["auto", "none"] = "auto"  # sampling defaults are the model's own, or OpenAI's
    unknown_fields: Literal["refuse", "ignore"] = "refuse"
    disable_additional_properties: bool = True  # objects of JSON schemas have the properties that these name only
    strip_billing_header: bool = True  # the changing line in Claude Code's system prompts is left out
    model_alias: tuple[str, ...] = ()  # PATTERN=NAME: names that clients may send for a model
    max_positions: int | None = None  # tokens of the model's own context, of which max_model_len may be a part


class TlsConfig(Config, frozen=True, kw_only=True):
    """PEM files for HTTPS."""

    cert: str  # the server's certificate with its chain
    key: str


EventLoop = Literal["auto", "uvloop", "asyncio"]
"""Of gateways; "auto": uvloop if it is installed."""


class GatewayConfig(Config, frozen=True, kw_only=True):
    """The configuration of a gateway process."""

    name: str = "gateway-0"
    incarnation: int = 1
    limits_redis: str | None = None  # URL of a Redis for tenants' rates
    rate_host: str = ""  # the same for gateways that share buckets of rates in memory; empty: none is shared
    host: str = "127.0.0.1"
    port: int = 8000
    model_path: str = ""  # folder with tokenizer and template
    model_name: str = ""  # as clients name it
    max_model_len: int = 2048
    requests: RequestConfig = RequestConfig()
    split: bool = True
    task: Task = Task.GENERATE
    vocabulary: int | None = None  # size of the vocabulary; None: workers' tokens are not checked against it
    width: int = 0  # of a pooling model: dimensions of its vectors, or labels
    api_key: str | None = None
    api_keys: str | None = None  # file of several keys
    audit_log: str | None = None  # file of refusals and of what operators do; None: none
    audit: AuditLimits = AuditLimits()
    limits: RequestLimits = RequestLimits()
    scheduling: SchedulingConfig = SchedulingConfig()
    failover: FailoverConfig = FailoverConfig()
    routing: RoutingConfig = RoutingConfig()
    turns: TurnLimits = TurnLimits()
    join: tuple[str, ...] = ()  # mailboxes of workers on other hosts
    members: str | None = None  # where to learn of such mailboxes, as KIND:...
    fleet_file: str | None = None  # of the node that this is on, whose other nodes' workers are followed
    node: str = ""  # the name of that node
    membership: MembershipConfig = MembershipConfig()
    allow_mixed_numerics: bool = False  # a request may continue in another numerics class
    allow_model_upgrade: bool = False  # workers of another model than that of the first ones are used
    remote_images: bool = False  # images may be fetched from public addresses
    remote_image_hosts: tuple[str, ...] = ()  # the only ones; empty: any
    lora: LoraConfig = LoraConfig()
    response_cache: int = 0  # bytes of stored responses; 0: none
    response_store: str | None = None  # file of responses that later requests continue; None: none are kept
    trace: TraceConfig = TraceConfig()
    event_loop: EventLoop = "auto"
    allowed_origins: tuple[str, ...] = ()  # of web pages that may use the service from a browser
    allowed_hosts: tuple[str, ...] = ()  # Host names that clients may use without a key, besides this host's own
    event_key: str = ""  # hex: key that signs event ids (docs/security.md)
    tls: TlsConfig | None = None  # None: HTTP in clear
    log_requests: bool = False  # log a line for each request, not only for refused ones
    fronted: bool = False  # the key is that of a catalog's front, which names the tenant


class EngineSettings(Config, frozen=True, kw_only=True):
    """The settings of both commands that start workers.  None means that ``resolve`` decides."""

    model: str | None = None  # None: the bundled storyteller; a folder or .gguf file; or a Hub name as "org/name"
    max_model_len: Positive | None = None  # tokens of prompt and output together
    kv_memory: Positive | None = None  # bytes of KV pages in each worker
    image_cache: Positive = 256 << 20  # bytes of encoded images kept in each worker
    decoded_weights: Literal["auto"] | NotNegative = "auto"  # bytes of decoded copies of compressed weights; 0: none
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    kv_dtype: Literal["auto", "fp8_e4m3"] = "auto"  # type of KV pages; "auto": the compute type
    activation_dtype: Literal["auto", "int8"] = "auto"  # inputs of quantized weights; "auto": the compute type
    threads: Positive | None = None  # kernel threads of each worker; of a worker of several ranks, of each rank
    parallel: str | None = None  # how the ranks of each worker divide the model, as "tp2,pp2"; None: one process
    tensor_parallel_size: Positive | None = None  # the same as parallel="tpN"
    pipeline_parallel_size: Positive | None = None  # the same as parallel="ppN"
    max_chunk_tokens: Positive | None = None
    max_running: Positive = 256
    speculate: Literal["off", "auto", "lookup", "head", "draft"] = "off"  # speculative decoding
    draft_model: str | None = None  # folder of a draft head or draft model
    max_draft_tokens: Positive = 8
    sparse_attention: bool = False  # attend to only part of a long context: faster, but the output differs
    sparse_sinks: Positive = 64  # first tokens that are always attended to, in whole blocks of 64
    sparse_window: Positive = 1024  # last tokens that are always attended to
    sparse_blocks: Positive = 32  # blocks of 64 tokens that each token chooses between them
    sparse_from: Annotated[int, msgspec.Meta(ge=0)] = 4096  # positions before it attend to everything
    kernels: str = "auto"  # a kernel family, or "reference"
    device: Literal["auto", "cpu", "cuda"] = "auto"  # "auto": a GPU if there is one that suits the model
    gpu_lanes: Literal["off", "auto", "priority", "green"] = "off"  # removed: another value is reported and ignored
    max_loras: Positive = 16  # adapters in memory at once
    lora_memory: Positive = 1 << 30  # bytes of adapters in memory of a worker, and of the files of all that are listed
    max_lora_rank: Positive = 256
    log_json: bool = False
    audit_log: str | None = None  # file of refusals and of what operators do, as JSON lines; None: none
    audit: AuditLimits = AuditLimits()
    keys: str | None = None  # folder of the keys that hosts share
    weights_cache: str = "auto"  # folder of the manifests of weights; "auto": in the user's cache; "off": none
    accept_new_weights: bool = False  # serve weights that are not those of the last load, and remember them
    kv_peers: bool = True  # workers read KV pages from each other's caches
    kv_host: Positive | None = None  # bytes of KV pages in memory that all workers share
    kv_disk: str | None = None  # folder for KV pages
    kv_disk_size: Positive = 8 << 30  # bytes of a model's pages there
    kv_redis: str | None = None  # URL of a Redis for KV pages
    kv_mooncake: str | None = None  # HOST:PORT of the master of a Mooncake store for KV pages
    kv_mooncake_size: Positive | None = None  # bytes of memory that each worker gives to it
    kv_key: str | None = None  # file of the key that pages on disk and in remote tiers are encrypted with
    hand_over: KvTransferConfig = KvTransferConfig()
    kv_store: KvStoreLimits = KvStoreLimits()
    supervise: SuperviseConfig = SuperviseConfig()
    scheduling: SchedulingConfig = SchedulingConfig()


class ServeConfig(EngineSettings, frozen=True, kw_only=True):
    """The settings of ``penstock serve``, from flags, environment and file."""

    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8000  # 0: any free port
    gateways: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1  # gateway processes, on one port
    event_loop: EventLoop = "auto"
    prefill: Positive | None = None
    decode: Positive | None = None
    encode_workers: Positive | None = None  # None: prefill workers encode images
    aggregated: bool = False
    prefill_device: Literal["cpu", "cuda"] | None = None  # of prefill workers, if another than the others'
    prefill_kernels: str | None = None  # their kernel family, if not that of the decode workers
    prefill_parallel: str | None = None  # of prefill workers, if not ``parallel``
    decode_parallel: str | None = None
    prefill_cores: str | None = None  # processors of the prefill workers, as "0-3,8"
    decode_cores: str | None = None
    lend_cores: bool = True  # idle workers lend their cores
    transfer: Literal["auto", "shm", "tcp", "curve", "nixl"] = "auto"
    api_key: str | None = None
    api_keys: str | None = None  # file of several keys, each of a tenant (`penstock keys add`)
    limits_redis: str | None = None  # URL of a Redis for tenants' rates; None: hosts divide them
    allowed_host: tuple[str, ...] = ()  # Host names accepted without a key; "*": all
    tls_cert: str | None = None  # file of the certificate for HTTPS, PEM; None: HTTP in clear
    tls_key: str | None = None  # file of its private key
    stop_with_parent: Positive | None = None  # id of this process's parent; the service stops when that ends
    log_requests: bool = False  # log a line for each request, not only for refused ones
    allowed_origin: tuple[str, ...] = ()  # of web pages that may use the service from a browser; "*": all
    served_model_name: str | None = None
    generation_config: Literal["auto", "none"] = "auto"  # whose sampling defaults: the model's own file's, or OpenAI's
    unknown_fields: Literal["refuse", "ignore"] = "refuse"  # fields of requests that are not known
    disable_additional_properties: bool = True  # objects of JSON schemas are closed where the schema says nothing
    strip_billing_header: bool = True  # Claude Code's changing line is left out of system prompts
    model_alias: tuple[str, ...] = ()  # PATTERN=NAME: names that clients may send for a model, as claude-*=NAME
    catalogue: str | None = None  # file that names several models, loaded on demand
    model_memory: Positive | None = None  # bytes of all loaded models of the catalogue; None: no limit
    lora: tuple[str, ...] = ()  # adapters, each NAME=FOLDER
    allow_lora_updating: bool = False  # clients may load and unload adapters
    join: tuple[str, ...] = ()  # mailboxes of workers on other hosts, instead of workers here
    members: str | None = None  # where to learn of such mailboxes, as KIND:..., instead of a fixed list
    allow_mixed_numerics: bool = False  # prompts may be read in another numerics class than answers are written in, and
    # an answer may go on in another when its own has no worker left
    allow_model_upgrade: bool = False  # joined workers of another model than that of the first ones are used
    remote_images: bool = False  # images may be fetched from public addresses; else they come within the request only
    remote_image_host: tuple[str, ...] = ()  # the only hosts that they are fetched from; empty: any
    response_cache: Positive | None = None  # bytes of stored responses, all gateways together; None: none are stored
    response_store: str | None = None  # folder of responses that later requests continue; None: that of this run
    trace_endpoint: str | None = None  # URL of an OpenTelemetry collector that spans of requests are sent to
    trace_file: str | None = None  # that they are written to
    trace_sample: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0  # of requests, where the caller does not say
    limits: RequestLimits = RequestLimits()
    failover: FailoverConfig = FailoverConfig()
    routing: RoutingConfig = RoutingConfig()
    turns: TurnLimits = TurnLimits()
    trace: TraceLimits = TraceLimits()
    membership: MembershipConfig = MembershipConfig()

    @property
    def workers_elsewhere(self) -> bool:
        """Whether all workers are on other hosts, and none is started here."""
        return bool(self.join) or self.members is not None

    @property
    def elsewhere_flag(self) -> str:
        """The flag that says so."""
        return "--join" if self.join else "--members"


class WorkerServeConfig(EngineSettings, frozen=True, kw_only=True):
    """The settings of ``penstock worker``: one worker that gateways on other hosts join."""

    role: Role = Role.BOTH
    listen: str = "tcp://127.0.0.1:9000"
    transfer: Literal["auto", "tcp", "tcp-clear", "curve", "nixl"] = (
        "auto"  # how pages travel to and from other workers
    )
    pages_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0  # where they are fetched; 0: any free one
    mixed_with: str | None = None  # numerics class of the workers of the other role, where it is not this one's
    name: Annotated[str, msgspec.Meta(pattern="^[a-z0-9][a-z0-9.-]{0,63}$")] | None = None
    nnodes: Positive = 1  # machines that its ranks are on
    node_rank: Annotated[int, msgspec.Meta(ge=0)] = 0  # which of them this is; gateways join the worker at number 0
    master_addr: str | None = None  # tcp://HOST:PORT at which number 0 listens for the others


class PickerConfig(Config, frozen=True, kw_only=True):
    """The settings of ``penstock picker``: which gateway a proxy sends each request to."""

    members: str | None = None  # where to learn of gateways, as KIND:...
    listen: str = "tcp://127.0.0.1:9002"  # for proxies
    plaintext: bool = False  # it may listen in clear off the loopback
    tls_cert: str | None = None  # file of the certificate that proxies are shown, PEM; None: in clear
    tls_key: str | None = None  # file of its private key
    health_port: PortOrFree = 9003  # of grpc.health.v1, in clear, on the same host
    metrics_port: PortOrFree = 9090  # of Prometheus' metrics, on the same host
    https_gateways: bool = False  # gateways speak HTTPS
    log_json: bool = False
    picker: PickerLimits = PickerLimits()
    membership: MembershipConfig = MembershipConfig()


_TIERS = ("kv_host", "kv_disk", "kv_redis", "kv_mooncake")


def kv_store_flags(config: EngineSettings) -> list[str]:
    """The flags of the KV store's tiers that are set: ``--kv-host`` first, then those that outlive the service."""
    return [f"--{name.replace('_', '-')}" for name in _TIERS if getattr(config, name) is not None]
