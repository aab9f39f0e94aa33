"""Pages between two workers in one process: the double for tests without processes.

It reads the sender's memory as ``shm`` does, in the same place and with the same checks.
"""

from __future__ import annotations

from penstock.kv.transfer.shm import ShmCarrier


class MemoryCarrier(ShmCarrier):
    """``peers``: the other workers' memory, by worker."""

    name = "memory"
