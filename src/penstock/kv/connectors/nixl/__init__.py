"""Pages over NIXL (UCX): for RDMA, where the network card reads them without a processor.

::

    sender                                                     receiver
    worker -- agent_client == agent_process  <---- READ ----  agent_process == agent_client -- reader -- worker
                              its pages                       bounce pages     a thread: copies and verifies

UCX has threads and ports of its own, takes any address that a peer names, and may hang or abort.  So each end runs it
in a process that has mapped only the exported pages, or the bounce pages.  Whatever fails goes by ``tcp``.
"""
