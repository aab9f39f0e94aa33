"""The oracle: every operation in torch, written to be read rather than to be fast."""
