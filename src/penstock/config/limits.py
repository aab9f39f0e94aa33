"""Every limit of the system with its default, one struct for each table of the configuration file.

Units are in the names (``_s`` seconds, ``_ms`` milliseconds, ``_bytes``).  docs/limits.md explains each.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from penstock.config.base import Config, Milliseconds, Positive, Seconds

NIXL = "nixl+"
"""Prefix of a KV connector's name: pages are read by NIXL where both ends have it."""

VERY_LONG_PROMPT_TARGETS = 2.0
"""A prompt is very long if its prefill alone takes more than this many interactive TTFT targets; only such prompts are
paced while requests decode."""


class RequestLimits(Config, frozen=True, kw_only=True):
    """``[limits]``: what a request may ask for.  Each refusal names the limit and its value."""

    max_body_bytes: int = 16 << 20
    max_pending_body_bytes: int = 256 << 20  # of all bodies that are being received, parsed or tokenized
    max_json_depth: int = 64
    max_json_values: int = 2_097_152  # members of all arrays and objects in a body
    max_json_containers: int = 131_072  # arrays and objects in a body
    max_ignored_chars: int = 65_536  # of a field without effect, such as metadata
    max_header_bytes: int = 64 << 10
    max_n: int = 16  # choices per prompt
    max_prompts: int = 64  # per /v1/completions request
    max_stops: int = 16
    max_stop_chars: int = 256
    max_stop_token_ids: int = 128
    max_logit_bias: int = 1024
    max_top_logprobs: int = 20
    max_prompt_logprobs: int = 262_144  # with echo: prompt tokens x (1 + alternatives), over all choices
    max_messages: int = 4096
    max_content_parts: int = 4096  # in all messages of a chat, tool calls included
    max_tools: int = 512  # per chat; also tool calls per message
    max_tokenize_chars: int = 4 << 20  # text for /tokenize, which need not fit the context
    max_chars_per_token: int = 32  # a text with more characters per token of the context is refused unread
    max_template_output_bytes: int = 16 << 20
    max_template_s: float = 5.0
    max_grammar_chars: int = 131_072  # of a schema, regular expression or grammar
    max_grammar_choices: int = 4096  # strings in structured_outputs.choice
    max_grammar_s: float = 1.0  # CPU time to compile one
    max_grammar_memory_bytes: int = 512 << 20  # to compile one
    max_queued_grammars: int = 64  # waiting to be checked, over all tenants
    max_grammar_verdicts_bytes: int = 16 << 20  # of cached check results
    max_images: int = 8  # per chat
    max_image_bytes: int = 12 << 20  # of one image, uploaded or fetched
    max_image_pixels: int = 32_000_000  # of one image, checked before it is decoded
    max_image_scans: int = 64  # of one JPEG file: each scan is a pass over all its pixels
    max_decoding_image_bytes: int = 512 << 20  # of all images in decoding, 12 bytes per pixel
    max_image_tokens: int = 1024  # per image; larger images are scaled down
    max_queued_images: int = 64  # waiting to be decoded, over all requests
    remote_image_s: float = 10.0  # to fetch one image, redirects included
    max_audio_bytes: int = 25 << 20  # per upload
    max_audio_s: float = 1800.0  # duration of one recording
    max_audio_rate: int = 192_000  # samples per second
    max_audio_prompt_chars: int = 16_384  # of a transcription's prompt
    max_pending_audio_s: float = 7200.0  # of all recordings in transcription; samples take 64 kB per second
    max_reading_audio_bytes: int = 256 << 20  # of all files in decoding, about 8 bytes per sample
    max_queued_audio: int = 16  # recordings and windows waiting to be decoded, over all requests
    max_session_chars: int = 256  # of a session's name
    max_sessions: int = 4096  # whose latest prompts a gateway keeps, to find why a prefix cache broke
    max_session_prefix_bytes: int = 64 << 20  # of all that is kept of them; 0: nothing
    session_prefix_s: float = 3600.0  # for which a session is kept behind its last turn
    default_max_tokens: Positive | None = None  # of a chat without max_tokens; None: what is left of the context
    max_inputs: int = 2048  # per /v1/embeddings, /rerank or /classify request
    max_input_tokens: int = 300_000  # of all inputs together
    max_inputs_at_once: int = 64  # inputs that are at workers at the same time
    max_queued_requests: int = 512  # accepted and without a first token, per ready prefill worker
    max_queued_tokens: int = 262_144  # prompt tokens of those, per ready prefill worker
    max_prompt_bytes: int = 1 << 30  # memory of the prompts of all open requests in a gateway
    first_byte_s: float = 120.0  # to the first token, resubmissions included
    max_stated_wait_s: float = 3600.0  # the longest wait for the first token that a client may state
    stall_s: float = 60.0  # between two tokens
    idle_client_s: float = 30.0  # a client that reads nothing for this long is disconnected
    slow_body_s: float = 30.0  # to receive a request's body
    header_s: float = 15.0  # to receive a request's head
    metrics_cache_s: float = 1.0  # for which a rendered metrics page is reused
    metrics_publish_s: float = 1.0  # between two snapshots of a gateway's metrics for the others of its host
    metrics_stale_s: float = 5.0  # after which the gauges of such a snapshot are not shown any more
    load_s: float = 120.0  # to wait for a model of the catalog to be loaded
    max_queued_loads: int = 256  # requests waiting for models to be loaded
    max_idempotency_key_chars: int = 256
    max_idempotency_keys: int = 65_536  # remembered by a gateway
    idempotency_s: float = 600.0  # for which a key is remembered
    max_logged_refusals: int = 20  # 4xx responses logged one by one in 10 s; the others are counted
    max_kept_tokens: int = 1 << 20  # of finished responses with a key, which are replayed without being computed
    stored_responses_s: float = 14_400.0  # for which a response with "store" is kept, 4 h
    max_stored_responses_bytes: int = 256 << 20  # of all of a host's; 0: none is kept
    max_stored_response_bytes: int = 4 << 20  # of the conversation that is kept with one, its input
    max_pending_response_bytes: int = 256 << 20  # of such conversations of open requests, in a gateway
    max_referenced_responses: int = 1024  # responses whose items one input refers to
    response_store_wait_s: float = 2.0  # for another process that writes to the store
    resume_grace_s: float = 1.0  # for which a request with a key continues after its client has disconnected


