"""What one step has to read and to multiply: the two numbers that a roofline is made of.  Pure."""

from __future__ import annotations

from bench.peers.places import Shape


def weight_bytes(shape: Shape) -> int:
    """bf16 bytes that every step of decode reads: all matrices once, the tied embeddings as the output layer."""
    return 2 * (shape.layer_parameters + shape.vocab * shape.hidden)


def prefill_flops(shape: Shape, tokens: int) -> float:
    """Of one prompt: all layers' matrices, causal attention, and the output layer for the last token."""
    attention = 4 * shape.layers * shape.heads * shape.head_dim * tokens * (tokens + 1) / 2
    return 2.0 * tokens * shape.layer_parameters + attention + 2.0 * shape.vocab * shape.hidden


def decode_flops(shape: Shape, streams: int) -> float:
    """Of one step with short contexts: every weight once a stream."""
    return float(streams * weight_bytes(shape))


def decode_limit(shape: Shape, streams: int, *, read_gbs: float, peak_gflops: float, part: float = 1.0) -> float:
    """Tokens a second that cannot be exceeded; ``part``: of the bf16 bytes that are read."""
    read = part * weight_bytes(shape) / (read_gbs * 1e9)
    return streams / max(read, decode_flops(shape, streams) / (peak_gflops * 1e9))


def prefill_limit(shape: Shape, tokens: int, *, read_gbs: float, peak_gflops: float) -> float:
    """Tokens a second that cannot be exceeded."""
    read = weight_bytes(shape) / (read_gbs * 1e9)
    return tokens / max(read, prefill_flops(shape, tokens) / (peak_gflops * 1e9))
