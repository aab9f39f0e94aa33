"""Checkpoints on disk: what they are, what is in them, and how they get into memory.  Knows no engine, no process."""
