"""What an operator's settings mean for the scheduler of every worker.  Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.config.schema import MAX_CHUNK_TOKENS, EngineSettings, Limits, SchedulerConfig, ServeConfig

if TYPE_CHECKING:
    from penstock.config.resolve import ModelFacts


def scheduler_of(config: EngineSettings, model: ModelFacts, room: tuple[int, int]) -> SchedulerConfig:
    """``room``: pages, and tokens of the longest context."""
    pages, max_model_len = room
    return SchedulerConfig(
        pages=pages,
        reaches=model.reaches,
        max_model_len=max_model_len,
        max_running=config.max_running,
        max_chunk_tokens=config.max_chunk_tokens or MAX_CHUNK_TOKENS,
        step_budget_ms=config.scheduling.interactive_tpot_ms,
        batch_step_budget_ms=config.scheduling.batch_tpot_ms,
        long_prompt_ms=config.scheduling.interactive_ttft_ms,
        gentle_read_s=_gentle_read_s(config),
        contended_step_ms=config.scheduling.contended_step_ms,
        batch_patience_s=config.scheduling.batch_patience_s,
        output_token_weight=config.scheduling.output_token_weight,
        tenant_memory_s=config.scheduling.tenant_memory_s,
        pooling=model.pooling,
    )


def _gentle_read_s(config: EngineSettings) -> float:
    """Half of what a first token may take.  A worker that is started by itself is told no gateway's limits."""
    limits = config.limits if isinstance(config, ServeConfig) else Limits()
    return limits.first_byte_s / 2