class FailoverConfig(Config, frozen=True, kw_only=True):
    """``[failover]``: when the gateway gives up on a worker or a request."""

    max_attempts: int = 8  # submissions without a new token in between; full queues do not count
    beat_s: float = 0.25  # between two Hellos to a worker
    idle_hellos_per_s: Positive = 100  # to all workers together that have no requests of this gateway
    idle_beat_max_s: Seconds = 2.0  # between two Hellos to one of them at most, however many they are
    silence_s: float = 1.0  # a worker with requests is suspected after silence_s + overrun x predicted step of silence
    overrun: float = 3.0  # see there; the two times are added
    quiet_s: float = 0.25  # a silent worker of another host is connected to after quiet_s + a step; refused: it is gone
    still_s: float = 4.0  # a worker that reports but computes nothing for this long loses its requests
    quarantine_s: float = 1.0  # before a lost worker that speaks again is probed; doubles each time
    quarantine_max_s: float = 30.0  # upper bound of that
    probe_s: float = 2.0  # to answer a probe
    pin_model_s: float = 5.0  # after the first worker is ready, the model of the majority is pinned
    no_path_s: float = 2.0  # requests fail when every worker that could serve them is gone, or not met, for this long
    retry_share: float = 1.0  # resubmissions that each new request adds to the retry budget
    retry_burst: int = 1024  # the most that the budget holds; at least the number of open streams
    retry_per_s: float = 10.0  # added to the budget each second
    retry_wait_s: float = 15.0  # the longest that a resubmission waits for the budget
    streams_per_turn: Positive = 24  # streams of a lost worker that are moved in one turn of the event loop
    forget_s: float = 3600.0  # after which a lost worker is removed, counters included
    save_tokens_s: Annotated[float, msgspec.Meta(ge=0)] = (
        0.25  # between two messages of new tokens to a worker; 0: none
    )
    poison_deaths: int = 2  # a request fails once this many workers have crashed under it
    poison_tokens: int = 8  # a crash after this many new tokens is not held against the request


