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
    "stored_tokens",  # tokens of prompts that the KV store brought
    "store_waits",  # requests that waited for it
    "store_wait_seconds",  # how long, together
    "store_waits_in_vain",  # of those, the ones that it brought nothing in time
    "preemptions",  # requests whose pages were taken back before their end
    "requests_yielded",  # of those, batch work that gave its pages to an interactive request
    "rows_left_out",  # rows of batch work that a step had no time for
    "rows_waited_for_masks",  # rows computed in vain, as it was not known yet what their grammars allow
    "requests_expired",  # given back because they had waited for as long as they may
    "pages_sent",  # pages announced to a decode worker
    "pages_received",  # pages copied from a prefill worker and verified
    "bytes_received",  # of those
    "transfer_seconds",  # spent copying and verifying pages, by threads that fetch them too
    "transfer_wait_seconds",  # that computed prompts waited for their last pages, and others for any, in vain
    "pages_missed",  # pages that were announced and had not come when they were given up
    "pages_corrupt",  # pages that failed their check and were computed anew
    "cached_pages_corrupt",  # cached pages that were damaged when a request was about to use them, computed anew
    "hand_overs",  # hand-overs finished, counted by the receiver
    "hand_overs_failed",  # hand-overs given up by either side
    "hand_overs_outrun",  # prompts computed again because their pages were slow
    "answers_moved",  # answers that were written here and go on at another worker
    "answers_joined",  # answers that another worker wrote and that go on here
    "role_changes",  # other roles taken on
    "leases_expired",  # pages given back because the other side fell silent
    "page_connections_refused",  # connections for pages that proved nothing, or were too many
    "requests_returned",  # given back to the gateway unfinished
    "requests_cancelled",  # forgotten because the gateway said so
    "dropped_frames",  # frames that were malformed, of another version, or could not be sent
    "peer_refusals",  # messages and connections that their sender's key does not allow
    "peer_links_closed",  # unused links to other workers
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
"""Names in ``WorkerReport.counters`` that only grow within one incarnation; the gateway adds them over incarnations."""

WORKER_MAXIMA: tuple[str, ...] = (
    "batch_rows_max",  # most requests computed in one step
)
"""Names in ``WorkerReport.counters`` of which the largest value counts, over all incarnations."""

TIERS: tuple[str, ...] = ("peers", "host", "disk", "redis", "mooncake")
"""Of the KV store, nearest first."""

TIER_FIGURES: tuple[str, ...] = (
    "pages_read",  # fetched from the tier and proved
    "bytes_read",  # of those
    "read_seconds",  # spent on those
    "pages_missed",  # that the tier was said to have and had not any more
    "pages_corrupt",  # that failed their proof and were computed instead
    "pages_written",
    "bytes_written",
    "write_seconds",
    "writes_dropped",  # pages that had to be left out: too many waited, or they were gone before they were copied
    "errors",  # things the tier did not do, or not in time
)
"""What is counted of each tier of a worker."""

TIER_PAGES = "pages"
"""The name in reports of the pages that the tier has now."""


def tier_counter(tier: str, figure: str) -> str:
    """The name of a tier's figure in ``WorkerReport.counters``."""
    return f"kv_{tier}_{figure}"


TIER_COUNTERS: dict[str, tuple[str, str]] = {
    tier_counter(tier, figure): (tier, figure) for tier in TIERS for figure in TIER_FIGURES
}
"""Name in ``WorkerReport.counters`` to (tier, figure)."""


class MetricKind(Enum):
    """What Prometheus calls the type of a family."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class MergeRule(Enum):
    """What the page of a host shows of the values that its gateways have of one series."""

    SUM = "sum"
    MAX = "max"  # all gateways see the same, some of them later
    MIN = "min"


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """One metric.  A counter is shown with Prometheus' suffix ``_total``."""

    name: str  # without the prefix
    kind: MetricKind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    merge: MergeRule = MergeRule.SUM  # of what gateways count; what workers report is the same at all of them


_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_ITL = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40)
_E2E = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_DECISION = (20e-6, 50e-6, 100e-6, 150e-6, 200e-6, 300e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3)
_PHASE = (0.001, 0.005, 0.01, 0.025, 0.05, *_E2E[1:])


def _counter(name: str, text: str, *labels: str, merge: MergeRule = MergeRule.SUM) -> MetricFamily:
    return MetricFamily(name, MetricKind.COUNTER, text, labels, merge=merge)


def _gauge(name: str, text: str, *labels: str, merge: MergeRule = MergeRule.SUM) -> MetricFamily:
    return MetricFamily(name, MetricKind.GAUGE, text, labels, merge=merge)


