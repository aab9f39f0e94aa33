"""What the receiving end of hand-overs counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class TransferCounters:
    """Numbers only grow."""

    pages: int = 0
    bytes: int = 0
    corrupt: int = 0  # pages whose copy failed its check
    duplicates: int = 0  # frames for a block that was here or queued
    strays: int = 0  # frames that nobody expected
    expired: int = 0  # pulls given up because the sender was silent
    outrun: int = 0  # pulls given up because computing was sooner
    waited_s: float = 0.0  # that complete prompts waited for their last pages, and others for any, in vain
    missed: int = 0  # pages that were announced and had not come when their pulls were given up for that
