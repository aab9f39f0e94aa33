"""Every metric name of Penstock, declared as data.

Knows nothing about how they are counted or shown: workers fill ``WORKER_COUNTERS`` into their reports without
importing a metrics library, and ``telemetry.registry`` shows all families to Prometheus.  Names are those that vLLM's
dashboards expect, under our own prefix.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

PREFIX = "penstock:"

WORKER_COUNTERS: tuple[str, ...] = (
    "steps",  # steps that computed something
    "prompt_tokens_computed",  # prompt (and resubmitted) tokens computed here, not found in a cache or received
    "generation_tokens",  # tokens drawn here
    "texts_pooled",  # texts read to the end for an embedding or scores
    "prefix_cache_queries",  # tokens looked up in the prefix cache
    "prefix_cache_hits",  # of those, found
    "preemptions",  # requests whose pages were taken back before their end
    "pages_sent",  # pages announced to a decode worker
    "pages_received",  # pages copied from a prefill worker and verified
    "bytes_received",  # of those
    "transfer_seconds",  # spent copying and verifying pages
    "pages_corrupt",  # pages that failed their check and were computed anew
    "hand_overs",  # hand-overs finished, counted by the receiver
    "hand_overs_failed",  # hand-overs given up by either side
    "leases_expired",  # pages given back because the other side fell silent
    "requests_returned",  # given back to the gateway unfinished
    "requests_cancelled",  # forgotten because the gateway said so
    "dropped_frames",  # frames that were malformed, of another version, or could not be sent
    "peer_links_closed",  # links to other workers that nobody used any more
    "step_seconds",  # spent in steps
    "borrowed_core_seconds",  # computed at cores of workers that were idle
    "batch_multi_row_steps",  # steps that computed two requests or more
    "spec_drafts",  # rows that had guessed tokens
    "spec_draft_tokens",  # guessed tokens computed
    "spec_accepted_tokens",  # of those, the ones that stood
    "images_encoded",  # images encoded here
    "images_received",  # images that another worker encoded for this one
    "image_slices",  # turns between steps in which an image was worked at
    "image_seconds",  # spent in those
    "image_cache_queries",  # images that requests came with and that no prefix cache covered
    "image_cache_hits",  # of those, found encoded
)
"""Names in ``Report.counters`` that only grow within one incarnation; the gateway adds them over incarnations."""

WORKER_MAXIMA: tuple[str, ...] = (
    "batch_rows_max",  # most requests computed in one step
)
"""Names in ``Report.counters`` of which the largest value counts, over all incarnations."""


class Kind(Enum):
    """What Prometheus calls the type of a family."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Family:
    """One metric.  A counter is shown with Prometheus' suffix ``_total``."""

    name: str  # without the prefix
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_ITL = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40)
_E2E = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_DECISION = (20e-6, 50e-6, 100e-6, 150e-6, 200e-6, 300e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3)
_PHASE = (0.001, 0.005, 0.01, 0.025, 0.05, *_E2E[1:])


def _counter(name: str, text: str, *labels: str) -> Family:
    return Family(name, Kind.COUNTER, text, labels)


def _gauge(name: str, text: str, *labels: str) -> Family:
    return Family(name, Kind.GAUGE, text, labels)


def _histogram(name: str, text: str, buckets: tuple[float, ...]) -> Family:
    return Family(name, Kind.HISTOGRAM, text, (), buckets)


# --- of each worker, from its reports -----------------------------------------------------------------------------

NUM_REQUESTS_RUNNING = _gauge("num_requests_running", "Requests in the worker's steps.", "worker", "role")
NUM_REQUESTS_WAITING = _gauge("num_requests_waiting", "Requests queued in the worker.", "worker", "role")
KV_CACHE_USAGE = _gauge("kv_cache_usage_perc", "Share of KV pages in use; 1 means all.", "worker", "role")
KV_PAGES_LEAKED = _gauge("kv_pages_leaked", "KV pages without an owner; 0 at every idle moment.", "worker", "role")
WORKER_UP = _gauge("worker_up", "1 while the worker can be given work.", "worker", "role")

