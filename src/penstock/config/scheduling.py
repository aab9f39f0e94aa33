"""How requests share the service: the table ``[scheduling]`` (docs/scheduling.md)."""

from __future__ import annotations

from typing import Annotated

import msgspec

from penstock.config.base import Config

LONG_PROMPT = 2.0
"""Targets for a first token: a prompt that takes longer than so many to read, alone, is very long; others are not kept
back for answers (``engine.core.gentle``)."""

_Seconds = Annotated[float, msgspec.Meta(gt=0)]
_Milliseconds = Annotated[float, msgspec.Meta(gt=0)]


class SchedulingConfig(Config, frozen=True, kw_only=True):
    """Targets and waits of each class, and what tenants' turns are measured by."""

    interactive_ttft_ms: _Milliseconds = 1000.0  # goodput counts answers that begin within this; longer prompts: gently
    interactive_tpot_ms: _Milliseconds = 100.0  # and whose tokens follow each other so on the average; bounds steps
    interactive_max_wait_s: _Seconds | None = None  # to the first token; None: ``Limits.first_byte_s``
    batch_ttft_ms: _Milliseconds = 600_000.0
    batch_tpot_ms: _Milliseconds = 250.0
    batch_max_wait_s: _Seconds = 600.0
    batch_patience_s: _Seconds = 5.0  # batch work left out for so long has one request go on as an interactive one
    contended_step_ms: _Milliseconds = 10.0  # a piece of a prompt, while other tenants are there whom it keeps waiting
    output_token_weight: Annotated[float, msgspec.Meta(gt=0)] = 2.0  # of an answer, against one of a prompt
    tenant_memory_s: _Seconds = 10.0  # so long after its last request a tenant counts as being there
    max_tenants: Annotated[int, msgspec.Meta(ge=1)] = 1024  # keys in the file of keys
    metric_tenants: Annotated[int, msgspec.Meta(ge=0)] = 64  # that metrics tell apart; the others are one
