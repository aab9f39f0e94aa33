"""This machine: processors, memory, NUMA nodes, and what a container leaves of them.  Linux only.

Reads /proc, /sys and cgroup v2; what cannot be read counts as unlimited.  Decides nothing (``config.resolve`` does).
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from penstock.config.cpu_cores import parse_cpus
from penstock.config.facts import MachineFacts, PhysicalCore
from penstock.errors import ConfigError
from penstock.kv.connectors.tcp.protocol import aes_gcm

_START_TIME = 19
"""proc_pid_stat(5): ticks from the system's start to the process's, counted from the field after its name."""


def machine_facts(kernel_families: tuple[str, ...], root: Path = Path("/")) -> MachineFacts:
    """The facts for ``config.resolve``.  ``kernel_families``: those that run here, best first."""
    cpus = tuple(sorted(os.sched_getaffinity(0)))
    return MachineFacts(
        cpus=cpus,
        cores=usable_cores(cpus, root),
        topology=topology(cpus, root),
        memory_bytes=free_memory(root),
        kernel_families=kernel_families,
        can_encrypt_pages=_encrypts(),
    )


def process_start_time(root: Path = Path("/")) -> float:
    """When this process started, on the monotonic clock, to a hundredth of a second; now if unknown."""
    numbers = _read(root / "proc/self/stat").rpartition(")")[2].split()
    if len(numbers) <= _START_TIME:
        return time.monotonic()
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(numbers[_START_TIME]) / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - max(age, 0.0)


def topology(cpus: tuple[int, ...], root: Path = Path("/")) -> tuple[PhysicalCore, ...]:
    """The physical cores behind these logical processors, by node and number."""
    nodes = _nodes(root)
    cores: dict[str, list[int]] = {}
    for cpu in cpus:
        cores.setdefault(_siblings(cpu, root), []).append(cpu)
    made = [PhysicalCore(cpus=tuple(own), numa_node=nodes.get(own[0], 0)) for own in cores.values()]
    return tuple(sorted(made, key=lambda core: (core.numa_node, core.cpus)))


def usable_cores(cpus: tuple[int, ...], root: Path = Path("/")) -> int:
    """Physical cores behind these logical processors, or what the container's quota leaves of them; at least 1."""
    cores = len({_siblings(cpu, root) for cpu in cpus})
    for folder in _cgroups(root):
        quota, _, period = _read(folder / "cpu.max").partition(" ")
        if quota.isdigit() and period.isdigit():
            cores = min(cores, int(quota) // int(period))
    return max(1, cores)


def free_memory(root: Path = Path("/")) -> int:
    """Bytes available without swapping, within the container's limit."""
    available = 0
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    for folder in _cgroups(root):
        limit, used = _read(folder / "memory.max"), _read(folder / "memory.current")
        if limit.isdigit() and used.isdigit():
            # Cached files count as used, but are evicted when memory is needed.
            available = min(available, int(limit) - int(used) + _cached(folder))
    return max(0, available)


def _encrypts() -> bool:
    """Whether the library that encrypts pages between hosts is installed."""
    try:
        aes_gcm()
    except ConfigError:
        return False
    return True


def _siblings(cpu: int, root: Path) -> str:
    """A key that all logical processors of a core share."""
    return _read(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu)


def _nodes(root: Path) -> dict[int, int]:
    """The NUMA node of each processor."""
    found: dict[int, int] = {}
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        cpus = _read(folder / "cpulist")
        if cpus:  # a node may have memory only
            found |= dict.fromkeys(parse_cpus(cpus, folder.name), int(folder.name.removeprefix("node")))
    return found


def _cached(folder: Path) -> int:
    for line in _read(folder / "memory.stat").splitlines():
        if line.startswith("inactive_file "):
            return int(line.split()[1])
    return 0


def _cgroups(root: Path) -> Iterator[Path]:
    """This process's control group and its ancestors: each may have a limit."""
    base = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        if line.startswith("0::"):
            here = base / line.removeprefix("0::").strip().lstrip("/")
            while here != base and base in here.parents:
                yield here
                here = here.parent
    yield base


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


_CALL = {"x86_64": 238, "aarch64": 237}  # number of set_mempolicy
_DEFAULT, _INTERLEAVE = 0, 3
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)

log = logging.getLogger(__name__)


@contextmanager
def interleave_memory(nodes: Sequence[int]) -> Iterator[None]:
    """Interleave the pages that this thread touches first over these NUMA nodes; no nodes: change nothing.

    A refusal, as in a container, costs only speed, so it is logged.  Uses set_mempolicy(2) without libnuma.
    """
    if not nodes:
        yield
        return
    _set_policy(_INTERLEAVE, nodes)
    try:
        yield
    finally:
        _set_policy(_DEFAULT, ())


def node_mask(nodes: Sequence[int]) -> tuple[int, ...]:
    """The nodes as a bit mask in words of the machine's size."""
    words = [0] * (max(nodes, default=-1) // _WORD_BITS + 1)
    for node in nodes:
        words[node // _WORD_BITS] |= 1 << node % _WORD_BITS
    return tuple(words)


def _set_policy(mode: int, nodes: Sequence[int]) -> None:
    number = _CALL.get(platform.machine())
    if number is None:
        return
    words = node_mask(nodes)
    mask = (ctypes.c_ulong * max(1, len(words)))(*words)
    libc = ctypes.CDLL(None, use_errno=True)
    # Linux reads one bit less than the given length.
    if libc.syscall(ctypes.c_long(number), mode, mask, ctypes.c_ulong(len(words) * _WORD_BITS + 1)) != 0:
        log.info("memory is not interleaved over nodes: set_mempolicy: %s", os.strerror(ctypes.get_errno()))