class MembershipConfig(Config, frozen=True, kw_only=True):
    """``[membership]``: how a gateway learns where workers of other hosts are (``--members``, ``--join``)."""

    max_members: Positive = 4096  # a file with more is not used; of what DNS answers, the others are left out
    max_members_bytes: Positive = 4 << 20  # of a members file
    file_poll_s: Seconds = 1.0  # between two looks at a members file
    dns_poll_s: Seconds = 2.0  # between two look-ups of a name
    dns_timeout_s: Seconds = 5.0  # after which a name without an answer is reported
    dns_empty_s: Annotated[float, msgspec.Meta(ge=0)] = 30.0  # for which addresses stay after "no such name"
    name_server: str = ""  # ADDRESS:PORT that SRV records are asked of; empty: those of /etc/resolv.conf
    nats_check_s: Seconds = 2.0  # a NATS server that does not answer within this is a problem; then until the next try
    nats_relist_s: Seconds = 60.0  # after which all keys of a bucket are read anew
    nats_credentials: str = ""  # file with the server's USER:PASSWORD or token; empty: none
    ray_poll_s: Seconds = 2.0  # between two questions to a fleet's actors in Ray
    ray_silent_s: Seconds = 45.0  # without any answer from Ray its client is started anew
    ray_address: str = ""  # HOST:PORT of the cluster; empty: that of RAY_ADDRESS, or the one of this host


class RoutingConfig(Config, frozen=True, kw_only=True):
    """``[routing]``: how workers are chosen, and what the gateway remembers for that."""

    policy: Literal["penstock", "round-robin", "random", "least-loaded", "prefix"] = "penstock"
    split: Literal["auto", "always"] = "auto"  # auto: decode workers also prefill where that is better
    max_indexed_blocks: Positive = 1 << 24  # of all workers' caches together; 20 bytes each
    max_indexed_workers: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)] = 1024  # with an index of their own
    expected_answer_tokens: Positive = 256  # of a response without max_tokens, before any has ended
    remembered_requests: Annotated[int, msgspec.Meta(ge=0)] = 1024  # whose decisions can be queried
    remembered_decisions: Annotated[int, msgspec.Meta(ge=0)] = 16  # the latest of each of those


class SchedulingConfig(Config, frozen=True, kw_only=True):
    """``[scheduling]``: latency targets of each class, and fairness between tenants (docs/scheduling.md)."""

    interactive_ttft_ms: Milliseconds = 1000.0  # TTFT target, for goodput; longer prefills are paced
    interactive_tpot_ms: Milliseconds = 100.0  # TPOT target, for goodput; bounds a step's length
    interactive_max_wait_s: Seconds | None = None  # to the first token; None: ``RequestLimits.first_byte_s``
    batch_ttft_ms: Milliseconds = 600_000.0
    batch_tpot_ms: Milliseconds = 250.0
    batch_max_wait_s: Seconds = 600.0
    batch_patience_s: Seconds = 5.0  # batch work that waits for this long has one request promoted to interactive
    contended_step_ms: Milliseconds = 10.0  # length of a prefill chunk while other tenants wait
    output_token_weight: Annotated[float, msgspec.Meta(gt=0)] = 2.0  # cost of an output token, in prompt tokens
    tenant_memory_s: Seconds = 10.0  # for which a tenant counts as active after its last request
    limits_redis_s: Seconds = 0.25  # for --limits-redis to answer; then hosts divide rates until it is back
    max_tenants: Positive = 1024  # keys in the file of API keys
    metric_tenants: Annotated[int, msgspec.Meta(ge=0)] = 64  # with metrics of their own; the others are one label


