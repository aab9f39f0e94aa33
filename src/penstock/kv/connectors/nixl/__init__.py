"""Pages over NIXL (UCX): for RDMA, where the network card reads them and nobody's processor.

::

    sender                                                receiver
    worker -- house.py == process.py  <---- READ ----  process.py == house.py -- taker.py -- carrier.py -- worker
              (giver.py)  its pages                    bounce pages   a thread: copies and proves

UCX has threads and ports of its own, takes any address that a peer names, and may hang or abort.  So each end has a
process for it, in which nothing is but the pages that are given, or the pages that reads land in.  Whatever fails goes
by ``tcp``.
"""
