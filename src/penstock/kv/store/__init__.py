"""KV pages below a worker's own memory: other workers' caches, host memory, disk, Redis, Mooncake.

A tier may fail, be slow, be full or have lost everything at any time: that costs a computation, never a response.
``store`` puts the tiers together; ``tier`` is the protocol that each implements; ``tier_worker`` runs one on threads.
"""
