"""What a streamed token costs the gateway, and how long its event loop is held: ``python -m bench.gateway``."""
