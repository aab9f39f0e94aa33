"""The pure heart of the engine: requests, pages, prefix cache, plan.  No torch, no NumPy, no I/O, no clock."""
