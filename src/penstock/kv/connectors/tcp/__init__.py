"""The TCP connector: a receiver fetches announced pages over connections of its own, straight into its own memory.

::

    sender                                          receiver
    worker loop --> PageServer, threads  <====>  FetchConnections, threads <-- SourcePool, FetchClient <-- worker loop
                                                                           results -->
"""
