"""Pages in Mooncake's store, for all workers of all hosts that have the same model.

::

    worker: tier.py -> keeper.py ==lanes==> process.py: Mooncake's client <--TCP, RDMA--> its master, its other clients

Mooncake's client has threads, ports and memory of its own, and may hang or abort.  So it lives in a process of its own
that is killed when it does not answer in time (``words.py``: what is said to it).  A lane is a socket and the memory of
one value, for one question at a time.
"""