def _histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> MetricFamily:
    return MetricFamily(name, MetricKind.HISTOGRAM, text, labels, buckets)


# --- of each worker, from its reports -----------------------------------------------------------------------------

NUM_REQUESTS_RUNNING = _gauge("num_requests_running", "Requests in the worker's steps.", "worker", "role")
NUM_REQUESTS_WAITING = _gauge("num_requests_waiting", "Requests queued in the worker.", "worker", "role")
KV_CACHE_USAGE = _gauge("kv_cache_usage_perc", "Share of KV pages in use; 1 means all.", "worker", "role")
KV_PAGES_LEAKED = _gauge("kv_pages_leaked", "KV pages without an owner; 0 at every idle moment.", "worker", "role")
KV_PAGES_LOADING = _gauge("kv_pages_loading", "KV pages that a tier of the KV store is filling.", "worker", "role")
WORKER_UP = _gauge("worker_up", "1 while the worker can be given work.", "worker", "role")

PREDICTED_QUEUE = _gauge(
    "predicted_queue_seconds", "What a request would wait at the role's best worker.", "role", merge=MergeRule.MAX
)
PREDICTED_STEP = _gauge(
    "predicted_step_seconds", "Of a step that decodes what the role's workers have now.", "role", merge=MergeRule.MAX
)

