"""The settings of compressed-tensors (vLLM's LLM Compressor): groups of modules, each with its own scheme.

Served: "pack-quantized" (4 or 8 bits in words), "int-quantized", "naive-quantized" and "float-quantized" (a byte each).
"""

from __future__ import annotations

from typing import Any

from penstock.weights.fields import Fields
from penstock.weights.formats.coded import Scheme
from penstock.weights.formats.eight_bits import EightBits
from penstock.weights.formats.modules import EVERY_LINEAR
from penstock.weights.formats.packed import Packed

PACKED = "pack-quantized"
BYTES = ("int-quantized", "naive-quantized", "float-quantized")
MIXED = "mixed-precision"
MAX_GROUPS = 1000


def parse(stored: Fields) -> tuple[list[tuple[tuple[str, ...], Scheme]], str]:
    """Each group's targets and scheme, and what is not done to activations.  Raises ModelError."""
    _refuse_more(stored)
    groups = stored.get("config_groups", dict, {})
    if not 1 <= len(groups) <= MAX_GROUPS:
        raise stored.refuse(f"config_groups has {len(groups)} groups, it must have 1 to {MAX_GROUPS}")
    found, activations = [], set[str]()
    for name in groups:
        group = Fields(groups, f"{stored.where}: config_groups").section(str(name))
        weights = None if group is None else group.section("weights")
        if group is None or weights is None:
            raise stored.refuse(f"config_groups: {name}: has no weights")
        targets = group.get("targets", list, [EVERY_LINEAR])
        if not all(isinstance(target, str) for target in targets):
            raise group.refuse(f"targets must name modules, got {targets!r}")
        written = group.get("format", str, stored.get("format", str, ""))
        found.append((tuple(targets), _scheme(weights, "" if written == MIXED else written)))
        activations.add(_activations(group))
    return found, ", ".join(sorted(activations - {""}))


def _refuse_more(stored: Fields) -> None:
    """What else the format can do to weights."""
    sparsity = stored.section("sparsity_config")
    if sparsity is not None and sparsity.get("format", str, "dense") != "dense":
        raise stored.refuse(f"sparsity_config: format {sparsity.values['format']!r}; dense matrices can be served")
    if any(stored.get("transform_config", dict, {}).values()):
        raise stored.refuse("transform_config: rotated weights need operations that are not computed here")


def _scheme(weights: Fields, written: str) -> Scheme:
    kind, bits = weights.get("type", str, "int"), weights.size("num_bits")
    if weights.get("dynamic", bool, False):
        raise weights.refuse("dynamic is true, which weights in a file cannot be")
    packs = written == PACKED or (not written and bits == 4)
    if packs and kind == "int" and bits in (4, 8):
        symmetric = weights.get("symmetric", bool, True)
        return Packed(code_bits=bits, group=_group(weights), symmetric=symmetric)
    if bits == 8 and kind in ("int", "float") and (written in BYTES or not written):
        return EightBits(kind="int8" if kind == "int" else "e4m3", block=_block(weights))
    raise weights.refuse(
        f"{kind} of {bits} bits, format {written!r}; these can be served: {PACKED} of 4 or 8 bits, "
        f"{', '.join(BYTES)} of 8"
    )


def _group(weights: Fields) -> int | None:
    """Columns that share a scale; None: all."""
    strategy = weights.get("strategy", str, "group" if weights.has("group_size") else "channel")
    if strategy not in ("group", "channel"):
        raise weights.refuse(f"strategy is {strategy!r}; 'group' and 'channel' can be served with packed codes")
    if strategy == "channel":
        return None
    size = weights.get("group_size", int)
    if size == -1:
        return None
    return weights.size("group_size")


def _block(weights: Fields) -> tuple[int, int] | None:
    """Rows and columns that share a scale; None: what the scales' shape says."""
    match weights.get("strategy", str, "channel"):
        case "tensor" | "channel":
            return None
        case "group":
            return 1, weights.size("group_size")
        case "block":
            sizes: list[Any] = weights.get("block_structure", list)
            if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
                raise weights.refuse(f"block_structure must be rows and columns, got {sizes!r}")
            return sizes[0], sizes[1]
        case other:
            raise weights.refuse(f"strategy is {other!r}; tensor, channel, group and block can be served")


def _activations(group: Fields) -> str:
    """How activations would be quantised."""
    inputs = group.section("input_activations")
    if inputs is None:
        return ""
    when = "dynamic" if inputs.values.get("dynamic") else "static"
    return f"{when} {inputs.get('type', str, 'int')}{inputs.size('num_bits', 8)}"