class KvTransferConfig(Config, frozen=True, kw_only=True):
    """``[hand_over]``: the transfer of KV pages between workers."""

    lease_s: float = 10.0  # either end frees the pages when it hears nothing from the other for this long
    copy_budget_bytes: int = 32 << 20  # copied and verified between two steps of a decode worker
    window_bytes: int = 64 << 20  # sent to one receiver and not yet acknowledged
    peer_idle_s: float = 60.0  # an unused connection to another worker is closed after this
    ahead_tokens: Annotated[int, msgspec.Meta(ge=16)] = 256  # page space for tokens decoded during a migration
    hedge_after_s: float = 0.1  # after which recomputing the missing pages locally is considered
    hedge_margin: float = 1.5  # recomputing must be this many times faster than waiting
    connections: Annotated[int, msgspec.Meta(ge=1, le=16)] = 2  # to each worker that sends pages over sockets
    max_connections: Positive = 256  # of receivers to one sender; further ones are refused
    max_strangers: Positive = 32  # of those, not authenticated yet
    greeting_s: float = 3.0  # to authenticate, or to answer a new connection
    fetch_stall_s: float = 3.0  # a connection that brings no byte of the requested pages for this long is closed
    nixl_transports: str = "rc,dc,ud"  # UCX transports that NIXL reads pages over
    nixl_devices: str = "all"  # UCX devices
    fetch_tries: Positive = 3  # connections over which a page is requested


class KvStoreLimits(Config, frozen=True, kw_only=True):
    """``[kv_store]``: how long the tiers of the KV store may take, and how much may queue for them."""

    max_wait_s: float = 2.0  # for pages from tiers; never longer than recomputing them takes
    hang_s: float = 1.0  # a tier that spends this long on one page gets no further ones until it is done
    always: bool = False  # read and write pages even if recomputing them is faster
    max_queued_writes: int = 1024  # pages queued for one tier; further ones are not written
    direct_io: bool = True  # bypass the page cache
    remote_timeout_s: float = 0.5  # of one exchange with a remote tier
    remote_expire_s: float = 86_400.0  # lifetime of a page in Redis since its last use
    mooncake_metadata: str = "P2PHANDSHAKE"  # where Mooncake's clients find each other
    mooncake_protocol: Literal["tcp", "rdma"] = "tcp"
    mooncake_devices: str = ""  # RDMA devices; empty: Mooncake chooses
    close_s: float = 1.0  # for a worker that ends to write what is queued


class SuperviseConfig(Config, frozen=True, kw_only=True):
    """``[supervise]``: how dead and hung processes are dealt with."""

    wedge_s: float = 2.0  # without progress beyond the predicted end of a step: killed and restarted
    busy_s: float = 60.0  # the same for a process that uses, or waits for, a processor meanwhile
    backoff_first_s: float = 0.05
    backoff_max_s: float = 5.0
    rapid_deaths: int = 10  # deaths of one worker before it was ever ready, after which the service gives up
    stable_s: float = 5.0  # ready for this long: earlier deaths no longer count
    start_s: float = 120.0  # from the fork, or the last sign of progress, to ready; longer counts as hung
    drain_s: float = 30.0  # to finish running requests after SIGTERM
    grace_s: float = 2.0  # between SIGTERM and SIGKILL of a child
    look_s: float = 0.1  # between two readings of the heartbeat table

    @property
    def stops_within_s(self) -> float:
        """From SIGTERM to the end of all processes."""
        return self.drain_s + self.grace_s


