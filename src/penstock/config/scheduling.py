"""How requests share the service: the table ``[scheduling]`` (docs/scheduling.md)."""

from __future__ import annotations

from typing import Annotated

import msgspec

from penstock.config.base import Config, Milliseconds, Positive, Seconds

LONG_PROMPT = 2.0
"""Targets for a first token: a prompt that takes longer than so many to read, alone, is very long; others are not kept
back for answers (``engine.core.gentle``)."""


class SchedulingConfig(Config, frozen=True, kw_only=True):
    """Targets and waits of each class, and what tenants' turns are measured by."""

    interactive_ttft_ms: Milliseconds = 1000.0  # goodput counts answers that begin within this; longer prompts: gently
    interactive_tpot_ms: Milliseconds = 100.0  # and whose tokens follow each other so on the average; bounds steps
    interactive_max_wait_s: Seconds | None = None  # to the first token; None: ``Limits.first_byte_s``
    batch_ttft_ms: Milliseconds = 600_000.0
    batch_tpot_ms: Milliseconds = 250.0
    batch_max_wait_s: Seconds = 600.0
    batch_patience_s: Seconds = 5.0  # batch work left out for so long has one request go on as an interactive one
    contended_step_ms: Milliseconds = 10.0  # a piece of a prompt, while other tenants are there whom it keeps waiting
    output_token_weight: Annotated[float, msgspec.Meta(gt=0)] = 2.0  # of an answer, against one of a prompt
    tenant_memory_s: Seconds = 10.0  # so long after its last request a tenant counts as being there
    max_tenants: Positive = 1024  # keys in the file of keys
    metric_tenants: Annotated[int, msgspec.Meta(ge=0)] = 64  # that metrics tell apart; the others are one
