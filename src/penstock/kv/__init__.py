"""KV pages as bytes: how large they are, where they lie, how they get from one worker to another."""