BY_WORKER_COUNTER: dict[str, Family] = {
    "steps": _counter("engine_steps", "Steps that computed something.", "worker"),
    "prompt_tokens_computed": _counter("prompt_tokens_computed", "Prompt tokens computed, not cached.", "worker"),
    "generation_tokens": _counter("worker_generation_tokens", "Tokens drawn, resubmitted work included.", "worker"),
    "texts_pooled": _counter("texts_pooled", "Texts read for an embedding or scores.", "worker"),
    "prefix_cache_queries": _counter("prefix_cache_queries", "Tokens looked up in the prefix cache.", "worker"),
    "prefix_cache_hits": _counter("prefix_cache_hits", "Tokens found in the prefix cache.", "worker"),
    "preemptions": _counter("num_preemptions", "Requests preempted.", "worker"),
    "pages_sent": _counter("kv_transfer_pages_sent", "KV pages announced to a decode worker.", "worker"),
    "pages_received": _counter("kv_transfer_pages", "KV pages received and verified.", "worker"),
    "bytes_received": _counter("kv_transfer_bytes", "Bytes of KV pages received and verified.", "worker"),
    "transfer_seconds": _counter("kv_transfer_seconds", "Time spent on copying and verifying KV pages.", "worker"),
    "pages_corrupt": _counter("kv_pages_corrupt", "KV pages that failed their check.", "worker"),
    "hand_overs": _counter("kv_hand_overs", "Hand-overs finished.", "worker"),
    "hand_overs_failed": _counter("kv_hand_overs_failed", "Hand-overs given up.", "worker"),
    "leases_expired": _counter("kv_leases_expired", "Leases that ended because the other side was silent.", "worker"),
    "requests_returned": _counter("requests_returned", "Requests given back to the gateway.", "worker"),
    "requests_cancelled": _counter("requests_cancelled", "Requests cancelled by the gateway.", "worker"),
    "dropped_frames": _counter("worker_dropped_frames", "Frames a worker dropped.", "worker"),
    "peer_links_closed": _counter("worker_peer_links_closed", "Links to other workers closed unused.", "worker"),
    "step_seconds": _counter("engine_step_seconds", "Time spent in steps.", "worker"),
    "borrowed_core_seconds": _counter("borrowed_core_seconds", "Computed at cores of idle workers.", "worker"),
    "batch_multi_row_steps": _counter("engine_multi_row_steps", "Steps of two requests or more.", "worker"),
    "spec_drafts": _counter("spec_decode_num_drafts", "Rows of steps that had guessed tokens.", "worker"),
    "spec_draft_tokens": _counter("spec_decode_num_draft_tokens", "Guessed tokens computed.", "worker"),
    "spec_accepted_tokens": _counter("spec_decode_num_accepted_tokens", "Guessed tokens that stood.", "worker"),
    "images_encoded": _counter("images_encoded", "Images encoded.", "worker"),
    "images_received": _counter("images_received", "Images encoded by another worker.", "worker"),
    "image_slices": _counter("image_slices", "Turns between steps that worked at an image.", "worker"),
    "image_seconds": _counter("image_seconds", "Time spent on encoding images.", "worker"),
    "image_cache_queries": _counter("image_cache_queries", "Images looked up in the image cache.", "worker"),
    "image_cache_hits": _counter("image_cache_hits", "Images found encoded.", "worker"),
}
"""The family of each name in ``WORKER_COUNTERS``."""

BY_WORKER_MAXIMUM: dict[str, Family] = {
    "batch_rows_max": _gauge("engine_batch_rows_max", "Most requests computed in one step.", "worker"),
}
"""The family of each name in ``WORKER_MAXIMA``."""

# --- of the gateway -----------------------------------------------------------------------------------------------

PROMPT_TOKENS = _counter("prompt_tokens", "Prompt tokens of requests that got a first token.")
GENERATION_TOKENS = _counter("generation_tokens", "Tokens delivered to clients, each once.")
TTFT = _histogram("time_to_first_token_seconds", "From a request's arrival to its first token.", _TTFT)
ITL = _histogram("inter_token_latency_seconds", "Between two tokens of one answer.", _ITL)
E2E = _histogram("e2e_request_latency_seconds", "From a request's arrival to the end of its answer.", _E2E)
QUEUE_TIME = _histogram("request_queue_time_seconds", "Waiting in a worker before the prompt was read.", _PHASE)
PREFILL_TIME = _histogram("request_prefill_time_seconds", "From the end of the queue to the first token.", _PHASE)
DECODE_TIME = _histogram("request_decode_time_seconds", "From the first token to the end of the answer.", _PHASE)
REQUEST_SUCCESS = _counter("request_success", "Requests ended, by reason.", "finished_reason")
RESUBMISSIONS = _counter("resubmissions", "Requests submitted anew, after a loss or a return.")
WORKER_DEATHS = _counter("worker_deaths", "Worker processes that ended or were ended.", "worker")
WORKER_SUSPICIONS = _counter("worker_suspicions", "Workers given up because they were silent.", "worker")
DROPPED_FRAMES = _counter("dropped_frames", "Frames the gateway dropped: malformed, or not to be sent.")
REQUESTS_OPEN = _gauge("requests_open", "Requests that the gateway serves now.")

DECISIONS = _counter("router_decisions", "Times that workers were chosen, by what came of it.", "outcome")
DECISION_TIME = _histogram("router_decision_seconds", "To choose the workers of one request.", _DECISION)
PREFIX_BLOCKS = _gauge("prefix_index_blocks", "Blocks of workers' prefix caches that the gateway knows of.")
PREFIX_BYTES = _gauge("prefix_index_bytes", "Memory of what it knows of them.")
PREFIX_GAPS = _counter("prefix_index_gaps", "Times that a worker's telling was missed and asked for anew.")
PREFIX_REFUSED = _counter("prefix_index_refused_blocks", "Blocks over max_indexed_blocks, not known therefore.")

OUTCOMES = ("nobody", "whole", "split")
"""Of decisions, by how many legs they have."""

FINISHED_REASONS = ("stop", "length", "abort", "error")