BY_WORKER_COUNTER: dict[str, MetricFamily] = {
    "steps": _counter("engine_steps", "Steps that computed something.", "worker"),
    "prompt_tokens_computed": _counter("prompt_tokens_computed", "Prompt tokens computed, not cached.", "worker"),
    "generation_tokens": _counter("worker_generation_tokens", "Tokens drawn, resubmitted work included.", "worker"),
    "texts_pooled": _counter("texts_pooled", "Texts read for an embedding or scores.", "worker"),
    "prefix_cache_queries": _counter("prefix_cache_queries", "Tokens looked up in the prefix cache.", "worker"),
    "prefix_cache_hits": _counter("prefix_cache_hits", "Tokens found in the prefix cache.", "worker"),
    "stored_tokens": _counter("kv_store_tokens", "Prompt tokens that the KV store brought.", "worker"),
    "store_waits": _counter("kv_store_waits", "Requests that waited for the KV store.", "worker"),
    "store_wait_seconds": _counter("kv_store_wait_seconds", "How long they waited.", "worker"),
    "store_waits_in_vain": _counter("kv_store_waits_in_vain", "Those that it brought nothing in time.", "worker"),
    "preemptions": _counter("num_preemptions", "Requests preempted.", "worker"),
    "requests_yielded": _counter("requests_yielded", "Batch work that gave its pages to others.", "worker"),
    "rows_waited_for_masks": _counter(
        "rows_waited_for_masks", "Rows computed in vain, as it was not known what their grammars allow.", "worker"
    ),
    "rows_left_out": _counter("batch_rows_left_out", "Rows of batch work that a step had no time for.", "worker"),
    "requests_expired": _counter("requests_expired", "Requests given back because their time was up.", "worker"),
    "pages_sent": _counter("kv_transfer_pages_sent", "KV pages announced to a decode worker.", "worker"),
    "pages_received": _counter("kv_transfer_pages", "KV pages received and verified.", "worker"),
    "bytes_received": _counter("kv_transfer_bytes", "Bytes of KV pages received and verified.", "worker"),
    "transfer_seconds": _counter("kv_transfer_seconds", "Time spent on copying and verifying KV pages.", "worker"),
    "transfer_wait_seconds": _counter(
        "kv_transfer_wait_seconds",
        "Computed prompts waited for their last pages, and others for any, in vain.",
        "worker",
    ),
    "pages_missed": _counter("kv_transfer_pages_missed", "KV pages given up because they did not come.", "worker"),
    "hand_overs_outrun": _counter("kv_hand_overs_outrun", "Prompts computed again: pages were too slow.", "worker"),
    "pages_corrupt": _counter("kv_pages_corrupt", "KV pages that failed their check.", "worker"),
    "cached_pages_corrupt": _counter("kv_cached_pages_corrupt", "Cached KV pages found damaged before use.", "worker"),
    "hand_overs": _counter("kv_hand_overs", "Hand-overs finished.", "worker"),
    "hand_overs_failed": _counter("kv_hand_overs_failed", "Hand-overs given up.", "worker"),
    "answers_moved": _counter("answers_moved", "Answers handed over while they were written.", "worker"),
    "answers_joined": _counter("answers_joined", "Answers taken over while they were written.", "worker"),
    "role_changes": _counter("worker_role_changes", "Other roles taken on.", "worker"),
    "leases_expired": _counter("kv_leases_expired", "Leases that ended because the other side was silent.", "worker"),
    "page_connections_refused": _counter("kv_page_connections_refused", "Connections for pages refused.", "worker"),
    "requests_returned": _counter("requests_returned", "Requests given back to the gateway.", "worker"),
    "requests_cancelled": _counter("requests_cancelled", "Requests cancelled by the gateway.", "worker"),
    "dropped_frames": _counter("worker_dropped_frames", "Frames a worker dropped.", "worker"),
    "peer_refusals": _counter("worker_peer_refusals", "Messages and connections their key does not allow.", "worker"),
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

BY_WORKER_MAXIMUM: dict[str, MetricFamily] = {
    "batch_rows_max": _gauge("engine_batch_rows_max", "Most requests computed in one step.", "worker"),
}
"""The family of each name in ``WORKER_MAXIMA``."""

BY_TIER_FIGURE: dict[str, MetricFamily] = {
    "pages_read": _counter("kv_store_pages_read", "KV pages fetched from a tier and proved.", "worker", "tier"),
    "bytes_read": _counter("kv_store_bytes_read", "Bytes of those.", "worker", "tier"),
    "read_seconds": _counter("kv_store_read_seconds", "Time spent on fetching those.", "worker", "tier"),
    "pages_missed": _counter("kv_store_pages_missed", "KV pages that had gone before they came.", "worker", "tier"),
    "pages_corrupt": _counter("kv_store_pages_corrupt", "KV pages that failed their proof.", "worker", "tier"),
    "pages_written": _counter("kv_store_pages_written", "KV pages written to a tier.", "worker", "tier"),
    "bytes_written": _counter("kv_store_bytes_written", "Bytes of those.", "worker", "tier"),
    "write_seconds": _counter("kv_store_write_seconds", "Time spent on writing those.", "worker", "tier"),
    "writes_dropped": _counter("kv_store_writes_dropped", "KV pages that had to be left out.", "worker", "tier"),
    "errors": _counter("kv_store_errors", "What a tier did not do, or not in time.", "worker", "tier"),
}
"""The family of each name in ``TIER_FIGURES``."""

KV_STORE_PAGES = _gauge("kv_store_pages", "KV pages that a tier has, as its worker knows.", "worker", "tier")

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
RETURNS = _counter("request_returns", "Requests that workers returned unfinished.", "reason")
RESUBMISSIONS = _counter("resubmissions", "Requests submitted anew, after a loss or a return.")
WORKER_DEATHS = _counter("worker_deaths", "Worker processes that ended or were ended.", "worker", merge=MergeRule.MAX)
WORKER_SUSPICIONS = _counter(
    "worker_suspicions", "Workers given up because they were silent.", "worker", merge=MergeRule.MAX
)
WORKER_PROBES = _counter("worker_probes", "Probes of workers in quarantine, by what came of them.", "worker", "outcome")
RETRIES = _counter("retries", "Resubmissions after failures: at once, or delayed by the retry budget.", "outcome")
FENCED = _counter("fenced_messages", "Messages of an older epoch or incarnation, ignored.", "kind")
POISONED = _counter("poison_requests", "Requests failed because workers died of them.")
UNAUTHORIZED = _counter("requests_unauthorized", "Requests that had no valid key.", "code")
UNAUTHORIZED_CODES = ("missing_api_key", "invalid_api_key", "expired_api_key")
FORBIDDEN = _counter("requests_forbidden", "Requests that their key, origin or host may not send.", "code")
FORBIDDEN_CODES = ("model_not_found", "route_not_allowed", "class_not_allowed", "not_an_operator", "node_not_operator")
PEER_REFUSALS = _counter("peer_refusals", "Messages of workers that their node's key does not allow.", "reason")
PEER_REFUSAL_REASONS = ("unknown_key", "revoked", "no_right", "foreign_name")
AUDIT_LOST = _counter("audit_events_lost", "Events that the audit log had no room for.")
KEYED = _counter("idempotent_requests", "Requests with an idempotency key, by how they were met.", "met")
REPLAYED_TOKENS = _counter(
    "idempotent_replayed_tokens", "Tokens sent again of responses that another gateway has counted."
)
RESUMED_TOKENS = _counter(
    "idempotent_resumed_tokens", "Tokens that another gateway had saved, and that were not computed again."
)
PREFIX_BREAKS = _counter(
    "session_prefix_breaks", "Prompts that left their session's earlier prompt before its end.", "reason"
)
PREFIX_LOST = _counter("session_prefix_lost_tokens", "Tokens of those earlier prompts that no cache could serve.")
DROPPED_FRAMES = _counter("dropped_frames", "Frames the gateway dropped: malformed, or not to be sent.")
REQUESTS_OPEN = _gauge("requests_open", "Requests that the gateway serves now.")

DECISIONS = _counter("router_decisions", "Times that workers were chosen, by what came of it.", "outcome")
DECISION_TIME = _histogram("router_decision_seconds", "To choose the workers of one request.", _DECISION)
PREFIX_BLOCKS = _gauge("prefix_index_blocks", "Blocks of workers' prefix caches that the gateway knows of.", "gateway")
PREFIX_BYTES = _gauge("prefix_index_bytes", "Memory of what it knows of them.", "gateway")
PREFIX_GAPS = _counter("prefix_index_gaps", "Times that a worker's telling was missed and asked for anew.")
PREFIX_REFUSED = _counter("prefix_index_refused_blocks", "Blocks over max_indexed_blocks, not known therefore.")
RESPONSE_LOOKUPS = _counter("response_cache_lookups", "Choices looked up among stored responses.", "outcome")
RESPONSE_TOKENS = _counter("response_cache_tokens", "Tokens delivered from stored responses.")
RESPONSE_EVICTIONS = _counter("response_cache_evictions", "Stored responses that made room for others.")
RESPONSE_ENTRIES = _gauge("response_cache_entries", "Stored responses.")
RESPONSE_BYTES = _gauge("response_cache_bytes", "Memory of those.")
TRACE_SPANS = _counter("trace_spans", "Spans of requests, by what became of them.", "outcome")

# --- of classes and tenants ---------------------------------------------------------------------------------------

CLASS_TTFT = _histogram("class_time_to_first_token_seconds", "From being let in to the first token.", _TTFT, "class")
CLASS_TPOT = _histogram("class_time_per_output_token_seconds", "A token after the first, on average.", _ITL, "class")
CLASS_QUEUE_TIME = _histogram("class_queue_time_seconds", "In a worker before the prompt was read.", _PHASE, "class")
PREDICTED_WAIT = _histogram("predicted_wait_seconds", "To the first token, as foreseen at the door.", _TTFT, "class")
PREDICTION_RATIO = _histogram(
    "wait_prediction_ratio", "The wait that came, by the one foreseen.", (0.1, 0.25, 0.5, 0.8, 1.25, 2, 4, 10), "class"
)
REQUESTS_SHED = _counter("requests_shed", "Requests that were not let in.", "class", "reason")
DEADLINE_MISSES = _counter("deadline_misses", "Requests that waited as long as they may, in vain.", "class")
ANSWERS_BY_TARGET = _counter("answers_by_target", "Complete answers, by which target they missed.", "class", "target")
TENANT_REQUESTS = _counter("tenant_requests", "Requests that were answered.", "tenant")
TENANT_TOKENS = _counter("tenant_tokens", "Tokens of those requests.", "tenant", "kind")
LIMITS_REDIS_UP = _gauge("limits_redis_up", "1 while the Redis of --limits-redis answers.", merge=MergeRule.MIN)
RATE_LIMIT_HOSTS = _gauge(
    "rate_limit_hosts", "Hosts with gateways, among which the rates of tenants are divided.", merge=MergeRule.MAX
)

# --- of an endpoint picker ----------------------------------------------------------------------------------------

PICKER_REQUESTS = _counter("picker_requests", "Requests that a gateway was picked for, by what decided.", "outcome")
PICKER_OUTCOMES = ("idempotency_key", "session", "none", "no_gateway")
PICKER_TIME = _histogram("picker_decision_seconds", "To pick the gateway of one request.", _DECISION)
PICKER_GATEWAYS = _gauge("picker_gateways", "Gateways among the members, by whether they can serve.", "state")
PICKER_REFUSED = _counter("picker_refused_streams", "Streams of proxies that brought no request in time or form.")

TARGETS = ("met", "ttft_missed", "tpot_missed", "both_missed")
"""Of answers; those that met theirs are the goodput."""

TOKEN_KINDS = ("prompt", "completion", "cached", "stored")
"""Of a tenant's tokens; cached ones are among those of prompts, stored ones among those of completions."""

OUTCOMES = ("nobody", "whole", "split")
"""Of decisions, by how many legs they have."""

FINISHED_REASONS = ("stop", "length", "abort", "error")

MERGE_RULES: dict[str, MergeRule] = {
    PREFIX + family.name: family.merge
    for family in (PREDICTED_QUEUE, PREDICTED_STEP, WORKER_DEATHS, WORKER_SUSPICIONS, LIMITS_REDIS_UP, RATE_LIMIT_HOSTS)
}
"""By name, of the families whose values are not added."""
