"""Transfer of KV pages from the worker that computed them to the worker that needs them.

``KvSender`` and ``KvReceiver`` are pure state machines: they know no sockets and no clock.  A KV connector
(``kv.connectors``) moves the bytes.  The caller passes in messages and the time, sends the messages that come out and
applies the events.
"""
