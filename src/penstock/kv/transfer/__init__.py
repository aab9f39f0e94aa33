"""The hand-over of KV pages from the worker that computed them to the worker that needs them.

Two ends that know no sockets (``sender``, ``receiver``), and carriers that know how bytes get across (``shm``, ``tcp``,
``memory``).  Whoever drives them passes on messages and time, and does what a turn asks for.
"""
