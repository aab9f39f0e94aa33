"""Results for people: a table of latencies, a few rates, and every failure.

Knows nothing about how they came about; the JSON for scripts is the mapping itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.cli.paint import Paint, table

LATENCIES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "itl_s": "ITL", "e2e_s": "E2E", "send_lag_s": "sent late by"}
"""What the rows are called; docs/benchmarks.md says what they mean."""


def latency_table(rows: Mapping[str, Mapping[str, float] | None]) -> str:
    """Milliseconds, one row a latency; rows without values are left out."""
    present = {name: row for name, row in rows.items() if row}
    columns = list(next(iter(present.values()), {}))
    lines = [(name, *(f"{1000 * row[column]:,.2f}" for column in columns)) for name, row in present.items()]
    return table(lines, headers=("milliseconds", *columns), right=range(1, 1 + len(columns)))


def print_measures(paint: Paint, title: str, found: Mapping[str, Any]) -> None:
    """One ``measures.measure``: latencies, then rates, then failures."""
    print(paint(title, "bold"))
    print(latency_table({text: found[key] for key, text in LATENCIES.items()}))
    print(
        f"{found['completed']} of {found['requests']} requests in {found['duration_s']:.2f} s: "
        f"{found['request_throughput']:.3f} requests/s, {found['output_throughput']:.1f} output tokens/s, "
        f"{found['total_token_throughput']:.1f} tokens/s with the prompts'"
    )
    print(
        f"{found['prompt_tokens']} prompt tokens ({found['cached_tokens']} of them cached), "
        f"{found['output_tokens']} output tokens" + _per_event(found["tokens_per_event"])
    )
    if found["objectives"]:
        wanted = ", ".join(f"{name[:-2]} <= {1000 * limit:g} ms" for name, limit in found["objectives"].items())
        print(f"goodput: {found['goodput']:.3f} requests/s ({wanted})")
    print_errors(paint, found["errors"])


def _per_event(tokens: float | None) -> str:
    return "" if tokens is None or abs(tokens - 1) < 0.005 else f", {tokens:.2f} an event"


def print_errors(paint: Paint, errors: Mapping[str, int]) -> None:
    """Every kind of failure with its number."""
    for kind, count in errors.items():
        print(paint(f"failed: {count} x {kind}", "red"))


def print_stutter(paint: Paint, found: Mapping[str, Any]) -> None:
    """The report of ``stutter.StutterResult``."""
    running = found["running"]
    rows = {"before the long prompts": running["itl_before_s"], "while they arrived": running["itl_s"]}
    print(paint("Inter-token latency of the running answers", "bold"))
    print(latency_table(rows))
    print(f"{running['events_per_s']:.1f} events/s in all running answers, for {found['duration_s']:.2f} s")
    print_errors(paint, running["errors"])
    print()
    print_measures(paint, "The long prompts", found["long"])
