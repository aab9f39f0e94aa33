"""KV connectors: the ways by which page bytes get from one worker to another.

``base`` is the protocol; ``shm``, ``inline``, ``tcp`` and ``nixl`` implement it.
"""
