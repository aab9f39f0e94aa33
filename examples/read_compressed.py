"""Reads a file of `penstock compress` or `penstock shard` with NumPy alone (the format: docs/format.md).

python examples/read_compressed.py model.safetensors             names, types and shapes
python examples/read_compressed.py model.safetensors OUT.npz     every tensor; bf16 as float32 (exact)
"""

import json
import math
import sys

import numpy as np

TYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16, "U8": np.uint8, "I32": np.int32, "I64": np.int64}


def decode(raw, shape, base, step):
    """bf16 bits [n, k] of one compressed tensor."""
    n, k = shape
    panels, blocks = -(-n // 16), -(-k // 4)
    fixed = raw[4 * panels :][: panels * blocks * 88].reshape(panels, blocks * 88)
    escapes = raw[4 * panels + fixed.size :].astype(np.uint16)
    planes, signs = [], []
    for first in range(0, blocks, 8):  # chunks of eight blocks: their planes, then their bytes
        count = min(8, blocks - first)
        chunk = fixed[:, first * 88 : (first + count) * 88]
        planes.append(chunk[:, : count * 24].reshape(panels, count, 3, 8))
        signs.append(chunk[:, count * 24 :].reshape(panels, count, 64))
    bits = np.unpackbits(np.concatenate(planes, axis=1), axis=3, bitorder="little").astype(np.int16)
    code = bits[:, :, 0] + 2 * bits[:, :, 1] + 4 * bits[:, :, 2]
    exponent = (base + step * code).astype(np.uint16)
    exponent[code == 0] = (escapes << 1 | escapes >> 7) & 0xFF
    sign = np.concatenate(signs, axis=1).astype(np.uint16)
    words = (sign & 0x80) << 8 | exponent << 7 | (sign & 0x7F)
    order = words.reshape(panels, blocks, 4, 2, 4, 2).transpose(0, 2, 4, 1, 3, 5)
    return order.reshape(panels * 16, blocks * 4)[:n, :k]


def decode_for_gpu(raw, shape, base):
    """The same in the layout for GPUs."""
    n, k = shape
    panels, blocks, stretches = -(-n // 16), -(-k // 64), -(-k // 1024)
    counts = raw[: 4 * panels * stretches].view(np.uint32)
    words = raw[counts.nbytes :][: panels * blocks * 1536].reshape(panels, blocks, 1536)
    values = raw[counts.nbytes + words.size :].view(np.uint16)
    group = (panels, blocks, 16, 8, 2, 2, 2)
    own = words[:, :, :1024].reshape(group).transpose(0, 2, 1, 3, 4, 6, 5)
    codes = words[:, :, 1024:].reshape(panels, blocks, 512)
    code = np.stack([codes & 15, codes >> 4], axis=-1).reshape(group).transpose(0, 2, 1, 3, 5, 6, 4)
    own, code = (array.reshape(panels * 16, blocks * 64).astype(np.uint16) for array in (own, code))
    weight = (own & 0x80) << 8 | (base + code) << 7 | (own & 0x7F)
    row, column = np.nonzero(code == 0)  # the byte is a place in the dictionary of 16 rows and 1024 columns
    first = (np.cumsum(counts) - counts).reshape(panels, stretches)[row // 16, column // 1024]
    weight[row, column] = values[first + own[row, column]]
    return weight[:n, :k]


def slices(raw, original):
    """The bytes and the shape of each slice of a tensor; all of it if it has none."""
    if "slices" not in original:
        return [(raw, original["shape"])]
    found, first, begin = [], 0, 0
    for end, size, _ in original["slices"]:
        shape = (
            [end - first, original["shape"][1]] if original["axis"] == "rows" else [original["shape"][0], end - first]
        )
        found.append((raw[begin : begin + size], shape))
        first, begin = end, begin + size
    return found


def array_of(raw, shape, original):
    """A tensor, or a slice of one."""
    if "layout" in original:
        return decode_for_gpu(raw, shape, original["code"][0])
    if "code" in original:
        return decode(raw, shape, *original["code"])
    return raw.view(TYPES[original["dtype"]]).reshape(shape)


def read(path):
    """Yields (name, type, array) for every tensor of the original."""
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        data = file.read()
    originals = json.loads(header.pop("__metadata__")["penstock.tensors"])
    for name, entry in header.items():
        original = originals[name]
        raw = np.frombuffer(data[slice(*entry["data_offsets"])], np.uint8)
        arrays = [array_of(part, shape, original) for part, shape in slices(raw, original)]
        array = np.concatenate(arrays, axis=1) if original.get("axis") == "columns" else np.concatenate(arrays)
        assert array.size == math.prod(original["shape"])
        yield name, original["dtype"], array


if __name__ == "__main__":
    tensors = {}
    for name, dtype, array in read(sys.argv[1]):
        print(f"{name}  {dtype}  {list(array.shape)}")
        tensors[name] = (array.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else array
    if len(sys.argv) > 2:
        np.savez(sys.argv[2], **tensors)
