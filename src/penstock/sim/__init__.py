"""The simulator: the real scheduler, memory, router and prefix index under a virtual clock (``cluster``).

Only what needs a machine is replaced, in ``resources``: a step takes what a fleet file says (``fleet``), pages travel
over modeled links, and lower tiers of the KV cache are counted by capacity.
"""
