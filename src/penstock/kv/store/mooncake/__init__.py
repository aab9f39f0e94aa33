"""The Mooncake tier: pages in Mooncake's store, for all workers of all hosts that serve the same model.

::

    worker: tier -> client ==lanes==> process: Mooncake's client <--TCP, RDMA--> its master, its other clients

Mooncake's client has threads, ports and memory of its own, and may hang or abort.  So it runs in a process of its own
that is killed when it does not respond in time.  A lane is a socket and the memory of one value, for one request at a
time.
"""
