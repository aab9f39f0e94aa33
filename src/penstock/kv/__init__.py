"""KV pages as bytes: their size, the memory that holds them, and how they move between workers and tiers."""
