"""penstock.config.limits: NEEDS A DOCSTRING."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from penstock.config.base import Config, Milliseconds, Positive, Seconds

# MERGED: How much one turn of a gateway's event loop may do, so that nobody's tokens wait for long behind
# MERGED: others'.
# MERGED:
# MERGED: Each limit is a number of things, never a time: what one of them costs does not grow with streams,
# MERGED: workers or tokens.


class TurnLimits(Config, frozen=True, kw_only=True):
    """Of one gateway process."""

    client_reads_per_turn: Positive = 4  # pieces of what clients send that are parsed, and so requests that begin
    answer_units_per_turn: Positive = 1024  # of tokens made text and written: 8 a write, 1 a token, 128 a new request
    message_units_per_turn: Positive = 384  # of messages from workers: 16 a message, 1 a request that has tokens in it
    flights_per_turn: Positive = 256  # requests that are looked at for silent workers and deadlines
    young_collection_objects: Positive = 500  # new objects that garbage is looked for among
    full_collection_streams: Annotated[int, msgspec.Meta(ge=0)] = 256  # open streams up to which all are searched
    full_collection_s: Seconds = 60.0  # at least, between two looks among all
    full_collection_bytes: Positive = 1 << 30  # that the process has grown by since then: it is done all the same


# MERGED: Where spans of requests go, and how many may wait for that (docs/tracing.md).


class TraceLimits(Config, frozen=True, kw_only=True):
    """Spans never keep an answer waiting: those that there is no room for are lost."""

    max_queued_spans: Positive = 16_384  # that wait to be sent; the oldest are dropped
    max_batch_spans: Positive = 512  # sent at a time
    send_every_s: Seconds = 1.0  # between two batches that are not full
    send_timeout_s: Seconds = 5.0  # for one batch, repetitions included
    flush_s: Seconds = 1.0  # for a gateway that ends to send what waits


class TraceConfig(TraceLimits, frozen=True, kw_only=True):
    """Of one gateway."""

    endpoint: str | None = None  # URL of a collector (OTLP over HTTP)
    file: str | None = None
    sample: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0  # of requests whose callers do not say

    @property
    def enabled(self) -> bool:
        """Is anything recorded?"""
        return self.endpoint is not None or self.file is not None


# MERGED: How requests share the service: the table ``[scheduling]`` (docs/scheduling.md).

VERY_LONG_PROMPT_TARGETS = 2.0
"""Targets for a first token: a prompt that takes longer than so many to read, alone, is very long; others are not kept
back for answers (``engine.core.gentle``)."""


class SchedulingConfig(Config, frozen=True, kw_only=True):
    """Targets and waits of each class, and what tenants' turns are measured by."""

    interactive_ttft_ms: Milliseconds = 1000.0  # goodput counts answers that begin within this; longer prompts: gently
    interactive_tpot_ms: Milliseconds = 100.0  # and whose tokens follow each other so on the average; bounds steps
    interactive_max_wait_s: Seconds | None = None  # to the first token; None: ``RequestLimits.first_byte_s``
    batch_ttft_ms: Milliseconds = 600_000.0
    batch_tpot_ms: Milliseconds = 250.0
    batch_max_wait_s: Seconds = 600.0
    batch_patience_s: Seconds = 5.0  # batch work left out for so long has one request go on as an interactive one
    contended_step_ms: Milliseconds = 10.0  # a piece of a prompt, while other tenants are there whom it keeps waiting
    output_token_weight: Annotated[float, msgspec.Meta(gt=0)] = 2.0  # of an answer, against one of a prompt
    tenant_memory_s: Seconds = 10.0  # so long after its last request a tenant counts as being there
    max_tenants: Positive = 1024  # keys in the file of keys
    metric_tenants: Annotated[int, msgspec.Meta(ge=0)] = 64  # that metrics tell apart; the others are one


# MERGED: How long the two ends of a hand-over wait for each other, and what pages that are fetched over
# MERGED: sockets may take.

NIXL = "nixl+"
"""Before the name of a carrier: pages are read by NIXL where both ends have it."""


class KvTransferConfig(Config, frozen=True, kw_only=True):
    """How long the two ends of a hand-over wait for each other, and how much is copied between two steps."""

    lease_s: float = 10.0  # without a sign of the other side, either end gives its pages back
    copy_budget_bytes: int = 32 << 20  # copied and verified between two steps of a decode worker
    window_bytes: int = 64 << 20  # sent to one receiver and not yet acknowledged
    peer_idle_s: float = 60.0  # a link to another worker that nobody uses for so long is closed
    ahead_tokens: Annotated[int, msgspec.Meta(ge=16)] = 256  # room for what is written of an answer while it moves
    hedge_after_s: float = 0.1  # that a prompt waits for bytes alone before computing them here is thought of
    hedge_margin: float = 1.5  # computing must be so many times sooner than waiting
    connections: Annotated[int, msgspec.Meta(ge=1, le=16)] = 2  # to each worker that sends pages over sockets
    max_connections: Positive = 256  # of receivers to one sender; more are hung up on
    max_strangers: Positive = 32  # of those, that have not proved themselves yet
    greeting_s: float = 3.0  # to prove oneself, or to answer a new connection
    fetch_stall_s: float = 3.0  # without a byte of pages that were asked for: the connection is given up
    nixl_transports: str = "rc,dc,ud"  # of UCX, over which NIXL reads pages
    nixl_devices: str = "all"  # of UCX
    fetch_tries: Positive = 3  # connections that a page is asked for over


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


class RequestLimits(Config, frozen=True, kw_only=True):
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
