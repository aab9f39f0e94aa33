"""``--decoded-weights``: how much memory decoded copies of compressed weights may take.  Pure."""

from __future__ import annotations

from penstock.config.base import Config
from penstock.config.device import DeviceChoice
from penstock.config.facts import MachineFacts
from penstock.config.kv_memory import KvMemoryBudget
from penstock.config.schema import EngineSettings, ServeConfig

DECODED_WEIGHTS_AUTO = "auto"

FREE_SHARE = 0.10
"""Share of the free memory that ``auto`` leaves for all that grows while serving."""


class DecodedWeightsBudget(Config, frozen=True, kw_only=True):
    """Memory for decoded copies of compressed weights, of all workers together, which share them."""

    nbytes: int
    all_or_none: bool = False  # copies of some matrices only are not made


def can_copy(machine: MachineFacts, family: str, dtype: str, choice: DeviceChoice) -> bool:
    """Whether compressed weights stay compressed in this host's memory; elsewhere there is nothing to copy."""
    return choice.gpu is None and dtype == "bf16" and family in machine.decoding_families


def reserved_bytes(config: EngineSettings) -> int:
    """What ``--decoded-weights SIZE`` sets aside; nothing for ``auto``."""
    asked = config.decoded_weights
    return 0 if asked == DECODED_WEIGHTS_AUTO else int(asked)


def decoded_weights_budget(
    config: EngineSettings, memory: KvMemoryBudget, kv_bytes: int
) -> DecodedWeightsBudget | None:
    """The memory for copies; None: there are to be none.  ``kv_bytes``: of the KV pages of each worker.

    ``auto`` takes what nothing else was planned for: neither weights, KV pages, the largest grammars nor a reserve.
    Raises ConfigError where weights alone do not fit.
    """
    asked = config.decoded_weights
    if asked != DECODED_WEIGHTS_AUTO:
        return DecodedWeightsBudget(nbytes=int(asked)) if asked else None
    stored = config.kv_host or 0
    if isinstance(config, ServeConfig):
        stored += config.response_cache or 0
    stored += memory.workers * config.image_cache if memory.model.multimodal else 0
    reserve = int(FREE_SHARE * memory.free_bytes)
    free = memory.available_bytes() - memory.workers * kv_bytes - memory.grammars_bytes - stored - reserve
    return DecodedWeightsBudget(nbytes=max(0, free), all_or_none=True)