class ProbeLimits(Config, frozen=True, kw_only=True):
    """Defaults of ``penstock probe``, for --timeout-s and --still-s."""

    probe_timeout_s: Seconds = 5.0  # for a worker or a gateway to answer
    probe_still_s: Seconds = 120.0  # for which a worker with requests may make no step and move no page


class PickerLimits(Config, frozen=True, kw_only=True):
    """``[picker]`` of ``penstock picker``: how gateways are probed, and what proxies may send."""

    ready_every_s: Seconds = 1.0  # between two questions to a gateway whether it is ready
    ready_timeout_s: Seconds = 2.0  # for a gateway to answer; then it gets no requests
    max_endpoints: Positive = 3  # gateways that a request is given: the one of its key, and those to try after it
    max_subset: Positive = 4096  # endpoints among which a proxy may have the gateway chosen
    max_message_bytes: Positive = 4 << 20  # of a message of a proxy: headers, or a piece of a body
    max_streams: Positive = 1024  # requests in processing at a time, a thread each; further ones are refused
    first_message_s: Seconds = 10.0  # for a stream to bring a request's headers; it is ended within twice that
    stop_s: Annotated[float, msgspec.Meta(ge=0)] = 5.0  # for open streams to end after SIGTERM


class TraceLimits(Config, frozen=True, kw_only=True):
    """``[trace]``: buffers of the span exporter (docs/tracing.md).  If full, the oldest spans are dropped."""

    max_queued_spans: Positive = 16_384
    max_batch_spans: Positive = 512  # sent at a time
    send_every_s: Seconds = 1.0  # between two batches that are not full
    send_timeout_s: Seconds = 5.0  # for one batch, retries included
    flush_s: Seconds = 1.0  # for a gateway that ends to send what is queued


class TraceConfig(TraceLimits, frozen=True, kw_only=True):
    """Where a gateway sends its spans."""

    endpoint: str | None = None  # URL of a collector (OTLP over HTTP)
    file: str | None = None
    sample: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0  # share of requests whose callers make no decision

    @property
    def enabled(self) -> bool:
        """Whether spans are recorded."""
        return self.endpoint is not None or self.file is not None


class AuditLimits(Config, frozen=True, kw_only=True):
    """``[audit]``: size and queue of the audit log (docs/security.md)."""

    max_audit_file_bytes: Annotated[int, msgspec.Meta(ge=64 << 10)] = 64 << 20  # at which a new file is begun
    max_audit_files: Positive = 8  # earlier files that are kept, as FILE.1 and so on
    max_queued_audit_events: Positive = 8192  # beyond which events are counted instead of written
    refusal_window_s: Seconds = 10.0  # in which like refusals are counted together
    max_refusal_groups: Positive = 1024  # kinds of refusals that are counted apart at a time
    audit_flush_s: Seconds = 1.0  # for a gateway that ends to write what is queued


class TurnLimits(Config, frozen=True, kw_only=True):
    """``[turns]``: how much one turn of a gateway's event loop may do, so that no stream waits long for others.

    Each limit is a number of things, never a time: their cost grows with neither streams nor workers nor tokens.
    """

    client_reads_per_turn: Positive = 4  # pieces of requests that are parsed
    answer_units_per_turn: Positive = 1024  # of output: 8 per write, 1 per token, 128 per new request
    message_units_per_turn: Positive = 384  # of workers' messages: 16 per message, 1 per request with tokens in it
    flights_per_turn: Positive = 256  # requests checked for silent workers and deadlines
    young_collection_objects: Positive = 500  # new objects that trigger a collection of the young generation
    full_collection_streams: Annotated[int, msgspec.Meta(ge=0)] = 256  # open streams up to which a full one may run
    full_collection_s: Seconds = 60.0  # between two full collections at least
    full_collection_bytes: Positive = 1 << 30  # growth of the process that forces a full collection
