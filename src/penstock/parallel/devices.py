"""Devices by name, and how much memory each has.  A table: no driver is queried."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from penstock.errors import ConfigError

GIB = 1 << 30

DEVICE_MEMORY_GIB: Mapping[str, float] = MappingProxyType(
    {
        "H100": 79.1,
        "H100-NVL": 93.1,
        "H200": 139.8,
        "B200": 178.3,
        "A100": 79.1,
        "A100-40": 39.4,
        "L40S": 44.4,
        "L4": 22.0,
        "A10": 22.0,
        "RTX5090": 31.4,
        "RTX4090": 23.6,
        "RTX3090": 23.6,
        "MI300X": 191.7,
    }
)
"""GiB that a program finds on a device of this name: what the driver keeps for itself is not in it."""

TOO_LITTLE_SHARED_MEMORY = ("L40S", "L4", "A10", "RTX5090", "RTX4090", "RTX3090")
"""Of compute capability 8.6, 8.9 and 12.0: a program gets 99 KiB, less than the kernels' tiles take."""

WITHOUT_CUDA = ("MI300X",)

MAX_DEVICES = 1024
_SPEC = re.compile(r"(?:(?P<count>\d{1,6})x)?(?P<name>[A-Za-z][\w-]*)?:?(?:(?P<size>\d+(?:\.\d+)?)(?P<unit>GiB|GB))?")


@dataclass(frozen=True, slots=True)
class Devices:
    """``count`` equal devices of one host."""

    count: int
    name: str
    memory_bytes: int  # of each
    is_cpu: bool

    @property
    def total_bytes(self) -> int:
        return self.count * self.memory_bytes


def why_not_servable(devices: Devices) -> str:
    """Why ``penstock serve`` cannot use these devices today; empty if the name gives no reason."""
    if devices.is_cpu:
        return ""
    if devices.name in WITHOUT_CUDA:
        return f"{devices.name} has no CUDA"
    if devices.name in TOO_LITTLE_SHARED_MEMORY:
        return f"{devices.name} has too little shared memory for the kernels; A100, H100, H200 and B200 have enough"
    if devices.count > 1:
        return "one model runs on one GPU"
    return ""


def parse_devices(text: str) -> Devices:
    """ "8xH100", "H200", "2x48GiB" or "cpu:64GiB".  Raises ConfigError that says what is known."""
    match = _SPEC.fullmatch(text.strip())
    if match is None or not (match["name"] or match["size"]):
        raise ConfigError(f"devices {text!r} are not understood; {_expected()}")
    count = int(match["count"] or 1)
    if not 1 <= count <= MAX_DEVICES:
        raise ConfigError(f"devices {text!r}: 1 to {MAX_DEVICES} can be planned for, not {count}")
    name = match["name"] or f"{match['size']}{match['unit']}"
    known = {each.upper(): each for each in DEVICE_MEMORY_GIB}.get(name.upper(), name)
    if match["size"]:
        size = float(match["size"]) * (GIB if match["unit"] == "GiB" else 1e9)
    elif known in DEVICE_MEMORY_GIB:
        size = DEVICE_MEMORY_GIB[known] * GIB
    else:
        raise ConfigError(f"device {name!r} is not known; {_expected()}")
    return Devices(count=count, name=known, memory_bytes=int(size), is_cpu=name.lower() == "cpu")


def _expected() -> str:
    return f"expected COUNTxNAME with one of {', '.join(DEVICE_MEMORY_GIB)}, or a size: 8xH100, 2x48GiB, cpu:64GiB"
