"""What a worker reports of the tiers of its KV store, as an operator sees it.  Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.telemetry.metrics import TIER_FIGURES, TIER_PAGES, TIERS, tier_counter


def tier_rows(counters: Mapping[str, float]) -> list[dict[str, Any]]:
    """One mapping a tier that has pages or has counted anything, nearest first."""
    rows = []
    for tier in TIERS:
        figures = {name: counters.get(tier_counter(tier, name), 0.0) for name in (TIER_PAGES, *TIER_FIGURES)}
        if any(figures.values()):
            whole = {
                name: round(value, 3) if name.endswith("seconds") else int(value) for name, value in figures.items()
            }
            rows.append({"tier": tier, **whole})
    return rows
