"""Quantized checkpoints as published on the Hub: how each format's codes and scales are read."""
