"""What the device can do, measured with torch in the same run: the rates that all bars are parts of."""

from __future__ import annotations

import torch
from bench.gpu.place import Place

MIB = 1 << 20


def copy_rate(place: Place) -> float:
    """Bytes a second of a copy from device memory to device memory, both ways counted."""
    size = MIB if place.dry else 2048 * MIB
    source = torch.empty(size, dtype=torch.uint8, device=place.device).random_(0, 255)
    into = torch.empty_like(source)
    return 2 * size / place.seconds(lambda: into.copy_(source))


def read_rate(place: Place) -> float:
    """Bytes a second at which memory is read and nothing written: the best of a sum and of a copy's half."""
    size = MIB if place.dry else 2048 * MIB
    numbers = torch.empty(size // 4, dtype=torch.float32, device=place.device).normal_()
    return max(size / place.seconds(numbers.sum), copy_rate(place))


def matmul_rate(place: Place) -> float:
    """Operations a second of bf16 8192^3 on random numbers, by cuBLAS."""
    size = 64 if place.dry else 8192
    a = torch.randn(size, size, device=place.device).to(torch.bfloat16)
    b = torch.randn(size, size, device=place.device).to(torch.bfloat16)
    return float(2 * size**3 / place.seconds(lambda: a @ b.T, repeats=20, warm=5))


def measured(place: Place) -> dict[str, float]:
    """All of them."""
    return {
        "copy_bytes_per_s": copy_rate(place),
        "read_bytes_per_s": read_rate(place),
        "matmul_flops": matmul_rate(place),
    }
