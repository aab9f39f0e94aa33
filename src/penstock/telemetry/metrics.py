"""Every metric name of Penstock, declared as data.

Knows nothing about how they are counted or shown: workers fill ``WORKER_COUNTERS`` into their reports without
importing a metrics library, and ``telemetry.registry`` shows all families to Prometheus.
"""

from __future__ import annotations

WORKER_COUNTERS: tuple[str, ...] = (
    "steps",  # steps that computed something
    "prompt_tokens_computed",  # prompt (and resubmitted) tokens computed here, not found in a cache or received
    "generation_tokens",  # tokens drawn here
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
    "step_seconds",  # spent in steps
    "batch_multi_row_steps",  # steps that computed two requests or more
)
"""Names in ``Report.counters`` that only grow within one incarnation; the gateway adds them over incarnations."""

WORKER_MAXIMA: tuple[str, ...] = (
    "batch_rows_max",  # most requests computed in one step
)
"""Names in ``Report.counters`` of which the largest value counts, over all incarnations."""
