"""Finds the host's GPU and its free memory in a child process.

A process that has initialized CUDA must not fork, so the supervisor never does: a child queries the driver, prints one
line of JSON and ends.  Without a driver, or a torch that can use it, no child is started and the report says what is
missing.  Figures are those of ``torch.cuda.mem_get_info``: what is free to a process that has its context.

``python -m penstock.launch.gpu_probe`` prints what was found.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from penstock import sidecar
from penstock.config.facts import GpuFacts, GpuReport

DRIVER = "libcuda.so.1"
PROBE_TIMEOUT_S = 20.0
"""For the driver to answer: waking a sleeping GPU may take seconds."""

LEAST_CAPABILITY = (8, 0)
"""bf16 in the tensor cores."""

LEAST_SHARED = 160 << 10
"""Bytes of shared memory that one program may take: products keep up to 147 KiB of tiles on their way.  GPUs of
data centers have 163 (8.0) and 227 (9.0, 10.0); those of 8.6, 8.9 and 12.0 have 99, and there every step would fail.
Only latent attention in fp32 takes more, 164."""

_MAJOR, _MINOR, _SHARED = 75, 76, 97  # CUdevice_attribute; _SHARED: of a block, if it opts in


def gpu_report(driver: str = DRIVER) -> GpuReport:
    """A usable GPU, or why there is none."""
    try:
        ctypes.CDLL(driver)  # does not initialize CUDA: that is cuInit
    except OSError:
        return GpuReport(reason="there is no CUDA driver")
    missing = missing_packages()
    if missing:
        return GpuReport(reason=f"there is a CUDA driver, but {missing}", remedy="pip install 'penstock[gpu]'")
    return parse_report(*_ask(driver))


def missing_packages() -> str:
    """The packages that a GPU needs and that are missing; empty: none.  Imports nothing, as torch takes seconds."""
    torch = find_spec("torch")
    if torch is None or find_spec("triton") is None:
        return f"no {'torch' if torch is None else 'triton'} for it"
    folders = torch.submodule_search_locations or []
    if not any((Path(folder) / "lib" / "libtorch_cuda.so").exists() for folder in folders):
        return f"torch {package_version('torch')} was built without CUDA"
    return ""


def package_version(name: str) -> str | None:
    """The version of an installed package, without importing it."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _ask(driver: str) -> tuple[str, str]:
    """The child's output and error output."""
    command, env = sidecar.python_command(__name__, driver), sidecar.child_environment()
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False, env=env)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"the CUDA driver could not be asked: {type(error).__name__}"
    return child.stdout, child.stderr


def parse_report(said: str, complained: str) -> GpuReport:
    """The report in the child's output."""
    try:
        found: dict[str, Any] = json.loads(said)
        gpu = GpuFacts(
            name=found["name"],
            count=found["count"],
            capability=(found["capability"][0], found["capability"][1]),
            total_bytes=found["total_bytes"],
            free_bytes=found["free_bytes"],
        )
        shared = int(found["shared_bytes"])
    except (ValueError, KeyError, IndexError, TypeError):
        lines = complained.strip().splitlines()
        return GpuReport(reason=lines[-1] if lines else "the CUDA driver gave no answer", remedy="see nvidia-smi")
    if gpu.capability < LEAST_CAPABILITY:
        major, minor = gpu.capability
        return GpuReport(reason=f"{gpu.name} has compute capability {major}.{minor}, and 8.0 is the least that serves")
    if shared < LEAST_SHARED:
        has, least = shared >> 10, LEAST_SHARED >> 10
        return GpuReport(
            reason=f"{gpu.name} has {has} KiB of shared memory for a program, and the kernels need {least}"
        )
    return GpuReport(gpu=gpu, reason="")


def query_driver(driver: str) -> dict[str, Any]:
    """The first device.  Initializes CUDA in this process.  Raises OSError if there is none or it does not answer."""
    cuda: Any = ctypes.CDLL(driver)
    count, device, context = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
    name = ctypes.create_string_buffer(128)
    _call(cuda, "cuInit", 0)
    _call(cuda, "cuDeviceGetCount", ctypes.byref(count))
    if count.value == 0:
        raise OSError("the CUDA driver finds no device")
    _call(cuda, "cuDeviceGet", ctypes.byref(device), 0)
    _call(cuda, "cuDeviceGetName", name, len(name), device)
    attributes = []
    for attribute in (_MAJOR, _MINOR, _SHARED):
        value = ctypes.c_int()
        _call(cuda, "cuDeviceGetAttribute", ctypes.byref(value), attribute, device)
        attributes.append(value.value)
    _call(cuda, "cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    _call(cuda, "cuCtxSetCurrent", context)
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    _call(cuda, "cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    return {
        "name": name.value.decode(errors="replace"),
        "count": count.value,
        "capability": attributes[:2],
        "shared_bytes": attributes[2],
        "total_bytes": total.value,
        "free_bytes": free.value,
    }


def _call(cuda: Any, function: str, *arguments: object) -> None:
    own = getattr(cuda, function, None)
    if own is None:
        raise OSError(f"the CUDA driver is too old, or none: it has no {function}")
    code = own(*arguments)
    if code != 0:
        raise OSError(f"the CUDA driver does not answer: {function} gave error {code}")


def main(driver: str = DRIVER) -> int:
    """The child's entry point."""
    sidecar.end_with_parent()
    try:
        print(json.dumps(query_driver(driver)))  # noqa: T201 - this is what it is for
    except OSError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
