"""How much smaller quantized weights could be without a loss: the entropy of their codes and scales.

The entropy of single codes, each with its frequency in its matrix, is what no code of one symbol at a time undercuts.
"Fixed" is what kernels can decode fast: a prefix that says which of the commonest codes or exponents it is, and the
others apart (docs/format.md does that for bf16).

    python bench/quantized_entropy.py            bundled model, and one Gaussian matrix of 4,096 x 4,096
    python bench/quantized_entropy.py --gguf FILE       the codes that llama.cpp wrote: Q8_0 and Q4_K
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from penstock.bundled import storyteller
from penstock.weights.checkpoint_reader import Checkpoint

Codes = NDArray[np.uint8]
Floats = NDArray[np.float32]

FP8_BLOCK = 128
"""Rows and columns of a block with one scale (DeepSeek-V3)."""


class Stored(NamedTuple):
    """A quantized matrix: a byte a code, and the bytes of its scales and zero points as they are stored."""

    codes: Codes
    bits: int  # of one code
    scales: Codes


def entropy(codes: Codes) -> float:
    """Bits a symbol."""
    counts = np.bincount(codes.ravel(), minlength=256)
    share = counts[counts > 0] / codes.size
    return float(-(share * np.log2(share)).sum())


def fixed(codes: Codes, bits: int) -> float:
    """Bits a code where the most common ones have a short prefix and the others follow apart, at the best prefix.

    Of FP8, exponents (the code's four upper bits after its sign) are what is common or not.
    """
    symbols, kept = (codes >> 3 & 15, 4) if bits == 8 else (codes, 0)
    counts = np.sort(np.bincount(symbols.ravel(), minlength=16))[::-1] / codes.size
    whole = bits - kept
    return min(
        (kept + prefix + (1 - counts[: 2**prefix - 1].sum()) * whole for prefix in range(1, whole)), default=float(bits)
    )


def grouped(weight: Floats, group: int) -> Floats:
    return weight[:, : weight.shape[1] // group * group].reshape(-1, group)


def integers(weight: Floats, group: int, bits: int) -> Stored:
    """Symmetric, with an fp16 scale a group (Q8_0; GPTQ and compressed-tensors without zero points)."""
    blocks = grouped(weight, group)
    most = 2 ** (bits - 1) - 1
    scale = (np.abs(blocks).max(axis=1) / most).astype(np.float16)
    codes = np.clip(np.rint(blocks / np.maximum(scale.astype(np.float32), 1e-12)[:, None]), -most - 1, most)
    return Stored((codes + most + 1).astype(np.uint8), bits, scale.view(np.uint8))


def ranges(weight: Floats, group: int, bits: int) -> Stored:
    """With a scale and a zero point a group (GPTQ, AWQ)."""
    blocks = grouped(weight, group)
    low, high = np.minimum(blocks.min(axis=1), 0), np.maximum(blocks.max(axis=1), 0)
    scale = np.maximum((high - low) / (2**bits - 1), 1e-12).astype(np.float16)
    zero = np.rint(-low / scale)
    codes = np.clip(np.rint(blocks / scale[:, None]) + zero[:, None], 0, 2**bits - 1).astype(np.uint8)
    return Stored(codes, bits, np.concatenate([scale.view(np.uint8), zero.astype(np.uint8)]))


def fp8(weight: Floats) -> Stored:
    """E4M3 with an fp32 scale for each block of 128 x 128 (DeepSeek-V3)."""
    rows, columns = (size // FP8_BLOCK * FP8_BLOCK for size in weight.shape)
    blocks = weight[:rows, :columns].reshape(rows // FP8_BLOCK, FP8_BLOCK, columns // FP8_BLOCK, FP8_BLOCK)
    scale = np.abs(blocks).max(axis=(1, 3), keepdims=True) / 448
    codes = (blocks / scale).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return Stored(codes, 8, scale.astype(np.float32).view(np.uint8).ravel())


def mxfp4(weight: Floats) -> Stored:
    """E2M1 with a power of two for each 32 (OCP microscaling formats)."""
    blocks = grouped(weight, 32)
    exponent = np.floor(np.log2(np.maximum(np.abs(blocks).max(axis=1), 1e-30))) - 2
    codes = (blocks / np.exp2(exponent)[:, None]).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    return Stored(codes, 4, (exponent + 127).astype(np.uint8))


FORMATS: dict[str, Callable[[Floats], Stored]] = {
    "int8, groups of 32 (Q8_0)": lambda weight: integers(weight, 32, 8),
    "int8, a scale a row (W8A16)": lambda weight: integers(weight, weight.shape[1], 8),
    "int4, groups of 32": lambda weight: integers(weight, 32, 4),
    "int4, groups of 128": lambda weight: integers(weight, 128, 4),
    "int4 with zero points, groups of 128 (AWQ, GPTQ)": lambda weight: ranges(weight, 128, 4),
    "FP8 E4M3, blocks of 128 x 128": fp8,
    "MXFP4": mxfp4,
}


def gguf_codes(path: Path) -> Iterator[tuple[str, Stored]]:
    """The matrices of a file by type: Q8_0, and the 4-bit codes of Q4_K with all that belongs to a super-block."""
    from gguf import GGUFReader

    found: dict[str, list[tuple[Codes, int, Codes]]] = {}
    for tensor in GGUFReader(path).tensors:
        kind, raw = tensor.tensor_type.name, np.asarray(tensor.data, np.uint8)
        if kind == "Q8_0":
            blocks = raw.reshape(-1, 34)
            found.setdefault(kind, []).append((blocks[:, 2:] ^ 128, 8, blocks[:, :2]))
        elif kind == "Q4_K":
            blocks = raw.reshape(-1, 144)
            codes = np.concatenate([blocks[:, 16:] & 15, blocks[:, 16:] >> 4])
            found.setdefault(kind, []).append((codes, 4, blocks[:, :16]))
    for kind, matrices in found.items():
        codes, scales = (np.concatenate([matrix[part].ravel() for matrix in matrices]) for part in (0, 2))
        yield kind, Stored(codes, matrices[0][1], scales)


def bundled() -> Floats:
    """The matrices of the bundled model that have 512 columns, one below the other."""
    with Checkpoint(storyteller()) as checkpoint:
        arrays = [checkpoint.array(name) for name in checkpoint.names if "proj" in name]
    widest = max((array.shape[1] for array in arrays), key=[array.shape[1] for array in arrays].count)
    return np.concatenate([np.asarray(array, np.float32) for array in arrays if array.shape[1] == widest])


def line(name: str, stored: Stored) -> str:
    scales = 8.0 * stored.scales.size / stored.codes.size
    now = stored.bits + scales
    least = entropy(stored.codes) + scales * entropy(stored.scales) / 8
    quick = min(fixed(stored.codes, stored.bits), stored.bits) + scales
    return f"{name:52}{now:7.3f}{least:9.3f}{100 * (1 - least / now):8.1f} %{100 * (1 - quick / now):8.1f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="codes that llama.cpp wrote instead")
    args = parser.parse_args()
    print(f"{'':52}{'bits':>7}{'entropy':>9}{'saved':>10}{'fixed':>10}")
    if args.gguf:
        for name, stored in gguf_codes(args.gguf):
            print(line(name, stored))
        return
    gaussian = np.random.default_rng(0).standard_normal((4096, 4096), dtype=np.float32) * 0.02
    for of, weight in (("Gaussian", gaussian), ("bundled model", bundled())):
        for name, quantize in FORMATS.items():
            print(line(f"{of}: {name}"[:51], quantize(weight)))


if __name__ == "__main__":
    main()
