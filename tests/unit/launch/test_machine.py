"""Machines made of text files."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.config.facts import PhysicalCore
from penstock.errors import ConfigError
from penstock.kv.connectors.tcp.protocol import aes_gcm
from penstock.launch.machine import free_memory, machine_facts, process_start_time, topology, usable_cores

MEMINFO = "MemTotal: 16000000 kB\nMemFree: 1 kB\nMemAvailable: 8000000 kB\n"


class Machine:
    """A root folder with what is read of /proc and /sys."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path)
    made.write("proc/meminfo", MEMINFO)
    for cpu in range(8):
        siblings = f"{cpu % 4},{cpu % 4 + 4}\n"
        made.write(f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", siblings)
    return made


def test_hyperthreads_are_no_cores(machine: Machine) -> None:
    assert usable_cores(tuple(range(8)), machine.root) == 4
    assert usable_cores((0, 4), machine.root) == 1
    assert usable_cores((0, 1, 2), machine.root) == 3


def test_without_topology_every_processor_counts(tmp_path: Path) -> None:
    assert usable_cores((0, 1, 2), tmp_path) == 3


@pytest.mark.parametrize(("quota", "cores"), [("max 100000", 4), ("250000 100000", 2), ("50000 100000", 1), ("", 4)])
def test_a_quota_leaves_fewer(machine: Machine, quota: str, cores: int) -> None:
    machine.write("sys/fs/cgroup/cpu.max", quota)
    assert usable_cores(tuple(range(8)), machine.root) == cores


def test_memory_is_what_is_available(machine: Machine) -> None:
    assert free_memory(machine.root) == 8_000_000 * 1024


def test_the_tightest_of_nested_limits_counts(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/pod/box\n")
    machine.write("sys/fs/cgroup/pod/memory.max", "3000000000")
    machine.write("sys/fs/cgroup/pod/memory.current", "1000000000")
    machine.write("sys/fs/cgroup/pod/box/memory.max", "max")
    machine.write("sys/fs/cgroup/pod/box/memory.current", "900000000")
    assert free_memory(machine.root) == 2_000_000_000
    machine.write("sys/fs/cgroup/pod/memory.stat", "anon 1\ninactive_file 500000000\n")
    assert free_memory(machine.root) == 2_500_000_000


def test_this_machine_has_something() -> None:
    facts = machine_facts(("portable",))
    assert facts.cpus
    assert facts.cores >= 1
    assert facts.memory_bytes > 0
    assert facts.kernel_families == ("portable",)


def test_cores_have_their_threads_and_their_node(machine: Machine) -> None:
    machine.write("sys/devices/system/node/node0/cpulist", "0-1,4-5\n")
    machine.write("sys/devices/system/node/node1/cpulist", "2-3,6-7\n")
    machine.write("sys/devices/system/node/node2/cpulist", "\n")  # memory only
    assert topology(tuple(range(8)), machine.root) == (
        PhysicalCore(cpus=(0, 4), numa_node=0),
        PhysicalCore(cpus=(1, 5), numa_node=0),
        PhysicalCore(cpus=(2, 6), numa_node=1),
        PhysicalCore(cpus=(3, 7), numa_node=1),
    )
    assert topology((1, 6), machine.root) == (
        PhysicalCore(cpus=(1,), numa_node=0),
        PhysicalCore(cpus=(6,), numa_node=1),
    )


def test_a_process_knows_when_it_began(tmp_path: Path) -> None:
    before = time.monotonic()
    words = "from penstock.launch.machine import process_start_time; print(process_start_time())"
    said = subprocess.run(
        [sys.executable, "-c", words],
        env={**os.environ, "PYTHONPATH": "src"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert before - 0.02 <= float(said.stdout) <= time.monotonic()
    assert process_start_time(tmp_path) == pytest.approx(time.monotonic(), abs=1.0)


def test_only_a_library_that_encrypts_into_buffers_counts(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine_facts((), machine.root).can_encrypt_pages

    class Old:
        """As it was before it could."""

        encrypt = decrypt = None

    monkeypatch.setattr("cryptography.hazmat.primitives.ciphers.aead.AESGCM", Old)
    assert not machine_facts((), machine.root).can_encrypt_pages
    with pytest.raises(ConfigError, match=r"a recent one: pip install 'penstock\[encryption\]'"):
        aes_gcm()
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    assert not machine_facts((), machine.root).can_encrypt_pages
