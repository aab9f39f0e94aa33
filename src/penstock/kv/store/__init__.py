"""KV pages that outlive their place in a worker's memory: other workers' caches, host memory, disk, Redis, Mooncake.

::

    port.py        what a tier is, and what a page is called there
    seal.py        how a page at rest is proved to be the right one, and encrypted
    directory.py   who has which page: a table in memory or a file that several processes share, one writer a place
    slabs.py       pages in a file of equal places: host memory (a memfd) and disk; slab_file.py opens and checks it
    peers.py       pages that stand in other workers' KV memory
    remote.py      pages in Redis
    mooncake/      pages in Mooncake's store, whose client has a process of its own
    worth.py       what a page is worth: who is written, who goes first; pure
    breaker.py     when a tier that fails is left alone; pure
    hands.py       threads that do what blocks
    store.py       all tiers together, as a worker asks them
    setup.py       from settings to tiers

A tier may fail, be slow, be full or have lost everything at any time: that costs a computation, never an answer.
"""
